"""The main job on a generated task: does untying the head help, non-privately and privately?

    python experiments/quickstart.py

A tiny GPT-2 is pretrained on public text, then fine-tuned five times on private reviews: tied and untied
without privacy, tied and untied with exact ghost norms, and tied with the naive ghost norm at the same noise
multiplier. One table compares them. It needs no file and no hub, and takes up to three minutes on two cores.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import optax

from wtdp_jax import cli, embedded, report, train
from wtdp_jax.bag_of_words import bag_of_words_accuracy
from wtdp_jax.config import TrainConfig
from wtdp_jax.data import encode, encode_text, load_split
from wtdp_jax.inputs import Inputs
from wtdp_jax.losses import lm_loss
from wtdp_jax.models import GPT2, GPT2Config
from wtdp_jax.rules import TiedNorm

Params = Any
NOT_DP = "–"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Compares weight-tied and untied private fine-tuning on a generated task."""

    out: Path = Path("runs/quickstart")
    """Folder for the table, the figure and one run folder an arm; must not exist."""

    pretrain_steps: int = 800
    """Steps of non-private pretraining on public text, 64 lines each."""

    steps: int = 60
    """Steps of each private fine-tuning."""

    batch_size: int = 192
    """Expected examples a private step; a non-private run sees as many examples in smaller batches."""

    physical_batch_size: int = 64
    """Examples on the device at once."""

    epsilon: float = 4.0
    """Target epsilon of the private runs with exact norms, at delta n^-1.1."""

    seed: int = 0
    """Seed of everything: runs to look at. What is released takes its noise from the operating system."""

    measured_examples: int = 32
    """Private examples whose clipped contribution is measured after each private run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the table."""

    name: str
    tie: bool
    regime: Literal["dp", "nonprivate"]
    tied_norm: TiedNorm = "cross_term"


ARMS = (
    Arm(name="tied, non-private", tie=True, regime="nonprivate"),
    Arm(name="untied, non-private", tie=False, regime="nonprivate"),
    Arm(name="tied, DP, exact norms", tie=True, regime="dp"),
    Arm(name="untied, DP, exact norms", tie=False, regime="dp"),
    Arm(name="tied, DP, naive norms", tie=True, regime="dp", tied_norm="omit"),
)


def main(settings: Quickstart) -> None:
    """Pretrains, fine-tunes each arm, and writes the table and the figure."""
    started = time.perf_counter()
    settings.out.mkdir(parents=True)
    # Arms share most of their programs.
    jax.config.update("jax_compilation_cache_dir", str(settings.out / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    tokenizer = embedded.tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=64, n_layer=2, n_head=2, tie_embeddings=True
    )
    train_data, eval_data = (
        encode(load_split(embedded.TASK, split), embedded.TASK, tokenizer, max_length=config.n_positions)
        for split in ("train", "dev")
    )
    params = pretrain(GPT2(config), settings, tokenizer)
    print(f"pretrained on public text in {time.perf_counter() - started:.0f} s", flush=True)

    rows: list[dict[str, Any]] = []
    noise_multiplier = None
    for arm in ARMS:
        model = GPT2(dataclasses.replace(config, tie_embeddings=arm.tie))
        start = params if arm.tie else {**params, "lm_head": {"kernel": params["wte"]["embedding"].T}}
        inputs = Inputs(
            model=model, params=start, tokenizer=tokenizer, train_data=train_data, eval_data=eval_data
        )
        outcome = train.run(train_config(arm, settings, noise_multiplier), inputs)
        if outcome.plan.statement is not None:
            noise_multiplier = outcome.plan.statement.noise_multiplier  # the same for every private arm
        rows.append(row(arm, outcome, inputs, settings))
        print(f"{arm.name}: accuracy {outcome.results.accuracy:.1%}", flush=True)

    baseline = bag_of_words_accuracy(train_data, eval_data)
    text = table(rows, baseline)
    seconds = time.perf_counter() - started
    write(settings, rows, baseline, text, seconds)
    print(f"\n{text}\n{seconds:.0f} s in all; table, figure and run folders are in {settings.out}")


def pretrain(model: GPT2, settings: Quickstart, tokenizer: Any) -> Params:
    """Trains a new model on the public text, without privacy."""
    text = encode_text(embedded.public_text(), tokenizer, max_length=model.config.n_positions)
    params = jax.jit(model.init)(jax.random.key(settings.seed), text["ids"][:1])["params"]
    warmup = settings.pretrain_steps // 16
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup, settings.pretrain_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99))
    loss_fn = lm_loss(model)

    @jax.jit
    def step(params: Params, state: optax.OptState, batch: Mapping[str, Any]) -> tuple[Params, Any]:
        gradient = jax.grad(lambda params: jnp.mean(loss_fn(params, batch)))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    rng, state = np.random.default_rng(settings.seed), optimizer.init(params)
    for _ in range(settings.pretrain_steps):
        chosen = rng.integers(0, len(text["ids"]), 64)
        params, state = step(params, state, {name: leaf[chosen] for name, leaf in text.items()})
    return params


def train_config(arm: Arm, settings: Quickstart, noise_multiplier: float | None) -> TrainConfig:
    """The settings of one arm; the first private arm calibrates the noise, the others are given it."""
    base = TrainConfig(
        tie_embeddings=arm.tie,
        engine="bookkeeping",
        physical_batch_size=settings.physical_batch_size,
        seed=settings.seed,
        out=settings.out / arm.name.replace(",", "").replace(" ", "-"),
    )
    changes: dict[str, Any]
    if arm.regime == "nonprivate":
        steps = settings.steps * settings.batch_size // settings.physical_batch_size
        changes = {"batch_size": settings.physical_batch_size, "learning_rate": 1e-3}
    else:
        steps = settings.steps
        changes = {"batch_size": settings.batch_size, "learning_rate": 2e-3}
        changes |= (
            {"noise_multiplier": noise_multiplier} if noise_multiplier else {"epsilon": settings.epsilon}
        )
    changes |= {"steps": steps, "evaluate_every": steps, "checkpoint_every": steps}
    return dataclasses.replace(base, regime=arm.regime, tied_norm=arm.tied_norm, **changes)


def row(arm: Arm, outcome: train.Outcome, inputs: Inputs, settings: Quickstart) -> dict[str, Any]:
    """One row of the table, as plain values."""
    results = outcome.results
    return {
        "arm": arm.name,
        "accuracy": results.accuracy,
        "epsilon": results.epsilon,
        "epsilon_claimed": results.epsilon_claimed,
        "non_private_worst_clipped_norm_over_c": (
            worst_clipped_norm(outcome, inputs, settings) if arm.regime == "dp" else None
        ),
        "step_memory_bytes": step_memory(outcome, inputs, settings),
        "median_step_seconds": results.median_step_seconds,
    }


def worst_clipped_norm(outcome: train.Outcome, inputs: Inputs, settings: Quickstart) -> float:
    """The largest norm, over C, of what one private example really adds to a sum, after training."""
    batch = physical_batch(inputs, settings)
    worst = 0.0
    for example in range(min(settings.measured_examples, settings.physical_batch_size)):
        alone = np.arange(settings.physical_batch_size) != example
        arguments = (outcome.params, jax.tree.map(lambda _: None, outcome.params), batch, alone)
        step = outcome.plan.step
        gradient = step.accumulate(step.start(*arguments), *arguments).gradient
        squares = [np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(gradient)]
        worst = max(worst, float(np.sqrt(sum(squares))))
    return worst / outcome.plan.config.l2_clip_norm


def step_memory(outcome: train.Outcome, inputs: Inputs, settings: Quickstart) -> int:
    """Bytes that the compiled gradient step needs: arguments, results and temporaries."""
    batch = physical_batch(inputs, settings)
    no_padding = np.zeros(settings.physical_batch_size, bool)
    arguments = (outcome.params, jax.tree.map(lambda _: None, outcome.params), batch, no_padding)
    sums = jax.eval_shape(outcome.plan.step.start, *arguments)
    accumulate: Any = outcome.plan.step.accumulate
    used = accumulate.lower(sums, *arguments).compile().memory_analysis()
    sizes = (used.argument_size_in_bytes, used.output_size_in_bytes, used.temp_size_in_bytes)
    return sum(sizes) - used.alias_size_in_bytes


def physical_batch(inputs: Inputs, settings: Quickstart) -> dict[str, np.ndarray]:
    """The first private examples."""
    return {name: leaf[: settings.physical_batch_size] for name, leaf in inputs.train_data.arrays.items()}


def table(rows: Sequence[Mapping[str, Any]], baseline: float) -> str:
    """The rows as a markdown table."""

    def number(value: float | None, pattern: str) -> str:
        return NOT_DP if value is None else format(value, pattern)

    lines = [
        "| arm | accuracy | epsilon | claimed epsilon | worst clipped norm / C | step memory | step time |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = (
            r["arm"],
            f"{r['accuracy']:.1%}",
            number(r["epsilon"], ".2f"),
            number(r["epsilon_claimed"], ".2f"),
            number(r["non_private_worst_clipped_norm_over_c"], ".4f"),
            f"{r['step_memory_bytes'] / 2**20:.1f} MiB",
            f"{r['median_step_seconds'] * 1e3:.0f} ms",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"A bag of words reaches {baseline:.1%}, guessing 50.0%. One seed, 500 evaluation examples.",
        "The worst clipped norm is measured without noise and is not private. With naive norms it can reach",
        "sqrt(2), so the claimed epsilon is not one that the run has; epsilon allows for it.",
    ]
    return "\n".join(lines)


def write(
    settings: Quickstart, rows: Sequence[Mapping[str, Any]], baseline: float, text: str, seconds: float
) -> None:
    """Writes table.md, results.json and accuracy.png."""
    (settings.out / "table.md").write_text(text + "\n")
    record = {
        "settings": dataclasses.asdict(settings),
        "rows": list(rows),
        "bag_of_words_accuracy": baseline,
        "seconds": seconds,
        "versions": report.versions(),
        "device": report.device(),
    }
    (settings.out / "results.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    names = [r["arm"] for r in rows]
    bars = axes.barh(names, [100 * r["accuracy"] for r in rows], color="tab:blue")
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.axvline(100 * baseline, color="tab:orange", linestyle="--", label="bag of words")
    axes.axvline(50, color="gray", linestyle=":", label="guessing")
    axes.set(xlabel="accuracy on 500 reviews, %", xlim=(40, 106))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(settings.out / "accuracy.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    quickstart = cli.parse(Quickstart)
    with cli.one_line_errors(ValueError, OSError):
        main(quickstart)
