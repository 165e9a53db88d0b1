"""Epsilon of a Poisson-subsampled Gaussian, by PLD and by RDP, and the noise that a target epsilon needs.

Everything here is about the EFFECTIVE noise multiplier, the noise's standard deviation over the sensitivity,
but for what `calibrate_noise_multiplier` returns; see `wtdp_jax.privacy`. The mathematics of both bounds is
the `dp_accounting` library's.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting
from dp_accounting import pld, rdp

# The calibrated multiplier's epsilon lies within this fraction of the target, below it.
_CALIBRATION_TOLERANCE = 1e-3
# Beyond this effective noise multiplier a target counts as out of reach, and more noise as no more.
_MAX_NOISE_MULTIPLIER = 2.0**20
# Less noise than this counts as none: epsilons above 1e11 say nothing, and float64 can't square much less.
_MIN_NOISE_MULTIPLIER = 1e-6
# Beyond as many steps the library takes minutes, or does not end: it raises a distribution's size to this
# power, and composes a small one step by step.
_MAX_PLD_STEPS = 1_000_000
# Wider grids are needed where one step's loss reaches 2e6, or all steps' 1e7; the library overflows on them.
_MAX_INTERVAL = 10.0
_RDP_BRACKET_ORDERS = (*range(2, 65), 128, 256, 512)


def effective_noise_multiplier(noise_multiplier: float, *, l2_clip_norm: float, sensitivity: float) -> float:
    """Returns the noise's standard deviation in units of the sensitivity.

    Args:
        noise_multiplier: The noise's standard deviation in units of the clip norm.
        l2_clip_norm: The clip norm, in units of the gradient's norm.
        sensitivity: The most that adding or removing one row changes the clipped sum, in the same units.

    Returns:
        noise_multiplier * l2_clip_norm / sensitivity, without rounding where the last two are equal.
    """
    return noise_multiplier / (sensitivity / l2_clip_norm)


def epsilon_pld(*, noise_multiplier: float, sampling_prob: float, steps: int, delta: float) -> float:
    """Returns epsilon from the privacy loss distribution, the tighter of the two bounds.

    | case                                  | epsilon  |
    |---------------------------------------|----------|
    | steps = 0 or sampling_prob = 0        | 0        |
    | noise_multiplier below 1e-6, otherwise| infinite |
    | noise_multiplier above 2^20           | that at 2^20: less noise, a valid bound |
    | delta below about 1e-14               | infinite: the distribution's cut tails weigh more |
    | more than a million steps             | that of `epsilon_rdp`, as where losses exceed 2e6 |

    Args:
        noise_multiplier: The noise's standard deviation over the sensitivity (the effective one).
        sampling_prob: The probability, in [0, 1], with which a step draws a row.
        steps: The number of steps composed.
        delta: The probability with which epsilon may fail, in (0, 1).

    Returns:
        The smallest epsilon shown, for adding or removing one row.

    Raises:
        ValueError: If an argument is out of its range.
    """
    check_mechanism(noise_multiplier, sampling_prob, steps, delta)
    return _pld_epsilon(noise_multiplier, sampling_prob, steps, delta, coarseness=1.0)


def epsilon_rdp(*, noise_multiplier: float, sampling_prob: float, steps: int, delta: float) -> float:
    """Returns epsilon from Renyi differential privacy; arguments and edge cases as in `epsilon_pld`."""
    check_mechanism(noise_multiplier, sampling_prob, steps, delta)
    return _rdp_epsilon(noise_multiplier, sampling_prob, steps, delta)


def calibrate_noise_multiplier(
    *,
    sampling_prob: float,
    steps: int,
    epsilon: float,
    delta: float,
    l2_clip_norm: float,
    sensitivity: float,
) -> float:
    """Finds the noise multiplier whose epsilon is just below a target.

    RDP brackets the answer, a coarse PLD (ten times cheaper, a valid bound too) searches the bracket, and the
    PLD of `epsilon_pld` decides: what is returned never exceeds the target by that figure. A few seconds.

    Args:
        sampling_prob: The probability, in (0, 1], with which a step draws a row.
        steps: The number of steps composed, at least 1.
        epsilon: The target.
        delta: The probability with which epsilon may fail, in (0, 1).
        l2_clip_norm: The clip norm.
        sensitivity: The most that one row changes the clipped sum, in the clip norm's units.

    Returns:
        The noise's standard deviation over the clip norm: the PLD epsilon of its effective noise multiplier
        lies in [(1 - 1e-3) epsilon, epsilon].

    Raises:
        ValueError: If an argument is out of its range, or no noise multiplier meets or none is needed for the
            target.
    """
    check_mechanism(1.0, sampling_prob, steps, delta)
    check_norms(l2_clip_norm, sensitivity)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon}")
    drawn_at_all = -math.expm1(steps * math.log1p(-sampling_prob)) if sampling_prob < 1 else float(steps > 0)
    if delta >= drawn_at_all:
        raise ValueError(
            f"delta must be below the probability {drawn_at_all:.3g} that a row is drawn at all "
            f"(else no noise is needed), got {delta}"
        )
    # The coarse search is off by a little, nearly the same a little further on: aim, see where it lands,
    # correct.
    middle = epsilon * (1 - _CALIBRATION_TOLERANCE / 2)
    aim = middle
    for _ in range(8):
        if aim <= 0:
            break
        noise_multiplier = _search(aim, sampling_prob, steps, delta) * (sensitivity / l2_clip_norm)
        effective = effective_noise_multiplier(
            noise_multiplier, l2_clip_norm=l2_clip_norm, sensitivity=sensitivity
        )
        reached = epsilon_pld(
            noise_multiplier=effective, sampling_prob=sampling_prob, steps=steps, delta=delta
        )
        if (1 - _CALIBRATION_TOLERANCE) * epsilon <= reached <= epsilon:
            return noise_multiplier
        aim += middle - reached
    raise ValueError(f"epsilon must be reachable by calibration at delta {delta}, got {epsilon}")


def check_mechanism(noise_multiplier: float, sampling_prob: float, steps: int, delta: float) -> None:
    """Refuses what no accountant can mean."""
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be finite and at least 0, got {noise_multiplier}")
    if not 0 <= sampling_prob <= 1:
        raise ValueError(f"sampling_prob must be in [0, 1], got {sampling_prob}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")


def check_norms(l2_clip_norm: float, sensitivity: float) -> None:
    """Refuses norms that bound nothing, or a sensitivity that no clipping to this norm could have."""
    if not 0 < l2_clip_norm < math.inf:
        raise ValueError(f"l2_clip_norm must be positive and finite with privacy, got {l2_clip_norm}")
    if not 0 < sensitivity < math.inf:
        raise ValueError(f"sensitivity must be positive and finite with privacy, got {sensitivity}")


def _event(noise_multiplier: float, sampling_prob: float, steps: int) -> dp_accounting.DpEvent:
    """The whole run as the accountants read it."""
    step = dp_accounting.PoissonSampledDpEvent(sampling_prob, dp_accounting.GaussianDpEvent(noise_multiplier))
    return dp_accounting.SelfComposedDpEvent(step, steps)


@lru_cache(maxsize=256)
def _pld_epsilon(
    noise_multiplier: float, sampling_prob: float, steps: int, delta: float, coarseness: float
) -> float:
    """PLD epsilon on a grid `coarseness` times as wide as `_loss_interval`; a valid bound on any grid."""
    if steps == 0 or sampling_prob == 0:
        return 0.0
    if noise_multiplier < _MIN_NOISE_MULTIPLIER:
        return math.inf
    noise_multiplier = min(noise_multiplier, _MAX_NOISE_MULTIPLIER)
    interval = coarseness * _loss_interval(noise_multiplier, sampling_prob, steps)
    if steps > _MAX_PLD_STEPS or interval > _MAX_INTERVAL:
        return _rdp_epsilon(noise_multiplier, sampling_prob, steps, delta)
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
    return float(accountant.compose(_event(noise_multiplier, sampling_prob, steps)).get_epsilon(delta))


def _loss_interval(noise_multiplier: float, sampling_prob: float, steps: int) -> float:
    """The grid's spacing: the library's 1e-4, finer where losses are tiny, coarser where huge.

    A grid not well below one step's typical loss loosens the bound over many steps: at noise multiplier 10,
    sampling probability 1e-3 and a million steps 1e-4 gives epsilon 0.39, and this 0.36 (delta 5e-6). A grid
    of many more points than these would take minutes, or gigabytes.
    """
    precision = noise_multiplier**-2
    typical_square = _log1p_scaled_expm1(sampling_prob**2, precision)  # the Renyi divergence of order 2
    typical = math.sqrt(typical_square)
    # The largest loss that the library keeps lies 10 standard deviations out.
    largest = _log1p_scaled_expm1(sampling_prob, 10 / noise_multiplier + precision / 2)
    composed = steps * typical_square + 10 * math.sqrt(steps) * typical
    return max(min(1e-4, typical / 10), largest / 2e5, composed / 1e6)


def _log1p_scaled_expm1(scale: float, exponent: float) -> float:
    """log(1 + scale (e^exponent - 1)) without overflow, scale in (0, 1]."""
    if exponent < 1:
        return math.log1p(scale * math.expm1(exponent))
    return exponent + math.log(scale + (1 - scale) * math.exp(-exponent))


@lru_cache(maxsize=256)
def _rdp_epsilon(
    noise_multiplier: float,
    sampling_prob: float,
    steps: int,
    delta: float,
    orders: tuple[int, ...] | None = None,
) -> float:
    """RDP epsilon over the given orders, the library's own if None."""
    if steps == 0 or sampling_prob == 0:
        return 0.0
    if noise_multiplier < _MIN_NOISE_MULTIPLIER:
        return math.inf
    noise_multiplier = min(noise_multiplier, _MAX_NOISE_MULTIPLIER)
    accountant = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _order_warnings_silenced():
        return float(accountant.compose(_event(noise_multiplier, sampling_prob, steps)).get_epsilon(delta))


@contextmanager
def _order_warnings_silenced() -> Iterator[None]:
    """Leaves out the library's line for each order near 1 that it could not compute and did not use."""

    def keep(record: logging.LogRecord) -> bool:
        return "_compute_log_a_frac" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _search(target: float, sampling_prob: float, steps: int, delta: float) -> float:
    """The effective noise multiplier that the coarse PLD puts just below the target."""
    by_rdp = _smallest_multiplier(
        lambda multiplier: _rdp_epsilon(multiplier, sampling_prob, steps, delta, _RDP_BRACKET_ORDERS),
        target,
        start=1.0,
        factor=2.0,
        precision=1e-2,
    )
    return _smallest_multiplier(
        lambda multiplier: _pld_epsilon(multiplier, sampling_prob, steps, delta, coarseness=10.0),
        target,
        start=by_rdp,
        factor=1.1,
        precision=3e-5,
    )


def _smallest_multiplier(
    epsilon_of: Callable[[float], float], target: float, *, start: float, factor: float, precision: float
) -> float:
    """Walks from `start` in growing strides to a bracket, then bisects; epsilon there is <= target."""
    low = high = start
    while epsilon_of(high) > target:
        low, high, factor = high, high * factor, factor**2
        if high > _MAX_NOISE_MULTIPLIER:
            raise ValueError(
                f"epsilon must be reachable with a noise multiplier up to {_MAX_NOISE_MULTIPLIER:.0f}, "
                f"got {target:.6g}"
            )
    while epsilon_of(low) <= target:
        low, high, factor = low / factor, low, factor**2
    while high > low * (1 + precision):
        middle = math.sqrt(low * high)
        if epsilon_of(middle) > target:
            low = middle
        else:
            high = middle
    return high
