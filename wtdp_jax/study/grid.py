"""What a study compares: the grid, and the names of its models and tasks in folders and tables."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Literal

from wtdp_jax.study.arms import ARMS, find_arm

EMBEDDED = "embedded"
"""Name of the small untrained model that needs no file."""

FAIR_GRID = (4, 3)
"""Learning rates and clip norms that a fair choice has, at least."""

Loss = Literal["next_token", "label_words", "lm"]
Engine = Literal["ghost", "bookkeeping"]
Schedule = Literal["constant", "linear", "cosine"]
Measured = Literal["standard", "ghost", "bookkeeping"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """What a study compares.

    Attributes:
      models: each "embedded", "name=folder", or a hub name.
      tasks: as in `TrainConfig.task`.
      losses: as in `TrainConfig.loss`.
      arms: names of arms.
      epsilons: targets, at delta n^-1.1, of the exact norms.
      seeds: final runs a series; their seeds are 0, 1, ...
      learning_rates: peak learning rates of adam to choose from.
      schedule: as in `TrainConfig.schedule`.
      clip_norms: clip norms to choose from.
      batch_size: expected examples a step of private arms.
      nonprivate_batch_size: examples a step of non-private arms, which see as many examples in more steps.
      physical_batch_size: examples on the device at once.
      epochs: expected passes over the training rows; None: `steps` says.
      steps: private steps; None: `epochs` says.
      selection_share: length of a selection run as a share of a final one's steps.
      held_out_fraction: share of the training rows that selection runs evaluate on.
      short_steps: steps of arms that only repeat the first steps of another.
      max_length: longest sequence in tokens; None: as the model and the task have it.
      length_multiple: as in `TrainConfig.length_multiple`.
      engine: of private arms that don't form per-example gradients.
      standard_engine: what the short arms of standard clipping train with: the update is the same. Their
        memory and time are always measured of the materialized engine, which forms them all at once.
      remat: as in `TrainConfig.remat`.
      dtype: as in `TrainConfig.dtype`.
      measured: engines whose step memory and time are measured, besides non-private steps.
      repeats: timed rounds of that measurement.
      keep_models: whether finished runs keep the trained model.
      isolate: whether each run has a process of its own.
      quick_compilation: whether most optimizations are left out, for grids that compile more than they run.
    """

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    losses: tuple[Loss, ...] = ("label_words",)
    arms: tuple[str, ...] = tuple(ARMS)
    epsilons: tuple[float, ...] = (8.0,)
    seeds: int = 3
    learning_rates: tuple[float, ...]
    schedule: Schedule = "constant"
    clip_norms: tuple[float, ...] = (0.1, 1.0, 10.0)
    batch_size: int = 512
    nonprivate_batch_size: int = 32
    physical_batch_size: int = 32
    epochs: float | None = None
    steps: int | None = None
    selection_share: float = 0.25
    held_out_fraction: float = 0.05
    short_steps: int = 3
    max_length: int | None = None
    length_multiple: int | None = None
    engine: Engine = "ghost"
    standard_engine: Literal["materialized", "microbatched"] = "materialized"
    remat: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    measured: tuple[Measured, ...] = ("standard", "ghost", "bookkeeping")
    repeats: int = 5
    keep_models: bool = False
    isolate: bool = True
    quick_compilation: bool = False

    def __post_init__(self) -> None:
        for name in ("models", "tasks", "losses", "arms", "learning_rates", "clip_norms"):
            _require(bool(getattr(self, name)), name, "none", "at least one")
        for name in ("learning_rates", "clip_norms", "epsilons"):
            values = getattr(self, name)
            _require(all(0 < v < math.inf for v in values), name, values, "positive and finite")
        sizes = (
            "seeds",
            "batch_size",
            "nonprivate_batch_size",
            "physical_batch_size",
            "short_steps",
            "repeats",
        )
        for name in sizes:
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require((self.epochs is None) != (self.steps is None), "epochs", self.epochs, "given, or else steps")
        _require(self.steps is None or self.steps >= 1, "steps", self.steps, "at least 1")
        _require(
            self.epochs is None or 0 < self.epochs < math.inf, "epochs", self.epochs, "positive and finite"
        )
        _require(0 < self.selection_share <= 1, "selection_share", self.selection_share, "in (0, 1]")
        _require(0 < self.held_out_fraction < 1, "held_out_fraction", self.held_out_fraction, "in (0, 1)")
        for name in self.arms:
            arm = find_arm(name)
            if arm.choice_of is not None:
                _require(
                    arm.choice_of in self.arms, "arms", name, f"with {arm.choice_of}, whose choice it takes"
                )
        _require(
            bool(self.epsilons) or not any(ARMS[name].has_epsilon for name in self.arms),
            "epsilons",
            "none",
            "at least one with private arms",
        )
        names = [model_name(model) for model in self.models]
        _require(len(set(names)) == len(names), "models", names, "of different names")

    @property
    def is_fair(self) -> bool:
        """Whether the grid to choose from is as large as a fair comparison asks."""
        return len(set(self.learning_rates)) >= FAIR_GRID[0] and len(set(self.clip_norms)) >= FAIR_GRID[1]

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def model_name(model: str) -> str:
    """Returns a model's name in folders and tables: what stands before "=", or the hub name's last part."""
    name = model.partition("=")[0] if "=" in model else model.rstrip("/").rpartition("/")[2]
    return _plain(name)


def model_folder(model: str) -> str | None:
    """Returns what `TrainConfig.model` takes."""
    if model == EMBEDDED:
        return None
    return model.partition("=")[2] if "=" in model else model


def task_name(task: str) -> str:
    """Returns a task's name in folders and tables; a file's is its stem."""
    return _plain(Path(task).stem if task.endswith(".json") else task)


def _plain(name: str) -> str:
    """A name that a folder can have."""
    return re.sub(r"[^\w.-]+", "-", name) or "unnamed"


def _require(holds: bool, name: str, value: Any, requirement: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {requirement}, got {value}")
