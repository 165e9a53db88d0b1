"""Which runs a grid makes, and the settings of each.

A series is what an accuracy is given for: one model, task, loss, arm and epsilon. It has final runs, one a
seed, and, where the arm chooses its own settings, selection runs: one for each learning rate and clip norm.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from wtdp_jax.config import TrainConfig
from wtdp_jax.study.arms import ARMS, NEGLIGIBLE_NOISE, Arm
from wtdp_jax.study.grid import Grid, model_folder, model_name, task_name

SELECTION_SEED = 10_000
"""Seed of the selection runs: none of the final ones'."""

Purpose = Literal["selection", "final"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """What an accuracy is given for.

    Attributes:
      model: a grid's entry.
      task: a task's name.
      loss: a loss's name.
      arm: an arm's name.
      epsilon: the target; None for arms without one.
    """

    model: str
    task: str
    loss: str
    arm: str
    epsilon: float | None

    @property
    def path(self) -> str:
        """Its place below the study's folders."""
        target = "no-epsilon" if self.epsilon is None else f"epsilon-{self.epsilon:g}"
        return "/".join((model_name(self.model), task_name(self.task), self.loss, self.arm, target))

    @property
    def chooser(self) -> "Series":
        """The series whose learning rate and clip norm it has."""
        other = ARMS[self.arm].choice_of
        return self if other is None else dataclasses.replace(self, arm=other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run.

    Attributes:
      series: what it belongs to.
      purpose: to choose settings by, or to report.
      seed: of noise, sampling and dropout.
      learning_rate: peak; None where it is yet to be chosen.
      l2_clip_norm: likewise.
    """

    series: Series
    purpose: Purpose
    seed: int
    learning_rate: float | None = None
    l2_clip_norm: float | None = None

    @property
    def arm(self) -> Arm:
        """Its arm."""
        return ARMS[self.series.arm]

    @property
    def folder(self) -> str:
        """Its run folder, below the study's."""
        if self.purpose == "final":
            return f"cells/{self.series.path}/seed-{self.seed}"
        clip = "" if self.l2_clip_norm is None else f"-clip-{self.l2_clip_norm:g}"
        return f"selection/{self.series.path}/lr-{self.learning_rate:g}{clip}"

    def to_json(self) -> dict[str, Any]:
        """Returns what it is as JSON values, with its folder."""
        return {
            "folder": self.folder,
            **dataclasses.asdict(self.series),
            "model": model_name(self.series.model),
            "task": task_name(self.series.task),
            "purpose": self.purpose,
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "l2_clip_norm": self.l2_clip_norm,
        }


def series_of(grid: Grid) -> list[Series]:
    """Returns the series of a grid."""
    found = []
    for model, task, loss, name in itertools.product(grid.models, grid.tasks, grid.losses, grid.arms):
        epsilons = grid.epsilons if ARMS[name].has_epsilon else (None,)
        found += [
            Series(model=model, task=task, loss=loss, arm=name, epsilon=epsilon) for epsilon in epsilons
        ]
    return found


def selection_cells(grid: Grid, series: Series) -> list[Cell]:
    """Returns the runs that a series chooses its settings by; none where there is nothing to choose."""
    possible = candidates(grid, series)
    return possible if len(possible) > 1 else []


def candidates(grid: Grid, series: Series) -> list[Cell]:
    """Returns the settings that a series may choose, as runs; none where it takes another's choice.

    Without clipping there is no clip norm to choose.
    """
    arm = ARMS[series.arm]
    if arm.choice_of is not None:
        return []
    clip_norms: tuple[float | None, ...] = grid.clip_norms if arm.is_private else (None,)
    return [
        Cell(
            series=series,
            purpose="selection",
            seed=SELECTION_SEED,
            learning_rate=learning_rate,
            l2_clip_norm=clip_norm,
        )
        for learning_rate, clip_norm in itertools.product(grid.learning_rates, clip_norms)
    ]


def final_cells(grid: Grid, series: Series) -> list[Cell]:
    """Returns the runs that a series is reported by, their settings not yet chosen."""
    seeds = 1 if ARMS[series.arm].is_short else grid.seeds
    return [Cell(series=series, purpose="final", seed=seed) for seed in range(seeds)]


def cells_of(grid: Grid) -> Iterator[Cell]:
    """Yields all runs: first the selection's, then the final ones."""
    for make in (selection_cells, final_cells):
        for series in series_of(grid):
            yield from make(grid, series)


def private_steps(grid: Grid, num_examples: int, purpose: Purpose) -> int:
    """Returns the steps of a whole private run.

    Args:
      grid: gives steps or epochs.
      num_examples: training rows of a final run; a selection run is a share of that one.
      purpose: of the run.
    """
    steps = grid.steps or math.ceil((grid.epochs or 0) * num_examples / grid.batch_size)
    return steps if purpose == "final" else max(1, round(grid.selection_share * steps))


def cell_steps(grid: Grid, cell: Cell, num_examples: int) -> int:
    """Returns the optimizer steps of a run: non-private arms take more and smaller ones."""
    steps = private_steps(grid, num_examples, cell.purpose)
    if not cell.arm.is_private:
        return max(1, steps * grid.batch_size // grid.nonprivate_batch_size)
    return min(steps, grid.short_steps) if cell.arm.is_short else steps


def cell_examples(grid: Grid, cell: Cell, num_examples: int) -> int:
    """Returns the example gradients that a run is expected to see."""
    size = grid.batch_size if cell.arm.is_private else grid.nonprivate_batch_size
    return cell_steps(grid, cell, num_examples) * size


def train_config(
    grid: Grid,
    cell: Cell,
    *,
    num_examples: int,
    noise_multiplier: float | None,
    data_dir: Path | None,
    root: Path,
) -> TrainConfig:
    """Returns the settings of a run.

    Args:
      grid: the study's.
      cell: the run, its learning rate and clip norm chosen.
      num_examples: training rows of a final run.
      noise_multiplier: of its series' epsilon; None for arms without one.
      data_dir: the tasks' files.
      root: the study's folder.
    """
    arm, steps = cell.arm, cell_steps(grid, cell, num_examples)
    private: dict[str, Any] = {}
    if arm.is_private:
        private = {
            "engine": grid.standard_engine if arm.is_standard else grid.engine,
            "tied_norm": arm.tied_norm,
            "noise_multiplier": noise_multiplier if arm.is_noised else NEGLIGIBLE_NOISE,
            "double_noise": arm.double_noise,
            "l2_clip_norm": cell.l2_clip_norm,
        }
    return TrainConfig(
        **model_settings(grid, cell.series, tie=arm.tie, data_dir=data_dir),
        **private,
        regime="dp" if arm.is_private else "nonprivate",
        trainable=arm.trainable,
        held_out_fraction=grid.held_out_fraction if cell.purpose == "selection" else 0.0,
        steps=steps,
        batch_size=grid.batch_size if arm.is_private else grid.nonprivate_batch_size,
        physical_batch_size=grid.physical_batch_size,
        length_multiple=grid.length_multiple,
        learning_rate=cell.learning_rate or 0.0,
        schedule=grid.schedule,
        # A short run takes the first steps of a whole one, at that one's learning rates.
        schedule_steps=private_steps(grid, num_examples, cell.purpose) if arm.is_short else None,
        evaluate_every=steps,
        checkpoint_every=max(1, steps // 3),
        seed=cell.seed,
        out=root / cell.folder,
        resume=True,
    )


def model_settings(grid: Grid, series: Series, *, tie: bool, data_dir: Path | None) -> dict[str, Any]:
    """Returns the settings that say what a series works on."""
    return {
        "task": series.task,
        "data_dir": data_dir,
        "model": model_folder(series.model),
        "tie_embeddings": tie,
        "remat": grid.remat,
        "dtype": grid.dtype,
        "max_length": grid.max_length,
        "loss": series.loss,
    }
