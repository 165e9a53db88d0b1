"""Is weight tying still beneficial under DP-SGD? A grid of runs that answers it.

On a generated task, without a file, within two minutes on two cores:

    python experiments/study.py --preset smoke --out runs/smoke
    python experiments/report.py runs/smoke

On SST-2 with a small model that pretrain.py made, in the background for hours:

    python experiments/study.py --preset laptop --data-dir ../shared/data --jobs 2 --out runs/laptop

`--dry-run` prints the runs and an estimate of their time. Every run has a folder as finetune.py leaves it.
Finished ones are not done again; after an interruption the same command goes on where it stopped. Every arm
chooses learning rate and clip norm from the same grid, by accuracy on a held-out part of the TRAINING
rows; that choice costs privacy which epsilon does not count.

The exit status is 0 when every run is finished, 2 if nothing was run because of bad input, and 1 if a run
failed or a final run diverged. A selection run may diverge: its settings are not chosen, and the status is 0.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from wtdp_jax import cli
from wtdp_jax.study.cells import Cell, Purpose
from wtdp_jax.study.grid import Engine, Grid, Loss, Measured, Schedule
from wtdp_jax.study.presets import PRESETS

_NAMED = 5
"""Folders that a line names of runs that diverged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Compares weight-tied and untied fine-tuning; whatever is None is as the preset has it."""

    preset: Literal["smoke", "laptop", "colab", "paper"] = "smoke"
    """Size: 2 minutes and some hours on two cores, some hours on one GPU, the paper's models and tasks."""

    out: Path = Path("runs/study")
    """The study's folder, created if absent."""

    data_dir: Path | None = None
    """Folder with the tasks' files, e.g. ../shared/data; None generates the task or takes it from the hub."""

    models: tuple[str, ...] | None = None
    """Models: hub names, name=folder, or embedded for a small untrained one that needs no file."""

    tasks: tuple[str, ...] | None = None
    """Tasks, as for finetune.py."""

    losses: tuple[Loss, ...] | None = None
    """Losses to train by, as for finetune.py."""

    arms: tuple[str, ...] | None = None
    """Ways to train, see wtdp_jax/study/arms.py."""

    epsilons: tuple[float, ...] | None = None
    """Target epsilons, at delta n^-1.1."""

    seeds: int | None = None
    """Final runs of each arm, with seeds 0, 1, ..."""

    learning_rates: tuple[float, ...] | None = None
    """Learning rates that every arm chooses from."""

    schedule: Schedule | None = None
    """Course of the learning rate, as for finetune.py."""

    clip_norms: tuple[float, ...] | None = None
    """Clip norms that every private arm chooses from."""

    steps: int | None = None
    """Steps of a final private run; in place of epochs."""

    epochs: float | None = None
    """Expected passes over the training rows of a final run; in place of steps."""

    batch_size: int | None = None
    """Expected examples a private step."""

    physical_batch_size: int | None = None
    """Examples on the device at once."""

    selection_share: float | None = None
    """Length of a selection run as a share of a final one's, in (0, 1]."""

    held_out_fraction: float | None = None
    """Share of the training rows that selection runs are evaluated on, in (0, 1)."""

    max_length: int | None = None
    """Longest sequence in tokens."""

    length_multiple: int | None = None
    """Tokens to whose multiples physical batches are cut, as for finetune.py."""

    engine: Engine | None = None
    """How private arms that form no per-example gradient get their norms and sums."""

    measured: tuple[Measured, ...] | None = None
    """Engines whose step memory and time are measured besides steps without privacy; none: those alone."""

    jobs: int | None = None
    """Runs at once, each in a process on its share of the cores; None: 2 for smoke, else 1."""

    dry_run: bool = False
    """Whether to print the runs and an estimate of their time, and nothing else."""

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give steps or epochs, not both")
        self.grid()

    def grid(self) -> Grid:
        """The preset's grid, with what was given in its place."""
        names = {field.name for field in dataclasses.fields(Grid)}
        given = {k: v for k, v in vars(self).items() if k in names and v is not None}
        if "steps" in given or "epochs" in given:
            given = {"steps": None, "epochs": None} | given
        return dataclasses.replace(PRESETS[self.preset], **given)


def main(config: StudyConfig) -> int:
    """Conducts the study, or prints what it would do; returns the exit status."""
    # Imported late, so that --help and bad settings answer at once.
    from wtdp_jax.study.conduct import Study
    from wtdp_jax.study.folder import StudyFolder

    study = Study(
        grid=config.grid(),
        folder=StudyFolder(config.out),
        data_dir=config.data_dir,
        jobs=config.jobs or (2 if config.preset == "smoke" else 1),
        say=lambda line: print(line, flush=True),
    )
    with cli.one_line_errors(ValueError, OSError):
        if config.dry_run:
            print("\n".join(study.plan()))
            return 0
        failures = study.conduct()
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if failures:
        print(f"error: {len(failures)} failed; the same command tries them again", file=sys.stderr)
    diverged = _diverged(study.diverged())
    for line in diverged.values():
        print(line, file=sys.stderr)
    if failures or "final" in diverged:
        return 1
    print(f"all runs are finished: python experiments/report.py {config.out}")
    return 0


def _diverged(cells: Sequence[Cell]) -> dict[Purpose, str]:
    """A line on the runs of each purpose that diverged, with their folders if they are few."""
    said: dict[Purpose, str] = {
        "selection": "note: {} diverged, whose settings are not chosen: {}",
        "final": "error: {} diverged, and the same command does not try again: {}",
    }
    lines = {}
    for purpose, line in said.items():
        folders = [cell.folder for cell in cells if cell.purpose == purpose]
        if folders:
            named = [*folders[:_NAMED], *(["..."] if len(folders) > _NAMED else [])]
            count = f"{len(folders)} {purpose} run{'s' if len(folders) > 1 else ''}"
            lines[purpose] = line.format(count, ", ".join(named))
    return lines


if __name__ == "__main__":
    sys.exit(main(cli.parse(StudyConfig)))
