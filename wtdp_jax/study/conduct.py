"""Conducts a study: measures costs, calibrates noise, chooses settings, trains the final runs.

Whatever is finished is left as it is, so an interrupted study goes on where it stopped. Only worker processes
compute with jax.
"""

import dataclasses
import datetime
import functools
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from wtdp_jax import report
from wtdp_jax.accounting import calibrate_noise_multiplier
from wtdp_jax.config import WITHOUT_EFFECT_ON_VALUES
from wtdp_jax.data import load_split, load_task
from wtdp_jax.privacy import default_delta
from wtdp_jax.run_folder import read_json, write_json
from wtdp_jax.study import cells as study_cells
from wtdp_jax.study import runs
from wtdp_jax.study.cells import Cell, Series, cells_of, final_cells, selection_cells, series_of
from wtdp_jax.study.folder import StudyFolder, choose, chosen_cell
from wtdp_jax.study.grid import Grid, Measured, model_name, task_name
from wtdp_jax.study.origins import refuse_other_origins
from wtdp_jax.study.workers import Call, Failure, run_all

Say = Callable[[str], None]

_ESTIMATE_ROUNDS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A grid, and where and how it is run.

    Attributes:
      grid: what is compared.
      folder: the study's folder.
      data_dir: the tasks' files; None: generated, or from the hub.
      jobs: processes at once.
      say: told of progress, a line at a time.
    """

    grid: Grid
    folder: StudyFolder
    data_dir: Path | None
    jobs: int
    say: Say

    def conduct(self) -> list[str]:
        """Does what is left of the study, and returns what failed, a line each.

        Raises:
          ValueError: before anything is run, if a task has no rows, or a run in the folder has other
          settings, or began with another model or other data.
        """
        sizes = self._sizes()
        self._refuse_other_settings(sizes)
        refuse_other_origins(self.folder, self.grid, self.data_dir, self._compilation)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        record = {
            "begun": self._begun(),
            "grid": self.grid.to_json(),
            "num_examples": sizes,
            "data_dir": str(self.data_dir),
        }
        write_json(self.folder.study, record)
        self.folder.add_cells(cells_of(self.grid))
        failures = self._measure() + self._calibrate(sizes)
        if failures:
            return failures
        selection = [cell for series in series_of(self.grid) for cell in selection_cells(self.grid, series)]
        failures += self._train(selection, sizes)
        failures += self._train(self._chosen(failures), sizes)
        return failures

    def diverged(self) -> list[Cell]:
        """Returns the grid's runs that diverged: tried again, they would once more."""
        return [cell for cell in cells_of(self.grid) if self.folder.has_diverged(cell.folder)]

    def _begun(self) -> list[dict[str, Any]]:
        """The commands that the study was begun with, in their order: it may grow by arms or seeds."""
        now = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": report.commit(),
        }
        before = read_json(self.folder.study)["begun"] if self.folder.study.exists() else []
        return [*(row for row in before if row["command"] != now["command"]), now]

    def _sizes(self) -> dict[str, int]:
        """Training rows of each task."""
        return {task: len(load_split(load_task(task), "train", self.data_dir)) for task in self.grid.tasks}

    def _refuse_other_settings(self, sizes: dict[str, int]) -> None:
        """Finds what would be refused later, after hours: runs in the folder that are not this grid's."""
        noise, choices = self._known_noise(), self._known_choices()
        for cell in cells_of(self.grid):
            run = self.folder.run(cell)
            choice = choices.get(cell.series.chooser.path)
            if not run.config.exists() or (cell.purpose == "final" and choice is None):
                continue
            settled = chosen_cell(cell, choice) if cell.purpose == "final" and choice else cell
            # Of noise that is yet to be calibrated, the run's own stands in: the rest is compared.
            recorded = read_json(run.config)["settings"]["noise_multiplier"]
            multiplier = noise.get(self._noise_name(settled, sizes), recorded)
            run.check({"settings": self._config(settled, sizes, multiplier).to_json()}, resume=True)

    def _measure(self) -> list[str]:
        """Measures what steps cost, one model after the other, with nothing beside them."""
        calls = {}
        for series in series_of(self.grid):
            path = self.folder.costs(series.model, series.task, series.loss)
            measured, wanted = self._measured(series, path), {"nonprivate", *self.grid.measured}
            if path not in calls and not wanted <= measured:
                # All of them, those measured before too: seconds compare within one interleaved measurement.
                engines = tuple(engine for engine in get_args(Measured) if engine in measured | wanted)
                calls[path] = self._measurement(series, runs.variants_of(engines), self.grid.repeats)

        def on_end(path: Path, value: Any, seconds: float) -> None:
            if not isinstance(value, Failure):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, value)
            self._tell(path.relative_to(self.folder.path).as_posix(), value, seconds)

        results = run_all(calls, jobs=1, isolate=self.grid.isolate, on_end=on_end)
        return [f"{path}: {value.message}" for path, value in results.items() if isinstance(value, Failure)]

    def _measured(self, series: Series, path: Path) -> set[str]:
        """The engines whose costs a file has; none if it has those of other sizes or settings."""
        if not path.exists():
            return set()
        cost, settings = read_json(path), self._measured_settings(series)
        is_alike = cost["physical_batch_size"] == self.grid.physical_batch_size and all(
            cost["settings"].get(name) == str(value)
            for name, value in settings.items()
            if name not in WITHOUT_EFFECT_ON_VALUES
        )
        return {row["engine"] for row in cost["rows"]} if is_alike else set()

    def _measured_settings(self, series: Series) -> dict[str, Any]:
        """What steps are measured with, tied and untied."""
        settings = study_cells.model_settings(self.grid, series, tie=True, data_dir=self.data_dir)
        del settings["tie_embeddings"]
        return settings

    def _measurement(
        self, series: Series, variants: list[runs.Variant], repeats: int, *, keeps_programs: bool = True
    ) -> Call:
        measure = functools.partial(
            runs.measure_costs,
            repeats=repeats,
            physical_batch_size=self.grid.physical_batch_size,
            compilation=self._compilation if keeps_programs else self._compilation._replace(cache=None),
        )
        return Call(measure, (self._measured_settings(series), variants))

    @property
    def _compilation(self) -> runs.Compilation:
        return runs.Compilation(str(self.folder.compiled), self.grid.quick_compilation)

    def _calibrate(self, sizes: dict[str, int]) -> list[str]:
        """Finds the noise multiplier of every epsilon; all arms have the exact norm's."""
        noise = self._known_noise()
        calls = {}
        for cell in cells_of(self.grid):
            name = self._noise_name(cell, sizes)
            if cell.arm.has_epsilon and name not in noise:
                calls[name] = Call(calibrate, self._mechanism(cell, sizes))
        found = run_all(calls, jobs=self.jobs, isolate=False, on_end=self._tell)
        noise |= {name: value for name, value in found.items() if not isinstance(value, Failure)}
        write_json(self.folder.noise, noise)
        return [f"{name}: {value.message}" for name, value in found.items() if isinstance(value, Failure)]

    def _mechanism(self, cell: Cell, sizes: dict[str, int]) -> tuple[int, int, int, float]:
        """Rows, expected batch size, steps and epsilon: what a noise multiplier is calibrated for.

        Those of a whole final run: short arms repeat its first steps, selection runs are to meet its noise.
        """
        rows = sizes[cell.series.task]
        steps = study_cells.private_steps(self.grid, rows, "final")
        return rows, self.grid.batch_size, steps, cell.series.epsilon or 0.0

    def _noise_name(self, cell: Cell, sizes: dict[str, int]) -> str:
        rows, batch_size, steps, epsilon = self._mechanism(cell, sizes)
        return f"noise for epsilon {epsilon:g}: n {rows}, batch {batch_size}, {steps} steps"

    def _train(self, cells: Sequence[Cell], sizes: dict[str, int]) -> list[str]:
        """Trains what is not finished, and returns what failed."""
        noise, calls, failures = self._known_noise(), {}, []
        for cell in cells:
            config = self._config(cell, sizes, noise.get(self._noise_name(cell, sizes)))
            run, keeps_model = self.folder.run(cell), self._keeps_model(cell)
            try:
                run.check({"settings": config.to_json()}, resume=True)
            except ValueError as error:
                failures.append(f"{cell.folder}: {error}")
                continue
            if self.folder.is_finished(cell):
                runs.tidy(run, keeps_model)
            else:
                calls[cell.folder] = Call(runs.train_cell, (config, self._compilation, keeps_model))
        if cells:
            finished = len(cells) - len(calls) - len(failures)
            self.say(f"{finished} of {len(cells)} {cells[0].purpose} runs were finished before")
        found = run_all(calls, jobs=self.jobs, isolate=self.grid.isolate, on_end=self._tell)
        broken = [f"{name}: {value.message}" for name, value in found.items() if isinstance(value, Failure)]
        return failures + broken

    def _keeps_model(self, cell: Cell) -> bool:
        return self.grid.keep_models and cell.purpose == "final"

    def _chosen(self, failures: list[str]) -> list[Cell]:
        """The final runs, with the settings that their series chose; notes those that can't be chosen."""
        choices = self._known_choices()
        for series in series_of(self.grid):
            choice = choose(self.folder, self.grid, series) if series.chooser == series else None
            if choice is not None:
                choices[series.path] = choice
        write_json(self.folder.choices, choices)
        cells = []
        for series in series_of(self.grid):
            choice = choices.get(series.chooser.path)
            if choice is None:
                failures.append(f"{series.path}: {self._why_none_is_chosen(series.chooser)}")
            else:
                cells += [chosen_cell(cell, choice) for cell in final_cells(self.grid, series)]
        self.folder.add_cells(cells)
        return cells

    def _why_none_is_chosen(self, series: Series) -> str:
        """Whether trying again would help."""
        cells = selection_cells(self.grid, series)
        if all(self.folder.has_diverged(cell.folder) for cell in cells):
            return "nothing to choose from, as every selection run diverged: give lower learning rates"
        return "nothing to choose from, as selection runs are missing"

    def _config(self, cell: Cell, sizes: dict[str, int], noise_multiplier: float | None) -> Any:
        return study_cells.train_config(
            self.grid,
            cell,
            num_examples=sizes[cell.series.task],
            noise_multiplier=noise_multiplier,
            data_dir=self.data_dir,
            root=self.folder.path,
        )

    def _known_noise(self) -> dict[str, float]:
        return read_json(self.folder.noise) if self.folder.noise.exists() else {}

    def _known_choices(self) -> dict[str, Any]:
        return read_json(self.folder.choices) if self.folder.choices.exists() else {}

    def _tell(self, name: Any, value: Any, seconds: float) -> None:
        outcome = "diverged" if self.folder.has_diverged(str(name)) else "done"
        if isinstance(value, Failure):
            outcome = f"failed: {value.message}"
        self.say(f"{name} {outcome} ({seconds:.0f} s)")

    def plan(self) -> list[str]:
        """Returns every run, and an estimate of the time that is left, a line each; writes nothing."""
        sizes, lines, total, how = self._sizes(), [], 0.0, set()
        seconds_of: dict[tuple[str, str, str], tuple[dict[str, float], str]] = {}
        for cell in cells_of(self.grid):
            series = cell.series
            where = (series.model, series.task, series.loss)
            if where not in seconds_of:
                seconds_of[where] = self._seconds_of_a_step(series)
            seconds, source = seconds_of[where]
            how.add(source)
            finished = self.folder.is_finished(cell)
            estimate = 0.0 if finished else self._estimate(cell, sizes[series.task], seconds)
            total += estimate
            state = "finished" if finished else f"about {estimate:.0f} s"
            lines.append(f"{cell.folder}: {cell.arm.purpose}; {state}")
        return [
            *lines,
            f"{len(lines)} runs, about {total / 3600:.2g} hours of training left in one process (start of a "
            "process, compilation, evaluation and the cost measurement come on top)",
            *sorted(how),
        ]

    def _seconds_of_a_step(self, series: Series) -> tuple[dict[str, float], str]:
        """Seconds of one physical batch by variant, and how that is known."""
        path = self.folder.costs(series.model, series.task, series.loss)
        if path.exists():
            rows = read_json(path)["rows"]
            medians = {row["name"]: statistics.median(row["seconds"]) for row in rows if row["seconds"]}
            if medians:
                return medians, f"estimated from the steps measured in {path}"
        engine = self.grid.engine
        variant = runs.Variant(f"tied {engine}", True, engine)
        call = self._measurement(series, [variant], _ESTIMATE_ROUNDS, keeps_programs=False)
        row = call.function(*call.arguments)["rows"][0]
        if not row["seconds"]:
            raise ValueError(f"a step must fit in memory to be timed, got {row['step_bytes']} bytes")
        seconds = statistics.median(row["seconds"])
        name = f"{model_name(series.model)}, {task_name(series.task)}, {series.loss}"
        how = f"estimated from {seconds:.3g} s for a physical batch, measured now for tied {engine} ({name})"
        return {variant.name: seconds}, f"{how} and taken for all arms"

    def _estimate(self, cell: Cell, num_examples: int, seconds: dict[str, float]) -> float:
        """Seconds of training: physical batches times those of one."""
        arm, size = cell.arm, self.grid.physical_batch_size
        engine = "standard" if arm.is_standard else self.grid.engine if arm.is_private else "nonprivate"
        name = f"{'tied' if arm.tie else 'untied'} {engine}"
        one = seconds.get(name, max(seconds.values()))
        logical = self.grid.batch_size if arm.is_private else self.grid.nonprivate_batch_size
        # A Poisson draw's last physical batch is half empty on average.
        batches = -(-logical // size) + (0.5 if arm.is_private else 0)
        return study_cells.cell_steps(self.grid, cell, num_examples) * batches * one


def calibrate(num_examples: int, batch_size: int, steps: int, epsilon: float) -> float:
    """Returns the noise multiplier of the exact norm at the default delta.

    Args:
      num_examples: training rows.
      batch_size: expected examples a step.
      steps: of the whole run.
      epsilon: the target.
    """
    return calibrate_noise_multiplier(
        sampling_prob=batch_size / num_examples,
        steps=steps,
        epsilon=epsilon,
        delta=default_delta(num_examples),
        l2_clip_norm=1.0,
        sensitivity=1.0,
    )
