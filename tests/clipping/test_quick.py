"""All engines on one small tied model, in seconds: the suite that mutants of the engines are tried on."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.clipping import oracle, small
from wtdp_jax.clipping import clipped_grad
from wtdp_jax.clipping.factors import MARGIN_ULPS, clip_factor, rounding_margin

_PADDING, _NOT_FINITE = 3, 1
_REAL = [0, 2, 4]


class Small(nn.Module):
    """A tied embedding around one residual dense layer."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(7, 4, name="embed")
        x = embed(ids)
        x = x + nn.Dense(4, name="dense")(nn.LayerNorm(name="norm")(x))
        return embed.attend(x)


def _loss(params: Any, batch: Any) -> Any:
    log_probs = jax.nn.log_softmax(Small().apply({"params": params}, batch["ids"])[:, :-1])
    chosen = jnp.take_along_axis(log_probs, batch["ids"][:, 1:, None], -1)[..., 0]
    return -batch["scale"] * jnp.sum(chosen, -1)


def _batch() -> tuple[Any, Any]:
    """Five rows: one is padding and holds NaN, one has a loss that is not finite."""
    ids = np.random.default_rng(0).integers(0, 7, (5, 3)).astype(np.int32)
    scale = np.array([0.2, np.inf, 1.0, np.nan, 3.0])
    return {"ids": jnp.asarray(ids), "scale": jnp.asarray(scale)}, jnp.arange(5) == _PADDING


def _expected(clipping: str, gradients: Any, norms: Any, l2_clip_norm: float) -> Any:
    if clipping == "per_layer":
        return oracle.per_layer_clipped_sum(gradients, l2_clip_norm)
    of_kind = {"flat": oracle.flat_factors, "automatic": oracle.automatic_factors}[clipping]
    return oracle.clipped_sum(gradients, of_kind(norms, l2_clip_norm))


@functools.cache
def _oracle() -> tuple[Any, Any, Any]:
    """Parameters, and the losses and gradients of the real rows; asked for with 64-bit types alone."""
    batch, _ = _batch()
    params = small.random_params(Small(), batch["ids"])
    real = jax.tree.map(lambda leaf: leaf[jnp.asarray(_REAL)], batch)
    return params, np.asarray(_loss(params, real)), oracle.per_example_gradients(_loss, params, real)


@pytest.mark.parametrize(
    ("engine", "clipping"),
    [
        ("ghost", "flat"),
        ("ghost", "per_layer"),
        ("bookkeeping", "flat"),
        ("bookkeeping", "per_layer"),
        ("materialized", "automatic"),
    ],
)
def test_norms_and_sum(float64: None, engine: Any, clipping: Any) -> None:
    batch, is_padding = _batch()
    params, losses, gradients = _oracle()
    norms = oracle.norms(gradients)
    l2_clip_norm = float(np.median(norms))
    grad_fn = clipped_grad(_loss, engine=engine, l2_clip_norm=l2_clip_norm, clipping=clipping)
    total, per_example = jax.jit(grad_fn)(params, batch, is_padding)
    assert oracle.relative_error(total, _expected(clipping, gradients, norms, l2_clip_norm)) < 1e-10
    assert oracle.relative_error(per_example.norm[jnp.asarray(_REAL)], norms) < 1e-10
    assert per_example.norm[_NOT_FINITE] == jnp.inf and per_example.norm[_PADDING] == 0
    np.testing.assert_allclose(per_example.loss[jnp.asarray(_REAL)], losses, rtol=1e-12)
    assert per_example.loss[_PADDING] == 0


class Stacked(nn.Module):
    """Two dense layers, scanned, after a parameter that no rule covers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layer = nn.scan(
            lambda layer, x, _: (x + layer(x), None), variable_axes={"params": 0}, split_rngs={"params": True}
        )
        x = x * self.param("gain", nn.initializers.ones, (1, 1, 3))
        return layer(nn.Dense(3, name="dense"), x, jnp.arange(2))[0]


@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
def test_stacked_layers_and_an_uncovered_leaf(float64: None, engine: Any) -> None:
    batch = {"x": jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 3)))}
    params = small.random_params(Stacked(), batch["x"])

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum(jnp.square(Stacked().apply({"params": params}, batch["x"])), (1, 2))

    gradients = oracle.per_example_gradients(loss_fn, params, batch)
    norms = oracle.norms(gradients)
    l2_clip_norm = float(np.median(norms))
    total, per_example = jax.jit(clipped_grad(loss_fn, engine=engine, l2_clip_norm=l2_clip_norm))(
        params, batch
    )
    assert oracle.relative_error(total, _expected("flat", gradients, norms, l2_clip_norm)) < 1e-10
    assert oracle.relative_error(per_example.norm, norms) < 1e-10


@pytest.mark.parametrize("engine", ["ghost", "bookkeeping"])
def test_a_batch_of_one_never_exceeds_sensitivity_in_float32(engine: Any) -> None:
    batch, _ = _batch()
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[4:], leaf.dtype), batch)
    one["scale"] = one["scale"].astype(jnp.float32)
    grad_fn = jax.jit(clipped_grad(_loss, engine=engine, l2_clip_norm=0.5))
    for seed in range(20):
        params = small.random_params(Small(), batch["ids"], dtype=jnp.float32, seed=seed)
        total, _ = grad_fn(params, one)
        wide = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(total)]
        length = np.sqrt(sum(np.sum(leaf**2) for leaf in wide))
        assert 0.49 < length <= 0.5


def test_factors_at_the_edges() -> None:
    norm, counts = jnp.array([0.0, 1.0, 2.0, 4.0]), jnp.array([True, True, True, False])
    flat = clip_factor(norm, counts, 2.0, "flat", 0.0)
    np.testing.assert_array_equal(flat, [1, 1, 1, 0])
    raised = clip_factor(norm, counts, 2.0, "flat", 0.25)
    np.testing.assert_allclose(raised, [1, 1, 0.8, 0], rtol=1e-6)
    np.testing.assert_array_equal(clip_factor(norm, counts, 0.0, "flat", 0.0), [0, 0, 0, 0])
    automatic = clip_factor(norm, counts, 2.0, "automatic", 0.0)
    np.testing.assert_allclose(automatic, [200, 2 / 1.01, 2 / 2.01, 0], rtol=1e-5)
    eps = float(jnp.finfo(jnp.float32).eps)
    assert rounding_margin(jnp.dtype(jnp.float32), 12) == (MARGIN_ULPS + 2) * eps
