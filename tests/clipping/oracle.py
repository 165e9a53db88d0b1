"""The independent oracle: per-example gradients of the plain loss, clipped by the textbook formula in NumPy.

It shares no code with the engines: one example at a time, `jax.grad`, then sums in NumPy. `assert_exact`
compares both.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from wtdp_jax.clipping import clipped_grad


def gradients_fn(loss_fn: Callable) -> Callable:
    """The compiled function (params, batch) -> gradients with a leading axis of examples."""

    def one(params: Any, example: Any) -> Any:
        rows = jax.tree.map(lambda leaf: leaf[None], example)
        return jax.grad(lambda p: loss_fn(p, rows)[0])(params)

    return jax.jit(jax.vmap(one, in_axes=(None, 0)))


def per_example_gradients(loss_fn: Callable, params: Any, batch: Any) -> Any:
    """Gradients with a leading axis of examples, as NumPy arrays."""
    return jax.tree.map(np.asarray, gradients_fn(loss_fn)(params, batch))


def norms(gradients: Any) -> np.ndarray:
    """The L2 norm of each example's gradient."""
    return np.sqrt(sum(np.sum(g.reshape(len(g), -1) ** 2, -1) for g in jax.tree.leaves(gradients)))


def clipped_sum(gradients: Any, factors: np.ndarray) -> Any:
    """The sum over examples of factor times gradient."""
    return jax.tree.map(lambda g: np.tensordot(factors, g, 1), gradients)


def flat_factors(norms: np.ndarray, l2_clip_norm: float) -> np.ndarray:
    """min(1, C / norm), for C above 0; a layer's norm may be 0."""
    return l2_clip_norm / np.maximum(norms, l2_clip_norm)


def automatic_factors(norms: np.ndarray, l2_clip_norm: float) -> np.ndarray:
    """C / (norm + 0.01)."""
    return l2_clip_norm / (norms + 0.01)


def per_layer_clipped_sum(gradients: Any, l2_clip_norm: float, stacked: str = "h") -> Any:
    """Each module at each depth clipped to C / sqrt(K); under `stacked` are leading axes of depth."""
    slices = {}  # (module, depth) -> names of leaves
    for keys, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        *module, _ = (key.key for key in keys)
        depths = range(leaf.shape[1]) if module[:1] == [stacked] else [None]
        for depth in depths:
            slices.setdefault((*module, depth), []).append(keys)
    threshold = l2_clip_norm / np.sqrt(len(slices))
    total = jax.tree.map(lambda g: np.zeros(g.shape[1:]), gradients)
    for (*_, depth), leaves in slices.items():
        parts = {keys: _get(gradients, keys) for keys in leaves}
        parts = {keys: g if depth is None else g[:, depth] for keys, g in parts.items()}
        factors = flat_factors(norms(list(parts.values())), threshold)
        for keys, g in parts.items():
            out = _get(total, keys)
            out[... if depth is None else depth] += np.tensordot(factors, g, 1)
    return total


def _get(tree: Any, keys: tuple) -> Any:
    for key in keys:
        tree = tree[key.key]
    return tree


def relative_error(actual: Any, expected: Any) -> float:
    """The worst over leaves of max |actual - expected| / max |expected|.

    A gradient may vanish but for rounding, as that of a bias before a softmax: there the error is taken
    relative to a millionth of the largest entry of all.
    """
    least = 1e-6 * max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(expected))

    def worst(a: Any, e: Any) -> float:
        scale = max(np.max(np.abs(e)), least) or 1.0
        return float(np.max(np.abs(np.asarray(a, np.float64) - e)) / scale)

    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    return max(jax.tree.leaves(jax.tree.map(worst, actual, expected)))


def assert_exact(loss_fn: Callable, params: Any, batch: Any) -> None:
    """That the engines without per-example gradients give this oracle's norms and sum, in float64."""
    gradients = per_example_gradients(loss_fn, params, batch)
    expected_norms = norms(gradients)
    l2_clip_norm = float(np.median(expected_norms))
    expected = clipped_sum(gradients, flat_factors(expected_norms, l2_clip_norm))
    for engine in ("ghost", "bookkeeping"):
        grad_fn = clipped_grad(loss_fn, engine=engine, l2_clip_norm=l2_clip_norm)
        total, per_example = jax.jit(grad_fn)(params, batch)
        assert relative_error(per_example.norm, expected_norms) < 1e-10, engine
        assert relative_error(total, expected) < 1e-10, engine
