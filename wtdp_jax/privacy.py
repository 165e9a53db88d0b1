"""What a run's noise buys: epsilon of a Poisson-subsampled Gaussian, its calibration, its statement.

One step draws every row independently with probability `sampling_prob`, sums the clipped gradients of the
rows drawn, and adds Gaussian noise; `steps` of them are composed. Two data sets are neighbours when one has
one row more than the other, so the number of rows is treated as public. Epsilon is computed twice: from the
privacy loss distribution (PLD: the claim) and from Renyi differential privacy (RDP: an older, looser bound,
given beside it). Both are upper bounds, and both come from the `dp_accounting` library.

A noise multiplier is the noise's standard deviation over the CLIP NORM. The guarantee depends on the noise
over the SENSITIVITY, the most that one row can change the sum; the two differ where the clipped norms are not
the gradients' true norms. So every epsilon here is that of the effective noise multiplier, unless it is
called claimed.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import dp_accounting
from dp_accounting import pld, rdp

# The calibrated multiplier's epsilon lies within this fraction of the target, below it.
_CALIBRATION_TOLERANCE = 1e-3
# Beyond this effective noise multiplier a target counts as out of reach.
_MAX_NOISE_MULTIPLIER = 2.0**20
_RDP_BRACKET_ORDERS = (*range(2, 65), 128, 256, 512)

_NOT_COVERED = (
    "the choice of hyperparameters, of a checkpoint or of when to stop, where private rows had a say",
    "evaluation data",
    "two rows by one author: the unit is one row, and k related rows together spend about k epsilon",
    "figures with non_private in their name (training losses and gradient norms): no noise was added to them",
    "the number of training rows, which is treated as public",
    "the computer's arithmetic and pseudo-randomness: the analysis is for real numbers and true randomness",
)
_NOT_COVERED_WITH_SEED = "anyone who knows the seed, who can recompute the noise and take it off"


def default_delta(num_examples: int) -> float:
    """Returns 1 / n^1.1, below the 1/n at which publishing one row outright would be allowed.

    Args:
        num_examples: The number of training rows, n, at least 2 (at 1 it would be no promise).

    Returns:
        The delta.

    Raises:
        ValueError: If `num_examples` is below 2.
    """
    if num_examples < 2:
        raise ValueError(f"num_examples must be at least 2 for a default delta, got {num_examples}")
    return num_examples**-1.1


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
    | noise_multiplier = 0, otherwise       | infinite |
    | delta below about 1e-14               | infinite: the distribution's cut tails weigh more |

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
    _check_mechanism(noise_multiplier, sampling_prob, steps, delta)
    return _pld_epsilon(noise_multiplier, sampling_prob, steps, delta, coarseness=1.0)


def epsilon_rdp(*, noise_multiplier: float, sampling_prob: float, steps: int, delta: float) -> float:
    """Returns epsilon from Renyi differential privacy; arguments and edge cases as in `epsilon_pld`."""
    _check_mechanism(noise_multiplier, sampling_prob, steps, delta)
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
    _check_mechanism(1.0, sampling_prob, steps, delta)
    _check_norms(l2_clip_norm, sensitivity)
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


@dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """What a run promises about one training row, and what it does not.

    The fields are what the mechanism was; every other figure is computed from them, so that the statement
    cannot disagree with itself. The sampler, the noise and the accountant all read their numbers here. A run
    that stopped early states `dataclasses.replace(statement, steps=done)`.

    Attributes:
        num_examples: Training rows, n, a public constant.
        expected_batch_size: Rows drawn a step on average, at most n; `sampling_prob` is this over n.
        steps: Logical steps taken, empty draws included.
        noise_multiplier: The noise's standard deviation over the clip norm; 0 is no privacy at all.
        l2_clip_norm: The clip norm, positive and finite.
        sensitivity: The most that one row changes the clipped sum, in the clip norm's units.
        delta: The probability with which epsilon may fail.
        reproducible_randomness: Whether sampling and noise came from a seed, not from the operating system.
    """

    num_examples: int
    expected_batch_size: float | int
    steps: int
    noise_multiplier: float
    l2_clip_norm: float
    sensitivity: float
    delta: float
    reproducible_randomness: bool

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ValueError(f"num_examples must be at least 1, got {self.num_examples}")
        if not 0 < self.expected_batch_size <= self.num_examples:
            raise ValueError(
                f"expected_batch_size must be in (0, num_examples = {self.num_examples}], "
                f"got {self.expected_batch_size}"
            )
        _check_mechanism(self.noise_multiplier, self.sampling_prob, self.steps, self.delta)
        _check_norms(self.l2_clip_norm, self.sensitivity)

    @property
    def sampling_prob(self) -> float:
        """The probability with which a step draws a row, in full precision."""
        return self.expected_batch_size / self.num_examples

    @property
    def noise_stddev(self) -> float:
        """The standard deviation of the noise on each coordinate of the clipped SUM."""
        return self.noise_multiplier * self.l2_clip_norm

    @property
    def effective_noise_multiplier(self) -> float:
        """The noise's standard deviation over the sensitivity: what epsilon depends on."""
        return effective_noise_multiplier(
            self.noise_multiplier, l2_clip_norm=self.l2_clip_norm, sensitivity=self.sensitivity
        )

    @property
    def epsilon(self) -> float:
        """The claim: PLD epsilon of the effective noise multiplier."""
        return epsilon_pld(noise_multiplier=self.effective_noise_multiplier, **self._composition)

    @property
    def epsilon_rdp(self) -> float:
        """RDP epsilon of the effective noise multiplier."""
        return epsilon_rdp(noise_multiplier=self.effective_noise_multiplier, **self._composition)

    @property
    def epsilon_claimed(self) -> float:
        """PLD epsilon of the plain noise multiplier: right only where the sensitivity is the clip norm."""
        return epsilon_pld(noise_multiplier=self.noise_multiplier, **self._composition)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the statement says nothing about."""
        return _NOT_COVERED + ((_NOT_COVERED_WITH_SEED,) if self.reproducible_randomness else ())

    @property
    def _composition(self) -> dict[str, Any]:
        return {"sampling_prob": self.sampling_prob, "steps": self.steps, "delta": self.delta}

    def to_json(self) -> dict[str, Any]:
        """Returns the statement for `privacy.json`, strict JSON: an infinite epsilon is the string "inf"."""
        return {
            "mechanism": "gaussian",
            "sampling": "poisson",
            "sampling_prob": self.sampling_prob,
            "expected_batch_size": self.expected_batch_size,
            "num_examples": self.num_examples,
            "noise_multiplier": self.noise_multiplier,
            "effective_noise_multiplier": self.effective_noise_multiplier,
            "steps": self.steps,
            "delta": self.delta,
            "epsilon": _json_number(self.epsilon),
            "epsilon_rdp": _json_number(self.epsilon_rdp),
            "epsilon_claimed": _json_number(self.epsilon_claimed),
            "l2_clip_norm": self.l2_clip_norm,
            "sensitivity": self.sensitivity,
            "neighboring_relation": "add_or_remove_one",
            "privacy_unit": "one row",
            "reproducible_randomness": self.reproducible_randomness,
            "not_covered": list(self.not_covered),
        }

    def describe(self) -> str:
        """Returns the statement in plain words, for the end of a run."""
        lines = [self._promise(), *self._reservations(), "This does not cover:"]
        return "\n".join(lines + [f"  - {item}" for item in self.not_covered])

    def _promise(self) -> str:
        """The guarantee in one paragraph."""
        if math.isinf(self.epsilon):
            return "No privacy: with this little noise no finite epsilon can be promised."
        return (
            f"The released model is ({self.epsilon:.4g}, {self.delta:.3g})-differentially private for one "
            f"training row: with or without any one of the {self.num_examples} rows, the probability of any "
            f"outcome changes by at most a factor of e^{self.epsilon:.4g} = {_exp(self.epsilon):.3g}, "
            f"and a probability of {self.delta:.3g} besides. It holds for {self.steps} steps of Poisson "
            f"sampling at probability {self.sampling_prob:.6g} with Gaussian noise of "
            f"{self.effective_noise_multiplier:.4g} times the sensitivity "
            f"(RDP accounting gives epsilon {self.epsilon_rdp:.4g})."
        )

    def _reservations(self) -> list[str]:
        """What a reader of this particular run's figures must know besides."""
        notes = []
        if self.sensitivity != self.l2_clip_norm:
            notes.append(
                f"One row can change the clipped sum by {self.sensitivity:.4g}, not by the clip norm "
                f"{self.l2_clip_norm:.4g}: taking it for the clip norm would claim epsilon "
                f"{self.epsilon_claimed:.4g}, which does not hold."
            )
        if self.delta > 1 / self.num_examples:
            notes.append(
                f"Delta is above 1/n = {1 / self.num_examples:.3g}: publishing a random row would be allowed."
            )
        return notes


def _json_number(value: float) -> float | str:
    """JSON has no infinity; Python's `float("inf")` reads the string back."""
    return "inf" if math.isinf(value) else value


def _exp(value: float) -> float:
    """The exponential, infinite where a float cannot hold it."""
    return math.exp(value) if value < 700 else math.inf


def _check_mechanism(noise_multiplier: float, sampling_prob: float, steps: int, delta: float) -> None:
    """Refuses what no accountant can mean."""
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be finite and at least 0, got {noise_multiplier}")
    if not 0 <= sampling_prob <= 1:
        raise ValueError(f"sampling_prob must be in [0, 1], got {sampling_prob}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")


def _check_norms(l2_clip_norm: float, sensitivity: float) -> None:
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
    if noise_multiplier == 0:
        return math.inf
    accountant = pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        coarseness * _loss_interval(noise_multiplier, sampling_prob, steps),
    )
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
    if noise_multiplier == 0:
        return math.inf
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
