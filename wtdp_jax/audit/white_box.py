"""A white-box audit of one full step: the noisy sum with a canary, and without it.

Dimension key: B examples, N draws, K leaves.

The adversary knows the data, the parameters and the canary, and looks at the released sum along the direction
in which the canary moves it: against equal noise everywhere no test does better. In case the noise is not
equal, it also looks at each leaf alone, and takes what tells the two apart best on draws set aside for that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from wtdp_jax.audit import bounds

Batch = Any
Params = Any

# Draws at a time: as many copies of the parameters are held.
_CHUNK = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One step of which everything is known but the noise.

    Attributes:
        release: (params, batch, is_padding) -> the sum before noise, in the units of what is released.
        noised: (sum, key) -> the released sum.
    """

    release: Callable[[Params, Batch, Bool[Array, " B"]], Any]
    noised: Callable[[Any, Array], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Two neighbouring batches in one physical batch, whose last row is the canary.

    Attributes:
        params: the parameters.
        batch: a tree of (B, ...) arrays.
        others: (B - 1,) bool, which of the other rows are padding in both.
    """

    params: Params
    batch: Batch
    others: Bool[Array, " B_minus_1"]

    def is_padding(self, *, with_canary: bool) -> Bool[Array, " B"]:
        """The padding mask of one of the two."""
        return jnp.append(self.others, not with_canary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """What was found.

    Attributes:
        mu: lower bound on the sensitivity over the noise's standard deviation, see `bounds.mu_lower_bound`.
        epsilon: the lower bound on epsilon at delta that follows.
        delta: as asked for.
        confidence: with which both hold.
        draws: of either neighbour.
    """

    mu: float
    epsilon: float
    delta: float
    confidence: float
    draws: int


def audit(
    mechanism: Mechanism,
    neighbours: Neighbours,
    key: Array,
    *,
    draws: int,
    delta: float,
    confidence: float = 0.999,
) -> Audit:
    """Audits one step.

    Args:
        mechanism: the step.
        neighbours: its two inputs.
        key: for the noise of all draws.
        draws: draws of either input on which errors are counted; a quarter more choose the test's threshold.
        delta: at which epsilon is given.
        confidence: with which both error rates are bounded together.
    """
    release = jax.jit(mechanism.release)
    sums = [
        release(neighbours.params, neighbours.batch, neighbours.is_padding(with_canary=with_canary))
        for with_canary in (False, True)
    ]
    chosen = draws // 4
    without, with_canary = statistics(mechanism, sums, key, draws + chosen)
    view, threshold = best_test(without[:chosen], with_canary[:chosen])
    each = 1 - (1 - confidence) / 2
    false_positive = bounds.upper_bound(int(np.sum(without[chosen:, view] > threshold)), draws, each)
    false_negative = bounds.upper_bound(int(np.sum(with_canary[chosen:, view] <= threshold)), draws, each)
    mu = bounds.mu_lower_bound(false_positive, false_negative)
    return Audit(
        mu=mu, epsilon=bounds.gaussian_epsilon(mu, delta), delta=delta, confidence=confidence, draws=draws
    )


def statistics(
    mechanism: Mechanism, sums: list[Any], key: Array, draws: int
) -> tuple[Float[np.ndarray, "N K_plus_1"], Float[np.ndarray, "N K_plus_1"]]:
    """Where released sums lie on the way from one sum to the other: in each leaf, and in all together.

    Args:
        mechanism: adds the noise.
        sums: the two sums before noise.
        key: one key, split for the draws.
        draws: N, of either.

    Returns:
        For either sum the inner products of the released ones, less the first, with the difference.
    """
    difference = jax.tree.map(jnp.subtract, sums[1], sums[0])

    def one(total: Any, key: Array) -> Array:
        products = jax.tree.map(
            lambda released, start, d: jnp.sum((released - start) * d),
            mechanism.noised(total, key),
            sums[0],
            difference,
        )
        leaves = jnp.stack(jax.tree.leaves(products))
        return jnp.append(leaves, jnp.sum(leaves))

    @jax.jit
    def chunk_by_chunk(total: Any, keys: Array) -> Array:
        return jax.lax.map(jax.vmap(functools.partial(one, total)), keys)

    chunks = -(-draws // _CHUNK)
    keys = jax.random.split(key, (2, chunks, _CHUNK))
    without, with_canary = (
        np.asarray(chunk_by_chunk(*pair)).reshape(chunks * _CHUNK, -1)[:draws]
        for pair in zip(sums, keys, strict=True)
    )
    return without, with_canary


def best_test(without: np.ndarray, with_canary: np.ndarray) -> tuple[int, float]:
    """The column, and the threshold in it above which the canary is said to be there, with the fewest errors.

    Args:
        without: (N, K + 1) statistics without the canary.
        with_canary: the same with it.
    """
    tests = [_best_threshold(without[:, k], with_canary[:, k]) for k in range(without.shape[1])]
    view = int(np.argmin([errors for _, errors in tests]))
    return view, tests[view][0]


def _best_threshold(without: np.ndarray, with_canary: np.ndarray) -> tuple[float, float]:
    """A threshold, and the sum of its error rates."""
    candidates = np.sort(np.concatenate([without, with_canary]))
    positives = 1 - np.searchsorted(np.sort(without), candidates, side="right") / len(without)
    negatives = np.searchsorted(np.sort(with_canary), candidates, side="right") / len(with_canary)
    best = int(np.argmin(positives + negatives))
    return float(candidates[best]), float(positives[best] + negatives[best])
