"""Checks each engine's norms and clipped sums against per-example gradients of the plain model.

About a minute on two CPU cores, most of it compilation; the exit status is 1 where a figure is off:

    python experiments/check_norms.py

Everything, in several minutes, and once more in float64:

    python experiments/check_norms.py --losses next_token lm --clippings flat automatic per_layer \
        --tied-norms cross_term materialize --float64

On a GPU or TPU, at a published size and compiled as a run's programs are:

    python experiments/check_norms.py --preset distilgpt2 --length 64 --optimize

The reference is written apart from the engines: `jax.vmap` of `jax.grad` of a loss made here from the model's
logits, then clipped in float64 by numpy. Every batch holds repeated tokens and one padding row that is not
valid input; the clip norm is the median norm, so that some rows are clipped and some are not.

Dimension key: B examples, T tokens, V vocabulary, G slices of a scanned leaf (1 of any other).
"""

import dataclasses
import functools
import itertools
import math
import sys
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from wtdp_jax import cli, clipped_grad
from wtdp_jax.clipping import Engine, PerExample
from wtdp_jax.clipping.factors import Clipping
from wtdp_jax.losses import lm_loss, next_token_loss
from wtdp_jax.models import GPT2, GPT2Config
from wtdp_jax.trees import leaf_paths, map_with_path, parent

Model = Literal["tied", "untied"]
Loss = Literal["next_token", "lm"]
ExactTiedNorm = Literal["cross_term", "materialize"]
Batch = dict[str, np.ndarray]

_LOSSES = {"next_token": next_token_loss, "lm": lm_loss}
_LINE = "{:<8} {:<11} {:<13} {:<12} {:<10} {:>10} {:>10}  {}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Checks each engine's norms and clipped sums against per-example gradients of the plain model."""

    engines: tuple[Engine, ...] = ("materialized", "microbatched", "ghost", "bookkeeping")
    """Engines to check."""

    models: tuple[Model, ...] = get_args(Model)
    """Whether the output head is the embedding itself, or a matrix of its own."""

    losses: tuple[Loss, ...] = ("next_token",)
    """Losses: at one position an example, or on the whole sequence."""

    clippings: tuple[Clipping, ...] = ("flat",)
    """Kinds of clipping."""

    tied_norms: tuple[ExactTiedNorm, ...] = ("cross_term",)
    """Exact ways to the tied matrix's norm, in the ghost and bookkeeping engines."""

    preset: str = "tiny"
    """Model size: tiny, distilgpt2, gpt2, gpt2-medium, gpt2-large or gpt2-xl."""

    batch_size: int = 4
    """Examples, besides the padding row."""

    length: int = 12
    """Tokens an example."""

    float64: bool = False
    """Whether to compute in float64; else float32."""

    tolerance: float | None = None
    """Largest relative error allowed; None: 1e-4 in float32, 1e-10 in float64."""

    optimize: bool = False
    """Whether to compile with all optimizations, which takes several times as long."""

    seed: int = 0
    """Seed of parameters and batch."""

    def __post_init__(self) -> None:
        for name in ("engines", "models", "losses", "clippings", "tied_norms"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one, got none")
        limit = GPT2Config.preset(self.preset).n_positions
        if not 2 <= self.length <= limit:
            raise ValueError(f"length must be in [2, {limit}], got {self.length}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance must be positive and finite, got {self.tolerance}")

    @property
    def limit(self) -> float:
        """The largest relative error allowed."""
        return self.tolerance or (1e-10 if self.float64 else 1e-4)


class Case(NamedTuple):
    """What is checked: one engine, in one of its forms, on one model and loss."""

    model: Model
    loss: Loss
    engine: Engine
    tied_norm: ExactTiedNorm | None
    clipping: Clipping


class Setting(NamedTuple):
    """A model with parameters, a batch whose last row is padding, and what is right there."""

    model: GPT2
    params: Any
    batch: Batch
    reference: "Reference"


def main(config: CheckConfig) -> int:
    """Prints a line for each case; returns the exit status."""
    jax.config.update("jax_disable_most_optimizations", not config.optimize)
    print(_LINE.format("model", "loss", "engine", "tied_norm", "clipping", "norms", "sum", "").rstrip())
    errors = []
    # TF32 and bfloat16 units would put the reference itself off by 1e-3.
    with jax.enable_x64(config.float64), jax.default_matmul_precision("highest"):
        for case in cases(config):
            norms, total = worst_errors(config, case)
            # A NaN, which compares as false, is an error without a bound.
            errors.append(max(norms, total) if norms + total < math.inf else math.inf)
            verdict = "ok" if errors[-1] <= config.limit else "OFF"
            columns = ("-" if value is None else value for value in case)
            print(_LINE.format(*columns, f"{norms:.1e}", f"{total:.1e}", verdict), flush=True)
    off = sum(error > config.limit for error in errors)
    within = f"{len(errors) - off} of {len(errors)} within {config.limit:.0e}"
    print(f"{within}; worst relative error {max(errors):.1e}")
    return int(off > 0)


def cases(config: CheckConfig) -> list[Case]:
    """All that is to be checked, the cases of one setting together."""
    found = []
    for model, loss, engine, norm, clipping in itertools.product(
        config.models, config.losses, config.engines, config.tied_norms, config.clippings
    ):
        has_tied_norm = model == "tied" and engine in ("ghost", "bookkeeping")
        found.append(Case(model, loss, engine, norm if has_tied_norm else None, clipping))
    return list(dict.fromkeys(found))


def worst_errors(config: CheckConfig, case: Case) -> tuple[float, float]:
    """The worst relative errors: of a norm, and of an entry of the sum over its leaf's largest."""
    model, params, batch, reference = _setting(config, case.model, case.loss)
    grad_fn = clipped_grad(
        _LOSSES[case.loss](model),
        engine=case.engine,
        l2_clip_norm=reference.clip_norm,
        tied_norm=case.tied_norm or "cross_term",
        clipping=case.clipping,
    )
    is_padding = np.arange(config.batch_size + 1) == config.batch_size
    clipped_sum, per_example = jax.jit(grad_fn)(params, batch, is_padding)
    return reference.errors(clipped_sum, per_example, case.clipping)


@functools.lru_cache(maxsize=1)
def _setting(config: CheckConfig, tie: Model, loss: Loss) -> Setting:
    model = GPT2(GPT2Config.preset(config.preset, tie_embeddings=tie == "tied"))
    params, batch = _draw(config, model)
    return Setting(model, params, batch, Reference(_per_example_gradients(model, loss, params, batch)))


class Reference:
    """Per-example gradients of the plain model, and what clipping must make of them.

    Attributes:
        gradients: by path, (B, ...), without the padding row.
        norms: (B,) in float64.
        clip_norm: the clip norm of all checks, the median of `norms`.
    """

    def __init__(self, gradients: dict[str, np.ndarray]) -> None:
        self.gradients = gradients
        self._squared = {
            path: np.sum(np.square(_in_slices(path, leaf), dtype=np.float64), -1)
            for path, leaf in gradients.items()
        }
        self.norms = np.sqrt(sum(np.sum(squared, -1) for squared in self._squared.values()))
        self.clip_norm = float(np.median(self.norms))

    def errors(self, clipped_sum: Any, per_example: PerExample, clipping: Clipping) -> tuple[float, float]:
        """Worst relative errors of an engine's norms, the padding row's included, and of its sum."""
        norms = np.append(self.norms, 0)
        norm_errors = np.abs(np.asarray(per_example.norm) - norms) / np.where(norms == 0, 1, norms)
        found, right = leaf_paths(clipped_sum), self.clipped_sum(clipping)
        sum_errors = [_relative_error(np.asarray(found[path]), leaf) for path, leaf in right.items()]
        return float(np.max(norm_errors)), float(np.max(sum_errors))

    def clipped_sum(self, clipping: Clipping) -> dict[str, np.ndarray]:
        """The sum of clipped gradients by path, in float64."""
        sums = {}
        for path, factors in self._factors(clipping).items():
            leaf = self.gradients[path]
            total = np.einsum("bg,bgn->gn", factors, _in_slices(path, leaf))
            sums[path] = total.reshape(leaf.shape[1:])
        return sums

    def _factors(self, clipping: Clipping) -> dict[str, np.ndarray]:
        """Clip factors (B, G) by path."""
        if clipping == "per_layer":
            return self._factors_per_layer()
        if clipping == "automatic":
            factors = self.clip_norm / (self.norms + 0.01)
        else:
            factors = np.minimum(1, self.clip_norm / self.norms)
        return {
            path: np.broadcast_to(factors[:, None], squared.shape) for path, squared in self._squared.items()
        }

    def _factors_per_layer(self) -> dict[str, np.ndarray]:
        """Each module at each depth is clipped by itself, to the clip norm over the root of their number."""
        modules: dict[str, np.ndarray] = {}
        for path, squared in self._squared.items():
            modules[parent(path)] = modules.get(parent(path), np.zeros(())) + squared
        threshold = self.clip_norm / math.sqrt(sum(squared.shape[1] for squared in modules.values()))
        factors = {
            # A module that an example does not use has gradient 0, and any factor will do.
            module: np.minimum(1, threshold / np.maximum(np.sqrt(squared), np.finfo(np.float64).tiny))
            for module, squared in modules.items()
        }
        return {path: factors[parent(path)] for path in self._squared}


def _relative_error(found: np.ndarray, right: np.ndarray) -> float:
    """The largest difference over the largest entry."""
    return float(np.max(np.abs(found - right)) / np.max(np.abs(right)))


def _in_slices(path: str, leaf: np.ndarray) -> np.ndarray:
    """A leaf (B, ...) as (B, G, entries of a slice): the blocks' leaves, under "h", are stacked."""
    return leaf.reshape(leaf.shape[0], leaf.shape[1] if path.startswith("h/") else 1, -1)


def _per_example_gradients(model: GPT2, loss: Loss, params: Any, batch: Batch) -> dict[str, np.ndarray]:
    """`jax.vmap` of `jax.grad`, over all rows but the last, which is padding."""

    def example_loss(params: Any, example: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply({"params": params}, example["ids"][None])[0]
        log_probs = jax.nn.log_softmax(logits)
        if loss == "next_token":
            return -log_probs[example["positions"], example["targets"]]
        losses = -jnp.take_along_axis(log_probs[:-1], example["ids"][1:, None], axis=1)[:, 0]
        return jnp.average(losses, weights=example["weights"][1:])

    rows = {name: leaf[:-1] for name, leaf in batch.items()}
    gradients = jax.jit(jax.vmap(jax.grad(example_loss), in_axes=(None, 0)))(params, rows)
    return {path: np.asarray(leaf) for path, leaf in leaf_paths(gradients).items()}


def _draw(config: CheckConfig, model: GPT2) -> tuple[Any, Batch]:
    """Random parameters, none at a special value such as 0, and a batch whose last row is not valid input."""
    rng = np.random.default_rng(config.seed)
    dtype = np.float64 if config.float64 else np.float32
    rows, length = config.batch_size, config.length
    # From half as many tokens as an example is long: some repeat, and the target is often one of the inputs.
    some_tokens = max(2, length // 2)
    batch = {
        "ids": rng.integers(0, some_tokens, (rows + 1, length), np.int32),
        "positions": rng.integers(0, length, rows + 1, np.int32),
        "targets": rng.integers(0, some_tokens, rows + 1, np.int32),
        "weights": rng.uniform(0.1, 1, (rows + 1, length)).astype(dtype),
    }
    batch["ids"][-1], batch["weights"][-1] = model.config.vocab_size, np.nan
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch["ids"])["params"]

    def leaf(path: str, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = 1.0 if path.endswith("/scale") else 0.0
        return rng.normal(mean, model.config.n_embd**-0.5, shape.shape).astype(dtype)

    return map_with_path(leaf, shapes), batch


if __name__ == "__main__":
    sys.exit(main(cli.parse(CheckConfig)))
