"""From squared norms to clip factors, and the sum of clipped per-example gradients.

Dimension key: B examples, K groups of leaves that are clipped together.

A group is one module at one depth: its leaves, at one index of the axes along which a scanned module is
stacked. Norms and factors of the groups of one module are held as one array (B, *stack).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax.rules import accumulation_dtype
from wtdp_jax.trees import leaf_paths, map_with_path, parent

Clipping = Literal["flat", "automatic", "per_layer"]

AUTOMATIC_GAMMA = 0.01
"""The stabilizer of automatic clipping (Bu et al. 2023, arXiv 2206.07136)."""

# A computed norm may be below the norm of the sum that is really formed by some units in the last place,
# beyond what the rules' slack covers: sums of up to 10^8 squares, and the rounding of the clipped sum itself.
# Norms are raised by this many before they are compared with the clip norm, and by more for long sequences:
# where many positions are alike, each addition in a running sum rounds the same way. On repeated tokens a sum
# of T terms was off by up to T / 12 ulps. Tests search batches of one for a sum that still exceeds the bound.
MARGIN_ULPS = 32
MARGIN_ULPS_PER_POSITION = 1 / 6

LOST_SQUARES = 2**40
"""How many squares, at most, a squared norm may lack because each is below the smallest normal number.

Those of more parameters than any model has, or of 8192 tokens at width 8192, all pairs. So no gradient whose
squares vanish exceeds the clip norm, however small that is: norms are raised by 1e-13 in float32.
"""

NARROW_MARGIN = 2.0**-9
"""By how much more, relatively, norms are raised where two passes compute layers in 16 bits.

XLA may round a value apart in the two passes, by up to 2^-8 of it. In a norm such errors average out: on a
CPU the passes of small GPT-2s agreed to 1e-6 (tests/clipping/test_sensitivity.py). A row that differs by more
than this is left out, see `wtdp_jax.clipping.ghost`.
"""


class Group(NamedTuple):
    """Leaves of one module that are stacked alike."""

    module: str
    stack: tuple[int, ...]


class Factors(NamedTuple):
    """What `clip_factors` returns.

    Attributes:
        factors: for each group, (B, *stack); exactly 0 for rows that do not count.
        norm: (B,) whole norm before clipping; inf where the gradient is not finite, 0 for padding.
        counts: (B,) whether the row contributes: neither padding nor non-finite.
    """

    factors: dict[Group, Array]
    norm: Array
    counts: Array


def groups(stacks: Mapping[str, tuple[int, ...]]) -> dict[str, Group]:
    """The group of each leaf, by path, from the axes along which it is stacked."""
    return {path: Group(parent(path), stack) for path, stack in stacks.items()}


def clip_factors(
    squared: Mapping[Group, Array],
    is_padding: Array,
    *,
    l2_clip_norm: float,
    clipping: Clipping,
    positions: int = 1,
    more_margin: float = 0.0,
) -> Factors:
    """Clip factors from squared norms.

    | case | flat | automatic | per_layer |
    |---|---|---|---|
    | factor | min(1, C / norm) | C / (norm + 0.01) | min(1, C / sqrt(K) / group norm) |
    | norm 0 | 1 | C / 0.01 | 1 |
    | C = 0 | 0 | 0 | 0 |
    | C = inf | 1 | refused | 1 |
    | gradient not finite, padding | 0 | 0 | 0 |

    Args:
        squared: squared norms of each group, (B, *stack).
        is_padding: (B,) bool.
        l2_clip_norm: C, in units of the gradient of one example's loss.
        clipping: "flat" (Abadi et al. 2016), "automatic" (Bu et al. 2023) or "per_layer" with fixed
            thresholds.
        positions: at how many positions, at most, one layer was applied.
        more_margin: by how much, relatively, norms are raised beyond what rounding of their own type asks.
    """
    totals = [jnp.sum(s.reshape(s.shape[0], -1), -1) for s in squared.values()]
    norm = jnp.sqrt(sum(totals[1:], start=totals[0]))
    counts = jnp.isfinite(norm) & ~is_padding
    margin = rounding_margin(norm.dtype, positions) + more_margin
    threshold = l2_clip_norm / math.sqrt(count(squared)) if clipping == "per_layer" else l2_clip_norm
    factors = {}
    for group, values in squared.items():
        rows = (values.shape[0],) + (1,) * len(group.stack)
        whole = jnp.sqrt(values) if clipping == "per_layer" else norm.reshape(rows)
        factor = clip_factor(whole, counts.reshape(rows), threshold, clipping, margin)
        factors[group] = jnp.broadcast_to(factor, values.shape)
    reported = jnp.where(is_padding, 0, jnp.where(counts, norm, jnp.inf))
    return Factors(factors, reported.astype(norm.dtype), counts)


def count(groups: Iterable[Group]) -> int:
    """How many are clipped apart: a module that is stacked is one at each index."""
    return sum(math.prod(group.stack) for group in groups)


def rounding_margin(dtype: jnp.dtype, positions: int) -> float:
    """By how much, relatively, norms of this type are raised.

    Args:
        dtype: the norms' type.
        positions: at how many positions, at most, one layer was applied.
    """
    return (MARGIN_ULPS + MARGIN_ULPS_PER_POSITION * positions) * float(jnp.finfo(dtype).eps)


def clip_factor(norm: Array, counts: Array, threshold: float, clipping: Clipping, margin: float) -> Array:
    """The factor for gradients of given norms, 0 where they don't count; see `clip_factors`.

    Args:
        norm: norms.
        counts: whether each counts; its norm is finite then.
        threshold: C, or a group's share of it.
        clipping: the kind.
        margin: by how much, relatively, norms are raised.
    """
    lost = math.sqrt(LOST_SQUARES * float(jnp.finfo(norm.dtype).tiny))
    norm = jnp.where(counts, norm, 1) * (1 + margin) + lost
    if clipping == "automatic":
        value = threshold / (norm + AUTOMATIC_GAMMA)
    else:
        value = jnp.where(norm <= threshold, 1, threshold / norm)
    return jnp.where(counts, value, 0).astype(norm.dtype)


def squared_norms(gradients: Any, leaf_groups: Mapping[str, Group]) -> dict[Group, Array]:
    """Squared norms (B, *stack) by group of per-example gradients, leaves (B, ...)."""
    squared: dict[Group, Array] = {}
    for path, leaf in leaf_paths(gradients).items():
        group = leaf_groups[path]
        wide = leaf.astype(accumulation_dtype(leaf.dtype))
        values = _sum_trailing(jnp.square(wide), 1 + len(group.stack))
        squared[group] = squared[group] + values if group in squared else values
    return squared


def weighted_sum(gradients: Any, leaf_groups: Mapping[str, Group], clipped: Factors) -> Any:
    """The sum over B of per-example gradients, leaves (B, ...), each times its group's factor."""

    def total(path: str, leaf: Array) -> Array:
        # A factor of 0 is not enough for a row that does not count: 0 x NaN is NaN.
        wide = leaf.astype(accumulation_dtype(leaf.dtype))
        finite = jnp.where(_expand(clipped.counts, leaf), wide, 0)
        return jnp.sum(finite * _expand(clipped.factors[leaf_groups[path]], leaf), 0)

    return map_with_path(total, gradients)


def _expand(values: Array, leaf: Array) -> Array:
    """`values`, whose axes are the leaf's first ones, with axes of length 1 for the rest."""
    return values.reshape(values.shape + (1,) * (leaf.ndim - values.ndim))


def _sum_trailing(x: Array, keep: int) -> Array:
    """Sums all but the first `keep` axes, the last one by itself first: shorter sums, smaller errors."""
    if x.ndim > keep:
        x = jnp.sum(x, -1)
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, tuple(range(keep, x.ndim)))
