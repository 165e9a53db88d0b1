"""Measures two engines beside jax-privacy and Opacus, each against its own framework's non-private step.

It needs the extra `bench`; on Linux torch's newest wheels bring gigabytes of CUDA, so for a CPU install a
build for it first. A library that isn't there is said to be missing, and the others are measured:

    pip install torch==2.13.0 && pip install -e ".[bench]"
    python experiments/bench_peers.py --out runs/peers
    python experiments/bench_peers.py --quick --out runs/peers-quick

All do the same work, as people do it there: from the same weights, the clipped sum of gradients of the same
batch's next-token loss at one position an example, and that with noise and SGD. A loss that differs by more
than rounding is an error. Ours and jax-privacy run on this package's Flax model, each as one compiled
program; Opacus runs on that of transformers. All are timed together: each once a round, in an order shuffled
each round.

On the tied model a norm that misses the cross-term lets a sum exceed the clip norm C, or fall short of it. So
each also clips one example by itself, whose tokens are all its target, and the norm of what comes out is
given over C: 1 to rounding where the norm is right. Beside them stands what this package's naive norm gives,
above 1 or below it by the cross-term's sign.

Dimension key: B examples, T tokens, V vocabulary.
"""

import dataclasses
import importlib
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import optax

from wtdp_jax import cli, clipped_grad
from wtdp_jax.benchmark import runs, tables, timing
from wtdp_jax.benchmark.contenders import (
    JAX_CONTENDERS,
    LEARNING_RATE,
    Contender,
    Model,
    Task,
    jax_contender,
)
from wtdp_jax.benchmark.tables import Column, Row
from wtdp_jax.losses import next_token_loss
from wtdp_jax.models import GPT2Config, save_pretrained

Library = Literal["jax-privacy", "opacus"]
_LEAVES = ("ids", "positions", "targets")
_MODULES: Mapping[Library, str] = {"jax-privacy": "jax_privacy", "opacus": "opacus"}

# The baseline, then what is measured against it, and which library it is of; as JAX_CONTENDERS.
_TORCH = {"non-private": "torch", "hooks": "opacus", "ghost": "opacus"}

_COLUMNS = (
    Column("model", "model"),
    Column("library", "library"),
    Column("variant", "variant"),
    Column("gradient (s)", "gradient_seconds", ".4g"),
    Column("gradient / non-private", "gradient_over", ".3f"),
    Column("step (s)", "step_seconds", ".4g"),
    Column("step / non-private", "step_over", ".3f"),
    Column("clipped norm / C", "clipped_norm_over_c", ".6f"),
    Column("note", "note"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeersConfig:
    """Measures two engines beside other libraries, each against its own framework's non-private step."""

    out: Path = Path("runs/bench_peers")
    """Folder for results.json and table.md; must not exist."""

    peers: tuple[Library, ...] = get_args(Library)
    """Libraries to measure beside this one; those that are not installed are left out."""

    models: tuple[Model, ...] = get_args(Model)
    """Whether the output head is the embedding itself, or a matrix of its own."""

    variants: tuple[str, ...] = tuple(dict.fromkeys([*JAX_CONTENDERS, *_TORCH]))
    """What to measure, by the names that the table shows; the non-private baselines always are."""

    preset: str = "distilgpt2"
    """Model size: tiny, distilgpt2, gpt2, gpt2-medium, gpt2-large or gpt2-xl."""

    batch_size: int = 8
    """Examples a batch, B."""

    length: int = 64
    """Tokens an example, T."""

    l2_clip_norm: float = 1.0
    """C, in units of the gradient of one example's loss; well below its norm, so that clipping is seen."""

    repeats: int = 7
    """Timed rounds; the figures are medians over them."""

    cpu_fusions: runs.CpuFusions = "dots"
    """What XLA hands to its CPU library: "dots", each by itself, or "all", its default, with which sums of
    weighted per-example gradients are an order of magnitude slower, and memory is planned too low."""

    seed: int = 0
    """Seed of weights, batch and order."""

    quick: bool = False
    """Whether to replace the sizes by tiny ones."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models must name at least one, got none")
        known = {*JAX_CONTENDERS, *_TORCH}
        if not set(self.variants) <= known:
            raise ValueError(
                f"variants must be among {', '.join(sorted(known))}, got {', '.join(self.variants)}"
            )
        limit = GPT2Config.preset(self.preset).n_positions
        if not 2 <= self.length <= limit:
            raise ValueError(f"length must be in [2, {limit}], got {self.length}")
        for name in ("batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.l2_clip_norm < math.inf:
            raise ValueError(f"l2_clip_norm must be positive and finite, got {self.l2_clip_norm}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def effective(self) -> "PeersConfig":
        """The settings with what `quick` replaces."""
        return dataclasses.replace(self, preset="tiny", batch_size=4, length=16) if self.quick else self


def main(config: PeersConfig) -> None:
    """Measures, and writes results.json and table.md."""
    runs.new_folder(config.out)
    config = config.effective()
    versions = installed(config.peers)
    rows: list[Row] = []
    for model in config.models:
        rows += measure(config, model, versions)
    table = tables.markdown_table(_COLUMNS, rows)
    record = {
        **runs.environment(**versions),
        "settings": dataclasses.asdict(config) | {"out": str(config.out)},
        "rows": rows,
    }
    runs.write_results(config.out, record, table)
    print(f"\n{table}\n\neverything is in {config.out}")


def installed(peers: tuple[Library, ...]) -> dict[str, str]:
    """The versions of the libraries that can be imported; the others are said to be missing."""
    versions: dict[str, str] = {}
    for peer in peers:
        try:
            versions[peer] = importlib.import_module(_MODULES[peer]).__version__
            if peer == "opacus":
                versions["torch"] = importlib.import_module("torch").__version__
        except ImportError as error:
            print(f'{peer} is left out: {error}; pip install -e ".[bench]" brings it', flush=True)
    return versions


def measure(config: PeersConfig, model: Model, versions: Mapping[str, str]) -> list[Row]:
    """The rows of one model."""
    task = Task(
        model,
        preset=config.preset,
        batch_size=config.batch_size,
        length=config.length,
        l2_clip_norm=config.l2_clip_norm,
        seed=config.seed,
    )
    rows: list[Row] = []
    calls: dict[Any, Callable[[], Any]] = {}
    builders = {("jax", name): (library, jax_contender) for name, library in JAX_CONTENDERS.items()}
    if "opacus" in versions:
        builders |= {("torch", name): (library, torch_contender) for name, library in _TORCH.items()}
    for (framework, name), (library, build) in builders.items():
        if library == "jax-privacy" and library not in versions:
            continue
        if name not in ("non-private", *config.variants):
            continue
        row: Row = {"model": model, "library": library, "variant": name, "framework": framework, "note": None}
        rows.append(row)
        try:
            contender = build(task, name)
            row |= try_out(contender, task)
        except Exception as error:  # whatever a library raises is its answer
            row["note"] = f"refused: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            calls[len(rows) - 1, "gradient"] = contender.gradient
            calls[len(rows) - 1, "step"] = contender.step
        print(f"{model} {library} {name}: {row['note'] or 'runs'}", flush=True)
    check_losses(rows)
    seconds = timing.interleaved_seconds(calls, repeats=config.repeats, seed=config.seed)
    for (number, part), median in timing.medians(seconds).items():
        rows[number][f"{part}_seconds"] = median
        rows[number].setdefault("all_seconds", {})[part] = seconds[number, part]
    for row in rows:
        base = next(r for r in rows if (r["framework"], r["variant"]) == (row["framework"], "non-private"))
        over = tables.ratios(row, base, ("gradient_seconds", "step_seconds"))
        row |= {"gradient_over": over["gradient_seconds"], "step_over": over["step_seconds"]}
    if model == "tied":
        rows.append(naive(task))
    return rows


def try_out(contender: Contender, task: Task) -> Row:
    """Loss and clipped norm before any step, then each function once."""
    row = {"loss": contender.loss(), "clipped_norm_over_c": None}
    if contender.clipped_norm is not None:
        row["clipped_norm_over_c"] = contender.clipped_norm() / task.l2_clip_norm
    jax.block_until_ready((contender.gradient(), contender.step()))
    return row


def check_losses(rows: list[Row]) -> None:
    """Refuses to compare what does not compute the same.

    Raises:
        ValueError: if two losses differ by more than rounding.
    """
    losses = [row["loss"] for row in rows if "loss" in row]
    if max(losses) - min(losses) > 1e-3 * max(losses):
        raise ValueError(f"the losses must agree within 1e-3, got {min(losses)} to {max(losses)}")


def naive(task: Task) -> Row:
    """What comes out where the norm misses the cross-term, for comparison."""
    grad_fn = clipped_grad(
        next_token_loss(task.model),
        engine="ghost",
        tied_norm="omit",
        l2_clip_norm=task.l2_clip_norm,
    )
    norm = float(optax.tree.norm(jax.jit(grad_fn)(task.params, task.one)[0]))
    return {
        "model": "tied",
        "library": "wtdp-jax",
        "variant": 'tied_norm="omit"',
        "framework": "jax",
        "clipped_norm_over_c": norm / task.l2_clip_norm,
        "note": "naive, for comparison",
    }


def torch_contender(task: Task, name: str) -> Contender:
    """A step in torch; "hooks" and "ghost" are Opacus' modes."""
    import torch
    from opacus import PrivacyEngine

    torch.set_num_threads(runs.cores())
    warnings.filterwarnings("ignore", message="Full backward hook is firing|Secure RNG turned off")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = torch_model(task).to(device).train()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    criterion: Any = torch.nn.CrossEntropyLoss()
    batch, one = (
        [torch.as_tensor(rows[name], dtype=torch.long, device=device) for name in _LEAVES]
        for rows in (task.batch, task.one)
    )
    if name != "non-private":
        data = torch.utils.data.TensorDataset(*batch)
        private = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=torch.utils.data.DataLoader(data, batch_size=len(task.batch["ids"])),
            noise_multiplier=1.0,
            max_grad_norm=task.l2_clip_norm,
            poisson_sampling=False,  # the batch is given
            grad_sample_mode=name,
        )
        model, optimizer = private[:2]
        criterion = private[2] if name == "ghost" else criterion

    def backward(rows: list[Any]) -> None:
        optimizer.zero_grad()
        ids, positions, targets = rows
        criterion(model(ids, positions), targets).backward()

    def clipped_sum(rows: list[Any]) -> None:
        backward(rows)
        if name == "hooks":  # in ghost mode the second backward pass has done it
            optimizer.clip_and_accumulate()

    def gradient() -> None:
        clipped_sum(batch)
        finish()

    def step() -> None:
        backward(batch)
        optimizer.step()
        finish()

    def finish() -> None:
        optimizer.zero_grad(set_to_none=True)  # frees per-example gradients, which others need room for
        if device.type == "cuda":
            torch.cuda.synchronize()

    def clipped_norm() -> float:
        clipped_sum(one)
        gradients = [p.summed_grad if name == "hooks" else p.grad for p in model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        finish()
        return float(norm)

    def loss() -> float:
        with torch.no_grad():
            ids, positions, targets = batch
            return float(torch.nn.functional.cross_entropy(model(ids, positions), targets))

    return Contender(loss, gradient, step, None if name == "non-private" else clipped_norm)


def torch_model(task: Task) -> Any:
    """GPT-2 of transformers with the task's weights, in the form that Opacus takes."""
    import torch
    from transformers import GPT2LMHeadModel, utils
    from transformers.pytorch_utils import Conv1D

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(Path(folder), task.model, task.params)
        utils.logging.disable_progress_bar()
        no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        gpt2 = GPT2LMHeadModel.from_pretrained(folder, **no_dropout)
    # Opacus knows no rule for transformers' Conv1D, which is a Linear whose weight is transposed. Without one
    # it would take the layer through functorch, and ghost mode would build per-example gradients.
    for parent in list(gpt2.modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                linear = torch.nn.Linear(child.nx, child.nf)
                linear.weight.data, linear.bias.data = child.weight.data.T.contiguous(), child.bias.data
                setattr(parent, child_name, linear)

    class NextToken(torch.nn.Module):
        """Logits (B, V) at one position an example."""

        def __init__(self) -> None:
            super().__init__()
            self.gpt2 = gpt2

        def forward(self, ids: Any, positions: Any) -> Any:
            rows, length = ids.shape
            # Without ids of their own the examples share a batch of one, which Opacus takes for one example.
            position_ids = torch.arange(length, device=ids.device).repeat(rows, 1)
            hidden = self.gpt2.transformer(ids, position_ids=position_ids, use_cache=False).last_hidden_state
            return self.gpt2.lm_head(hidden[torch.arange(rows, device=ids.device), positions])

    return NextToken()


if __name__ == "__main__":
    given = cli.parse(PeersConfig)
    runs.use_cpu_fusions(given.cpu_fusions)
    with cli.one_line_errors(ValueError, OSError):
        main(given)
