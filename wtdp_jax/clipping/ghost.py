"""Ghost clipping: one backward pass for the norms, a second for the clipped sum (Li et al. 2022, 2110.05679).

The first pass emits squared norms and forms no weight gradient. The second is an ordinary backward pass with each
example's loss weighted by its clip factor, over the same forward pass. Per-layer factors do not come from weighting
losses: there the second pass has a forward pass of its own, in which each layer weighs its own gradient.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax import capture, rules
from wtdp_jax.clipping import factors, layers, rows, tapped
from wtdp_jax.clipping.factors import Factors
from wtdp_jax.clipping.job import Job, Outcome, Params
from wtdp_jax.coverage import Coverage, Layer


def ghost(job: Job) -> Outcome:
    """The clipped sum by two backward passes."""
    coverage = job.coverage()
    split = tapped.split_leaves(job, coverage)
    probes = tapped.zero_probes(coverage.layers, lambda layer: _probe_shapes(layer, job), job.num_rows)
    losses_of = tapped.tapped_losses(job, coverage, split, lambda: _norm_taps(coverage, job))
    losses, backward = jax.vjp(losses_of, split.covered, probes, tapped.copies(split.uncovered, job.num_rows))
    _, norms, gradients = backward(jnp.ones_like(losses))

    squared = {
        factors.Group(layer.path, layer.stack): jnp.moveaxis(_layer_norm(layer, norm, job), -1, 0)
        for layer, norm in zip(coverage.layers, norms, strict=True)
    }
    clipped, uncovered_sum = tapped.clip(job, coverage, split, squared, gradients)
    if job.clipping == "per_layer":
        covered_sum = _weighed_sum(job, coverage, split, clipped)
    else:
        weights = factors.of_examples(clipped).astype(losses.dtype)
        covered_sum = jax.lax.cond(
            jnp.all(clipped.counts | job.is_padding),
            lambda: backward(weights)[0],
            lambda: _plain_sum(job, split, clipped, weights),
        )
    return Outcome(tapped.join(split, covered_sum, uncovered_sum), losses, clipped.norm)


# ---- the first pass ---------------------------------------------------------------------------------------


def _linked(job: Job) -> bool:
    """Whether the tied matrix's two taps need each other."""
    return job.tied_norm in ("cross_term", "materialize")


def _probe_shapes(layer: Layer, job: Job) -> Any:
    scalar = jax.ShapeDtypeStruct((), rules.accumulation_dtype(layer.calls[0].outputs.dtype))
    if layer.kind != "tied":
        return scalar
    return dict.fromkeys(("embedding", "head", "cross") if _linked(job) else ("embedding", "head"), scalar)


def _norm_taps(coverage: Coverage, job: Job) -> capture.Tap:
    """Taps that emit squared norms."""

    def emit(index: int, call: capture.Call, d: Array) -> Array:
        return layers.call_squared_norm(call, coverage.layers[index].leaves, capture.record(call, d))

    links = {"cross_term": _cross_term_link(), "materialize": _materializing_link()}
    return capture.Tap(emit, tapped.tied_indices(coverage.layers), links.get(job.tied_norm))


def _cross_term_link() -> capture.Link:
    """The side array carries the rows of the head's gradient that the tokens name, (T, D)."""

    def embedding(call: capture.Call, d: Array, rows: Array) -> tuple[Array, Array]:
        record = capture.record(call, d)
        norm = layers.call_squared_norm(call, ("embedding",), record)
        return norm, rules.cross_term(record["d"], rows)

    def head(call: capture.Call, ids: Array, d: Array) -> tuple[Array, Array]:
        record = capture.record(call, d)
        rows = rules.head_gradient_rows(ids, record["a"], record["d"])
        return layers.call_squared_norm(call, ("embedding",), record), rows

    return capture.Link(
        side_shape=lambda call: (call.positions, call.module.features), embedding=embedding, head=head
    )


def _materializing_link() -> capture.Link:
    """The side array carries the head's gradient itself, (V, D), to which the embedding's is added."""

    def embedding(call: capture.Call, d: Array, head_gradient: Array) -> tuple[Array, Array]:
        record = capture.record(call, d)
        joint = rules.squared_norm(layers.joint_gradient(record, head_gradient))
        return joint, jnp.zeros_like(joint)

    def head(call: capture.Call, ids: Array, d: Array) -> tuple[Array, Array]:
        gradient = layers.head_gradient(capture.record(call, d))
        return jnp.zeros((), gradient.dtype), gradient

    return capture.Link(
        side_shape=lambda call: (call.module.num_embeddings, call.module.features),
        embedding=embedding,
        head=head,
    )


def _layer_norm(layer: Layer, norm: Any, job: Job) -> Array:
    """Squared norms (*stack, B) of a layer, from its probe's cotangent."""
    if layer.kind != "tied":
        return norm
    cross = norm.get("cross", jnp.zeros_like(norm["head"]))
    return rules.tied_squared_norm(norm["embedding"], norm["head"], cross, job.tied_norm)


# ---- the second pass --------------------------------------------------------------------------------------


def _plain_sum(job: Job, split: tapped.Split, clipped: Factors, weights: Array) -> Params:
    """The weighted sum over a batch in which rows that do not count are replaced: 0 x NaN would be NaN."""
    batch = rows.replace(job.batch, ~clipped.counts)

    def losses_of(covered: Params) -> Array:
        trained = tapped.join(split, covered, split.uncovered)
        return jax.vmap(job.example_loss, in_axes=(None, 0))(trained, batch)

    (total,) = jax.vjp(losses_of, split.covered)[1](weights)
    return jax.tree.map(lambda leaf: jnp.where(jnp.any(clipped.counts), leaf, 0), total)


def _weighed_sum(job: Job, coverage: Coverage, split: tapped.Split, clipped: Factors) -> Params:
    """The sum with each layer's gradient weighed by its own factor."""
    probes = [
        jnp.moveaxis(clipped.factors[factors.Group(layer.path, layer.stack)], 0, -1)
        for layer in coverage.layers
    ]
    safe = dataclasses.replace(job, batch=rows.replace(job.batch, ~clipped.counts))
    losses_of = tapped.tapped_losses(safe, coverage, split, capture.Weigh)
    copies = tapped.copies(split.uncovered, job.num_rows)
    losses, backward = jax.vjp(lambda covered: losses_of(covered, probes, copies), split.covered)
    (total,) = backward(jnp.ones_like(losses))
    return jax.tree.map(lambda leaf: jnp.where(jnp.any(clipped.counts), leaf, 0), total)
