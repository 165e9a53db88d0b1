"""Which leaves the rules cover: proved on the traced loss, not trusted.

A rule gives the right norm for a leaf only if the leaf is read by exactly one call of one layer, as it is,
and by nothing else. An interceptor alone cannot know: it does not see ``wte.embedding`` used directly, a
regularizer in the loss, a weight scaled before it is used; it sees a scanned layer once or twice. So every
read of every leaf is found in the traced program, see `wtdp_jax.reads`. A leaf is covered if it has one read,
by a layer (embedding and head: two), which no loop repeats, no inner vmap shares and no inner differentiation
passes.

What is not covered is differentiated per example, which is exact and costs memory, or is refused.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from wtdp_jax import capture, rules
from wtdp_jax.reads import OTHER, Read, Reads, trace_reads
from wtdp_jax.trees import leaf_name, leaf_paths, merge, parent

PROBE_DTYPE = jnp.dtype(jnp.float32)
"""Type of the probes that are traced here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A module whose leaves a rule covers.

    Attributes:
        path: the module's path in params, "h/c_fc"; "" for a module that is the whole model.
        kind: its call's, "dense", "norm", "embed", "attend" (an embedding used as head only) and, for heads
            that give a loss, "dense_loss" and "attend_loss"; or "tied" (as embedding and as head).
        leaves: names of its trainable leaves, "kernel" and the like.
        stack: shape of the leading axes along which the module is stacked, () or (L,) under nn.scan.
        calls: its call, or embedding's and head's, for one slice and one example.
    """

    path: str
    kind: str
    leaves: tuple[str, ...]
    stack: tuple[int, ...]
    calls: tuple[capture.Call, ...]

    @property
    def leaf_paths(self) -> tuple[str, ...]:
        """Paths of its leaves in params."""
        return tuple(f"{self.path}/{name}".lstrip("/") for name in self.leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """What `trace_coverage` found; as text, a table with a line a leaf.

    Attributes:
        layers: the covered modules.
        unused: paths of leaves that the loss does not depend on; their gradient is 0.
        uncovered: path -> why no rule covers the leaf.
        stacks: path -> shape of the leading axes along which a leaf is stacked, for all trainable leaves.
        uses: path -> how often the leaf is read, "2" or "1, 3 times".
        leaves: path -> shape and dtype, of all trainable leaves.
    """

    layers: tuple[Layer, ...]
    unused: tuple[str, ...]
    uncovered: Mapping[str, str]
    stacks: Mapping[str, tuple[int, ...]]
    uses: Mapping[str, str]
    leaves: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def is_narrow(self) -> bool:
        """Whether a covered layer computes in less than float32."""
        calls = [call for layer in self.layers for call in layer.calls]
        return any(jnp.finfo(call.outputs.dtype).bits < 32 for call in calls)

    @property
    def bytes_materialized(self) -> int:
        """Bytes of per-example gradients that are held for each example of a batch."""
        return sum(self._bytes(path) for path in self.uncovered)

    def without_rules(self, reason: str) -> "Coverage":
        """The same, with no leaf covered."""
        covered = [path for layer in self.layers for path in layer.leaf_paths]
        uncovered = {**self.uncovered, **dict.fromkeys(covered, reason)}
        return dataclasses.replace(self, layers=(), uncovered=uncovered)

    def __str__(self) -> str:
        """A table: leaf, rule, uses, bytes materialized an example."""
        rows = [("leaf", "rule", "uses", "bytes materialized an example")]
        for path in self.leaves:
            held = self._bytes(path) if path in self.uncovered else 0
            rows.append((path, self._rule(path), self.uses[path], f"{held:,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in padded)

    def _rule(self, path: str) -> str:
        if path in self.uncovered:
            return f"none: {self.uncovered[path]}"
        return next((layer.kind for layer in self.layers if path in layer.leaf_paths), "unused")

    def _bytes(self, path: str) -> int:
        return math.prod(self.leaves[path].shape) * jnp.dtype(self.leaves[path].dtype).itemsize


def trace_coverage(loss_fn: Callable, trained: Any, frozen: Any, example: Any) -> Coverage:
    """Traces the loss of one example and says which leaves the rules cover.

    Args:
        loss_fn: ``loss_fn(params, batch) -> losses (B,)``.
        trained: the leaves that are differentiated; None in place of the frozen ones.
        frozen: the others; None in place of the trained ones.
        example: one example, leaves without a batch axis; arrays or `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: when loss_fn does not return one loss an example.
    """
    params, leaves = merge(trained, frozen), leaf_paths(trained)
    modules = list(dict.fromkeys(parent(path) for path in leaves))
    keys = capture.probe_keys(len(modules))
    probes = {module: {key: _probe(module, params)} for module, key in zip(modules, keys, strict=True)}
    reads = trace_reads(loss_fn, params, probes, example)
    unused = () if reads.failure else tuple(path for path in leaves if not reads.of(path))
    layers: list[Layer] = []
    uncovered: dict[str, str] = {}
    for index, module in enumerate(modules):
        # A leaf that the loss does not depend on says nothing about its module.
        own = {p: leaf for p, leaf in leaves.items() if parent(p) == module and p not in unused}
        probe = f"{module}/{keys[index]}".lstrip("/")
        reasons = _objections(own, reads, probe, index)
        if not reasons and own:
            layers.append(_layer(module, own, reads))
        uncovered |= reasons
    return Coverage(
        layers=tuple(layers),
        unused=unused,
        uncovered=uncovered,
        stacks={path: tuple(leaf.shape[: _stacked(reads.of(path))]) for path, leaf in leaves.items()},
        uses={path: _describe_uses(reads.of(path)) for path in leaves},
        leaves={path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()},
    )


def _probe(module: str, params: Any) -> jax.ShapeDtypeStruct:
    """A scalar for each slice of a module; the ranks of its leaves say along which axes it is stacked."""
    ranks = {name: rank for leaves in capture.LEAF_RANKS.values() for name, rank in leaves.items()}
    own = {leaf_name(path): leaf for path, leaf in leaf_paths(params).items() if parent(path) == module}
    stacks = [leaf.shape[: -ranks[name]] for name, leaf in own.items() if name in ranks]
    return jax.ShapeDtypeStruct(max(stacks, key=len, default=()), PROBE_DTYPE)


def _layer(module: str, leaves: Mapping[str, Any], reads: Reads) -> Layer:
    """The covered layer that a module without objections is."""
    calls = tuple(reads.calls[n] for n in sorted({read.call for path in leaves for read in reads.of(path)}))
    path, leaf = next(iter(leaves.items()))
    return Layer(
        path=module,
        kind="tied" if len(calls) == 2 else calls[0].kind,
        leaves=tuple(leaf_name(path) for path in leaves),
        stack=tuple(leaf.shape[: _stacked(reads.of(path))]),
        calls=calls,
    )


def _objections(leaves: Mapping[str, Any], reads: Reads, probe: str, index: int) -> dict[str, str]:
    """Why each of a module's leaves is not covered; empty if all are, since they share one probe."""
    if reads.failure:
        return dict.fromkeys(leaves, reads.failure)
    of_probe = reads.of(probe)
    objections = {path: _objection(path, leaf.dtype, reads, of_probe, index) for path, leaf in leaves.items()}
    reasons = {path: why for path, why in objections.items() if why}
    if not reasons and len({read.stacked for path in (*leaves, probe) for read in reads.of(path)}) > 1:
        reasons = dict.fromkeys(leaves, "the module's leaves are not stacked alike")
    return {path: reasons.get(path, "its module has an uncovered leaf") for path in leaves} if reasons else {}


def _objection(path: str, dtype: jnp.dtype, reads: Reads, of_probe: list[Read], index: int) -> str | None:
    """Why a leaf of a type is not covered, or None."""
    own = reads.of(path)
    others = [read.reader for read in own if read.call == OTHER]
    if others:
        return f"read by {others[0]}" + (" besides a layer" if len(others) < len(own) else "")
    if {read.call for read in own} != {read.call for read in of_probe}:
        return "its layer is not its module's, or loss_fn changes params"
    if narrowed := _narrowed(dtype, own, of_probe, reads):
        return f"cast to {narrowed} on its way to its layer"
    if any(read.reader != leaf_name(path) for read in own):
        return "its layer knows it by another name"
    if any(read.times > 1 for read in own):
        return "one layer reads it several times"
    if any(read.differentiated for read in own):
        return "the loss differentiates through its layer"
    if len(own) == 1:
        return None
    kinds = [reads.calls[read.call].kind for read in own]
    if kinds[0] != "embed" or kinds[1:] not in (["attend"], ["attend_loss"]):
        return f"{len(own)} layer calls read it"
    # The taps link the latest embedding to the head; a call whose output is unused would take its place.
    if any(reads.seen[index, kind] > 1 for kind in kinds):
        return "embedding or head is called again where its output is not used"
    embed, attend = own
    if attend.within[: len(embed.within)] != embed.within:
        return "embedding and head stand in different inner functions"
    return None


def _narrowed(dtype: jnp.dtype, own: list[Read], of_probe: list[Read], reads: Reads) -> jnp.dtype | None:
    """The type that a leaf or its probe passes through and that cannot hold what comes back through it."""
    outputs = [rules.accumulation_dtype(reads.calls[read.call].outputs.dtype) for read in own]
    widest = max(outputs, key=lambda dtype: dtype.itemsize)
    needed = {dtype.itemsize for dtype in (widest, dtype)}
    through = [read.dtype for read in own if read.dtype.itemsize < min(needed)]
    # The probe's type here is a stand-in; an engine's own is cast like it.
    through += [read.dtype for read in of_probe if read.dtype.itemsize < PROBE_DTYPE.itemsize]
    return through[0] if through else None


def _stacked(reads: list[Read]) -> int:
    """Along how many leading axes every reader takes slices of the leaf."""
    return min((read.stacked for read in reads), default=0)


def _describe_uses(reads: list[Read]) -> str:
    times = max((read.times for read in reads), default=1)
    return f"{len(reads)}, {times} times" if times > 1 else str(len(reads))
