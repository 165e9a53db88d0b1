"""The arms of the study: what is trained, and which question each answers.

All private arms of one model, task and epsilon have one noise multiplier, that of the exact norm. So the
naive arm differs from the exact one in its norm alone, and its honest epsilon is the larger.
"""

import dataclasses

from wtdp_jax.rules import TiedNorm

EMBEDDING = "^wte/"
"""Where the embedding's parameters lie; a tied model's head is the same."""

_ALL_BUT_EMBEDDING = "^(?!wte/)"
_ALL_BUT_HEAD = "^(?!lm_head/)"

NEGLIGIBLE_NOISE = 1e-6
"""Noise multiplier of the arms that clip without noise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Attributes:
      name: in folders and tables.
      tie: whether the head is the embedding.
      purpose: what the arm is for.
      is_private: whether gradients are clipped and noised.
      is_noised: whether a private arm's noise is more than negligible.
      is_standard: whether per-example gradients are formed whole, as in standard clipping.
      tied_norm: of the shared matrix.
      trainable: regular expression of what is trained; None: everything.
      double_noise: regular expression of what is noised twice.
      choice_of: the arm whose learning rate and clip norm it takes; None: it has its own, from the same grid.
      is_short: whether it only repeats the first steps of `choice_of`, to show that the update is the same.
    """

    name: str
    tie: bool
    purpose: str
    is_private: bool = True
    is_noised: bool = True
    is_standard: bool = False
    tied_norm: TiedNorm = "cross_term"
    trainable: str | None = None
    double_noise: str | None = None
    choice_of: str | None = None
    is_short: bool = False

    @property
    def has_epsilon(self) -> bool:
        """Whether there is one run for each epsilon."""
        return self.is_private and self.is_noised


TIED_NONPRIVATE, UNTIED_NONPRIVATE = "tied-nonprivate", "untied-nonprivate"
TIED_EXACT, UNTIED_EXACT, TIED_NAIVE = "tied-exact", "untied-exact", "tied-naive"
TIED_STANDARD, UNTIED_STANDARD = "tied-standard", "untied-standard"
TIED_MATERIALIZE, TIED_DOUBLE_NOISE = "tied-materialize", "tied-double-noise"
UNTIED_FROZEN_HEAD, UNTIED_FROZEN_EMBEDDING = "untied-frozen-head", "untied-frozen-embedding"
UNTIED_TIED_CHOICE, TIED_NAIVE_EXACT_CHOICE = "untied-tied-choice", "tied-naive-exact-choice"
TIED_CLIPPED, UNTIED_CLIPPED = "tied-clipped", "untied-clipped"

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(name=TIED_NONPRIVATE, tie=True, is_private=False, purpose="without privacy"),
        Arm(name=UNTIED_NONPRIVATE, tie=False, is_private=False, purpose="without privacy"),
        Arm(name=TIED_EXACT, tie=True, purpose="exact norms by the cross-term"),
        Arm(name=UNTIED_EXACT, tie=False, purpose="exact norms; no cross-term to miss"),
        Arm(
            name=TIED_NAIVE,
            tie=True,
            tied_norm="omit",
            purpose="the cross-term left out, at the exact arm's noise multiplier",
        ),
        Arm(
            name=TIED_NAIVE_EXACT_CHOICE,
            tie=True,
            tied_norm="omit",
            choice_of=TIED_EXACT,
            purpose="naive, with the exact arm's learning rate and clip norm: only the norm differs",
        ),
        Arm(
            name=TIED_STANDARD,
            tie=True,
            is_standard=True,
            choice_of=TIED_EXACT,
            is_short=True,
            purpose="standard per-example clipping",
        ),
        Arm(
            name=UNTIED_STANDARD,
            tie=False,
            is_standard=True,
            choice_of=UNTIED_EXACT,
            is_short=True,
            purpose="standard per-example clipping",
        ),
        Arm(
            name=TIED_MATERIALIZE,
            tie=True,
            tied_norm="materialize",
            choice_of=TIED_EXACT,
            is_short=True,
            purpose="exact norms by forming the shared matrix's per-example gradients",
        ),
        Arm(
            name=TIED_DOUBLE_NOISE,
            tie=True,
            double_noise=EMBEDDING,
            purpose="exact norms; the shared matrix noised twice, as an untied model's two are once each",
        ),
        Arm(
            name=UNTIED_FROZEN_HEAD,
            tie=False,
            trainable=_ALL_BUT_HEAD,
            purpose="untied, the head kept as pretrained",
        ),
        Arm(
            name=UNTIED_FROZEN_EMBEDDING,
            tie=False,
            trainable=_ALL_BUT_EMBEDDING,
            purpose="untied, the embedding kept as pretrained",
        ),
        Arm(
            name=UNTIED_TIED_CHOICE,
            tie=False,
            choice_of=TIED_EXACT,
            purpose="untied, with the tied arm's learning rate and clip norm",
        ),
        Arm(name=TIED_CLIPPED, tie=True, is_noised=False, purpose="clipped, without noise"),
        Arm(name=UNTIED_CLIPPED, tie=False, is_noised=False, purpose="clipped, without noise"),
    )
}


def find_arm(name: str) -> Arm:
    """Returns an arm by its name.

    Raises:
      ValueError: if there is none.
    """
    if name not in ARMS:
        raise ValueError(f"arms must be among {', '.join(ARMS)}, got {name!r}")
    return ARMS[name]
