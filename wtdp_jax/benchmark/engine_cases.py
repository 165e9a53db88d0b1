"""The engines' cases: a size, a model, and how its gradient is made; each as compiled programs.

Dimension key: B examples, T tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wtdp_jax import clipped_grad, compiled
from wtdp_jax.benchmark import step_cost, timing
from wtdp_jax.benchmark.step_cost import Programs, State
from wtdp_jax.clipping import Engine
from wtdp_jax.losses import lm_loss, next_token_loss
from wtdp_jax.models import GPT2, GPT2Config
from wtdp_jax.noise import key_from_seed
from wtdp_jax.rules import TiedNorm
from wtdp_jax.step import plain_grad

Model = Literal["tied", "untied"]
Loss = Literal["next_token", "lm"]
DType = Literal["float32", "bfloat16"]
Variant = Literal[Engine, "non-private"]
Remat = bool | Literal["full"]

_LOSSES = {"next_token": next_token_loss, "lm": lm_loss}


class Setting(NamedTuple):
    """What is timed together.

    Attributes:
        preset: the model's size.
        loss: at one position an example, or on the whole sequence.
        dtype: that layers compute in.
        batch_size: B.
        length: T.
    """

    preset: str
    loss: Loss
    dtype: DType
    batch_size: int
    length: int


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        setting: its size.
        model: whether the head is the embedding.
        engine: or "non-private".
        tied_norm: None where it has no effect.
        remat: what the backward pass computes again.
        microbatch_size: of the microbatched engine.
    """

    setting: Setting
    model: Model
    engine: Variant
    tied_norm: TiedNorm | None
    remat: Remat
    microbatch_size: int = 1


def compile_case(case: Case) -> Programs:
    """Compiles gradient and step for arrays of the case's shapes, and allocates none."""
    return Programs(step_cost.compile_gradient(_grad_fn(case), _shapes(case)), _compile_step(case))


@functools.cache
def largest_batch(case: Case, limit: float) -> int:
    """The largest B whose step fits in so many bytes, by compiling at it and at the next.

    Args:
        case: the case; its B is tried first.
        limit: bytes.
    """

    def total(rows: int) -> int:
        at = case._replace(setting=case.setting._replace(batch_size=rows))
        return compiled.memory(_compile_step(at)).total

    return timing.largest_fitting(total, limit, first=case.setting.batch_size)


def initial_state(setting: Setting, model: Model, seed: int) -> State:
    """Random parameters and batch, and the optimizer's state."""
    init_key, *keys = jax.random.split(jax.random.key(seed), 4)
    gpt2 = _model(setting, model, remat=False)
    rows, vocabulary = setting.batch_size, gpt2.config.vocab_size
    batch = {
        "ids": jax.random.randint(keys[0], (rows, setting.length), 0, vocabulary, jnp.int32),
        "positions": jax.random.randint(keys[1], (rows,), 0, setting.length, jnp.int32),
        "targets": jax.random.randint(keys[2], (rows,), 0, vocabulary, jnp.int32),
        "weights": jnp.ones((rows, setting.length)),
    }
    params = gpt2.init(init_key, batch["ids"][:1])["params"]
    return step_cost.initial_state(params, batch, key_from_seed(seed, "noise"))


def _compile_step(case: Case) -> Any:
    private = case.engine != "non-private"
    return step_cost.compile_step(_grad_fn(case), _shapes(case), private=private)


def _shapes(case: Case) -> State:
    return _shapes_of(case.setting, case.model)


@functools.cache
def _shapes_of(setting: Setting, model: Model) -> State:
    return jax.eval_shape(lambda: initial_state(setting, model, seed=0))


def _model(setting: Setting, model: Model, *, remat: Remat) -> GPT2:
    shape = {"tie_embeddings": model == "tied", "remat": remat, "dtype": setting.dtype}
    return GPT2(GPT2Config.preset(setting.preset, **shape))


def _grad_fn(case: Case) -> step_cost.GradFn:
    is_plain = case.engine == "non-private" and not case.remat
    make_loss = _whole_lm_loss if is_plain and case.setting.loss == "lm" else _LOSSES[case.setting.loss]
    loss_fn = make_loss(_model(case.setting, case.model, remat=case.remat))
    if case.engine == "non-private":
        return plain_grad(loss_fn)
    return clipped_grad(
        loss_fn,
        engine=case.engine,
        l2_clip_norm=1.0,
        tied_norm=case.tied_norm or "cross_term",
        microbatch_size=case.microbatch_size,
    )


def _whole_lm_loss(model: GPT2) -> Callable[[Any, Any], jax.Array]:
    """`lm_loss` as people write it, with whole logits; the batch's weights are ones."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        losses = model.apply({"params": params}, batch["ids"], method="token_losses")
        return jnp.mean(losses[:, 1:], -1)

    return loss_fn
