"""What an engine is given and what it returns."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax import capture
from wtdp_jax.clipping.factors import Clipping
from wtdp_jax.coverage import Coverage, trace_coverage
from wtdp_jax.rules import TiedNorm
from wtdp_jax.trees import merge

Params = Any
Batch = Any


class Outcome(NamedTuple):
    """The clipped sum, a tree like `Job.trained`; each example's loss and norm before clipping, (B,)."""

    clipped_sum: Params
    loss: Array
    norm: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One batch of per-example gradients to clip and sum.

    Attributes:
        loss_fn: ``loss_fn(params, batch) -> losses (B,)``.
        trained: the differentiated leaves; None in place of the frozen ones.
        frozen: the frozen leaves; None in place of the trained ones.
        batch: a tree of (B, ...) arrays; padding rows already hold a copy of a real one.
        is_padding: (B,) bool.
        l2_clip_norm, clipping, tied_norm, uncovered, microbatch_size: as in `clipped_grad`.
    """

    loss_fn: Callable
    trained: Params
    frozen: Params
    batch: Batch
    is_padding: Array
    l2_clip_norm: float
    clipping: Clipping
    tied_norm: TiedNorm
    uncovered: Literal["materialize", "error"]
    microbatch_size: int

    @property
    def num_rows(self) -> int:
        """Rows of the batch, padding included."""
        return self.is_padding.shape[0]

    def example_loss(self, trained: Params, example: Any) -> Array:
        """The plain loss of one example, leaves without a batch axis."""
        return capture.example_loss(self.loss_fn, merge(trained, self.frozen), example)

    def outcome(self, clipped_sum: Params, loss: Array, norm: Array) -> Outcome:
        """The outcome in the types that all engines return, float32 or wider."""
        zeros = self.zero_outcome()
        return jax.tree.map(
            lambda leaf, zero: leaf.astype(zero.dtype), Outcome(clipped_sum, loss, norm), zeros
        )

    def zero_outcome(self) -> Outcome:
        """The outcome of no example."""

        def zeros(shape: tuple[int, ...], *dtypes: Any) -> Array:
            return jnp.zeros(shape, jnp.result_type(jnp.float32, *dtypes))

        per_example = zeros((self.num_rows,), *(leaf.dtype for leaf in jax.tree.leaves(self.trained)))
        sums = jax.tree.map(lambda leaf: zeros(leaf.shape, leaf.dtype), self.trained)
        return Outcome(sums, per_example, per_example)

    def coverage(self) -> Coverage:
        """Which leaves the rules cover, from a trace of the loss for one example."""
        return trace_coverage(self.loss_fn, self.trained, self.frozen, self.example())

    def example(self) -> Batch:
        """Shapes and types of one example."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.batch)
