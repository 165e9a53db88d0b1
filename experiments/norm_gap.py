"""What the naive norm does to a tied model in training: the cross-term left out, beside the exact norm.

On the generated task, in a minute:

    python experiments/norm_gap.py --out runs/norm_gap

On SST-2 with the small model of pretrain.py:

    python experiments/norm_gap.py --task sst2 --data-dir ../shared/data --model runs/pretrain/model \
        --steps 60 --batch-size 512 --max-length 48 --out runs/norm_gap-sst2

A run is trained with the naive norm (or, to compare, with the exact one). Before it, every so many steps, and
at its end the same training examples are measured: naive over exact norm; how many clipped gradients exceed
C, and by how much; how the clipped sum's direction and length differ from the exact one's. The epsilon that
the noise would buy by the naive account stands beside the honest one, for a sensitivity of sqrt(2) C.
Measured without noise, so none of it is private, and the run is not for release.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from wtdp_jax import cli
from wtdp_jax.config import TrainConfig

_FIGURE = "norm_gap.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormGapConfig:
    """Measures what the naive norm does to a tied model in training."""

    out: Path = Path("runs/norm_gap")
    """Folder for results.json, table.md and the figure; must not exist."""

    task: str = "reviews"
    """Task, as for finetune.py."""

    data_dir: Path | None = None
    """Folder with the tasks' files; None: generated, or from the hub."""

    model: str | None = None
    """Tied model in Hugging Face form; None: a small untrained one (reviews)."""

    loss: Literal["next_token", "label_words", "lm"] = "next_token"
    """Training loss."""

    trained_by: Literal["omit", "cross_term"] = "omit"
    """Norm that the run itself is clipped by: naive or exact."""

    epsilon: float = 8.0
    """Epsilon that the noise is calibrated to for the exact norm."""

    l2_clip_norm: float = 1.0
    """Clipping threshold C."""

    learning_rate: float = 1e-3
    """Learning rate of adam."""

    steps: int = 20
    """Private steps."""

    batch_size: int = 256
    """Expected examples a step."""

    physical_batch_size: int = 32
    """Examples on the device at once."""

    max_length: int | None = None
    """Longest sequence in tokens."""

    length_multiple: int | None = None
    """Tokens to whose multiples physical batches are cut, as for finetune.py."""

    every: int = 5
    """Steps between measurements."""

    measured_examples: int = 256
    """Training examples that are measured, the first ones."""

    seed: int = 0
    """Seed of noise and sampling."""

    def __post_init__(self) -> None:
        for name in ("every", "measured_examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for noise_multiplier in (None, 1.0):
            self.train_config(noise_multiplier)

    def train_config(self, noise_multiplier: float | None) -> TrainConfig:
        """The settings of the run; without a noise multiplier, those that calibrate it for the exact norm."""
        noise: dict[str, Any] = {"noise_multiplier": noise_multiplier, "tied_norm": self.trained_by}
        if noise_multiplier is None:
            noise = {"epsilon": self.epsilon}
        names = {field.name for field in dataclasses.fields(TrainConfig)} - {"epsilon", "out"}
        shared = {name: value for name, value in vars(self).items() if name in names}
        return TrainConfig(**shared, **noise, tie_embeddings=True, engine="ghost")


def main(config: NormGapConfig) -> None:
    """Trains and measures, and writes results.json, table.md and the figure."""
    from wtdp_jax.benchmark import runs

    runs.use_cpu_fusions("dots")
    with cli.one_line_errors(ValueError, OSError, FloatingPointError):
        rows, privacy = measure(config)
        runs.new_folder(config.out)
    settings = {name: str(value) for name, value in vars(config).items()}
    record = {**runs.environment(), "settings": settings, "privacy": privacy, "rows": rows}
    runs.write_results(config.out, record, f"{table(rows)}\n\n{caption(record)}")
    plot(config.out / _FIGURE, rows, privacy)
    print(
        f"claimed epsilon {privacy['epsilon_claimed']:.4g}, honest epsilon of the naive norm "
        f"{privacy['epsilon']:.4g}; table.md, results.json and {_FIGURE} are in {config.out}"
    )


def measure(config: NormGapConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Trains, and returns the figures by step, and the naive norm's claimed and honest epsilon."""
    from wtdp_jax import losses
    from wtdp_jax.inputs import load
    from wtdp_jax.plan import make_plan
    from wtdp_jax.study.norm_gap import NormGap, train_and_measure

    if config.out.exists():
        raise ValueError(f"out must not exist, got {config.out}")
    inputs = load(config.train_config(None))
    exact = make_plan(config.train_config(None), inputs)
    assert exact.statement is not None
    plan = make_plan(config.train_config(exact.statement.noise_multiplier), inputs)
    naive = make_plan(
        dataclasses.replace(config, trained_by="omit").train_config(exact.statement.noise_multiplier), inputs
    )
    assert naive.statement is not None
    loss_fn = {
        "next_token": lambda: losses.next_token_loss(inputs.model),
        "label_words": lambda: losses.label_word_loss(inputs.model, inputs.train_data.label_ids.tolist()),
        "lm": lambda: losses.lm_loss(inputs.model),
    }[config.loss]()
    gap = NormGap(
        loss_fn,
        {name: leaf[: config.measured_examples] for name, leaf in inputs.train_data.arrays.items()},
        l2_clip_norm=config.l2_clip_norm,
        batch_size=config.physical_batch_size,
    )
    rows = []
    for row in train_and_measure(plan, inputs, gap, every=config.every):
        rows.append(row)
        middle = row["non_private_ratio_quantiles"]["0.5"]
        print(
            f"step {row['step']}: naive over exact norm {middle:.4f} (median), "
            f"{row['non_private_share_over_c']:.1%} exceed C, the largest by a factor of "
            f"{row['non_private_largest_over_c']:.4f}",
            flush=True,
        )
    return rows, naive.statement.to_json()


def table(rows: list[dict[str, Any]]) -> str:
    """The figures by step as a markdown table; all but the accuracy are non-private."""
    from wtdp_jax.benchmark.tables import Column, markdown_table

    columns = (
        Column("step", "step"),
        Column("accuracy, %", "eval_accuracy", ".1f", 1e-2),
        Column("naive / exact norm: least", "least", ".4f"),
        Column("median", "median", ".4f"),
        Column("largest", "largest", ".4f"),
        Column("clipped, %", "non_private_clipped_share", ".1f", 1e-2),
        Column("beyond C, %", "non_private_share_over_c", ".1f", 1e-2),
        Column("farthest, over C", "non_private_largest_over_c", ".4f"),
        Column("cosine of the sums", "non_private_cosine", ".6f"),
        Column("length, naive / exact", "non_private_length_ratio", ".4f"),
    )

    def named(row: dict[str, Any]) -> dict[str, Any]:
        quantiles = row["non_private_ratio_quantiles"]
        return row | {"least": quantiles["0.0"], "median": quantiles["0.5"], "largest": quantiles["1.0"]}

    return markdown_table(columns, [named(row) for row in rows])


def caption(record: dict[str, Any]) -> str:
    """What must be known of a table to read it: how short the run was, and its epsilons."""
    from wtdp_jax.study.evidence import DEMONSTRATION_BELOW

    settings, privacy = record["settings"], record["privacy"]
    gradients = int(settings["steps"]) * int(settings["batch_size"])
    demonstration = " (a demonstration)" if gradients < DEMONSTRATION_BELOW else ""
    return (
        f"Loss `{settings['loss']}`, {gradients:,} example gradients{demonstration}, "
        f"C {settings['l2_clip_norm']}, claimed epsilon {privacy['epsilon_claimed']:.3g}, honest epsilon "
        f"{privacy['epsilon']:.3g}. All but the accuracy is non-private."
    )


def plot(path: Path, rows: list[dict[str, Any]], privacy: dict[str, Any]) -> None:
    """Draws the figures by step."""
    from wtdp_jax.study.plots import Figure

    steps = [row["step"] for row in rows]
    figure = Figure(3)
    axes = figure.panel(0, xlabel="step", ylabel="naive norm / exact norm", title="norms (non-private)")
    medians = [row["non_private_ratio_quantiles"]["0.5"] for row in rows]
    for low, high in (("0.0", "1.0"), ("0.05", "0.95"), ("0.25", "0.75")):
        ends = [[row["non_private_ratio_quantiles"][end] for row in rows] for end in (low, high)]
        axes.fill_between(steps, *ends, alpha=0.25, color="C0", label=f"quantiles {low} to {high}")
    axes.plot(steps, medians, color="C0", marker=".", label="median")
    axes.axhline(1.0, color="0.5", linestyle=":")
    axes.legend(fontsize="small")
    title = f"claimed epsilon {privacy['epsilon_claimed']:.3g}, honest {privacy['epsilon']:.3g}"
    axes = figure.panel(1, xlabel="step", ylabel="clipped gradient's norm / C", title=title)
    axes.plot(steps, [row["non_private_largest_over_c"] for row in rows], marker=".", label="largest")
    axes.axhline(2**0.5, color="0.5", linestyle=":", label="bound, sqrt(2)")
    beside = axes.twinx()
    beside.plot(steps, [100 * row["non_private_share_over_c"] for row in rows], color="C1", marker=".")
    beside.set_ylabel("examples that exceed C, %", color="C1")
    axes.legend(fontsize="small")
    axes = figure.panel(2, xlabel="step", title="naive against exact clipped sum")
    axes.plot(steps, [row["non_private_cosine"] for row in rows], marker=".", label="cosine")
    axes.plot(steps, [row["non_private_length_ratio"] for row in rows], marker=".", label="length ratio")
    axes.legend(fontsize="small")
    figure.write(path)


if __name__ == "__main__":
    main(cli.parse(NormGapConfig))
