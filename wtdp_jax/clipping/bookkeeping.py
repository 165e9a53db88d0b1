"""Book-keeping: one backward pass that keeps each layer's activations and backprops (Bu et al. 2023,
2210.00038).

The records give the norms, and then, with the clip factors, the weighted sums. No second backward pass is
needed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax import taps
from wtdp_jax.clipping import layers, records, tapped
from wtdp_jax.clipping.factors import Factors, Group
from wtdp_jax.clipping.job import Job, Outcome, Params
from wtdp_jax.coverage import Coverage, Layer


def bookkeeping(job: Job) -> Outcome:
    """The clipped sum by one backward pass and its records."""
    coverage = coverage_of(job)
    split = tapped.split_leaves(job, coverage)
    losses_of = tapped.tapped_losses(job, coverage, split, lambda: _record_taps(coverage))
    losses, backward = jax.vjp(
        lambda probes, copies: losses_of(split.covered, probes, copies),
        _probes(coverage, job),
        tapped.copies(split.uncovered, job.num_rows),
    )
    cotangents, gradients = backward(jnp.ones_like(losses))
    kept = [of_layer["emitted"] for of_layer in cotangents]

    squared = {
        Group(layer.path, layer.stack): _squared_norms(layer, record, job)
        for layer, record in zip(coverage.layers, kept, strict=True)
    }
    clipped, uncovered_sum = tapped.clip(job, coverage, split, squared, gradients)
    covered_sum = _weighted_sums(coverage, kept, clipped, like=split.covered)
    return job.outcome(tapped.join(split, covered_sum, uncovered_sum), losses, clipped.norm)


def coverage_of(job: Job) -> Coverage:
    """Which leaves the rules cover."""
    coverage = job.coverage()
    return tapped.confirmed(job, coverage, jax.eval_shape(lambda: _probes(coverage, job)))


def _probes(coverage: Coverage, job: Job) -> list[dict[str, Any]]:
    """Each layer's probe, whose cotangent is its record."""
    records = tapped.zeros_for(coverage.layers, _record_shapes, job.num_rows)
    return [{"emitted": zeros} for zeros in records]


def _record_taps(coverage: Coverage) -> taps.Tap:
    """Taps that emit records."""
    tied = tapped.tied_indices(coverage.layers)
    loss_heads = taps.LossHeads(
        whole_logits=records.has_whole_logits, hold=lambda tied: True, emit=records.of_loss
    )
    return taps.Tap(lambda index, call, d: records.of_call(call, d), tied, loss_heads)


def _record_shapes(layer: Layer) -> Any:
    if layer.kind != "tied":
        return records.shapes(layer.calls[0], num_tokens=None)
    embed, head = layer.calls
    return {
        "embedding": records.shapes(embed, num_tokens=None),
        "head": records.shapes(head, num_tokens=embed.positions),
    }


def _squared_norms(layer: Layer, kept: Any, job: Job) -> Array:
    """Squared norms (B, *stack) from records (*stack, B, ...)."""

    def of_slice(kept: Any) -> Array:
        return jax.vmap(lambda record: layers.squared_norm(layer, record, job.tied_norm))(kept)

    return jnp.moveaxis(_slice_by_slice(of_slice, layer)(kept), -1, 0)


def _weighted_sums(coverage: Coverage, kept: list[Any], clipped: Factors, like: Params) -> Params:
    """The weighted sums of all covered leaves, a tree like `like`."""

    def finite(x: Array) -> Array:
        # A factor of 0 is not enough for a row that does not count: 0 x NaN is NaN.
        return jnp.where(clipped.counts.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)

    def sums_of(layer: Layer, kept: Any) -> dict[str, Array]:
        def of_slice(inputs: tuple[Any, Array]) -> dict[str, Array]:
            return layers.gradient_sums(layer, jax.tree.map(finite, inputs[0]), inputs[1])

        return _slice_by_slice(of_slice, layer)((kept, tapped.factors_of(layer, clipped)))

    sums = [sums_of(*pair) for pair in zip(coverage.layers, kept, strict=True)]
    return tapped.by_layer(coverage, sums, like)


def _slice_by_slice(function: Callable, layer: Layer) -> Callable:
    """Maps a function over a layer's stacked axes in turn: one slice's temporaries at a time."""
    for _ in layer.stack:
        function = (lambda of_slice: lambda inputs: jax.lax.map(of_slice, inputs))(function)
    return function
