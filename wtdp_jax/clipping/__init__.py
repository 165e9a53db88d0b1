"""Exact sums of clipped per-example gradients: the contract that all engines keep.

Dimension key: B examples.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from wtdp_jax.clipping import auto, bookkeeping, ghost, rows
from wtdp_jax.clipping.factors import Clipping
from wtdp_jax.clipping.job import Batch, Job, Outcome, Params
from wtdp_jax.clipping.materialized import materialized, microbatched
from wtdp_jax.coverage import Coverage
from wtdp_jax.rules import TiedNorm
from wtdp_jax.trees import leaf_paths, merge, partition

__all__ = ["ClippedGrad", "Engine", "PerExample", "clipped_grad", "merge", "partition"]

Engine = Literal["materialized", "microbatched", "ghost", "bookkeeping", "auto"]
LossFn = Callable[[Params, Batch], Float[Array, " B"]]

_ENGINES: Mapping[str, Callable[[Job], Outcome]] = {
    "materialized": materialized,
    "microbatched": microbatched,
    "ghost": ghost.ghost,
    "bookkeeping": bookkeeping.bookkeeping,
}

# What the rules cover depends on what an engine puts among the params.
_COVERAGE: Mapping[str, Callable[[Job], Coverage]] = {
    "ghost": ghost.coverage_of,
    "bookkeeping": bookkeeping.coverage_of,
    "auto": ghost.coverage_of,
}


class PerExample(NamedTuple):
    """Un-noised values of each example; not private.

    Attributes:
        loss: (B,) 0 for padding.
        norm: (B,) L2 norm of the whole gradient before clipping, as the engine computed it; 0 for padding,
            inf where the gradient is not finite.
    """

    loss: Float[Array, " B"]
    norm: Float[Array, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedGrad:
    """A function (params, batch) -> sum of clipped per-example gradients; made by `clipped_grad`.

    Hashable, so that `jax.jit` takes it. Formal guarantee: adding or removing one row of the batch, or
    turning it into padding, changes the sum by at most `sensitivity` in L2 norm, whatever the params.
    """

    loss_fn: LossFn
    engine: Engine
    l2_clip_norm: float
    tied_norm: TiedNorm
    clipping: Clipping
    trainable: Callable[[str], bool] | None
    uncovered: Literal["materialize", "error"]
    microbatch_size: int
    memory_budget: int | None

    def __post_init__(self) -> None:
        choices = {"engine": Engine, "tied_norm": TiedNorm, "clipping": Clipping}
        for name, kind in {**choices, "uncovered": Literal["materialize", "error"]}.items():
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if not self.l2_clip_norm >= 0:
            raise ValueError(f"l2_clip_norm must be at least 0, got {self.l2_clip_norm}")
        if self.clipping == "automatic" and math.isinf(self.l2_clip_norm):
            raise ValueError('l2_clip_norm must be finite with clipping="automatic", got inf')
        if self.microbatch_size < 1:
            raise ValueError(f"microbatch_size must be at least 1, got {self.microbatch_size}")
        if self.memory_budget is not None and self.memory_budget < 1:
            raise ValueError(f"memory_budget must be at least 1 byte, got {self.memory_budget}")

    @property
    def sensitivity(self) -> float:
        """Bound on the L2 norm of one example's contribution to the sum, adding or removing it.

        C, or sqrt(2) C where the cross-term of a tied matrix is left out: ||a + b||^2 <= 2 (||a||^2 +
        ||b||^2). The latter also for an untied model, which this cannot know.
        """
        omits = self.tied_norm == "omit" and self.engine in ("ghost", "bookkeeping", "auto")
        return math.sqrt(2) * self.l2_clip_norm if omits else self.l2_clip_norm

    def __call__(
        self, params: Params, batch: Batch, is_padding_example: Bool[Array, " B"] | None = None
    ) -> tuple[Params, PerExample]:
        """Sums the clipped gradients of a batch.

        Args:
            params: nested dicts of arrays.
            batch: a tree of (B, ...) arrays.
            is_padding_example: (B,) rows that contribute exactly zero, whatever they hold. None: none.

        Returns:
            The sum, never the mean, in float32 or wider: a tree like params, None in place of frozen leaves.
                And the
            un-noised loss and norm of each example.

        Raises:
            ValueError: when the batch is empty or ragged, loss_fn does not return one loss an example, no
                leaf is trainable, or a leaf is uncovered and that is refused.
        """
        num_rows = rows.size(batch, is_padding_example)
        is_padding = jnp.zeros(num_rows, bool) if is_padding_example is None else is_padding_example
        _refuse_varying(batch)
        # Padding may hold anything, NaN included, so it never meets the model.
        job = self._job(params, rows.replace(jax.tree.map(jnp.asarray, batch), is_padding), is_padding)
        engine = self.choose(params, batch).engine if self.engine == "auto" else self.engine
        outcome = _ENGINES[engine](job)
        return outcome.clipped_sum, PerExample(jnp.where(is_padding, 0, outcome.loss), outcome.norm)

    def check(self, params: Params, batch: Batch) -> Coverage:
        """Which leaves have a rule and which are materialized; as text, a table.

        Args:
            params: nested dicts of arrays or `jax.ShapeDtypeStruct`.
            batch: a tree of (B, ...) arrays.
        """
        num_rows = rows.size(batch, None)
        job = self._job(params, batch, jnp.zeros(num_rows, bool))
        return _COVERAGE.get(self.engine, Job.coverage)(job)

    def choose(self, params: Params, batch: Batch) -> auto.Choice:
        """The engine that "auto" stands for on arrays of these shapes; as text, why.

        Args:
            params: nested dicts of arrays or `jax.ShapeDtypeStruct`.
            batch: a tree of (B, ...) arrays or shapes.

        Raises:
            ValueError: when no engine fits in the memory budget.
        """
        rows.size(batch, None)
        leaves, structure = jax.tree.flatten((params, batch))
        shapes = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
        return _choose(self, structure, tuple(shapes))

    def _job(self, params: Params, batch: Batch, is_padding: Array) -> Job:
        trained, frozen = partition(params, self.trainable)
        for path, leaf in leaf_paths(trained).items():
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ValueError(f"trained leaves must be real floats, got {path} of {jnp.result_type(leaf)}")
        return Job(
            loss_fn=self.loss_fn,
            trained=trained,
            frozen=frozen,
            batch=batch,
            is_padding=is_padding,
            l2_clip_norm=self.l2_clip_norm,
            clipping=self.clipping,
            tied_norm=self.tied_norm,
            uncovered=self.uncovered,
            microbatch_size=self.microbatch_size,
        )


@functools.lru_cache(maxsize=64)
def _choose(grad_fn: ClippedGrad, structure: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> auto.Choice:
    """The engine for params and batch of these shapes; remembered, because it is found by compiling."""
    params, batch = jax.tree.unflatten(structure, shapes)
    job = grad_fn._job(params, batch, jnp.zeros(rows.size(batch, None), bool))
    return auto.choose(job, _ENGINES, grad_fn.memory_budget)


def _refuse_varying(batch: Batch) -> None:
    """Where types say on which devices a value varies, JAX sums gradients over devices before clipping."""
    types = [getattr(jax.typeof(leaf), "manual_axis_type", None) for leaf in jax.tree.leaves(batch)]
    axes = {name for kind in types for name in getattr(kind, "varying", ())}
    if axes:
        raise ValueError(f"inside jax.shard_map over {sorted(axes)} it must be called with check_vma=False")


def clipped_grad(
    loss_fn: LossFn,
    *,
    engine: Engine,
    l2_clip_norm: float,
    tied_norm: TiedNorm = "cross_term",
    clipping: Clipping = "flat",
    trainable: Callable[[str], bool] | None = None,
    uncovered: Literal["materialize", "error"] = "materialize",
    microbatch_size: int = 1,
    memory_budget: int | None = None,
) -> ClippedGrad:
    """Makes a function that sums clipped per-example gradients.

    Args:
        loss_fn: ``loss_fn(params, batch) -> losses (B,)``, no operation across examples, on any Flax Linen
            model.
        engine: "materialized": vmap of grad, standard per-example clipping. "microbatched": the same, a few
            examples at a time. "ghost": two passes and no per-example gradient. "bookkeeping": one
            backward pass. "auto": of the last two the one with fewer operations that fits in the memory
            budget, else the second, found by compiling them for the shapes at hand, see `ClippedGrad.choose`.
        l2_clip_norm: C, the largest L2 norm of an example's gradient that is left as it is. 0 gives a sum of
            zeros; inf clips nothing.
        tied_norm: how the norm of a matrix that is embedding and output head is had, by "ghost" and
            "bookkeeping": "cross_term", exact; "materialize", exact, by building its per-example gradients;
            "omit", the sum of both uses' squared norms, which can be too small: `sensitivity` is sqrt(2) C;
            "triangle", an upper bound.
        clipping: "flat", factor min(1, C / norm) (Abadi et al. 2016); "automatic", C / (norm + 0.01) (Bu et
            al. 2023); "per_layer", each module at each depth clipped to C / sqrt(their number).
        trainable: says of a leaf's path, "h/c_fc/kernel", whether it is trained. None: all are. Frozen leaves
            have no part in the norm and None in the sum.
        uncovered: what to do with leaves that no rule covers: "materialize" their per-example gradients, or
            "error".
        microbatch_size: examples at a time for "microbatched".
        memory_budget: bytes for the program that "auto" chooses; None: what the device has.

    Raises:
        ValueError: when an argument is none of these.
    """
    return ClippedGrad(
        loss_fn=loss_fn,
        engine=engine,
        l2_clip_norm=l2_clip_norm,
        tied_norm=tied_norm,
        clipping=clipping,
        trainable=trainable,
        uncovered=uncovered,
        microbatch_size=microbatch_size,
        memory_budget=memory_budget,
    )
