"""Untied minus tied, and how much of it each factor explains."""

from typing import Any, NamedTuple

from wtdp_jax.study import arms as a
from wtdp_jax.study.evidence import Difference, Evidence, Place, Row, bracketed, difference


class Contrast(NamedTuple):
    """One arm's accuracy minus another's.

    Attributes:
      name: what the difference tells.
      plus: an arm.
      minus: an arm.
    """

    name: str
    plus: str
    minus: str


GAPS = (
    Contrast("untied - tied, without privacy", a.UNTIED_NONPRIVATE, a.TIED_NONPRIVATE),
    Contrast("untied - tied with exact norms", a.UNTIED_EXACT, a.TIED_EXACT),
    Contrast("untied - tied with naive norms", a.UNTIED_EXACT, a.TIED_NAIVE),
)
"""What untying gains, by what it is compared with."""

WHOLE_GAP = GAPS[2]
"""What a study that uses naive norms would report; the path's factors add up to it."""

PATH = (
    Contrast("the wrong norm: tied, exact - naive", a.TIED_EXACT, a.TIED_NAIVE),
    Contrast("doubled noise: tied, shared matrix noised twice - once", a.TIED_DOUBLE_NOISE, a.TIED_EXACT),
    Contrast("a head of its own: untied - tied at that noise", a.UNTIED_EXACT, a.TIED_DOUBLE_NOISE),
)
"""From the naive tied arm to the untied one, a factor a step."""

DETAILS = (
    Contrast(
        "the wrong norm alone, at equal learning rate and clip norm",
        a.TIED_EXACT,
        a.TIED_NAIVE_EXACT_CHOICE,
    ),
    Contrast("learning rate and clip norm fitted to untying", a.UNTIED_EXACT, a.UNTIED_TIED_CHOICE),
    Contrast(
        "untying alone, at the tied arm's learning rate and clip norm", a.UNTIED_TIED_CHOICE, a.TIED_EXACT
    ),
    Contrast("training the head: untied - with the head frozen", a.UNTIED_EXACT, a.UNTIED_FROZEN_HEAD),
    Contrast(
        "training the embedding: untied - with the embedding frozen",
        a.UNTIED_EXACT,
        a.UNTIED_FROZEN_EMBEDDING,
    ),
    Contrast("untied with the head frozen - tied", a.UNTIED_FROZEN_HEAD, a.TIED_EXACT),
    Contrast("untied with the embedding frozen - tied", a.UNTIED_FROZEN_EMBEDDING, a.TIED_EXACT),
    Contrast("untied - tied, clipped without noise", a.UNTIED_CLIPPED, a.TIED_CLIPPED),
    GAPS[0],
)
"""Each by itself: they overlap, and don't add up."""


def gap_rows(evidence: Evidence, place: Place) -> list[Row]:
    """What untying gains, in accuracy points, at each epsilon and against each baseline."""
    rows = []
    for contrast in GAPS:
        epsilons = evidence.epsilons(place) if a.ARMS[contrast.plus].has_epsilon else [None]
        for epsilon in epsilons:
            found = difference(evidence, place, contrast.plus, contrast.minus, epsilon)
            if found is not None:
                rows.append(_row(place, contrast, epsilon, found) | {"verdict": verdict(found)})
    return rows


def factor_rows(evidence: Evidence, place: Place, epsilon: float) -> list[Row]:
    """What each factor adds to the gap between the naive tied and the untied arm, in accuracy points.

    A share is formed only where the gap itself is shown to differ from zero.
    """
    whole = difference(evidence, place, WHOLE_GAP.plus, WHOLE_GAP.minus, epsilon)
    gap = None
    if whole is not None and whole.is_evidence and not whole.interval.includes(0.0):
        gap = whole.interval.mean
    rows = []
    parts = (("adds up to the gap", PATH), ("the gap", (WHOLE_GAP,)), ("by itself", DETAILS))
    for part, contrasts in parts:
        for contrast in contrasts:
            found = difference(evidence, place, contrast.plus, contrast.minus, epsilon)
            if found is None:
                continue
            points = found.interval.mean
            share = 100 * points / gap if gap is not None and part != "by itself" else None
            rows.append(_row(place, contrast, epsilon, found) | {"part": part, "share": share})
    return rows


def verdict(found: Difference) -> str:
    """Whether a difference is shown, in words."""
    if not found.is_evidence:
        return f"cannot tell: {found.obstacle}"
    if found.interval.includes(0.0):
        return "no difference shown"
    better = found.plus if found.interval.mean > 0 else found.minus
    return f"{better.arm} is better"


def _row(place: Place, contrast: Contrast, epsilon: float | None, found: Difference) -> dict[str, Any]:
    points = found.interval
    return {
        "model": place.model,
        "task": place.task,
        "loss": place.loss,
        "contrast": contrast.name,
        "plus": contrast.plus,
        "minus": contrast.minus,
        "target_epsilon": epsilon,
        "seeds": len(found.seeds),
        "points": points.mean,
        "low": points.low,
        "high": points.high,
        "interval": bracketed(points),
        "folders": found.folders,
    }
