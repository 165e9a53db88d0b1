"""Book-keeping: one backward pass that keeps each layer's activations and backprops (Bu et al. 2023,
2210.00038).

The records give the norms, and then, with the clip factors, the weighted sums. No second backward pass is
needed. With per-layer clipping most layers need no records either: a layer's factor depends on its own norm
alone, so its weighted sum is formed where its backprops are. A tied matrix, with two uses, keeps its records.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax import capture, taps
from wtdp_jax.clipping import factors, layers, records, rounds, tapped
from wtdp_jax.clipping.factors import Factors, Group
from wtdp_jax.clipping.job import Job, Outcome, Params
from wtdp_jax.coverage import Coverage, Layer
from wtdp_jax.rules import accumulation_dtype


def bookkeeping(job: Job) -> Outcome:
    """The clipped sum by one backward pass and its records."""
    coverage = coverage_of(job)
    if _clipped_at_once(coverage, job):
        return rounds.until_settled(job, lambda job: _one_pass(job, coverage))
    return _one_pass(job, coverage)


def coverage_of(job: Job) -> Coverage:
    """Which leaves the rules cover."""
    coverage = job.coverage()
    probes = jax.eval_shape(lambda trained: _probes(coverage, trained, job), job.trained)
    return tapped.confirmed(job, coverage, probes)


def _one_pass(job: Job, coverage: Coverage) -> Outcome:
    split = tapped.split_leaves(job, coverage)
    at_once = _clipped_at_once(coverage, job)
    losses_of = tapped.tapped_losses(job, coverage, split, lambda: _taps(coverage, job))
    losses, backward = jax.vjp(
        lambda probes, copies: losses_of(split.covered, probes, copies),
        _probes(coverage, split.covered, job),
        tapped.copies(split.uncovered, job.num_rows),
    )
    cotangents, gradients = backward(jnp.ones_like(losses))
    emitted = [of_layer["emitted"] for of_layer in cotangents]

    def squared_norms(index: int, layer: Layer) -> Array:
        kept = emitted[index]
        return jnp.moveaxis(kept, -1, 0) if index in at_once else _squared_norms(layer, kept, job)

    squared = {
        Group(layer.path, layer.stack): squared_norms(index, layer)
        for index, layer in enumerate(coverage.layers)
    }
    clipped, uncovered_sum = tapped.clip(job, coverage, split, squared, gradients)
    sums = [
        cotangents[index]["leaves"] if index in at_once else _weighted_sums(layer, emitted[index], clipped)
        for index, layer in enumerate(coverage.layers)
    ]
    if at_once:
        sums = tapped.unless_spoilt(job, coverage, sums, clipped.counts)
    covered_sum = tapped.by_layer(coverage, sums, like=split.covered)
    return job.outcome(tapped.join(split, covered_sum, uncovered_sum), losses, clipped.norm)


def _clipped_at_once(coverage: Coverage, job: Job) -> frozenset[int]:
    """Indices of the layers whose gradients need no record, because their norm alone decides their factor."""
    if job.clipping != "per_layer":
        return frozenset()
    leaf_groups = factors.groups(coverage.stacks)
    shared = {leaf_groups[path] for path in coverage.uncovered}
    return frozenset(
        index
        for index, layer in enumerate(coverage.layers)
        if layer.kind in ("dense", "norm", "embed") and Group(layer.path, layer.stack) not in shared
    )


def _probes(coverage: Coverage, covered: Params, job: Job) -> list[dict[str, Any]]:
    """Each layer's probe, whose cotangent is its record, or its squared norm and its leaves' sums."""
    at_once = _clipped_at_once(coverage, job)

    def probe(index: int, layer: Layer) -> dict[str, Any]:
        if index not in at_once:
            return {"emitted": tapped.zeros_for(layer, _record_shapes(layer), job.num_rows)}
        dtype = accumulation_dtype(layer.calls[0].outputs.dtype)
        counts = jnp.broadcast_to((~job.is_padding).astype(dtype), (*layer.stack, job.num_rows))
        return {
            "emitted": jnp.zeros_like(counts),
            "counts": counts,
            "leaves": tapped.wide_leaves(layer, covered),
        }

    return [probe(index, layer) for index, layer in enumerate(coverage.layers)]


def _taps(coverage: Coverage, job: Job) -> taps.Tap:
    """Taps that emit records, or squared norms."""
    at_once = _clipped_at_once(coverage, job)
    num_groups = factors.count(set(factors.groups(coverage.stacks).values()))
    positions = tapped.positions(coverage)

    def emit(index: int, call: capture.Call, d: Array) -> Any:
        if index in at_once:
            return layers.call_squared_norm(call, coverage.layers[index].leaves, capture.record(call, d))
        return records.of_call(call, d)

    def clip(squared_norm: Array, counts: Array) -> Array:
        norm = jnp.sqrt(squared_norm)
        counts = (counts > 0) & jnp.isfinite(norm)
        threshold = job.l2_clip_norm / math.sqrt(num_groups)
        margin = factors.rounding_margin(norm.dtype, positions)
        return factors.clip_factor(norm, counts, threshold, job.clipping, margin)

    tied = tapped.tied_indices(coverage.layers)
    loss_heads = taps.LossHeads(
        whole_logits=records.has_whole_logits, hold=lambda tied: True, emit=records.of_loss
    )
    return taps.Tap(emit, tied, loss_heads, clip=clip)


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


def _weighted_sums(layer: Layer, kept: Any, clipped: Factors) -> dict[str, Array]:
    """The weighted sums of a layer's leaves, by name."""

    def finite(x: Array) -> Array:
        # A factor of 0 is not enough for a row that does not count: 0 x NaN is NaN.
        return jnp.where(clipped.counts.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)

    def of_slice(inputs: tuple[Any, Array]) -> dict[str, Array]:
        return layers.gradient_sums(layer, jax.tree.map(finite, inputs[0]), inputs[1])

    return _slice_by_slice(of_slice, layer)((kept, tapped.factors_of(layer, clipped)))


def _slice_by_slice(function: Callable, layer: Layer) -> Callable:
    """Maps a function over a layer's stacked axes in turn: one slice's temporaries at a time."""
    for _ in layer.stack:
        function = (lambda of_slice: lambda inputs: jax.lax.map(of_slice, inputs))(function)
    return function
