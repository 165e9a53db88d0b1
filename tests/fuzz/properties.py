"""What must hold of an engine's sum, whatever the batch and the parameters."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.clipping import oracle
from tests.fuzz.shapes import ROWS, Shape, compiled, gradients

# Engines agree with the oracle to this, relatively, and beyond it to what an ulp of the parameters does to
# the oracle itself: a nearly saturated softmax, or a scaled-up attention score, loses digits that no engine
# has.
_TOLERANCE = 1e-10
_ULPS = 64
# Squares below the smallest normal number vanish in an engine, or are replaced by it, so smaller norms are 0.
_LEAST_NORM = 1e-140

# Two sums of B clipped gradients, each rounded B times by an ulp of at most B C, differ from the one gradient
# between them by 2 B^2 ulps of C.
_SUM_ULPS = 2 * ROWS**2


def length(tree: Any) -> float:
    """The L2 norm, in float64."""
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in jax.tree.leaves(tree)))


def assert_harmless(shape: Shape, params: Any, batch: Any, is_padding: np.ndarray, other: Any) -> None:
    """That nothing is NaN, and that padding and rows that are not finite leave no trace.

    Args:
        shape: what is tested.
        params: the parameters.
        batch: any rows.
        is_padding: (B,).
        other: another batch, for the rows of padding to hold instead.
    """
    run = compiled(shape)
    total, per_example = run(params, batch, jnp.asarray(is_padding))
    norm = np.asarray(per_example.norm)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(total))
    assert not np.isnan(norm).any() and (norm[is_padding] == 0).all()
    assert (np.asarray(per_example.loss)[is_padding] == 0).all()
    refilled = {
        name: jnp.where(is_padding.reshape((-1,) + (1,) * (leaf.ndim - 1)), other[name], leaf)
        for name, leaf in batch.items()
    }
    _assert_same(run(params, refilled, jnp.asarray(is_padding))[0], total)
    if np.isinf(norm).any():
        _assert_same(run(params, batch, jnp.asarray(is_padding | np.isinf(norm)))[0], total)


def largest_change(shape: Shape, params: Any, batch: Any, is_padding: np.ndarray) -> float:
    """How much one row changes the sum, over what it may; asserts that no row changes it by more."""
    run, bound = compiled(shape), shape.grad_fn.sensitivity
    total, _ = run(params, batch, jnp.asarray(is_padding))
    changes = [0.0]
    for row in np.flatnonzero(~is_padding):
        without, _ = run(params, batch, jnp.asarray(is_padding | (np.arange(ROWS) == row)))
        changes.append(length(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), total, without)))
        assert changes[-1] <= bound * (1 + _SUM_ULPS * shape.eps), (row, changes[-1], bound)
        alone, _ = run(params, batch, jnp.asarray(np.arange(ROWS) != row))
        assert length(alone) <= bound, (row, length(alone), bound)
    return 0.0 if bound in (0, math.inf) else max(changes) / bound


def assert_exact(shape: Shape, params: Any, batch: Any, is_padding: np.ndarray) -> None:
    """That norms and sum are the oracle's, in float64; rows whose squares leave its range must be padding."""
    total, per_example = compiled(shape)(params, batch, jnp.asarray(is_padding))
    found = np.asarray(per_example.norm)
    expected = _oracle(shape, params, batch)
    norms = _norms(expected)
    counts = np.isfinite(norms) & ~is_padding
    np.testing.assert_array_equal(np.isfinite(found) & ~is_padding, counts)
    if not counts.any():
        assert length(total) == 0
        return
    rows = _rows(expected, counts)
    nearby = [_rows(_oracle(shape, _moved(params, sign), batch), counts) for sign in (1, -1)]
    spread = [np.abs(oracle.norms(other) - norms[counts]) for other in nearby]
    # Bounds, not equal norms, where the cross-term is bounded or left out.
    if shape.tied_norm in ("triangle", "omit"):
        least = norms[counts] if shape.tied_norm == "triangle" else norms[counts] / math.sqrt(2)
        assert (found[counts] >= least * (1 - _TOLERANCE) - _ULPS * np.max(spread, 0)).all()
        factors = oracle.flat_factors(found[counts], shape.l2_clip_norm)
        _assert_close(total, oracle.clipped_sum(rows, factors), [])
        return
    allowed = _TOLERANCE * norms[counts] + _ULPS * np.max(spread, 0) + _LEAST_NORM
    assert (np.abs(found[counts] - norms[counts]) <= allowed).all(), (found, norms)
    _assert_close(total, _clipped(shape, rows), [_clipped(shape, other) for other in nearby])


def _norms(gradients: Any) -> np.ndarray:
    """Norms, of which those of padding and of rows that are not finite may be infinite or NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        return oracle.norms(gradients)


def _oracle(shape: Shape, params: Any, batch: Any) -> Any:
    return jax.tree.map(np.asarray, gradients(shape)(params, batch))


def _rows(gradients: Any, which: np.ndarray) -> Any:
    return jax.tree.map(lambda leaf: leaf[which], gradients)


def _moved(params: Any, sign: int) -> Any:
    """The parameters an ulp away, neighbouring entries in opposite directions."""

    def move(leaf: Any) -> Any:
        signs = np.where(np.arange(leaf.size) % 2, sign, -sign).reshape(leaf.shape)
        return leaf * (1 + signs * np.finfo(leaf.dtype).eps)

    return jax.tree.map(move, params)


def _clipped(shape: Shape, gradients: Any) -> Any:
    """The clipped sum, by the textbook."""
    if shape.clipping == "per_layer":
        return oracle.per_layer_clipped_sum(gradients, shape.l2_clip_norm)
    factors: Callable = {"flat": oracle.flat_factors, "automatic": oracle.automatic_factors}[shape.clipping]
    return oracle.clipped_sum(gradients, factors(oracle.norms(gradients), shape.l2_clip_norm))


def _assert_close(total: Any, expected: Any, nearby: list[Any]) -> None:
    """Within tolerance of each leaf's largest entry, or of a millionth of the largest of all."""
    least = 1e-6 * max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(expected))

    def check(keys: Any, found: Any, wanted: np.ndarray, *others: np.ndarray) -> None:
        spread = max((float(np.max(np.abs(other - wanted))) for other in others), default=0.0)
        allowed = _TOLERANCE * max(float(np.max(np.abs(wanted))), least) + _ULPS * spread + _LEAST_NORM
        error = float(np.max(np.abs(np.asarray(found) - wanted)))
        assert error <= allowed, (jax.tree_util.keystr(keys), error, allowed)

    jax.tree_util.tree_map_with_path(check, total, expected, *nearby)


def _assert_same(total: Any, other: Any) -> None:
    """To the last bit."""
    jax.tree.map(np.testing.assert_array_equal, total, other)
