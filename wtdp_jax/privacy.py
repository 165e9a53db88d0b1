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

import math
from dataclasses import dataclass
from typing import Any

from wtdp_jax.accounting import (
    check_mechanism,
    check_norms,
    effective_noise_multiplier,
    epsilon_pld,
    epsilon_rdp,
)

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
        check_mechanism(self.noise_multiplier, self.sampling_prob, self.steps, self.delta)
        check_norms(self.l2_clip_norm, self.sensitivity)

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
