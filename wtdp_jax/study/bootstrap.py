"""Bootstrap intervals of accuracies and of their differences.

Dimension key: S seeds, N evaluation examples, R resamplings.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

RESAMPLINGS = 10_000
COVERAGE = 0.95


class Interval(NamedTuple):
    """An estimate with its bootstrap interval, all in the estimate's unit."""

    mean: float
    low: float
    high: float

    def includes(self, value: float) -> bool:
        """Whether a value lies in the interval, ends included."""
        return self.low <= value <= self.high


def interval(values: Shaped[np.ndarray, "S N"]) -> Interval:
    """Returns the mean of values, and where it lies if seeds and examples were drawn anew.

    Both are resampled, each with replacement and independently (the bootstrap of a table's two ways). A
    single seed can't be resampled: the interval then speaks of the examples alone. For a difference give the
    differences of two arms on the same seeds and examples, which makes it a paired one.

    Args:
      values: one number for each seed and evaluation example.
    """
    values = np.asarray(values, np.float64)
    num_seeds, num_examples = values.shape
    rng = np.random.default_rng(0)
    # Examples on which all seeds agree are drawn as one, by their share: the same draws, and far fewer.
    kinds, counts = np.unique(values, axis=1, return_counts=True)
    examples = rng.multinomial(num_examples, counts / num_examples, RESAMPLINGS)
    means = (examples @ kinds.T) / num_examples
    seeds = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), RESAMPLINGS)
    draws = np.sum(means * seeds, axis=1) / num_seeds
    low, high = np.quantile(draws, ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    return Interval(mean=float(np.mean(values)), low=float(low), high=float(high))


def standard_deviation(values: Float[np.ndarray, " S"]) -> float | None:
    """Returns the sample standard deviation over seeds; None for one seed."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
