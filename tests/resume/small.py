"""A private run that is tiny, and what of its folder must be the same however often it was interrupted."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tests import tiny
from wtdp_jax import train
from wtdp_jax.checkpoint import TrainState
from wtdp_jax.config import TrainConfig
from wtdp_jax.inputs import Inputs
from wtdp_jax.metrics import read_metrics
from wtdp_jax.models import save_pretrained
from wtdp_jax.plan import Plan, make_plan
from wtdp_jax.run_folder import RunFolder, read_json, write_bytes

STEPS = 5
"""Checkpoints are written of steps 0, 2, 4 and 5."""

SETTINGS = {
    "engine": "materialized",
    "trainable": "wte",
    "noise_multiplier": 4.0,
    "l2_clip_norm": 2.0,
    "learning_rate": 0.1,
    "steps": STEPS,
    "batch_size": 8,
    "physical_batch_size": 4,
    "evaluate_every": 100,
    "checkpoint_every": 2,
    "seed": 7,
}


def state(seed: int) -> TrainState:
    """A state of nothing in particular, most of it one array."""
    key = jax.random.key(seed)
    trained = {"a": jax.random.normal(key, (200, 50))}
    return TrainState(trained=trained, opt_state=(jnp.int32(seed),), streams={"noise_key": key})


class Stopped(Exception):
    """Ends a run before a step."""


# Time and memory, which are the computer's.
_MEASURED = ("median_step_seconds", "steps_per_second", "examples_per_second", "peak_memory_bytes")


def config(out: Path, **changes: Any) -> TrainConfig:
    """The settings, with changes."""
    return TrainConfig(out=out, **{**SETTINGS, **changes})


@functools.cache
def plan() -> Plan:
    """The plan of the settings as they stand; it holds compiled functions, so the tests share it."""
    return make_plan(config(Path("unused")), tiny.inputs())


def run(out: Path, *, stop_before: int | None = None, **changes: Any) -> train.Outcome:
    """Runs in this process.

    Args:
      out: the run folder.
      stop_before: the call of this process that updates parameters, counted from 1, raises `Stopped`.
      changes: settings that do not matter to the plan.
    """
    calls = itertools.count(1)

    def update(*args: Any) -> Any:
        if next(calls) == stop_before:
            raise Stopped
        return plan().step.update(*args)

    stopping = dataclasses.replace(plan(), step=dataclasses.replace(plan().step, update=update))
    return train.run(config(out, **changes), tiny.inputs(), stopping)


def no_curves(path: Path, rows: Any) -> None:
    """In place of `report.plot_curves`."""
    write_bytes(path, b"curves")


def ending(out: Path) -> dict[str, Any]:
    """What a finished run leaves, without times."""
    folder = RunFolder(out)
    results = read_json(folder.results)
    rows = read_metrics(folder.metrics)
    return {
        "files": sorted(path.name for path in out.iterdir() if not path.name.startswith(".")),
        "model": {path.name: path.read_bytes() for path in folder.model.iterdir()},
        "metrics": [{name: row[name] for name in row if name != "seconds"} for row in rows],
        "results": {name: results[name] for name in results if name not in _MEASURED},
        "privacy": read_json(folder.privacy),
        "predictions": read_json(folder.predictions),
    }


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def place(folder: Path) -> Path:
    """Writes data as GLUE's SST-2 has it, and a small model."""
    for split, size in (("train", 40), ("dev", 5)):
        (folder / "SST-2").mkdir(exist_ok=True)
        rows = ["sentence\tlabel"] + [f"{('bad', 'good')[i % 2]} film\t{i % 2}" for i in range(size)]
        (folder / "SST-2" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    inputs: Inputs = tiny.inputs()
    save_pretrained(folder / "model", inputs.model, inputs.params, inputs.tokenizer)
    return folder


def _on(place: Path) -> dict[str, Any]:
    """The settings, to work on what `place` wrote."""
    where = {"data_dir": place, "model": str(place / "model")}
    return {"task": "sst2", "prompt": "{sentence} it was", **where, **SETTINGS}


def script_config(place: Path, out: Path, **changes: Any) -> TrainConfig:
    """The settings that `arguments` gives."""
    return TrainConfig(**{**_on(place), "out": out, **changes})


def arguments(place: Path, out: Path, **changes: Any) -> list[str]:
    """The settings as a command line, on what `place` wrote; True is a flag, None leaves out."""
    words = []
    for name, value in {**_on(place), "out": out, **changes}.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words
