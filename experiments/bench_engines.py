"""Measures the engines against the non-private gradient of the same model: operations, memory, time.

Small sizes, within a minute on two CPU cores:

    python experiments/bench_engines.py --quick --out runs/bench-quick

DistilGPT2 on two CPU cores, about an hour, and what it would take at larger sizes, without running anything:

    python experiments/bench_engines.py --batch-sizes 8 16 --out runs/bench
    python experiments/bench_engines.py --compile-only --batch-sizes 8 16 32 --lengths 64 128 \
        --out runs/bench-plan

The largest batch that fits a device of 16 GB, for GPT-2 on whole sequences:

    python experiments/bench_engines.py --compile-only --presets gpt2 --losses lm --lengths 1024 \
        --batch-sizes 4 --memory-limit-gb 16 --out runs/bench-fit

Each engine's figures are also given as ratios to two baselines, the non-private gradient without and with the
model's remat policy, and to the materialized engine, which is standard per-example clipping. All that has one
size is timed together: every program once a round, in an order shuffled each round. `gradient` is the
(clipped) sum alone; `step` is one program of gradient, noise, division and adam, which writes parameters and
optimizer state over the old ones, and whose memory includes these; the baselines' step has no noise. FLOPs
are those of matrix products. The baseline without remat has whole logits. A variant that needs too much
memory is compiled and not run.

Dimension key: B examples, T tokens, V vocabulary.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np

from wtdp_jax import cli, compiled
from wtdp_jax.benchmark import figures, runs, step_cost, tables, timing
from wtdp_jax.benchmark.compilations import compilations_in_a_run
from wtdp_jax.benchmark.engine_cases import (
    Case,
    DType,
    Loss,
    Model,
    Remat,
    Setting,
    Variant,
    compile_case,
    initial_state,
    largest_batch,
)
from wtdp_jax.benchmark.step_cost import Arrays, Programs
from wtdp_jax.benchmark.tables import GB, Column, Row
from wtdp_jax.clipping import Engine
from wtdp_jax.models import GPT2Config
from wtdp_jax.rules import TiedNorm

_FIGURES = {
    "flops": Column("GFLOP", "flops", ".4g", 1e9),
    "temp_bytes": Column("gradient temp (GB)", "temp_bytes", ".4g", GB),
    "step_bytes": Column("step memory (GB)", "step_bytes", ".4g", GB),
    "peak_device_bytes": Column("peak on device (GB)", "peak_device_bytes", ".4g", GB),
    "gradient_seconds": Column("gradient (s)", "gradient_seconds", ".4g"),
    "step_seconds": Column("step (s)", "step_seconds", ".4g"),
    "examples_per_second": Column("examples/s", "examples_per_second", ".4g"),
    "tokens_per_second": Column("tokens/s", "tokens_per_second", ".4g"),
    "max_batch_size": Column("largest B", "max_batch_size"),
}
_PARTS = (Column("noise (s)", "noise_seconds", ".4g"), Column("adam (s)", "optimizer_seconds", ".4g"))
_REFERENCES = {
    "plain": "the non-private gradient without remat",
    "remat": "the non-private gradient with remat, the row's policy if it has one",
    "materialized": "the materialized engine with the same remat",
}
_COLORS = {
    "non-private": "0.3",
    "materialized": "C3",
    "microbatched": "C1",
    "ghost": "C0",
    "bookkeeping": "C2",
    "auto": "C4",
}
_REMATS = {False: "", True: ", remat", "full": ", full remat"}
_STYLES = {False: "-", True: "--", "full": ":"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Measures the engines against the non-private gradient of the same model."""

    out: Path = Path("runs/bench_engines")
    """Folder for results.json, table.md and the figures; must not exist."""

    engines: tuple[Engine, ...] = ("materialized", "microbatched", "ghost", "bookkeeping")
    """Engines to measure, besides the non-private baselines."""

    models: tuple[Model, ...] = get_args(Model)
    """Whether the output head is the embedding itself, or a matrix of its own."""

    presets: tuple[str, ...] = ("distilgpt2",)
    """Model sizes: tiny, distilgpt2, gpt2, gpt2-medium, gpt2-large or gpt2-xl."""

    losses: tuple[Loss, ...] = ("next_token",)
    """Losses: at one position an example, or on the whole sequence."""

    dtypes: tuple[DType, ...] = ("float32",)
    """Types that layers compute in; parameters are float32."""

    batch_sizes: tuple[int, ...] = (8,)
    """Examples a physical batch, B."""

    lengths: tuple[int, ...] = (64,)
    """Tokens an example, T."""

    remat: tuple[Remat, ...] = (False, True)
    """What an engine's backward pass computes again: nothing, what is cheap, or "full", the dense layers too.
    There are always baselines with False and True."""

    tied_norms: tuple[TiedNorm, ...] = ("cross_term",)
    """Ways to the tied matrix's norm, in the ghost and bookkeeping engines."""

    microbatch_size: int = 1
    """Examples at a time in the microbatched engine."""

    repeats: int = 7
    """Timed rounds; the figures are medians over them."""

    compile_only: bool = False
    """Whether to give operations and planned memory only: nothing is allocated or run."""

    memory_limit_gb: float | None = None
    """Memory in GB (10^9 bytes) for which the largest B that fits is found; None: it is not looked for."""

    run_limit_gb: float | None = None
    """A variant whose step needs more GB is not run; None: three quarters of the device's memory."""

    cpu_fusions: runs.CpuFusions = "dots"
    """What XLA hands to its CPU library: "dots", each by itself, or "all", its default, with which sums of
    weighted per-example gradients are an order of magnitude slower, and memory is planned too low."""

    seed: int = 0
    """Seed of parameters, batch and order."""

    quick: bool = False
    """Whether to replace sizes and variants by a few small ones."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value == () and name != "engines":
                raise ValueError(f"{name} must name at least one, got none")
        limit = min(GPT2Config.preset(preset).n_positions for preset in self.presets)
        for length in self.lengths:
            if not 2 <= length <= limit:
                raise ValueError(f"lengths must be in [2, {limit}], got {length}")
        for name in ("batch_sizes", "microbatch_size", "repeats"):
            if np.min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {np.min(getattr(self, name))}")
        for name in ("memory_limit_gb", "run_limit_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def effective(self) -> "BenchConfig":
        """The settings with what `quick` replaces."""
        if not self.quick:
            return self
        return dataclasses.replace(
            self,
            engines=("ghost",),
            models=("tied",),
            presets=("tiny",),
            batch_sizes=(2, 8),
            lengths=(16,),
            remat=(False,),
        )


def main(config: BenchConfig) -> None:
    """Measures, and writes results.json, table.md and the figures."""
    runs.new_folder(config.out)
    config = config.effective()
    compilations = compilations_in_a_run()
    compilations_line = (
        f"compilations in a run of {compilations['steps']} Poisson steps: "
        f"accumulate {compilations['accumulate']}, update {compilations['update']} (expected 1 each)"
    )
    print(compilations_line, flush=True)
    rows: list[Row] = []
    table = ""
    for setting in settings(config):
        rows += measure(config, setting)
        table = f"{markdown(rows)}\n\n{compilations_line}"
        # After each setting: what is measured stays, whatever befalls a larger one.
        record = {
            **runs.environment(),
            "settings": dataclasses.asdict(config) | {"out": str(config.out)},
            "compilations": compilations,
            "rows": rows,
        }
        runs.write_results(config.out, record, table)
    draw(config, rows, "batch_size", "examples a batch, B")
    draw(config, rows, "length", "tokens an example, T")
    print(f"\n{table}\neverything is in {config.out}")


def settings(config: BenchConfig) -> list[Setting]:
    """All sizes, the smaller ones first."""
    sizes = itertools.product(
        config.presets, config.losses, config.dtypes, sorted(config.batch_sizes), sorted(config.lengths)
    )
    return list(dict.fromkeys(Setting(*size) for size in sizes))


def cases(config: BenchConfig, setting: Setting) -> list[Case]:
    """The baselines and the engines' variants at one size."""
    found = []
    for model in config.models:
        remats = dict.fromkeys((False, True, *config.remat))
        found += [Case(setting, model, "non-private", None, remat) for remat in remats]
        for engine, norm, remat in itertools.product(config.engines, config.tied_norms, config.remat):
            has_tied_norm = model == "tied" and engine in ("ghost", "bookkeeping")
            size = config.microbatch_size if engine == "microbatched" else 1
            found.append(Case(setting, model, engine, norm if has_tied_norm else None, remat, size))
    return list(dict.fromkeys(found))


def measure(config: BenchConfig, setting: Setting) -> list[Row]:
    """The rows of one setting."""
    rows, programs = [], {}
    for number, case in enumerate(cases(config, setting)):
        row: Row = {**setting._asdict(), **case._asdict(), "note": None}
        del row["setting"]
        programs[number] = compile_case(case)
        row |= step_cost.planned(programs[number])
        if config.memory_limit_gb is not None:
            smallest = setting._replace(batch_size=min(config.batch_sizes))
            row["max_batch_size"] = largest_batch(
                case._replace(setting=smallest), config.memory_limit_gb * GB
            )
        rows.append(row)
        print(_progress(row), flush=True)
    if not config.compile_only:
        time_programs(config, setting, rows, programs)
    for row in rows:
        row["over"] = {
            name: tables.ratios(row, _reference(rows, row, name), list(_FIGURES)) for name in _REFERENCES
        }
    return rows


def time_programs(
    config: BenchConfig, setting: Setting, rows: list[Row], programs: dict[int, Programs]
) -> None:
    """Adds times and peaks to the rows of one setting, by their number."""
    arrays = {
        model: Arrays(jax.jit(lambda model=model: initial_state(setting, model, config.seed))())
        for model in config.models
    }
    limit = config.run_limit_gb * GB if config.run_limit_gb else 0.75 * compiled.device_memory()
    calls: dict[Any, Callable[[], Any]] = {}
    for model, kept in arrays.items():
        calls[model, "noise"], calls[model, "optimizer"] = kept.noise, kept.optimizer
    # Those that need least come first: a device's peak shows the largest so far alone.
    for number, program in sorted(programs.items(), key=lambda item: rows[item[0]]["step_bytes"]):
        row, kept = rows[number], arrays[rows[number]["model"]]
        if row["step_bytes"] > limit:
            row["note"] = f"not run: needs {row['step_bytes'] / GB:.1f} GB, more than {limit / GB:.1f}"
            continue
        calls[number, "gradient"] = functools.partial(kept.gradient, program)
        calls[number, "step"] = functools.partial(kept.step, program)
        row["peak_device_bytes"] = step_cost.device_peak(calls[number, "step"])
    seconds = timing.interleaved_seconds(calls, repeats=config.repeats, seed=config.seed)
    medians = timing.medians(seconds)
    for number, row in enumerate(rows):
        if (number, "step") in medians:
            row |= _times(setting, {part: medians[number, part] for part in ("gradient", "step")})
            row["optimizer_seconds"] = medians[row["model"], "optimizer"]
            row["noise_seconds"] = medians[row["model"], "noise"] if row["engine"] != "non-private" else None
            row["all_seconds"] = {part: seconds[number, part] for part in ("gradient", "step")}


def _times(setting: Setting, seconds: dict[str, float]) -> Row:
    examples = setting.batch_size / seconds["step"]
    return {
        "gradient_seconds": seconds["gradient"],
        "step_seconds": seconds["step"],
        "examples_per_second": examples,
        "tokens_per_second": examples * setting.length,
    }


def _reference(rows: list[Row], row: Row, name: str) -> Row | None:
    """The row of the same size and model that a row is compared with."""
    engine = "materialized" if name == "materialized" else "non-private"
    remat = {"plain": False, "remat": row["remat"] or True, "materialized": row["remat"]}[name]
    same = (row["model"], engine, remat)
    return next((r for r in rows if (r["model"], r["engine"], r["remat"]) == same), None)


def _progress(row: Row) -> str:
    what = f"{row['model']} {row['engine']}{_REMATS[row['remat']]}"
    size = f"{row['preset']} {row['loss']} {row['dtype']} B {row['batch_size']} T {row['length']}"
    return f"{size}: {what} " + (row["note"] or f"compiled, step {row['step_bytes'] / GB:.4g} GB")


def markdown(rows: list[Row]) -> str:
    """All figures, and their ratios to each reference, in markdown."""
    headings = {"batch_size": "B", "length": "T", "tied_norm": "tied norm"}
    names = (*Setting._fields, "model", "engine", "tied_norm", "remat")
    labels = [Column(headings.get(name, name), name) for name in names]
    same = [c for c in labels if c.name in Setting._fields and len({row[c.name] for row in rows}) == 1]
    labels = [column for column in labels if column not in same]
    parts = [
        ", ".join(f"{column.heading} {rows[0][column.name]}" for column in same),
        tables.markdown_table((*labels, *_FIGURES.values(), *_PARTS, Column("note", "note")), rows),
    ]
    # Ratios of rates are those of the step's time turned over.
    compared = [c for c in _FIGURES.values() if not c.name.endswith("_per_second")]
    over_columns = [Column(c.heading.partition(" (")[0], c.name, ".3f") for c in compared]
    for name, text in _REFERENCES.items():
        if over := [{**row, **row["over"][name]} for row in rows if any(row["over"][name].values())]:
            parts += [f"Over {text}:", tables.markdown_table((*labels, *over_columns), over)]
    return "\n\n".join(part for part in parts if part)


def draw(config: BenchConfig, rows: list[Row], axis: Literal["batch_size", "length"], label: str) -> None:
    """Draws time and memory of a step against one size, at the smallest of the other, if there are two."""
    first = settings(config)[0]
    fixed = {name: value for name, value in first._asdict().items() if name != axis}
    shown = [row for row in rows if all(row[name] == value for name, value in fixed.items())]
    if len({row[axis] for row in shown}) < 2:
        return
    panels = []
    quantities = {"step (s)": ("step_seconds", 1.0), "step memory (GB)": ("step_bytes", GB)}
    for (ylabel, (name, unit)), model in itertools.product(quantities.items(), config.models):
        lines: dict[Any, list[tuple[float, float]]] = {}
        for row in shown:
            if row["model"] == model and row.get(name) is not None:
                points = lines.setdefault((row["engine"], row["tied_norm"], row["remat"]), [])
                points.append((row[axis], row[name] / unit))
        drawn = [
            figures.Line(_label(*variant), points, _COLORS[variant[0]], _STYLES[variant[2]])
            for variant, points in lines.items()
        ]
        panels.append(figures.Panel(model, ylabel, drawn))
    name = "by_batch_size.png" if axis == "batch_size" else "by_length.png"
    figures.draw(config.out / name, panels, xlabel=label, columns=len(config.models))


def _label(engine: Variant, tied_norm: TiedNorm | None, remat: Remat) -> str:
    norm = "" if tied_norm in (None, "cross_term") else f", {tied_norm}"
    return f"{engine}{norm}{_REMATS[remat]}"


if __name__ == "__main__":
    settings_given = cli.parse(BenchConfig)
    runs.use_cpu_fusions(settings_given.cpu_fusions)
    with cli.one_line_errors(ValueError, OSError):
        main(settings_given)
