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
                rows.append(_row(place, contrast, epsilon, found))
    return rows


def factor_rows(evidence: Evidence, place: Place, epsilon: float) -> list[Row]:
    """What each factor adds to the gap between the naive tied and the untied arm, in accuracy points.

    The path's factors are over the seeds that all its arms have, or they would not add up. Shares are formed
    only of a whole path, and where the gap itself is shown to differ from zero.
    """
    rows = [
        _row(place, contrast, epsilon, found) | {"part": "by itself", "share": None}
        for contrast in DETAILS
        if (found := difference(evidence, place, contrast.plus, contrast.minus, epsilon)) is not None
    ]
    return _path_rows(evidence, place, epsilon) + rows


def _path_rows(evidence: Evidence, place: Place, epsilon: float) -> list[Row]:
    """The path's factors and the gap that they add up to, as far as their arms have runs."""
    arms = {arm for contrast in PATH for arm in (contrast.plus, contrast.minus)}
    known = [series for arm in arms if (series := evidence.find(place, arm, epsilon)) is not None]
    seeds = [{run.cell["seed"] for run in series.runs} for series in known]
    common = frozenset(set.intersection(*seeds)) if seeds else frozenset()
    path = {
        contrast: found
        for contrast in (*PATH, WHOLE_GAP)
        if (found := difference(evidence, place, contrast.plus, contrast.minus, epsilon, among=common))
    }
    is_whole = len(path) == len(PATH) + 1 and all(found.is_evidence for found in path.values())
    gap = path[WHOLE_GAP].interval if is_whole else None
    total = None if gap is None or gap.includes(0.0) else gap.mean
    return [
        _row(place, contrast, epsilon, found)
        | {
            "part": "the gap" if contrast is WHOLE_GAP else "adds up to the gap",
            "share": None if total is None else 100 * found.interval.mean / total,
        }
        for contrast, found in path.items()
    ]


def verdict(found: Difference) -> str:
    """Whether a difference is shown, in words."""
    if found.is_identical:
        return "the same predictions: nothing to tell apart"
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
        "verdict": verdict(found),
        "folders": found.folders,
    }
