"""The report: report.md, a CSV file for each table, and figures, all from run folders."""

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wtdp_jax.benchmark.tables import Column, markdown_table
from wtdp_jax.data import held_out_size
from wtdp_jax.run_folder import read_json, write_bytes
from wtdp_jax.study import claims, columns, contrasts, evidence, plots
from wtdp_jax.study.arms import ARMS, TIED_EXACT, UNTIED_EXACT
from wtdp_jax.study.evidence import DEMONSTRATION_BELOW, Difference, Evidence, Row, difference
from wtdp_jax.study.folder import Costs, Run, StudyFolder, read_costs, read_runs
from wtdp_jax.study.grid import FAIR_GRID

REPORT = "report.md"


class Report:
    """Collects a report's sections, and writes each table's rows as CSV beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[str] = []
        self._csv: dict[str, list[Row]] = {}

    def text(self, *paragraphs: str) -> None:
        """Adds paragraphs, headings included."""
        for paragraph in paragraphs:
            self._lines += [paragraph, ""]

    def table(self, name: str, heads: Sequence[Column], rows: Sequence[Row], empty: str = "No runs.") -> None:
        """Adds a table; its rows go into `name`.csv with the folders that they come from."""
        if not rows:
            self.text(empty)
            return
        self._csv.setdefault(name, []).extend(rows)
        self.text(markdown_table(heads, rows), f"Rows and run folders: `{name}.csv`.")

    def write(self) -> None:
        """Writes report.md and the CSV files."""
        for name, rows in self._csv.items():
            write_bytes(self._folder / f"{name}.csv", _csv(rows).encode())
        write_bytes(self._folder / REPORT, ("\n".join(self._lines).rstrip() + "\n").encode())


def write_report(folder: StudyFolder) -> Path:
    """Writes a study's report into its folder, and returns report.md's path.

    Raises:
      ValueError: if the folder holds no study.
    """
    finished, missing = read_runs(folder)
    found, costs, study = Evidence(finished), read_costs(folder), read_json(folder.study)
    report = Report(folder.path)
    report.text("# Is weight tying still beneficial under DP-SGD?", *_answer(found))
    report.text(*_what_was_run(study, finished, missing))
    _accuracy(report, folder, found)
    _factors(report, found)
    _claims(report, found, costs)
    _costs(report, folder, costs)
    _updates_and_signal(report, folder, found)
    _choices(report, folder, study)
    _missing(report, missing)
    report.write()
    return folder.path / REPORT


def _answer(found: Evidence) -> list[str]:
    """Whether untying pays once the tied norm is exact, a sentence for each place and epsilon."""
    lines = ["## Does untying still pay once the tied norm is exact and cheap?"]
    for place in found.places:
        for epsilon in found.epsilons(place):
            gap = difference(found, place, UNTIED_EXACT, TIED_EXACT, epsilon)
            lines.append(f"- {place}, epsilon {epsilon:g}: {_in_words(gap)}")
    return ["\n".join(lines[:1]), "\n".join(lines[1:]) or "No private runs."]


def _in_words(gap: Difference | None) -> str:
    if gap is None:
        return "not run."
    points = gap.interval
    measured = f"untied minus tied {points.mean:+.2f} points, 95% interval {evidence.bracketed(points)}"
    seeds = "seed" if len(gap.seeds) == 1 else "seeds"
    measured += f", {len(gap.seeds)} {seeds}"
    if not gap.is_evidence:
        return f"cannot tell ({gap.obstacle}); {measured}."
    if points.includes(0.0):
        return f"no difference shown; {measured}."
    return f"{'yes' if points.mean > 0 else 'no, tying is better'}; {measured}."


def _what_was_run(
    study: Mapping[str, Any], finished: Sequence[Run], missing: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The grid, the machine, and how far it got."""
    grid = study["grid"]
    machines = {json.dumps(run.results["device"], sort_keys=True) for run in finished}
    versions = {json.dumps(run.results["versions"], sort_keys=True) for run in finished}
    seeds = ", ".join(map(str, sorted({run.cell["seed"] for run in finished}))) or "–"
    known = {run.cell["arm"] for run in finished} | {*grid["arms"]}
    arms = "\n".join(f"- `{name}`: {ARMS[name].purpose}" for name in ARMS if name in known)
    begun = "\n".join(
        f"- `{row['command']}`, last begun {row['date']} at commit `{row['commit']}`"
        for row in study["begun"]
    )
    return [
        "## What was run",
        begun,
        f"{len(finished)} final runs are finished, with the seeds {seeds}; {len(missing)} are not. Devices: "
        f"{', '.join(sorted(machines))}. "
        f"Versions: {', '.join(sorted(versions))}.",
        arms,
        "All private arms of one epsilon have one noise multiplier, the exact norm's; the naive arm's honest "
        "epsilon is therefore larger, and stands beside the one it would claim. Private arms of one seed "
        "draw the same batches.",
    ]


def _accuracy(report: Report, folder: StudyFolder, found: Evidence) -> None:
    report.text(
        "## Accuracy",
        "Percent on the evaluation rows, mean over seeds; the standard deviation is that over seeds. "
        "Intervals resample the evaluation examples and allow for few seeds by Student's t; that of a single "
        "seed is for this seed alone. An arm whose interval includes the majority rate cannot be told from "
        f"guessing. A private run of fewer than {DEMONSTRATION_BELOW:,} example gradients is a "
        "demonstration.",
    )
    rows = []
    for place in found.places:
        of_place = evidence.accuracy_rows(found, place)
        report.text(f"### {place}", f"Majority rate: {of_place[0]['majority']:.2f}%.")
        report.table("accuracy", columns.SERIES, of_place)
        rows += [row for row in of_place if not ARMS[row["arm"]].is_short]
    if rows:
        plots.plot_accuracies(folder.path / "accuracy.png", rows)
        report.text("![Accuracy of each arm](accuracy.png)")
    report.text("## Untied minus tied", "Accuracy points, paired by seed and evaluation example.")
    for place in found.places:
        report.text(f"### {place}")
        report.table("untied_minus_tied", columns.GAPS, contrasts.gap_rows(found, place))


def _factors(report: Report, found: Evidence) -> None:
    report.text(
        "## How much of the gap each factor explains",
        "The gap is untied minus tied with naive norms. The first factors lead from one to the other, over "
        "the seeds that all of them have, and add up to it; those by themselves overlap. A share is given "
        "only where the gap is shown to differ from zero.",
    )
    for place in found.places:
        for epsilon in found.epsilons(place):
            report.text(f"### {place}, epsilon {epsilon:g}")
            report.table("factors", columns.FACTORS, contrasts.factor_rows(found, place, epsilon))


def _claims(report: Report, found: Evidence, costs: Sequence[Costs]) -> None:
    report.text(
        "## The paper's claims",
        "El Mais, Chehab, Issa and Tajeddine (arXiv 2609.40335) report up to 4.74 accuracy points gained by "
        "untying, and over 60% less memory, with GPT2 and DistilGPT2. Which baseline each is against is not "
        "known here, so each is set beside several, and each verdict is for the model, the task and the size "
        "named with it. Accuracy under standard clipping is that of the exact arms, whose update is the "
        "same.",
    )
    rows = claims.accuracy_claims(found)
    report.table("claims_accuracy", columns.ACCURACY_CLAIMS, rows, "Accuracy could not be tested.")
    rows = claims.memory_claims(costs)
    report.table("claims_memory", columns.MEMORY_CLAIMS, rows, "Memory could not be tested.")


def _costs(report: Report, folder: StudyFolder, costs: Sequence[Costs]) -> None:
    report.text(
        "## Memory and time of a step",
        "One program of gradient, noise and adam on one physical batch: all its memory as the compiler plans "
        "it, parameters, moments, gradient and noise included; median time of interleaved rounds.",
    )
    shown = []
    for cost in costs:
        rows = [_cost_row(row, cost) for row in cost.rows]
        tied, untied = (cost.contents[f"{tying}_parameters"] for tying in ("tied", "untied"))
        parameters = f"{tied:,} tied and {untied:,} untied parameters"
        environment = cost.contents["environment"]
        device = json.dumps(environment["device"])
        report.text(f"### {cost.place}", f"{cost.sizes}; {parameters}; {device}.")
        if environment.get("most_optimizations_left_out"):
            report.text("Compiled without most optimizations, to be quick: memory and time are not typical.")
        report.table("costs", columns.COSTS, rows)
        shown += rows
    if shown:
        plots.plot_memory(folder.path / "memory.png", shown)
        report.text("![Memory of a step](memory.png)")


def _cost_row(row: Mapping[str, Any], cost: Costs) -> Row:
    """A measured step, with ratios to the tied non-private one."""
    (base,) = [r for r in cost.rows if r["name"] == "tied nonprivate"] or [cost.rows[0]]
    seconds, base_seconds = (statistics.median(r["seconds"]) if r["seconds"] else None for r in (row, base))
    return {
        "place": cost.place,
        "name": row["name"],
        "tie": row["tie"],
        "step_bytes": row["step_bytes"],
        "memory_ratio": row["step_bytes"] / base["step_bytes"],
        "median_seconds": seconds,
        "time_ratio": seconds / base_seconds if seconds and base_seconds else None,
        "folders": [cost.file],
    }


def _updates_and_signal(report: Report, folder: StudyFolder, found: Evidence) -> None:
    report.text(
        "## The same update by different ways",
        "Standard clipping, the materialized norm and the cross-term are one mechanism: with the same seed "
        "their losses must agree, step by step.",
    )
    signal, lines = [], []
    for place in found.places:
        report.text(f"### {place}")
        report.table("same_update", columns.SAME, evidence.same_update_rows(found, place), "No such runs.")
        rows = evidence.signal_rows(found, place)
        signal += rows
        for row in rows:
            series = found.find(place, row["arm"], row["target_epsilon"])
            if series is not None:
                title = f"{place}, epsilon {row['target_epsilon']:g}"
                lines.append((title, row["arm"], evidence.signal_to_noise(series.runs[0])))
    report.text(
        "## Signal to noise",
        "The norm of the clipped sum over sigma C sqrt(parameters), the noise's norm; a mean over steps and "
        "seeds, computed from un-noised sums and so not private. Untying adds trained parameters, and noise "
        "on each. Where next to no example is clipped, the norm that clips makes no difference to the "
        "update.",
    )
    report.table("signal_to_noise", columns.SIGNAL, signal)
    if any(points for _, _, points in lines):
        plots.plot_signal(folder.path / "signal_to_noise.png", [line for line in lines if line[2]])
        report.text("![Signal to noise by step](signal_to_noise.png)")


def _held_out(task: str, num_examples: int, share: float) -> str:
    """How far an accuracy that settings are chosen by can be trusted."""
    rows = held_out_size(num_examples, share)
    return (
        f"{task}: {rows:,} rows are held out, on which an accuracy has a standard error of up to "
        f"{50 / math.sqrt(rows):.2f} points. Candidates that are closer than that are told apart by chance."
    )


def _edges(choice: Mapping[str, Any]) -> str:
    """Which chosen settings are the least or the largest that could be chosen: a wider grid may do better."""
    edges = []
    for name, words in (("learning_rate", "learning rate"), ("l2_clip_norm", "clip norm")):
        values = {row[name] for row in choice["candidates"]}
        for end, place in ((min, "lowest"), (max, "highest")):
            if len(values) > 1 and choice["chosen"][name] == end(values):
                edges.append(f"{place} {words}")
    return ", ".join(edges) or "–"


def _choices(report: Report, folder: StudyFolder, study: Mapping[str, Any]) -> None:
    grid = study["grid"]
    rates, norms = len(grid["learning_rates"]), len(grid["clip_norms"])
    fair = rates >= FAIR_GRID[0] and norms >= FAIR_GRID[1]
    share, part = grid["held_out_fraction"], grid["selection_share"]
    least = f"{FAIR_GRID[0]} x {FAIR_GRID[1]}"
    too_small = [] if fair else [f"The grid is smaller than the {least} of a fair comparison."]
    how = (
        f"Every arm had the same grid of {rates} learning rates and {norms} clip norms (without clipping, "
        f"the learning rates alone), and chose by accuracy on {share:.0%} of the TRAINING rows, held out of "
        f"runs that are {part:g} times as long as the final ones and have their noise. The evaluation rows "
        "were read for the final runs alone. The selection looked at private rows: what that costs is in no "
        "epsilon here."
    )
    if rates * norms == 1:
        how = "Every arm had one learning rate and clip norm, as given: nothing was chosen."
    report.text("## How learning rates and clip norms were chosen", how, *too_small)
    if rates * norms > 1:
        report.text(*(_held_out(task, rows, share) for task, rows in study["num_examples"].items()))
    known = read_json(folder.choices) if folder.choices.exists() else {}
    rows = [
        {
            "series": series,
            **choice["chosen"],
            "candidates": len(choice["candidates"]),
            "edge": _edges(choice),
            "folders": [row["folder"] for row in choice["candidates"]],
        }
        for series, choice in known.items()
    ]
    report.table("choices", columns.CHOICES, rows, "Nothing was chosen yet.")


def _missing(report: Report, missing: Sequence[Mapping[str, Any]]) -> None:
    if missing:
        lines = [f"- {cell['folder']}{': diverged' if cell['diverged'] else ''}" for cell in missing]
        report.text("## Not finished", "\n".join(lines))


def _csv(rows: Sequence[Row]) -> str:
    """Rows as CSV; folders are joined by spaces."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: " ".join(v) if k == "folders" else v for k, v in row.items()})
    return text.getvalue()
