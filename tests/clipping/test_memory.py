"""The ghost programs hold no per-example weight gradient: the compiled program's shapes say so."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from wtdp_jax.clipping import clipped_grad
from wtdp_jax.compiled import memory
from wtdp_jax.losses import lm_loss, next_token_loss
from wtdp_jax.models import GPT2, GPT2Config

# Sizes that no product of others makes: a shape is known by its factors.
ROWS, TOKENS, WIDTH, VOCAB = 5, 7, 16, 53
PER_EXAMPLE = [
    {ROWS, VOCAB, WIDTH},
    *({ROWS, a, b} for a, b in ((WIDTH, 3 * WIDTH), (WIDTH, 4 * WIDTH))),
]


@pytest.fixture
def optimized() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def _compiled(engine: Any, loss: Any, *, clipping: Any = "flat", remat: bool = False) -> Any:
    config = GPT2Config(vocab_size=VOCAB, n_positions=9, n_embd=WIDTH, n_layer=2, n_head=2, remat=remat)
    model = GPT2(config)
    shape = jax.ShapeDtypeStruct
    batch = {
        "ids": shape((ROWS, TOKENS), jnp.int32),
        "positions": shape((ROWS,), jnp.int32),
        "targets": shape((ROWS,), jnp.int32),
        "weights": shape((ROWS, TOKENS), jnp.float32),
    }
    params = jax.eval_shape(model.init, jax.random.key(0), batch["ids"])["params"]
    grad_fn = clipped_grad(loss(model), engine=engine, l2_clip_norm=1.0, clipping=clipping)
    return jax.jit(grad_fn).lower(params, batch).compile()


def _per_example_shapes(engine: Any, loss: Any) -> list[str]:
    text = _compiled(engine, loss).as_text()
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    return [s for s in shapes if any(wanted <= {int(n) for n in s.split(",")} for wanted in PER_EXAMPLE)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [next_token_loss, lm_loss])
@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
def test_no_per_example_weight_gradient(optimized: None, engine: Any, loss: Any) -> None:
    assert _per_example_shapes(engine, loss) == []


@pytest.mark.slow
def test_per_layer_clipping_in_one_pass_keeps_no_records_of_the_blocks(optimized: None) -> None:
    flat, per_layer = (
        memory(_compiled("bookkeeping", next_token_loss, clipping=clipping, remat=True)).temporaries
        for clipping in ("flat", "per_layer")
    )
    # Two blocks' inputs and backprops at five rows of seven positions in float32, and more than half of it.
    records = 2 * ROWS * TOKENS * 4 * (WIDTH + 3 * WIDTH + WIDTH + WIDTH + 2 * (WIDTH + 4 * WIDTH))
    assert flat - per_layer > records / 2


@pytest.mark.slow
def test_the_materialized_engine_has_them(optimized: None) -> None:
    found = _per_example_shapes("materialized", next_token_loss)
    for wanted in PER_EXAMPLE:
        assert any(wanted <= {int(n) for n in s.split(",")} for s in found)
