"""What finished runs say: accuracies by series, differences between arms, signal to noise, equal updates.

A row is a dict that goes into a table and, with the run folders it was computed from, into a CSV file.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wtdp_jax.study import arms as a
from wtdp_jax.study.bootstrap import Interval, interval, standard_deviation
from wtdp_jax.study.folder import Run

DEMONSTRATION_BELOW = 20_000
"""Example gradients that a private run must have seen to be evidence."""

SAME_UPDATE_WITHIN = 1e-4
"""Largest difference of two runs' losses, in nats, at which their updates count as the same."""

Row = dict[str, Any]


class Place(NamedTuple):
    """What arms are compared within."""

    model: str
    task: str
    loss: str

    def __str__(self) -> str:
        return f"{self.model}, {self.task}, {self.loss}"


@dataclasses.dataclass(frozen=True)
class SeriesResult:
    """The final runs of one series, by seed."""

    arm: str
    epsilon: float | None
    runs: list[Run]

    @property
    def right(self) -> np.ndarray:
        """(S, N): whether each seed's model is right on each example."""
        return np.array([run.right for run in self.runs], np.float64)

    @functools.cached_property
    def accuracy(self) -> Interval:
        """Mean accuracy, with its interval; with few seeds that one may leave what an accuracy can be."""
        found = interval(self.right)
        return found._replace(low=max(found.low, 0.0), high=min(found.high, 1.0))

    @property
    def majority_rate(self) -> float:
        """Accuracy of always naming the most frequent label."""
        return float(np.max(np.bincount(self.runs[0].labels)) / len(self.runs[0].labels))

    @property
    def has_learned(self) -> bool:
        """Whether the interval excludes the majority rate."""
        return not self.accuracy.includes(self.majority_rate) and self.accuracy.mean > self.majority_rate

    @property
    def is_demonstration(self) -> bool:
        """Whether a private run saw too few example gradients."""
        return a.ARMS[self.arm].is_private and min(run.examples for run in self.runs) < DEMONSTRATION_BELOW

    @property
    def folders(self) -> list[str]:
        """Where the numbers come from."""
        return [run.folder for run in self.runs]

    def reservations(self) -> list[str]:
        """What must be said beside the accuracy."""
        notes = []
        if a.ARMS[self.arm].is_short:
            notes.append("short run, for the update alone")
        elif not self.has_learned:
            notes.append("cannot tell: not above the majority rate")
        if self.is_demonstration:
            notes.append("demonstration")
        if len(self.runs) == 1:
            notes.append("single seed")
        return notes


class Evidence:
    """The final runs of a study, by place, arm and epsilon."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._series: dict[Place, dict[tuple[str, float | None], list[Run]]] = {}
        for run in runs:
            place = Place(run.cell["model"], run.cell["task"], run.cell["loss"])
            of_place = self._series.setdefault(place, {})
            of_place.setdefault((run.cell["arm"], run.cell["epsilon"]), []).append(run)

    @property
    def places(self) -> list[Place]:
        """Models, tasks and losses."""
        return sorted(self._series)

    def epsilons(self, place: Place) -> list[float]:
        """The epsilons that private arms were trained at."""
        return sorted({epsilon for _, epsilon in self._series[place] if epsilon is not None})

    def series(self, place: Place) -> list[SeriesResult]:
        """All series of a place, in the arms' order."""
        order = list(a.ARMS)
        found = [self._result(place, arm, epsilon) for arm, epsilon in self._series[place]]
        return sorted(found, key=lambda s: (s.epsilon is not None, s.epsilon or 0, order.index(s.arm)))

    def find(self, place: Place, arm: str, epsilon: float | None) -> SeriesResult | None:
        """One arm's series at an epsilon, which arms without one ignore; None if there is no run."""
        key = epsilon if a.ARMS[arm].has_epsilon else None
        return self._result(place, arm, key) if (arm, key) in self._series[place] else None

    def _result(self, place: Place, arm: str, epsilon: float | None) -> SeriesResult:
        runs = sorted(self._series[place][arm, epsilon], key=lambda run: run.cell["seed"])
        return SeriesResult(arm, epsilon, runs)


@dataclasses.dataclass(frozen=True)
class Difference:
    """One arm's accuracy minus another's, on the seeds that both have.

    Attributes:
      plus: an arm's runs.
      minus: another's.
      among: the only seeds that count; None: all.
    """

    plus: SeriesResult
    minus: SeriesResult
    among: frozenset[int] | None = None

    @property
    def seeds(self) -> list[int]:
        """The seeds that both have."""
        common = self._by_seed(self.plus).keys() & self._by_seed(self.minus).keys()
        return sorted(common if self.among is None else common & self.among)

    @functools.cached_property
    def _points(self) -> np.ndarray:
        """(S, N): 1 where the first alone is right, -1 where the second alone is."""
        plus, minus = self._by_seed(self.plus), self._by_seed(self.minus)
        rows = [np.subtract(plus[seed].right, minus[seed].right) for seed in self.seeds]
        return np.array(rows, np.float64)

    @functools.cached_property
    def interval(self) -> Interval:
        """In accuracy points (percent)."""
        return Interval(*(100 * value for value in interval(self._points)))

    @property
    def is_identical(self) -> bool:
        """Whether both predict the same, example by example."""
        return not self._points.any()

    @property
    def is_evidence(self) -> bool:
        """Whether both arms learned, saw enough examples, and have more than one seed."""
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why it is no evidence; empty if it is."""
        both = (self.plus, self.minus)
        stuck = [s.arm for s in both if not s.has_learned]
        if stuck:
            return f"{' and '.join(stuck)} not shown to exceed the majority rate"
        if any(s.is_demonstration for s in both):
            return "a demonstration: too few example gradients"
        return "a single seed" if len(self.seeds) == 1 else ""

    @property
    def folders(self) -> list[str]:
        """Where the numbers come from."""
        wanted = set(self.seeds)
        return [r.folder for s in (self.plus, self.minus) for r in s.runs if r.cell["seed"] in wanted]

    @staticmethod
    def _by_seed(series: SeriesResult) -> dict[int, Run]:
        return {run.cell["seed"]: run for run in series.runs}


def difference(
    evidence: Evidence,
    place: Place,
    plus: str,
    minus: str,
    epsilon: float | None,
    *,
    among: frozenset[int] | None = None,
) -> Difference | None:
    """Returns what one arm gains over another; None where they have no seed in common (of those `among`)."""
    first, second = evidence.find(place, plus, epsilon), evidence.find(place, minus, epsilon)
    if first is None or second is None:
        return None
    found = Difference(first, second, among)
    return found if found.seeds else None


def accuracy_rows(evidence: Evidence, place: Place) -> list[Row]:
    """One row a series: accuracy in percent, honest and claimed epsilon, chosen settings."""
    rows = []
    for series in evidence.series(place):
        run, accuracy = series.runs[0], series.accuracy
        deviation = standard_deviation(np.mean(series.right, axis=1))
        rows.append(
            {
                "model": place.model,
                "task": place.task,
                "loss": place.loss,
                "arm": series.arm,
                "target_epsilon": series.epsilon,
                "seeds": len(series.runs),
                "accuracy": 100 * accuracy.mean,
                "deviation": None if deviation is None else 100 * deviation,
                "low": 100 * accuracy.low,
                "high": 100 * accuracy.high,
                "interval": bracketed(Interval(*(100 * value for value in accuracy))),
                "majority": 100 * series.majority_rate,
                "epsilon": number(run.results["epsilon"]),
                "epsilon_claimed": number(run.results["epsilon_claimed"]),
                "noise_multiplier": run.results["noise_multiplier"],
                "learning_rate": run.settings["learning_rate"],
                "l2_clip_norm": run.settings["l2_clip_norm"] if a.ARMS[series.arm].is_private else None,
                "examples": run.examples,
                "says": "; ".join(series.reservations()) or "–",
                "folders": series.folders,
            }
        )
    return rows


def signal_rows(evidence: Evidence, place: Place) -> list[Row]:
    """One row a noised series: the clipped sum's norm over its noise's, and the share of examples clipped.

    Both are means over steps and seeds.

    The noise has standard deviation sigma C on each trained number, and so a norm near sigma C
    sqrt(parameters).
    """
    rows = []
    for series in evidence.series(place):
        arm = a.ARMS[series.arm]
        if not arm.has_epsilon or arm.is_short or arm.double_noise:
            continue
        ratios = [ratio for run in series.runs for _, ratio in signal_to_noise(run)]
        name = "non_private_clipped_fraction"
        clipped = [row[name] for run in series.runs for row in run.rows if row.get(name) is not None]
        run = series.runs[0]
        rows.append(
            {
                "model": place.model,
                "task": place.task,
                "loss": place.loss,
                "arm": series.arm,
                "target_epsilon": series.epsilon,
                "parameters": run.results["num_trained_parameters"],
                "noise_norm": _noise_norm(run),
                "non_private_signal_to_noise": _mean(ratios),
                name: _mean(clipped),
                "folders": series.folders,
            }
        )
    return rows


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def signal_to_noise(run: Run) -> list[tuple[int, float]]:
    """Returns (step, norm of the clipped sum over norm of the noise) of a run; not private."""
    norms = [(row["step"], row.get("non_private_clipped_sum_norm")) for row in run.rows]
    return [(step, norm / _noise_norm(run)) for step, norm in norms if norm is not None]


def _noise_norm(run: Run) -> float:
    """The norm that the noise on a sum has, nearly always."""
    stddev = run.results["noise_multiplier"] * run.settings["l2_clip_norm"]
    return stddev * math.sqrt(run.results["num_trained_parameters"])


def same_update_rows(evidence: Evidence, place: Place) -> list[Row]:
    """One row a short run: how far its losses are from those of the arm that it repeats, step by step."""
    rows = []
    for series in evidence.series(place):
        other = a.ARMS[series.arm].choice_of
        if not a.ARMS[series.arm].is_short or other is None:
            continue
        found = difference(evidence, place, series.arm, other, series.epsilon)
        if found is None:
            continue
        run, reference = found.plus.runs[0], found.minus.runs[0]
        losses = {row["step"]: row.get("non_private_loss") for row in reference.rows}
        gaps = [
            abs(row["non_private_loss"] - losses[row["step"]])
            for row in run.rows
            if row.get("non_private_loss") is not None and losses.get(row["step"]) is not None
        ]
        rows.append(
            {
                "model": place.model,
                "task": place.task,
                "loss": place.loss,
                "arm": series.arm,
                "reference": other,
                "target_epsilon": series.epsilon,
                "steps": len(gaps),
                "non_private_largest_loss_difference": max(gaps, default=None),
                "same": bool(gaps) and max(gaps) <= SAME_UPDATE_WITHIN,
                "folders": [run.folder, reference.folder],
            }
        )
    return rows


def bracketed(found: Interval, pattern: str = ".2f") -> str:
    """An interval's ends as text."""
    return f"[{found.low:{pattern}}, {found.high:{pattern}}]"


def number(value: float | str | None) -> float | None:
    """A JSON file's number, in which infinity is a string."""
    return None if value is None else float(value)
