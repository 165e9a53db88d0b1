"""Clip factors from squared norms, by hand; norms and sums of per-example gradients, by NumPy in float64."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wtdp_jax.clipping import factors
from wtdp_jax.clipping.factors import Group

_ONE, _STACKED = Group("one", ()), Group("h/layer", (2,))
_SQUARED = {_ONE: [9.0, 0.04, 1.0, np.inf], _STACKED: [[16.0, 0.0], [0.03, 0.02], [1.0, 1.0], [1.0, 1.0]]}
_IS_PADDING = [False, False, True, False]
_NORMS = [5.0, 0.3, 0.0, np.inf]
# Small against what the margins add, which has tests of its own.
_CLOSE: dict[str, Any] = {"rtol": 1e-5}


def _factors(clipping: Any, **more: Any) -> factors.Factors:
    squared = {group: jnp.array(values) for group, values in _SQUARED.items()}
    return factors.clip_factors(squared, jnp.array(_IS_PADDING), l2_clip_norm=1.5, clipping=clipping, **more)


def test_a_group_is_a_module_at_each_index_of_its_stack() -> None:
    stacks = {"h/layer/kernel": (2,), "h/layer/bias": (2,), "one/scale": ()}
    found = factors.groups(stacks)
    assert found == {"h/layer/kernel": _STACKED, "h/layer/bias": _STACKED, "one/scale": _ONE}
    assert factors.count({*found.values()}) == 3


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_norms_are_of_all_groups_and_infinite_or_zero_where_a_row_does_not_count(clipping: Any) -> None:
    found = _factors(clipping)
    np.testing.assert_allclose(found.norm, _NORMS, **_CLOSE)
    np.testing.assert_array_equal(found.counts, [True, True, False, False])


def test_flat_factors() -> None:
    found = _factors("flat").factors
    np.testing.assert_allclose(found[_ONE], [0.3, 1, 0, 0], **_CLOSE)
    np.testing.assert_allclose(found[_STACKED], [[0.3, 0.3], [1, 1], [0, 0], [0, 0]], **_CLOSE)


def test_automatic_factors() -> None:
    found = _factors("automatic").factors
    np.testing.assert_allclose(found[_ONE], [1.5 / 5.01, 1.5 / 0.31, 0, 0], **_CLOSE)


def test_per_layer_factors() -> None:
    found, threshold = _factors("per_layer").factors, 1.5 / math.sqrt(3)
    np.testing.assert_allclose(found[_ONE], [threshold / 3, 1, 0, 0], **_CLOSE)
    np.testing.assert_allclose(found[_STACKED], [[threshold / 4, 1], [1, 1], [0, 0], [0, 0]], **_CLOSE)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_margins_lower_factors(clipping: Any) -> None:
    base, long, more = (
        float(_factors(clipping, **settings).factors[_ONE][0])
        for settings in ({}, {"positions": 6 * 2**15}, {"more_margin": 0.01})
    )
    gamma = 0.01 if clipping == "automatic" else 0.0
    norm = 3.0 if clipping == "per_layer" else 5.0
    eps = float(jnp.finfo(jnp.float32).eps)
    assert base / long - 1 == pytest.approx(2**15 * eps * norm / (norm + gamma), rel=1e-3)
    assert base / more - 1 == pytest.approx(0.01 * norm / (norm + gamma), rel=1e-3)


def test_norms_are_raised_by_what_rounding_asks() -> None:
    eps = float(jnp.finfo(jnp.float32).eps)
    assert factors.rounding_margin(jnp.dtype(jnp.float32), 0) == 32 * eps
    assert factors.rounding_margin(jnp.dtype(jnp.float32), 600) == 132 * eps
    assert factors.rounding_margin(jnp.dtype(jnp.float64), 0) == 32 * float(jnp.finfo(jnp.float64).eps)
    at_the_norm = factors.clip_factor(jnp.ones(1), jnp.ones(1, bool), 1.0, "flat", 32 * eps)
    np.testing.assert_allclose(1 - at_the_norm, 32 * eps, rtol=0.05)


def _gradients() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        "h": {"layer": {"kernel": (4, 2, 3, 5), "bias": (4, 2, 5)}},
        "one": {"scale": (4, 3), "shift": (4,)},
    }
    return jax.tree.map(rng.standard_normal, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


_LEAF_GROUPS = {"h/layer/kernel": _STACKED, "h/layer/bias": _STACKED, "one/scale": _ONE, "one/shift": _ONE}


def test_squared_norms_of_gradients() -> None:
    gradients = _gradients()
    found = factors.squared_norms(jax.tree.map(jnp.asarray, gradients), _LEAF_GROUPS)
    layer = gradients["h"]["layer"]
    stacked = np.sum(layer["kernel"] ** 2, (2, 3)) + np.sum(layer["bias"] ** 2, 2)
    np.testing.assert_allclose(found[_STACKED], stacked, rtol=1e-5)
    one = np.sum(gradients["one"]["scale"] ** 2, 1) + gradients["one"]["shift"] ** 2
    np.testing.assert_allclose(found[_ONE], one, rtol=1e-5)


def test_the_weighted_sum_leaves_out_what_is_not_finite() -> None:
    gradients, clipped = _gradients(), _factors("per_layer")
    expected = {
        "one": np.einsum("b,bi->i", clipped.factors[_ONE], gradients["one"]["scale"]),
        "bias": np.einsum("bs,bsi->si", clipped.factors[_STACKED], gradients["h"]["layer"]["bias"]),
    }
    gradients["one"]["scale"][2], gradients["h"]["layer"]["bias"][3] = np.nan, np.inf
    found = factors.weighted_sum(jax.tree.map(jnp.asarray, gradients), _LEAF_GROUPS, clipped)
    np.testing.assert_allclose(found["one"]["scale"], expected["one"], rtol=1e-5)
    np.testing.assert_allclose(found["h"]["layer"]["bias"], expected["bias"], rtol=1e-5)
