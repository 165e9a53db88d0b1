"""What the ghost and the book-keeping engine share: the tapped loss of a batch, and each leaf's lot.

Probes have the batch axis after the axes along which their layer is stacked, so that a scan slices them, and
collects their cotangents, without a transpose.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import partial_eval

from wtdp_jax import capture
from wtdp_jax.clipping import factors
from wtdp_jax.clipping.job import Job, Params
from wtdp_jax.coverage import Coverage, Layer
from wtdp_jax.rules import accumulation_dtype
from wtdp_jax.trees import insert, leaf_name, leaf_paths, map_with_path, merge


class Split(NamedTuple):
    """The trained leaves, apart; None in each tree where another has the leaf.

    Attributes:
        covered: a rule gives their norm.
        unused: the loss does not depend on them.
        uncovered: they are differentiated per example.
    """

    covered: Params
    unused: Params
    uncovered: Params


def split_leaves(job: Job, coverage: Coverage) -> Split:
    """Splits the trained leaves.

    Raises:
        ValueError: when leaves are uncovered and `job.uncovered` is "error".
    """
    if coverage.uncovered and job.uncovered == "error":
        listed = "; ".join(f"{path}: {why}" for path, why in coverage.uncovered.items())
        raise ValueError(f'uncovered="error" and no rule covers {listed}')

    def choose(paths: Any) -> Params:
        return map_with_path(lambda path, leaf: leaf if path in paths else None, job.trained)

    in_layers = {path for layer in coverage.layers for path in layer.leaf_paths}
    return Split(choose(in_layers), choose(coverage.unused), choose(coverage.uncovered))


def join(split: Split, covered: Params, uncovered: Params) -> Params:
    """All trained leaves again, or their sums: those of unused leaves are zeros."""
    return merge(merge(covered, uncovered), jax.tree.map(jnp.zeros_like, split.unused))


def zeros_for(layer: Layer, shapes: Any, num_rows: int) -> Any:
    """Zeros (*stack, B, ...) for a layer, from the shapes for one slice and one example."""
    leading = (*layer.stack, num_rows)
    return jax.tree.map(lambda s: jnp.zeros(leading + s.shape, s.dtype), shapes)


def confirmed(job: Job, coverage: Coverage, probes: list[Any]) -> Coverage:
    """The coverage; or no covered leaf, if the loss is another function with the probes among its params.

    A loss may read params other than through its layers: count their leaves, or sum all that have two axes.

    Args:
        job: the job.
        coverage: its coverage.
        probes: shapes and types of each layer's probe, for the whole batch.
    """
    params = merge(job.trained, job.frozen)
    keyed = zip(coverage.layers, capture.probe_keys(len(probes)), probes, strict=True)
    entries = {layer.path: {key: _of_example(layer, probe)} for layer, key, probe in keyed}
    try:
        same = _program(job, params) == _program(job, insert(params, entries))
    except Exception as error:
        return coverage.without_rules(f"loss_fn fails on extra entries in params ({type(error).__name__})")
    return coverage if same else coverage.without_rules("loss_fn reads params as a whole")


def _program(job: Job, params: Params) -> str:
    """The loss of one example, without what it does not use, as text that tells what it computes."""
    with jax.disable_jit(False):
        program = jax.make_jaxpr(lambda p, e: capture.example_loss(job.loss_fn, p, e))(params, job.example())
    used, _ = partial_eval.dce_jaxpr(program.jaxpr, True)
    # Addresses of functions, and the trees that a scan's arguments came in (from jax 0.12 on), are left out.
    return _without_trees(re.sub(r"0x[0-9a-f]+", "", str(used)))


def _without_trees(program: str) -> str:
    """A program's text without its `ft_in=(...)` and the like, whose brackets are balanced."""
    first, *others = re.split(r"\bft_\w+=(?=\()", program)
    return first + "".join(_after_brackets(text) for text in others)


def _after_brackets(text: str) -> str:
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[index + 1 :]
    return text


def _of_example(layer: Layer, probe: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes and types of a layer's probe for one example."""

    def shape(axis: int | None, leaf: Any) -> jax.ShapeDtypeStruct:
        kept = leaf.shape if axis is None else leaf.shape[:axis] + leaf.shape[axis + 1 :]
        return jax.ShapeDtypeStruct(kept, leaf.dtype)

    axes = _batch_axes(layer, probe)
    return {name: jax.tree.map(functools.partial(shape, axis), probe[name]) for name, axis in axes.items()}


def copies(leaves: Params, num_rows: int) -> Params:
    """A copy of each leaf for each example: its gradient is the per-example gradient."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_rows, *leaf.shape)), leaves)


def tapped_losses(
    job: Job, coverage: Coverage, split: Split, make_interceptor: Callable[[], capture.Interceptor]
) -> Callable[[Params, list[Any], Params], Array]:
    """The batch's losses (B,) as a function of (covered leaves, probes, copies of the uncovered leaves).

    Args:
        job: the job.
        coverage: its coverage.
        split: its trained leaves.
        make_interceptor: a new interceptor for each trace.
    """
    layers = coverage.layers

    def one(covered: Params, probes: list[Any], uncovered: Params, example: Any) -> Array:
        params = merge(merge(merge(covered, uncovered), split.unused), job.frozen)
        keyed = zip(layers, capture.probe_keys(len(layers)), probes, strict=True)
        entries = {layer.path: {key: probe} for layer, key, probe in keyed}
        return capture.example_loss(job.loss_fn, insert(params, entries), example, make_interceptor())

    def batched(covered: Params, probes: list[Any], uncovered: Params) -> Array:
        axes = [_batch_axes(*pair) for pair in zip(layers, probes, strict=True)]
        return jax.vmap(one, in_axes=(None, axes, 0, 0))(covered, probes, uncovered, job.batch)

    return batched


def _batch_axes(layer: Layer, probe: Mapping[str, Any]) -> dict[str, int | None]:
    """The batch axis of a layer's probe comes after those of its stack; the leaves in one have none."""
    return {name: None if name == "leaves" else len(layer.stack) for name in probe}


def by_layer(coverage: Coverage, sums: Sequence[Mapping[str, Array]], like: Params) -> Params:
    """Each layer's sums, by leaf name, as a tree like the covered leaves."""
    by_path = {
        path: of_layer[leaf_name(path)]
        for layer, of_layer in zip(coverage.layers, sums, strict=True)
        for path in layer.leaf_paths
    }
    return map_with_path(lambda path, _: by_path[path], like)


def wide_leaves(layer: Layer, trained: Params) -> dict[str, Array]:
    """A layer's leaves by name, in the type in which their gradients are summed."""
    by_path = leaf_paths(trained)
    leaves = {leaf_name(path): by_path[path] for path in layer.leaf_paths}
    return jax.tree.map(lambda leaf: leaf.astype(accumulation_dtype(leaf.dtype)), leaves)


def unless_spoilt(job: Job, coverage: Coverage, sums: list[Any], counts: Array) -> list[Any]:
    """Each layer's sums of a backward pass; zeros where a row has spoilt them, or none counts (B,)."""
    fine = jnp.any(counts) & jnp.all(counts | job.is_padding)
    return [
        # An embedding's sum is finite as it is, see `wtdp_jax.taps`, and its table too large to be copied.
        of_layer if layer.kind == "embed" else jax.tree.map(lambda total: jnp.where(fine, total, 0), of_layer)
        for layer, of_layer in zip(coverage.layers, sums, strict=True)
    ]


def factors_of(layer: Layer, clipped: factors.Factors) -> Array:
    """A layer's clip factors, (*stack, B)."""
    return jnp.moveaxis(clipped.factors[factors.Group(layer.path, layer.stack)], 0, -1)


def tied_indices(layers: tuple[Layer, ...]) -> frozenset[int]:
    """Which layers are embedding and head at once."""
    return frozenset(i for i, layer in enumerate(layers) if layer.kind == "tied")


def positions(coverage: Coverage) -> int:
    """At how many positions, at most, one layer was applied."""
    return max((call.positions for layer in coverage.layers for call in layer.calls), default=1)


def clip(
    job: Job,
    coverage: Coverage,
    split: Split,
    squared: Mapping[factors.Group, Array],
    gradients: Params,
    *,
    more_margin: float = 0.0,
) -> tuple[factors.Factors, Params]:
    """Clip factors, and the weighted sum of the uncovered leaves.

    Args:
        job: the job.
        coverage: its coverage.
        split: its trained leaves.
        squared: squared norms (B, *stack) of the covered layers, by group.
        gradients: per-example gradients (B, ...) of the uncovered leaves.
        more_margin: as in `wtdp_jax.clipping.factors.clip_factors`.
    """
    leaf_groups, squared = factors.groups(coverage.stacks), dict(squared)
    unused = jax.tree.map(lambda leaf: jnp.zeros((job.num_rows, *leaf.shape), leaf.dtype), split.unused)
    for more in (factors.squared_norms(gradients, leaf_groups), factors.squared_norms(unused, leaf_groups)):
        for group, values in more.items():
            squared[group] = squared[group] + values if group in squared else values
    clipped = factors.clip_factors(
        squared,
        job.is_padding,
        l2_clip_norm=job.l2_clip_norm,
        clipping=job.clipping,
        positions=positions(coverage),
        more_margin=more_margin,
    )
    return clipped, factors.weighted_sum(gradients, leaf_groups, clipped)
