"""What a worker process does: trains one cell, or measures what steps cost.

Dimension key: B examples of a physical batch, T tokens.
"""

import functools
import shutil
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wtdp_jax import compiled, train
from wtdp_jax.benchmark import runs, step_cost, timing
from wtdp_jax.clipping import merge, partition
from wtdp_jax.config import TrainConfig
from wtdp_jax.inputs import Inputs, load
from wtdp_jax.noise import key_from_seed
from wtdp_jax.plan import Plan, make_plan
from wtdp_jax.run_folder import RunFolder, write_json
from wtdp_jax.step import GradFn
from wtdp_jax.study.folder import DIVERGED
from wtdp_jax.study.grid import Measured

MeasuredEngine = Literal["nonprivate", "standard", "ghost", "bookkeeping"]

# Settings that decide what is loaded.
_LOADING = (
    *("task", "data_dir", "model", "tie_embeddings", "dropout", "remat", "dtype", "prompt", "label_words"),
    *("max_length", "held_out_fraction", "loss"),
)

# A step that takes more of the device's memory is planned and not run: beside it lie the parameters and
# moments of the tied and the untied model, and on a CPU all that loading them has left.
_LARGEST_SHARE_RUN = 0.4


class Variant(NamedTuple):
    """What a step's cost is measured of.

    Attributes:
      name: in tables.
      tie: whether the head is the embedding.
      engine: "nonprivate", or how gradients are clipped.
      tied_norm: of the shared matrix.
    """

    name: str
    tie: bool
    engine: MeasuredEngine
    tied_norm: Literal["cross_term", "materialize"] = "cross_term"


class Compilation(NamedTuple):
    """How a process compiles.

    Attributes:
      cache: folder of compiled programs: the seeds of a series share theirs; None: none.
      is_quick: whether to leave out most optimizations, as pays where programs hardly run.
    """

    cache: str | None
    is_quick: bool

    def apply(self) -> None:
        """Settles it for this process."""
        runs.use_cpu_fusions("dots")
        jax.config.update("jax_disable_most_optimizations", self.is_quick)
        jax.config.update("jax_compilation_cache_dir", self.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def train_cell(config: TrainConfig, compilation: Compilation, keep_model: bool) -> None:
    """Trains, or continues, one run; then drops what only a continuation needs.

    Args:
      config: the run's settings, `resume` on.
      compilation: how to compile.
      keep_model: whether the trained model stays.
    """
    compilation.apply()
    try:
        train.run(config, _inputs(config))
    except FloatingPointError as error:
        write_json(config.out / DIVERGED, {"reason": str(error)})
    tidy(RunFolder(config.out), keep_model)


def tidy(folder: RunFolder, keep_model: bool) -> None:
    """Removes a finished run's checkpoints, and its model if it is not to be kept."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    if not keep_model:
        shutil.rmtree(folder.model, ignore_errors=True)


def measure_costs(
    settings: dict[str, Any],
    variants: list[Variant],
    *,
    repeats: int,
    physical_batch_size: int,
    compilation: Compilation,
) -> dict[str, Any]:
    """Compiles whole steps of one model and task, and times them in turns; one physical batch each.

    Args:
      settings: fields of `TrainConfig` that say what is loaded, without the tie.
      variants: what to measure.
      repeats: timed rounds; 0 plans memory only.
      physical_batch_size: B.
      compilation: how to compile.

    Returns:
      Sizes, environment, and a row a variant: planned bytes of the step and the seconds of each round, which
      are None where the step needs too much memory to run beside others.
    """
    compilation.apply()
    rows: list[dict[str, Any]] = []
    calls: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    limit = _LARGEST_SHARE_RUN * compiled.device_memory()
    for tie in sorted({variant.tie for variant in variants}):
        inputs = load(TrainConfig(**settings, tie_embeddings=tie))
        sizes |= {
            "length": inputs.train_data.arrays["ids"].shape[1],
            f"{'tied' if tie else 'untied'}_parameters": sum(p.size for p in jax.tree.leaves(inputs.params)),
        }
        arrays = None
        for variant in (variant for variant in variants if variant.tie == tie):
            plan = _plan(settings, variant, inputs, physical_batch_size)
            state = step_state(plan, inputs)
            step = step_cost.compile_step(
                whole_gradient(plan.grad_fn), state, private=variant.engine != "nonprivate"
            )
            step_bytes = compiled.memory(step).total
            rows.append({**variant._asdict(), "step_bytes": step_bytes, "seconds": None})
            if repeats and step_bytes <= limit:
                arrays = arrays or step_cost.Arrays(jax.device_put(state))
                programs = step_cost.Programs(gradient=None, step=step)
                calls[variant.name] = functools.partial(arrays.step, programs)
    if calls:
        seconds = timing.interleaved_seconds(calls, repeats=repeats)
        rows = [{**row, "seconds": seconds.get(row["name"])} for row in rows]
    return {
        **sizes,
        "physical_batch_size": physical_batch_size,
        "settings": {name: str(value) for name, value in settings.items()},
        "environment": {**runs.environment(), "most_optimizations_left_out": compilation.is_quick},
        "rows": rows,
    }


def step_state(plan: Plan, inputs: Inputs) -> step_cost.State:
    """The arguments of a whole step: frozen leaves ride in the batch, so that they are not trained."""
    rows = plan.config.physical_batch_size
    batch = {name: jnp.asarray(leaf[:rows]) for name, leaf in inputs.train_data.arrays.items()}
    trained, frozen = partition(inputs.params, plan.trainable)
    trained = jax.tree.map(jnp.array, trained)
    key = key_from_seed(0, "noise")
    opt_state = step_cost.optimizer(rows, key).init(trained)
    return step_cost.State(trained, opt_state, (batch, frozen), jnp.zeros(rows, bool), key)


def whole_gradient(grad_fn: GradFn) -> step_cost.GradFn:
    """A gradient function of `step_state`'s arguments."""

    def gradient(trained: Any, batch_and_frozen: Any, is_padding: Any) -> Any:
        batch, frozen = batch_and_frozen
        return grad_fn(merge(trained, frozen), batch, is_padding)

    return gradient


def _plan(settings: dict[str, Any], variant: Variant, inputs: Inputs, physical_batch_size: int) -> Plan:
    """The plan of one step of a variant."""
    private: dict[str, Any] = {"regime": "nonprivate"}
    if variant.engine != "nonprivate":
        # Whatever the standard arms train with: its memory is what the paper's saving is against.
        engine = "materialized" if variant.engine == "standard" else variant.engine
        private = {"noise_multiplier": 1.0, "engine": engine, "tied_norm": variant.tied_norm}
    config = TrainConfig(
        **settings,
        **private,
        tie_embeddings=variant.tie,
        steps=1,
        batch_size=physical_batch_size,
        physical_batch_size=physical_batch_size,
    )
    return make_plan(config, inputs)


def fingerprints(settings: Mapping[str, Any], compilation: Compilation) -> dict[str, str]:
    """Returns the fingerprints of what runs would begin with, as their config.json has them.

    Args:
      settings: fields of `TrainConfig` that say what is loaded.
      compilation: as the runs'; an untrained model's values may depend on it.
    """
    compilation.apply()
    return load(TrainConfig(**settings)).fingerprints()


def _inputs(config: TrainConfig) -> Inputs:
    """What a run works on; runs of one process share it."""
    return _loaded(TrainConfig(**{name: getattr(config, name) for name in _LOADING}))


@functools.lru_cache(maxsize=4)
def _loaded(config: TrainConfig) -> Inputs:
    return load(config)


def variants_of(measured: tuple[Measured, ...]) -> list[Variant]:
    """The variants to measure: each engine tied and untied, and the tied norm by materializing.

    Args:
      measured: engines besides "nonprivate".
    """
    engines: tuple[MeasuredEngine, ...] = ("nonprivate", *measured)
    found = [
        Variant(f"{'tied' if tie else 'untied'} {engine}", tie, engine)
        for engine in engines
        for tie in (True, False)
    ]
    for engine in (engine for engine in measured if engine != "standard"):
        name = f"tied {engine}, materialized norm"
        found.append(Variant(name, True, engine, "materialize"))
    return found
