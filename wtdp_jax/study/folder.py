"""A study's folder: what lies where, and reading it back.

study.json     the grid, and on what it was run
cells.json     every run: what it is, and its folder
noise.json     calibrated noise multipliers
choices.json   for each series the runs it chose by, and the choice
costs/         for each model, task and loss what a step takes
selection/, cells/   run folders as finetune.py leaves them
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from wtdp_jax.metrics import read_metrics
from wtdp_jax.run_folder import RunFolder, read_json, write_json
from wtdp_jax.study import cells as study_cells
from wtdp_jax.study.arms import ARMS
from wtdp_jax.study.cells import Cell, Series
from wtdp_jax.study.grid import Grid, model_name, task_name

DIVERGED = "diverged.json"
"""In a run folder: the run cannot be finished, because its loss or parameters were not finite."""


@dataclasses.dataclass(frozen=True)
class StudyFolder:
    """The paths of a study."""

    path: Path

    @property
    def study(self) -> Path:
        """Grid and environment."""
        return self.path / "study.json"

    @property
    def cells(self) -> Path:
        """All runs."""
        return self.path / "cells.json"

    @property
    def noise(self) -> Path:
        """Noise multipliers by what they were calibrated for."""
        return self.path / "noise.json"

    @property
    def choices(self) -> Path:
        """Chosen settings by series."""
        return self.path / "choices.json"

    @property
    def compiled(self) -> Path:
        """Compiled programs, which may be deleted."""
        return self.path / "compiled"

    def costs(self, model: str, task: str, loss: str) -> Path:
        """What a step takes, for one model, task and loss."""
        return self.path / "costs" / model_name(model) / task_name(task) / f"{loss}.json"

    def run(self, cell: Cell) -> RunFolder:
        """A run's folder."""
        return RunFolder(self.path / cell.folder)

    def is_finished(self, cell: Cell) -> bool:
        """Whether a run has ended for good."""
        return self.has_ended(cell.folder)

    def has_ended(self, folder: str) -> bool:
        """Whether the run in a folder below the study's has ended for good."""
        return RunFolder(self.path / folder).results.exists() or self.has_diverged(folder)

    def has_diverged(self, folder: str) -> bool:
        """Whether the run in a folder below the study's has diverged, as it would again."""
        return (self.path / folder / DIVERGED).exists()

    def add_cells(self, cells: Iterable[Cell]) -> None:
        """Writes runs into the list of all, over older entries of the same folders."""
        known = {row["folder"]: row for row in read_json(self.cells)} if self.cells.exists() else {}
        known |= {cell.folder: cell.to_json() for cell in cells}
        write_json(self.cells, sorted(known.values(), key=lambda row: (row["purpose"], row["folder"])))


def choose(folder: StudyFolder, grid: Grid, series: Series) -> dict[str, Any] | None:
    """Returns what a series' selection runs say: all candidates, and the best of them.

    The best has the highest accuracy on the held-out rows, which is what the study compares: under noise the
    loss often rises while the accuracy does too. Of several, such as runs that all have the majority's, it
    has the lowest loss. One that diverged is none. The only settings of a grid are chosen without a run.

    Args:
      folder: the study's.
      grid: its grid.
      series: one that chooses for itself.

    Returns:
      JSON values; None while a run is missing, or if every one diverged.
    """
    possible = study_cells.candidates(grid, series)
    if len(possible) == 1:
        return {"chosen": _candidate(possible[0], _UNKNOWN), "candidates": [], "epsilon": series.epsilon}
    candidates: list[dict[str, Any]] = []
    for cell in possible:
        if not folder.is_finished(cell):
            return None
        results = folder.run(cell).results
        found = _candidate(cell, read_json(results) if results.exists() else _UNKNOWN)
        candidates.append({"folder": cell.folder, **found})
    finished = [row for row in candidates if row["held_out_loss"] is not None]
    if not finished:
        return None
    best = min(finished, key=lambda row: (-row["held_out_accuracy"], row["held_out_loss"]))
    return {"chosen": best, "candidates": candidates, "epsilon": series.epsilon}


_UNKNOWN = {"accuracy": None, "loss": None}


def _candidate(cell: Cell, results: dict[str, Any]) -> dict[str, Any]:
    """Settings, and what a run with them came to on the held-out rows."""
    return {
        "learning_rate": cell.learning_rate,
        "l2_clip_norm": cell.l2_clip_norm,
        "held_out_accuracy": results["accuracy"],
        "held_out_loss": results["loss"],
    }


def chosen_cell(cell: Cell, choice: dict[str, Any]) -> Cell:
    """A final run with the settings that its series, or that of another arm, chose.

    An arm that clips needs a clip norm: chosen by an arm that doesn't, there is none.
    """
    best = choice["chosen"]
    return dataclasses.replace(cell, learning_rate=best["learning_rate"], l2_clip_norm=best["l2_clip_norm"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished final run, as the report reads it.

    Attributes:
      cell: its entry in cells.json.
      results: its results.json.
      privacy: its privacy.json.
      settings: of its config.json.
      right: for each evaluation example whether it is classified rightly.
      labels: for each evaluation example its label.
      rows: lines of its metrics.jsonl.
    """

    cell: dict[str, Any]
    results: dict[str, Any]
    privacy: dict[str, Any]
    settings: dict[str, Any]
    right: list[int]
    labels: list[int]
    rows: list[dict[str, Any]]

    @property
    def folder(self) -> str:
        """Its folder below the study's."""
        return self.cell["folder"]

    @property
    def examples(self) -> int:
        """Example gradients that it was expected to see, a public number."""
        return self.results["steps"] * self.settings["batch_size"]


def read_runs(folder: StudyFolder) -> tuple[list[Run], list[dict[str, Any]]]:
    """Returns the finished final runs, and the cells of those that are missing or diverged.

    Raises:
      ValueError: if the folder holds no study, or runs to be compared began with other models or data.
    """
    if not folder.cells.exists():
        raise ValueError(f"folder must hold a study (cells.json), got {folder.path}")
    finished, missing, identities = [], [], []
    for cell in read_json(folder.cells):
        if cell["purpose"] != "final":
            continue
        run = RunFolder(folder.path / cell["folder"])
        if not run.results.exists():
            missing.append({**cell, "diverged": folder.has_diverged(cell["folder"])})
            continue
        config, predictions = read_json(run.config), read_json(run.predictions)
        identities.append((cell, config["identity"]))
        finished.append(
            Run(
                cell=cell,
                results=read_json(run.results),
                privacy=read_json(run.privacy),
                settings=config["settings"],
                right=predictions["right"],
                labels=predictions["labels"],
                rows=read_metrics(run.metrics),
            )
        )
    _refuse_mixed(identities)
    return finished, missing


def _refuse_mixed(identities: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Refuses runs to be compared that did not begin with one model and the same data."""
    first: dict[tuple[Any, ...], tuple[str, str]] = {}
    for cell, identity in identities:
        place = (cell["model"], cell["task"], cell["loss"])
        groups = {
            "initial_model": (*place, ARMS[cell["arm"]].tie),
            "non_private_train_data": place,
            "eval_data": place,
        }
        for name, group in groups.items():
            value, folder = first.setdefault((name, *group), (identity[name], cell["folder"]))
            if identity[name] != value:
                raise ValueError(
                    f"{name} must be one for all runs of {', '.join(place)}, got {value[:12]} in {folder} "
                    f"and {identity[name][:12]} in {cell['folder']}"
                )


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a step of one model, task and loss takes, as the report reads it.

    Attributes:
      file: path below the study's folder.
      contents: of that file.
    """

    file: str
    contents: dict[str, Any]

    @property
    def place(self) -> str:
        """The names of model, task and loss."""
        return ", ".join(PurePosixPath(self.file).with_suffix("").parts[1:])

    @property
    def sizes(self) -> str:
        """Physical batch and length."""
        return f"B {self.contents['physical_batch_size']}, T {self.contents['length']}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each variant that was measured."""
        return self.contents["rows"]


def read_costs(folder: StudyFolder) -> list[Costs]:
    """Returns the measured costs, in the order of their files."""
    files = sorted((folder.path / "costs").rglob("*.json"))
    return [Costs(path.relative_to(folder.path).as_posix(), read_json(path)) for path in files]
