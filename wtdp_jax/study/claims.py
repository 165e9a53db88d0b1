"""The paper's claims beside what was measured.

The paper: El Mais, Chehab, Issa and Tajeddine, "Is Weight Tying Still Beneficial for Decoder-Only LLMs in
Private Settings Under DP-SGD?", arXiv 2609.40335. Of its figures two are known here: up to 4.74 accuracy
points gained by untying, and over 60% less memory.
"""

from collections.abc import Sequence

from wtdp_jax.study import arms as a
from wtdp_jax.study.contrasts import GAPS
from wtdp_jax.study.evidence import Difference, Evidence, Row, bracketed, difference
from wtdp_jax.study.folder import Costs

PAPER_POINTS = 4.74
"""Accuracy points that untying gains at most, as the paper has it."""

PAPER_SAVING = 60.0
"""Percent of memory that untying saves at least, as the paper has it."""

MEMORY_BASELINES = (
    ("non-private", "untied nonprivate", "tied nonprivate"),
    ("standard clipping, both", "untied standard", "tied standard"),
    ("ghost norms; tied by materializing, the paper's exact way", "untied {}", "tied {}, materialized norm"),
    ("ghost norms; tied by the cross-term, ours", "untied {}", "tied {}"),
    ("untied with ghost norms, tied with standard clipping", "untied {}", "tied standard"),
)
"""What the untied step's memory is compared with: (baseline, untied variant, tied variant)."""


_NO_NORM_TEST = "; the naive arm predicts as the exact one does, so this says nothing of its norm"


def accuracy_claims(evidence: Evidence) -> list[Row]:
    """One row for each place, baseline and epsilon: the paper's gain beside ours, and a verdict."""
    rows = []
    for place in evidence.places:
        for contrast in GAPS[1:]:
            for epsilon in evidence.epsilons(place):
                found = difference(evidence, place, contrast.plus, contrast.minus, epsilon)
                norm = difference(evidence, place, a.TIED_EXACT, contrast.minus, epsilon)
                is_exact_too = contrast.minus == a.TIED_NAIVE and norm is not None and norm.is_identical
                rows.append(
                    {
                        "place": str(place),
                        "baseline": contrast.minus,
                        "target_epsilon": epsilon,
                        "paper": f"up to {PAPER_POINTS}",
                        "seeds": None if found is None else len(found.seeds),
                        "points": None if found is None else found.interval.mean,
                        "interval": None if found is None else bracketed(found.interval),
                        "verdict": _accuracy_verdict(found) + (_NO_NORM_TEST if is_exact_too else ""),
                        "folders": [] if found is None else found.folders,
                    }
                )
    return rows


def _accuracy_verdict(found: Difference | None) -> str:
    if found is None:
        return "could not be tested: its runs are missing"
    if not found.is_evidence:
        return f"could not be tested: {found.obstacle}"
    points = found.interval
    if points.low > 0:
        size = (
            "as large as the paper's is possible"
            if points.high >= PAPER_POINTS
            else "smaller than the paper's"
        )
        return f"reproduced in direction, {size}"
    if points.high < 0:
        return "did not reproduce: the tied arm is better"
    if points.high >= PAPER_POINTS:
        return "cannot tell: neither no gain nor the paper's is excluded"
    return f"did not reproduce: no gain shown, and one of {PAPER_POINTS} is excluded"


def memory_claims(costs: Sequence[Costs]) -> list[Row]:
    """One row for each measured model and baseline: memory saved by untying, on the whole step."""
    rows = []
    for cost in costs:
        of_variant = {row["name"]: row["step_bytes"] for row in cost.rows}
        parameters = f"{cost.contents['tied_parameters'] / 1e6:.4g}M tied parameters"
        for engine in ("ghost", "bookkeeping"):
            for baseline, untied, tied in MEMORY_BASELINES:
                names = untied.format(engine), tied.format(engine)
                if not set(names) <= of_variant.keys():
                    continue
                if "{}" not in untied and engine == "bookkeeping":
                    continue  # the baseline has no engine of its own, and is there already
                saving = 100 * (1 - of_variant[names[0]] / of_variant[names[1]])
                rows.append(
                    {
                        "place": cost.place,
                        "size": f"{cost.sizes}, {parameters}",
                        "baseline": f"{baseline} ({engine})" if "{}" in untied else baseline,
                        "paper": f"over {PAPER_SAVING:g}% less",
                        "untied_bytes": of_variant[names[0]],
                        "tied_bytes": of_variant[names[1]],
                        "saving": saving,
                        "verdict": _memory_verdict(saving),
                        "folders": [cost.file],
                    }
                )
    return rows


def _memory_verdict(saving: float) -> str:
    if saving >= PAPER_SAVING:
        return "reproduced against this baseline"
    if saving > 0:
        return "untying saves memory against this baseline, but less"
    return "did not reproduce: untying takes more memory"
