"""Ghost clipping: one pass for the norms, a second for the clipped sum (Li et al. 2022, arXiv 2110.05679).

Both backward passes share one forward pass and send the same cotangents back. The first emits squared norms
and forms no weight gradient; in the second each layer weighs its own gradient by the example's factor.
Weighing the losses instead would round other numbers than those whose norm was taken: in an ill-conditioned
model the sum exceeded the clip norm by 1e-4 of it.

The factors are known after the first pass only, but each layer's factor is an argument of the loss that is
read by the backward pass alone. What `jax.vjp` returns keeps such arguments by themselves, so the second pass
is the first one's with the true factors in their place.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax import capture, rules, taps
from wtdp_jax.clipping import factors, layers, rows, tapped
from wtdp_jax.clipping.job import Job, Outcome, Params
from wtdp_jax.coverage import Coverage, Layer
from wtdp_jax.head_rules import HeadStatistics
from wtdp_jax.trees import leaf_name, leaf_paths


class _State(NamedTuple):
    """What the rounds of `ghost` hand on."""

    round: Array
    broken: Array
    outcome: Outcome


def ghost(job: Job) -> Outcome:
    """The clipped sum by two backward passes.

    A row whose gradient is not finite would spoil the second pass, whatever its factor: 0 x NaN is NaN. Only
    the first pass tells which rows these are. So if there are any, both run once more with them replaced.
    """
    coverage = coverage_of(job)
    _refuse_narrow_layers(coverage)

    def unfinished(state: _State) -> Array:
        good = ~(job.is_padding | state.broken)
        return (state.round == 0) | ((state.round == 1) & jnp.any(state.broken) & jnp.any(good))

    def next_round(state: _State) -> _State:
        left_out = job.is_padding | state.broken
        batch = rows.replace(job.batch, left_out)
        outcome = _two_passes(dataclasses.replace(job, batch=batch, is_padding=left_out), coverage)
        first = state.round == 0
        return _State(
            round=state.round + 1,
            broken=jnp.where(first, jnp.isinf(outcome.norm), state.broken),
            outcome=Outcome(
                clipped_sum=outcome.clipped_sum,
                loss=jnp.where(first, outcome.loss, state.outcome.loss),
                norm=jnp.where(first, outcome.norm, state.outcome.norm),
            ),
        )

    start = _State(
        round=jnp.zeros((), jnp.int32),
        broken=jnp.zeros(job.num_rows, bool),
        outcome=job.zero_outcome(),
    )
    return jax.lax.while_loop(unfinished, next_round, start).outcome


def coverage_of(job: Job) -> Coverage:
    """Which leaves the rules cover."""
    coverage = job.coverage()
    probes = jax.eval_shape(lambda trained: _probes(coverage, trained, job), job.trained)
    return tapped.confirmed(job, coverage, probes)


def _refuse_narrow_layers(coverage: Coverage) -> None:
    """In bfloat16 the passes differ by its rounding, and norms and sums are rounded to it: no bound holds."""
    for layer in coverage.layers:
        leaves = [coverage.leaves[path] for path in layer.leaf_paths]
        for array in (*leaves, *(call.outputs for call in layer.calls)):
            if jnp.finfo(array.dtype).bits < 32:
                raise ValueError(
                    f'engine "ghost" needs layers in float32 or wider, got {layer.path} in {array.dtype}: '
                    'use engine "bookkeeping"'
                )


def _two_passes(job: Job, coverage: Coverage) -> Outcome:
    """One round: zeros for the sum unless every row that is not padding has a finite gradient."""
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

    squared = {
        factors.Group(layer.path, layer.stack): jnp.moveaxis(_layer_norm(layer, norm, job), -1, 0)
        for layer, norm in zip(coverage.layers, norms, strict=True)
    }
    clipped, uncovered_sum = tapped.clip(job, coverage, split, squared, gradients)
    factors_of = _per_call(coverage, lambda layer: tapped.factors_of(layer, clipped))
    weighed = _with_last_arguments(backward, jax.tree.leaves(factors_of))
    if weighed is None:
        _, weighed = jax.vjp(losses_fn, *arguments, *jax.tree.leaves(factors_of))
    fine = jnp.any(clipped.counts) & jnp.all(clipped.counts | job.is_padding)
    sums = [
        # An embedding's sum is finite as it is, see `wtdp_jax.taps`, and its table too large to be copied.
        of_layer if layer.kind == "embed" else jax.tree.map(lambda total: jnp.where(fine, total, 0), of_layer)
        for layer, of_layer in zip(coverage.layers, weighed(ones)[0], strict=True)
    ]
    covered_sum = tapped.by_layer(coverage, sums, like=split.covered)
    return job.outcome(tapped.join(split, covered_sum, uncovered_sum), losses, clipped.norm)


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
        squared_norm = jnp.square(g) * statistics.squared_norm
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
    emitted = tapped.zeros_for(coverage.layers, lambda layer: _probe_shapes(layer, job), job.num_rows)
    factors = _per_call(coverage, lambda layer: _unknown(layer, job))
    by_path = leaf_paths(covered)
    leaves = [{leaf_name(path): by_path[path] for path in layer.leaf_paths} for layer in coverage.layers]
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
