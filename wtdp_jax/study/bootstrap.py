"""Intervals of accuracies and of their differences: a bootstrap over examples, Student's t over seeds.

Dimension key: S seeds, N evaluation examples, R resamplings.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped
from scipy import stats

RESAMPLINGS = 10_000
COVERAGE = 0.95


class Interval(NamedTuple):
    """An estimate with its interval, all in the estimate's unit."""

    mean: float
    low: float
    high: float

    def includes(self, value: float) -> bool:
        """Whether a value lies in the interval, ends included."""
        return self.low <= value <= self.high


def interval(values: Shaped[np.ndarray, "S N"]) -> Interval:
    """Returns the mean of values, and where it lies if seeds and examples were drawn anew.

    Examples are resampled with replacement. Of seeds there are too few for that: resampling three of them
    never leaves their range, which misses the truth one time in four. So each resampling also draws an error
    from Student's t with S - 1 degrees of freedom, in units of the mean's standard error over seeds. The two
    parts share what is peculiar to a seed and an example, so the interval is rather too wide than too narrow.
    A single seed says nothing of others: its interval speaks of the examples alone. For a difference give the
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
    draws = examples @ np.mean(kinds, axis=0) / num_examples
    deviation = standard_deviation(np.mean(values, axis=1))
    if deviation is not None:
        # Its quantiles in a random order: draws whose tails are where they ought to be.
        errors = stats.t.ppf((np.arange(RESAMPLINGS) + 0.5) / RESAMPLINGS, df=num_seeds - 1)
        draws += deviation / math.sqrt(num_seeds) * rng.permutation(errors)
    low, high = np.quantile(draws, ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    return Interval(mean=float(np.mean(values)), low=float(low), high=float(high))


def standard_deviation(values: Float[np.ndarray, " S"]) -> float | None:
    """Returns the sample standard deviation over seeds; None for one seed."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
