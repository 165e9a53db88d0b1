"""One example's contribution never exceeds `sensitivity`; why the naive tied norm claims sqrt(2) C."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.clipping import small
from wtdp_jax import head_rules
from wtdp_jax.clipping import clipped_grad, ghost
from wtdp_jax.clipping.factors import NARROW_MARGIN, Factors, Group
from wtdp_jax.lm_head import Head
from wtdp_jax.losses import lm_loss, next_token_loss
from wtdp_jax.models import GPT2

ENGINES = ("materialized", "microbatched", "ghost", "bookkeeping")
C = 0.5


class TiedPair(nn.Module):
    """An embedding that is its own head, and nothing else."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embedding = nn.Embed(4, 8, name="e")
        return embedding.attend(embedding(ids)[:, 0])


def _loss(params: Any, batch: Any) -> Any:
    log_probs = jax.nn.log_softmax(TiedPair().apply({"params": params}, batch["ids"]))
    return -jnp.take_along_axis(log_probs, batch["targets"][:, None], -1)[:, 0]


def _aligned() -> tuple[Any, Any]:
    """Token 0 is predicted where token 1 is the target, and E_1 = -a E_0.

    Then r = e_0 - e_1, h = E_0, g_out = r h^T, g_in = e_0 (E_0 - E_1)^T = (1 + a) e_0 E_0^T. In units of
    |E_0|^2: ||g_in||^2 = (1 + a)^2, ||g_out||^2 = 2, <g_in, g_out> = 1 + a. With 1 + a = sqrt(2) the true
    squared norm is 2 + 2 + 2 sqrt(2), the naive one 4: a ratio of norms of sqrt(1 + 1 / sqrt(2)) = 1.3066.
    """
    e = np.zeros((4, 8), np.float32)
    e[0, 0] = 5
    e[1, 0] = -5 * (math.sqrt(2) - 1)
    batch = {"ids": jnp.zeros((1, 1), jnp.int32), "targets": jnp.ones(1, jnp.int32)}
    return {"e": {"embedding": jnp.asarray(e)}}, batch


def _length(tree: Any) -> float:
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
def test_without_the_cross_term_the_clip_norm_is_exceeded(engine: Any) -> None:
    params, batch = _aligned()
    naive = clipped_grad(_loss, engine=engine, l2_clip_norm=C, tied_norm="omit")
    length = _length(naive(params, batch)[0])
    np.testing.assert_allclose(length / C, math.sqrt(1 + 1 / math.sqrt(2)), rtol=1e-3)
    assert C < length <= naive.sensitivity
    assert naive.sensitivity == math.sqrt(2) * C


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied_norm", ["cross_term", "materialize", "triangle"])
def test_with_it_the_same_example_is_within(engine: Any, tied_norm: Any) -> None:
    params, batch = _aligned()
    grad_fn = clipped_grad(_loss, engine=engine, l2_clip_norm=C, tied_norm=tied_norm)
    length = _length(grad_fn(params, batch)[0])
    assert length <= grad_fn.sensitivity == C
    if tied_norm != "triangle":
        assert length > 0.9999 * C


def test_engines_that_build_gradients_ignore_the_naive_norm() -> None:
    params, batch = _aligned()
    for engine in ("materialized", "microbatched"):
        grad_fn = clipped_grad(_loss, engine=engine, l2_clip_norm=C, tied_norm="omit")
        assert grad_fn.sensitivity == C
        assert _length(grad_fn(params, batch)[0]) <= C


def _one_layer(layer: nn.Module, x: Any, leaf: Any, weight: float) -> tuple[Any, Any, Any]:
    """A loss linear in the outputs of one layer, with its params and a batch of one."""

    def loss_fn(params: Any, batch: Any) -> Any:
        y = layer.apply({"params": params}, batch["x"])
        return jnp.sum(weight * y, tuple(range(1, y.ndim)))

    return loss_fn, leaf, {"x": x[None]}


@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
@pytest.mark.parametrize(("inputs", "weight", "l2_clip_norm"), [(9e18, 9e-20, 1.0), (1e15, 1e-20, 1e-4)])
@pytest.mark.parametrize("positions", [1, 3])
def test_backprops_whose_squares_underflow(
    engine: Any, inputs: float, weight: float, l2_clip_norm: float, positions: int
) -> None:
    layer = nn.Dense(4096, use_bias=False)
    x = jnp.full((positions, 4), inputs)
    loss_fn, params, batch = _one_layer(layer, x, {"kernel": jnp.ones((4, 4096))}, weight)
    grad_fn = clipped_grad(loss_fn, engine=engine, l2_clip_norm=l2_clip_norm)
    assert _length(jax.jit(grad_fn)(params, batch)[0]) <= l2_clip_norm


class LossHead(nn.Module):
    """A head that gives a loss, and nothing else."""

    @nn.compact
    def __call__(self, x: Any, ids: Any) -> Any:
        return Head(8, 4, name="head").weighted_loss(x, ids, jnp.ones(ids.shape))


@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
@pytest.mark.parametrize("positions", [1, 20])
@pytest.mark.parametrize(("inputs", "weight"), [(1e17, 1e-19), (1e-20, 1e19)])
def test_a_weighted_loss_whose_squares_underflow(
    engine: Any, positions: int, inputs: float, weight: float
) -> None:
    """Either the square of the loss's weight underflows, or those of the gradient before it is weighted."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return weight * LossHead().apply({"params": params}, batch["x"], batch["ids"])

    batch = {"x": jnp.full((1, positions, 8), inputs), "ids": jnp.ones((1, positions), jnp.int32)}
    params = {"head": {"kernel": jnp.zeros((8, 4))}}
    grad_fn = clipped_grad(loss_fn, engine=engine, l2_clip_norm=1e-3)
    assert 0 < _length(jax.jit(grad_fn)(params, batch)[0]) <= 1e-3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("l2_clip_norm", [0.0, 1e-30, 1e-19, 1e-15])
def test_clip_norms_whose_squares_underflow(engine: Any, clipping: Any, l2_clip_norm: float) -> None:
    """The squares of a gradient of 1e-20 are 0 in float32, but it is longer than a clip norm may be."""
    grad_fn = clipped_grad(
        lambda params, batch: batch["x"] @ params["w"],
        engine=engine,
        l2_clip_norm=l2_clip_norm,
        clipping=clipping,
    )
    compiled = jax.jit(grad_fn)
    for size in (1e-28, 1e-20, 1e-18, 1e-10, 1.0):
        assert _length(compiled({"w": jnp.ones(3)}, {"x": jnp.full((1, 3), size)})[0]) <= l2_clip_norm


@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_many_equal_positions(engine: Any, tokens: int) -> None:
    """Each addition of a running sum of equal terms rounds the same way."""
    worst = 0.0
    for weight in (0.1, 0.3, 0.7, 1.1):
        layer, ids = nn.Embed(4, 2), jnp.full(tokens, 3)
        loss_fn, params, batch = _one_layer(layer, ids, {"embedding": jnp.ones((4, 2))}, weight)
        grad_fn = clipped_grad(loss_fn, engine=engine, l2_clip_norm=C)
        worst = max(worst, _length(jax.jit(grad_fn)(params, batch)[0]))
    assert 0.99 * C < worst <= C


@pytest.mark.slow
@pytest.mark.parametrize("loss", [next_token_loss, lm_loss])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
def test_in_bfloat16_with_float32_sums(loss: Any, clipping: Any, engine: Any) -> None:
    """What is summed is what the norm is of, whatever type it was computed in; two passes have a margin."""
    config = dataclasses.replace(small.gpt2(tie=True).config, n_positions=12, dtype="bfloat16")
    grad_fn = clipped_grad(loss(GPT2(config)), engine=engine, l2_clip_norm=C, clipping=clipping)
    compiled = jax.jit(grad_fn)
    worst = 0.0
    for seed in range(60):
        batch = small.token_batch(2, tokens=12, dtype=jnp.float32, seed=seed)
        params = small.random_params(
            GPT2(config), batch["ids"], dtype=jnp.float32, seed=seed, scale=10 ** (seed % 5 / 2 - 1)
        )
        total, per_example = compiled(params, batch, jnp.asarray([False, True]))
        assert {leaf.dtype for leaf in jax.tree.leaves((total, per_example))} == {jnp.dtype(jnp.float32)}
        worst = max(worst, _length(total))
        assert bool(jnp.isfinite(per_example.norm).all())
    # The passes agree, so that all of the margin is left.
    margin = NARROW_MARGIN if engine == "ghost" else 0
    assert (1 - margin) * C * (1 - 1e-5) < worst <= C / (1 + margin)


def _factors(norm: list[float], *factors: list[float]) -> Factors:
    groups = {Group(str(number), ()): jnp.asarray(values) for number, values in enumerate(factors)}
    return Factors(groups, jnp.asarray(norm), jnp.isfinite(jnp.asarray(norm)))


def test_factors_may_exceed_those_that_the_second_pass_asks_for_by_the_margin() -> None:
    used = _factors([1.0] * 4, [0.5] * 4, [1.0] * 4)
    within, beyond = 1 / (1 + 0.9 * NARROW_MARGIN), 1 / (1 + 1.1 * NARROW_MARGIN)
    due = _factors([1.0, 1.0, 1.0, math.inf], [0.5 * within, 0.5 * beyond, 0.9, 0.5], [1, 1, beyond, 1])
    np.testing.assert_array_equal(ghost._agree(used, due), [True, False, False, False])


def test_a_row_whose_two_passes_disagree_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Dense(4, dtype=jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 5)), jnp.float32)
    params = layer.init(jax.random.key(0), x)["params"]

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum(jnp.square(layer.apply({"params": params}, batch["x"]).astype(jnp.float32)), (1, 2))

    grad_fn = clipped_grad(loss_fn, engine="ghost", l2_clip_norm=C)
    norms = grad_fn(params, {"x": x})[1].norm
    second, longest = jnp.sort(norms)[1:]
    without_it, _ = grad_fn(params, {"x": x}, norms == longest)

    monkeypatch.setattr(ghost, "_agree", lambda used, due: used.norm < (second + longest) / 2)
    total, per_example = grad_fn(params, {"x": x})
    np.testing.assert_array_equal(jnp.isinf(per_example.norm), norms == longest)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), total, without_it)

    monkeypatch.setattr(ghost, "_agree", lambda used, due: used.norm < 0)
    total, per_example = grad_fn(params, {"x": x})
    assert not any(leaf.any() for leaf in jax.tree.leaves(total)) and jnp.isinf(per_example.norm).all()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
def test_a_language_models_example_never_exceeds_sensitivity(
    monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """Here the head's backprops are formed a second time for the sum, from logits of up to a thousand."""
    monkeypatch.setattr(head_rules, "_TILE", 8)
    model = GPT2(dataclasses.replace(small.gpt2(tie=True).config, n_positions=12, remat="full"))
    grad_fn = clipped_grad(lm_loss(model), engine=engine, l2_clip_norm=C)
    compiled = jax.jit(grad_fn)
    worst = 0.0
    for seed in range(60):
        batch = small.token_batch(2, tokens=12, dtype=jnp.float32, seed=seed)
        params = small.random_params(
            model, batch["ids"], dtype=jnp.float32, seed=seed, scale=10 ** (seed % 5 / 2 - 1)
        )
        total, _ = compiled(params, batch, jnp.asarray([False, True]))
        worst = max(worst, _length(total))
    assert 0.99 * C < worst <= grad_fn.sensitivity


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "clipping"),
    [
        ("materialized", "flat"),  # "microbatched" runs the same code
        ("ghost", "flat"),
        ("bookkeeping", "flat"),
        ("ghost", "per_layer"),
        ("bookkeeping", "per_layer"),
    ],
)
def test_a_batch_of_one_never_exceeds_sensitivity_in_float32(engine: Any, clipping: Any) -> None:
    model = small.gpt2(tie=True)
    grad_fn = clipped_grad(next_token_loss(model), engine=engine, l2_clip_norm=C, clipping=clipping)
    compiled = jax.jit(grad_fn)
    worst = 0.0
    for seed in range(60):
        batch = small.token_batch(2, dtype=jnp.float32, seed=seed)
        params = small.random_params(
            model, batch["ids"], dtype=jnp.float32, seed=seed, scale=10 ** (seed % 5 / 2 - 1)
        )
        total, _ = compiled(params, batch, jnp.asarray([False, True]))
        worst = max(worst, _length(total))
    assert 0.99 * C < worst <= grad_fn.sensitivity
