"""Ghost clipping: one pass for the norms, a second for the clipped sum (Li et al. 2022, arXiv 2110.05679).

Both backward passes share one forward pass and send the same cotangents back. The first emits squared norms
and forms no weight gradient; in the second each layer weighs its own gradient by the example's factor.
Weighing the losses instead would round other numbers than those whose norm was taken: in an ill-conditioned
model the sum exceeded the clip norm by 1e-4 of it.

The factors are known after the first pass only, but each layer's factor is an argument of the loss that is
read by the backward pass alone. What `jax.vjp` returns keeps such arguments by themselves, so the second pass
is the first one's with the true factors in their place.

Where layers compute in 16 bits, each layer's gradient is still formed in float32, from the same inputs and
backprops as its norm. But XLA rounds such backprops in one pass otherwise than in the other. So the second
emits the norms again, of what it sums, and a row whose factor was too large for them is left out.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax import capture, rules, taps
from wtdp_jax.clipping import factors, layers, rounds, tapped
from wtdp_jax.clipping.job import Job, Outcome, Params
from wtdp_jax.coverage import Coverage, Layer
from wtdp_jax.head_rules import HeadStatistics, squared_norm_at


def ghost(job: Job) -> Outcome:
    """The clipped sum by two backward passes; by more, where a row's gradient is not finite."""
    coverage = coverage_of(job)
    return rounds.until_settled(job, lambda job: _two_passes(job, coverage))


def coverage_of(job: Job) -> Coverage:
    """Which leaves the rules cover."""
    coverage = job.coverage()
    probes = jax.eval_shape(lambda trained: _probes(coverage, trained, job), job.trained)
    return tapped.confirmed(job, coverage, probes)


def _two_passes(job: Job, coverage: Coverage) -> Outcome:
    """One round: zeros for the sum unless every row that is not padding can be part of it."""
    split = tapped.split_leaves(job, coverage)
    losses_of = tapped.tapped_losses(job, coverage, split, lambda: _norm_taps(coverage, job))
    probes = _probes(coverage, split.covered, job)
    slots, structure = jax.tree.flatten([probe["factor"] for probe in probes])

    def losses_fn(leaves: list[Any], emitted: list[Any], copies: Params, *factors: Array) -> Array:
        parts = zip(leaves, emitted, jax.tree.unflatten(structure, factors), strict=True)
        filled = [{"leaves": own, "emitted": zeros, "factor": factor} for own, zeros, factor in parts]
        return losses_of(split.covered, filled, copies)

    leaves, emitted = ([probe[name] for probe in probes] for name in ("leaves", "emitted"))
    arguments = (leaves, emitted, tapped.copies(split.uncovered, job.num_rows))
    losses, backward = jax.vjp(losses_fn, *arguments, *slots)
    ones = jnp.ones_like(losses)
    norms, gradients = backward(ones)[1:3]

    def clip(norms: list[Any]) -> tuple[factors.Factors, Params]:
        squared = _squared_norms(coverage, norms, job)
        more = factors.NARROW_MARGIN if coverage.is_narrow else 0.0
        return tapped.clip(job, coverage, split, squared, gradients, more_margin=more)

    clipped, uncovered_sum = clip(norms)
    factors_of = _per_call(coverage, lambda layer: tapped.factors_of(layer, clipped))
    weighed = _with_last_arguments(backward, jax.tree.leaves(factors_of))
    if weighed is None:
        _, weighed = jax.vjp(losses_fn, *arguments, *jax.tree.leaves(factors_of))
    sums, norms_again = weighed(ones)[:2]
    counts = clipped.counts
    if coverage.is_narrow:
        counts &= _agree(clipped, clip(norms_again)[0])
    sums = tapped.unless_spoilt(job, coverage, sums, counts)
    covered_sum = tapped.by_layer(coverage, sums, like=split.covered)
    norm = jnp.where(counts | job.is_padding, clipped.norm, jnp.inf)
    return job.outcome(tapped.join(split, covered_sum, uncovered_sum), losses, norm)


def _squared_norms(coverage: Coverage, norms: list[Any], job: Job) -> dict[factors.Group, Array]:
    """Squared norms (B, *stack) of each layer, from its probe's cotangent."""
    return {
        factors.Group(layer.path, layer.stack): jnp.moveaxis(_layer_norm(layer, norm, job), -1, 0)
        for layer, norm in zip(coverage.layers, norms, strict=True)
    }


def _agree(used: factors.Factors, due: factors.Factors) -> Array:
    """Whether (B,) the factors that were used are those that the second pass's own norms ask for, or less.

    The two passes round 16-bit values apart. Norms have been raised by as much as is allowed here, so a row
    that agrees is within its clip norm by the very numbers that were summed.
    """

    def of_group(group: factors.Group) -> Array:
        allowed = due.factors[group] * (1 + factors.NARROW_MARGIN)
        return jnp.all((used.factors[group] <= allowed).reshape(used.norm.shape[0], -1), -1)

    return functools.reduce(jnp.logical_and, map(of_group, used.factors)) & due.counts


# ---- the first pass ---------------------------------------------------------------------------------------


def _linked(job: Job) -> bool:
    """Whether the tied matrix's two taps need each other."""
    return job.tied_norm in ("cross_term", "materialize")


def _probe_shapes(layer: Layer, job: Job) -> Any:
    scalar = jax.ShapeDtypeStruct((), rules.accumulation_dtype(layer.calls[0].outputs.dtype))
    if layer.kind != "tied":
        return scalar
    return dict.fromkeys(("embedding", "head", "cross") if _linked(job) else ("embedding", "head"), scalar)


def _norm_taps(coverage: Coverage, job: Job) -> taps.Tap:
    """Taps that emit squared norms."""

    def emit(index: int, call: capture.Call, d: Array) -> Array:
        return layers.call_squared_norm(call, coverage.layers[index].leaves, capture.record(call, d))

    def emit_of_loss(statistics: HeadStatistics, g: Array) -> tuple[Array, Array | None]:
        squared_norm = squared_norm_at(g, statistics)
        if statistics.rows is None or not _linked(job):
            return squared_norm, None
        if statistics.gradient is not None:
            return jnp.zeros_like(g), g * statistics.gradient
        return squared_norm, g * statistics.rows

    loss_heads = taps.LossHeads(
        whole_logits=lambda call: False,
        hold=lambda tied: tied and job.tied_norm == "materialize",
        emit=emit_of_loss,
    )
    links = {"cross_term": _cross_term_link(), "materialize": _materializing_link()}
    return taps.Tap(emit, tapped.tied_indices(coverage.layers), loss_heads, links.get(job.tied_norm))


def _cross_term_link() -> taps.Link:
    """The side array carries the rows of the head's gradient that the tokens name, (T, D)."""

    def embedding(call: capture.Call, d: Array, rows: Array) -> tuple[Array, Array]:
        record = capture.record(call, d)
        norm = layers.call_squared_norm(call, ("embedding",), record)
        return norm, rules.cross_term(record["d"], rows)

    def head(call: capture.Call, ids: Array, d: Array) -> tuple[Array, Array]:
        record = capture.record(call, d)
        rows = rules.head_gradient_rows(ids, record["a"], record["d"])
        return layers.call_squared_norm(call, ("embedding",), record), rows

    return taps.Link(
        side_shape=lambda call: (call.positions, call.module.features), embedding=embedding, head=head
    )


def _materializing_link() -> taps.Link:
    """The side array carries the head's gradient itself, (V, D), to which the embedding's is added."""

    def embedding(call: capture.Call, d: Array, head_gradient: Array) -> tuple[Array, Array]:
        record = capture.record(call, d)
        joint = rules.squared_norm(layers.joint_gradient(record, head_gradient))
        return joint, jnp.zeros_like(joint)

    def head(call: capture.Call, ids: Array, d: Array) -> tuple[Array, Array]:
        gradient = layers.head_gradient(capture.record(call, d))
        return jnp.zeros((), gradient.dtype), gradient

    return taps.Link(
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


def _probes(coverage: Coverage, covered: Params, job: Job) -> list[dict[str, Any]]:
    """Each layer's probe, with its factors yet unknown."""
    emitted = [tapped.zeros_for(layer, _probe_shapes(layer, job), job.num_rows) for layer in coverage.layers]
    factors = _per_call(coverage, lambda layer: _unknown(layer, job))
    leaves = [tapped.wide_leaves(layer, covered) for layer in coverage.layers]
    parts = zip(leaves, emitted, factors, strict=True)
    return [{"leaves": own, "emitted": zeros, "factor": factor} for own, zeros, factor in parts]


def _per_call(coverage: Coverage, value: Callable[[Layer], Array]) -> list[Any]:
    """A value for each layer, or one for each of its two uses; no array twice, JAX tells them by identity."""
    return [
        {use: value(layer) for use in ("embedding", "head")} if layer.kind == "tied" else value(layer)
        for layer in coverage.layers
    ]


def _unknown(layer: Layer, job: Job) -> Array:
    """In place of a layer's factors (*stack, B). NaN, so that a sum with one left in it shows it."""
    dtype = rules.accumulation_dtype(layer.calls[0].outputs.dtype)
    return jnp.full((*layer.stack, job.num_rows), jnp.nan, dtype)


def _with_last_arguments(backward: Any, values: list[Array]) -> Callable | None:
    """What `jax.vjp` returned, with other values for the last arguments, which the backward pass alone reads.

    None where it holds something made of an argument in place of the argument itself, such as a scan's slices
    where JAX runs op by op. Then a second forward pass is needed.
    """
    kept = getattr(backward, "args_res", [])
    others, last = kept[: -len(values)], kept[-len(values) :]
    if not last or not all(isinstance(argument, jax.Array) for argument in last):
        return None
    return dataclasses.replace(backward, args_res=[*others, *values])
