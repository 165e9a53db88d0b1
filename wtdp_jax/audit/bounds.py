"""From counted errors of a test to lower bounds on epsilon, at a stated confidence.

A mechanism is audited as a test between two neighbouring inputs: without the canary (the null hypothesis) and
with it. (epsilon, delta)-differential privacy bounds how good any such test can be, so a good one refutes it.
"""

import math

import numpy as np
from scipy import optimize, stats

_LARGEST_EPSILON = 1e3


def upper_bound(count: int, draws: int, confidence: float) -> float:
    """Clopper and Pearson's (1934) upper bound on a probability.

    Args:
        count: how often the event was seen.
        draws: in how many independent draws.
        confidence: with which the bound holds.
    """
    if count == draws:
        return 1.0
    return float(stats.beta.ppf(confidence, count + 1, draws - count))


def mu_lower_bound(false_positive: float, false_negative: float) -> float:
    """The least mu for which a mechanism of Gaussian differential privacy allows these error rates.

    Dong, Roth and Su (2019, arXiv 1905.02383): mu-GDP is that no test is better than that between N(0, 1) and
    N(mu, 1). Used for audits by Nasr et al. (2023, arXiv 2302.07956).

    Args:
        false_positive: an upper bound on the rate of either error.
        false_negative: an upper bound on the rate of the other.

    Returns:
        mu, at least 0.
    """
    mu = stats.norm.isf(false_positive) - stats.norm.ppf(false_negative)
    return max(float(mu), 0.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at delta of one Gaussian mechanism whose sensitivity is mu standard deviations.

    The exact curve of Balle and Wang (2018, arXiv 1805.06530): another way to it than the privacy loss
    distributions of `wtdp_jax.accounting`.

    Args:
        mu: sensitivity over the noise's standard deviation, at least 0.
        delta: in (0, 1).
    """

    def excess(epsilon: float) -> float:
        tail = stats.norm.logcdf(-epsilon / mu - mu / 2)
        return float(stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon + tail)) - delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    if math.isinf(mu):
        return math.inf
    above = 1.0
    while excess(above) > 0:
        above *= 2
    return float(optimize.brentq(excess, 0.0, above, xtol=1e-9))


def one_run_epsilon_lower_bound(
    correct: int, guesses: int, *, canaries: int, delta: float, confidence: float
) -> float:
    """The least epsilon that allows so many correct guesses in one run.

    Steinke, Nasr and Jagielski (2023, arXiv 2305.08846, theorem 5.2): each canary is in the data with
    probability 1/2, by itself, and after the run the auditor says of some of them whether they were.

    Args:
        correct: correct guesses.
        guesses: all guesses, at most `canaries`.
        canaries: how many there were.
        delta: of the claim, in [0, 1).
        confidence: with which the bound holds.

    Returns:
        The bound, at least 0.
    """

    def refuted(epsilon: float) -> bool:
        return _one_run_probability(correct, guesses, canaries, epsilon, delta) < 1 - confidence

    if not refuted(0.0):
        return 0.0
    below, above = 0.0, 1.0
    while refuted(above):
        below, above = above, 2 * above
        if above > _LARGEST_EPSILON:
            return math.inf
    while above - below > 1e-6:
        middle = (below + above) / 2
        below, above = (middle, above) if refuted(middle) else (below, middle)
    return below


def _one_run_probability(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of at least so many correct guesses."""
    right = 1 / (1 + math.exp(-epsilon))
    at_least = stats.binom.sf(correct - 1, guesses, right)
    if correct == 0:
        return 1.0
    # What delta adds: at most 2 m delta times the largest mean over i of the i probabilities below `correct`.
    below = stats.binom.pmf(correct - np.arange(1, correct + 1), guesses, right)
    slope = np.max(np.cumsum(below) / np.arange(1, correct + 1))
    return float(min(1.0, at_least + 2 * canaries * delta * slope))
