"""Whether a study's runs began with the models and data that are given now, which names don't tell.

Compared are the fingerprints that every run records. A folder that was moved has the same ones.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wtdp_jax.run_folder import RunFolder, read_json
from wtdp_jax.study import cells as study_cells
from wtdp_jax.study import runs
from wtdp_jax.study.arms import ARMS
from wtdp_jax.study.cells import Series
from wtdp_jax.study.folder import StudyFolder
from wtdp_jax.study.grid import Grid, model_name, task_name
from wtdp_jax.study.workers import Call, Failure, run_all

_MODEL = "initial_model"
_DATA = ("non_private_train_data", "eval_data")


def refuse_other_origins(
    folder: StudyFolder, grid: Grid, data_dir: Path | None, compilation: runs.Compilation
) -> None:
    """Refuses to mix models or data of one name: runs that began with one, and others that are to follow.

    Args:
      folder: the study's; all its runs are compared, those of other arms than the grid's too.
      grid: what is given now.
      data_dir: the tasks' files that are given now.
      compilation: the runs'.

    Raises:
      ValueError: in one line, if a run began with something else, or if what is given cannot be loaded.
    """
    begun, calls = [], {}
    for cell, config in _begun(folder):
        given = _now(cell, config, grid, data_dir)
        if given is not None:
            key = tuple(given.items())
            begun.append((cell, config, key))
            calls[key] = Call(runs.fingerprints, (given, compilation))
    found = run_all(calls, jobs=1, isolate=False, retries=0)
    for cell, config, key in begun:
        _compare(folder.path / cell["folder"], cell, config, dict(key), found[key])


def _begun(folder: StudyFolder) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The runs that have begun: entry in cells.json, and config.json."""
    for cell in read_json(folder.cells) if folder.cells.exists() else []:
        config = RunFolder(folder.path / cell["folder"]).config
        if config.exists():
            yield cell, read_json(config)


def _now(
    cell: Mapping[str, Any], config: Mapping[str, Any], grid: Grid, data_dir: Path | None
) -> dict[str, Any] | None:
    """What the run would load now; None where the grid has no model of that name.

    A model is the same for every task: where the grid lacks the run's, any other will do.
    """
    models = {model_name(model): model for model in grid.models}
    if cell["model"] not in models:
        return None
    tasks = {task_name(task): task for task in grid.tasks}
    series = Series(
        model=models[cell["model"]],
        task=tasks.get(cell["task"], grid.tasks[0]),
        loss=cell["loss"] if cell["loss"] in grid.losses else grid.losses[0],
        arm=cell["arm"],
        epsilon=cell["epsilon"],
    )
    settings = study_cells.model_settings(grid, series, tie=ARMS[series.arm].tie, data_dir=data_dir)
    return {**settings, "held_out_fraction": config["settings"]["held_out_fraction"]}


def _compare(
    run: Path,
    cell: Mapping[str, Any],
    config: Mapping[str, Any],
    given: Mapping[str, Any],
    found: Mapping[str, str] | Failure,
) -> None:
    """Refuses a run that began with something else than what is given."""
    if isinstance(found, Failure):
        raise ValueError(found.message)
    recorded, identity = config["settings"], config["identity"]
    if identity[_MODEL] != found[_MODEL]:
        was, now = (_named(s["model"], i[_MODEL]) for s, i in ((recorded, identity), (given, found)))
        raise ValueError(f"model {cell['model']} must be that of {run}, {was}, got {now}")
    if (task_name(given["task"]), given["loss"]) != (cell["task"], cell["loss"]):
        return
    for name in _DATA:
        if identity[name] != found[name]:
            was, now = (_named(s["data_dir"], i[name]) for s, i in ((recorded, identity), (given, found)))
            raise ValueError(f"{name} of {cell['task']}, as encoded, must be that of {run}, {was}, got {now}")


def _named(place: object, fingerprint: str) -> str:
    """Where something lies, and what it is."""
    return f"{place or 'no folder'} (fingerprint {fingerprint[:12]})"
