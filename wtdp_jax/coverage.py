"""Which leaves the rules cover: proved on the traced loss, not trusted.

A rule gives the right norm for a leaf only if the leaf is read by exactly one call of one layer, as it is, and by
nothing else. An interceptor alone cannot know: it does not see ``wte.embedding`` used directly, a regularizer in
the loss, a weight scaled before it is used; it sees a scanned layer once or twice. So the loss is traced for
one example, each supported layer marks its leaves and its probe where it reads them, dead code is removed, and
every read of every leaf in the program is followed from the params: through calls, slices of a scan and casts
to a mark, or to anything else. A leaf is covered if it has one read, a mark (embedding and head: two), which no
loop repeats, no inner vmap shares and no inner differentiation passes.

What is not covered is differentiated per example, which is exact and costs memory, or is refused.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, partial_eval

from wtdp_jax import capture
from wtdp_jax.trees import insert, leaf_paths, merge, parent

Params = Any
Example = Any
LossFn = Callable[[Params, Any], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A module whose leaves a rule covers.

    Attributes:
        path: the module's path in params, "h/c_fc"; "" for a module that is the whole model.
        kind: "dense", "norm", "embed", "head" (an Embed used as head only) or "tied" (embedding and head).
        leaves: names of its trainable leaves, {"kernel", "bias"} and the like.
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
        uses: path -> how often layers read the leaf, as "2" or "1 in a loop of 3".
        shapes: path -> shape, of all trainable leaves.
        itemsize: path -> bytes an entry.
    """

    layers: tuple[Layer, ...]
    unused: tuple[str, ...]
    uncovered: Mapping[str, str]
    stacks: Mapping[str, tuple[int, ...]]
    uses: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    itemsize: Mapping[str, int]

    @property
    def bytes_materialized(self) -> int:
        """Bytes of per-example gradients held for each example of a batch."""
        return sum(int(np.prod(self.shapes[p], dtype=int)) * self.itemsize[p] for p in self.uncovered)

    def __str__(self) -> str:
        """A table: leaf, rule, uses, bytes materialized an example."""
        rule = {path: layer.kind for layer in self.layers for path in layer.leaf_paths}
        rows = [("leaf", "rule", "uses", "bytes materialized an example")]
        for path, shape in self.shapes.items():
            held = int(np.prod(shape, dtype=int)) * self.itemsize[path] if path in self.uncovered else 0
            how = "unused, 0" if path in self.unused else rule.get(path) or f"none: {self.uncovered[path]}"
            rows.append((path, how, self.uses[path], f"{held:,}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def trace_coverage(loss_fn: LossFn, trainable: Params, frozen: Params, example: Example) -> Coverage:
    """Traces the loss of one example and says which leaves the rules cover.

    Args:
        loss_fn: ``loss_fn(params, batch) -> losses (B,)``.
        trainable: the leaves that are differentiated; None in place of the frozen ones.
        frozen: the others; None in place of the trainable ones.
        example: one example, leaves without a batch axis; arrays or `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: when loss_fn does not return one loss an example.
    """
    params, leaves = merge(trainable, frozen), leaf_paths(trainable)
    modules = list(dict.fromkeys(parent(path) for path in leaves))
    probes = {m: {capture.probe_key(i): _probe(m, params)} for i, m in enumerate(modules)}
    reads, calls, failure = _trace(loss_fn, params, probes, example)
    covered: dict[str, Layer] = {}
    reasons: dict[str, str] = {}
    for index, module in enumerate(modules):
        probe = f"{module}/{capture.probe_key(index)}".lstrip("/")
        verdict = _judge(module, leaves, reads, reads.get(probe, []), calls)
        if isinstance(verdict, Layer):
            covered[module] = verdict
        else:
            reasons |= {path: failure or why for path, why in verdict.items()}
    unused = tuple(path for path in leaves if not failure and not reads[path])
    return Coverage(
        layers=tuple(covered.values()),
        unused=unused,
        uncovered={path: why for path, why in reasons.items() if path not in unused},
        stacks={path: leaf.shape[: _stacked_axes(reads.get(path, []))] for path, leaf in leaves.items()},
        uses={path: _describe_uses(reads.get(path, [])) for path in leaves},
        shapes={path: leaf.shape for path, leaf in leaves.items()},
        itemsize={path: jnp.dtype(leaf.dtype).itemsize for path, leaf in leaves.items()},
    )


# ---- marks ------------------------------------------------------------------------------------------------

# mark(leaf, inputs, probe) -> the leaf. It is traced and never run, so it needs no lowering.
_mark = Primitive("wtdp_mark")
_mark.def_abstract_eval(lambda marked, inputs, probe, **_: marked)


def _batch_mark(args: Sequence, axes: Sequence, *, lanes: int, **params: Any) -> tuple[Any, Any]:
    """An inner vmap that gives its lanes one leaf sums their gradients before any norm is taken."""
    sizes = [x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None]
    shared = axes[0] is None or axes[2] is None
    return _mark.bind(*args, lanes=lanes * sizes[0] if shared else lanes, **params), axes[0]


def _differentiate_mark(primals: Sequence, tangents: Sequence, **params: Any) -> tuple[Any, Any]:
    """An inner differentiation makes a second use of the leaf that no tap sees."""
    return _mark.bind(*primals, **params | {"differentiated": True}), tangents[0]


batching.primitive_batchers[_mark] = _batch_mark
ad.primitive_jvps[_mark] = _differentiate_mark


class _Mark(capture.Interceptor):
    """Marks each leaf of each supported layer with a probe, where the layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[capture.Call] = []

    def layer(self, kind, module, x, params, index, next_fun):  # noqa: D102
        if index is None:
            return next_fun(x)
        probe, number = params[capture.probe_key(index)], len(self.calls)
        marked = {
            name: _mark.bind(params[name], jnp.asarray(x), probe,
                             call=number, leaf=name, rank=rank, lanes=1, differentiated=False)
            for name, rank in capture.LEAF_RANKS[kind].items() if name in params
        }  # fmt: skip
        y = self.run(kind, module, x, marked)
        self.calls.append(capture.describe(kind, module, x, y))
        return y


def _probe(module: str, params: Params) -> jax.ShapeDtypeStruct:
    """A scalar probe for each slice of a module, judged by the rank of its largest leaf."""
    ranks = {name: rank for leaves in capture.LEAF_RANKS.values() for name, rank in leaves.items()}
    names = {path: path.rpartition("/")[2] for path in leaf_paths(params) if parent(path) == module}
    stacks = [leaf_paths(params)[p].shape[: -ranks[name]] for p, name in names.items() if name in ranks]
    return jax.ShapeDtypeStruct(max(stacks, key=len, default=()), jnp.float32)


# ---- reads ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """A variable that is a leaf, or a slice of it along its first `stacked` axes, in a body run `repeats` times."""

    path: str
    stacked: int = 0
    repeats: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read:
    """One read of a leaf or probe: by a mark, or, with call None, by the primitive named `leaf`."""

    source: _Source
    call: int | None
    leaf: str
    stacked: int
    within: tuple[int, ...]
    lanes: int = 1
    differentiated: bool = False


_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}


def _trace(
    loss_fn: LossFn, params: Params, probes: Mapping[str, dict], example: Example
) -> tuple[dict[str, list[_Read]], list[capture.Call], str]:
    """All reads by path, the calls that marks refer to, and why no leaf can be covered, if so."""
    mark = _Mark()

    def loss(params: Params, example: Example) -> jax.Array:
        return capture.example_loss(loss_fn, params, example, mark)

    failure = ""
    try:
        with jax.disable_jit(False):  # op by op, a scan would be traced as its unrolled steps
            jaxpr = jax.make_jaxpr(loss)(insert(params, dict(probes)), example)
    except Exception as error:
        jax.eval_shape(loss, params, example)  # if it fails on the caller's own params, that is the error to show
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {}, [], f"loss_fn does not run with extra entries in params ({message})"
    inputs = leaf_paths((insert(params, dict(probes)), example))
    body, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, True)
    paths = [path for path, keep in zip(inputs, used, strict=True) if keep]
    sources = [_Source(path=p.partition("/")[2]) if p.startswith("0/") else None for p in paths]
    reads: dict[str, list[_Read]] = {path.partition("/")[2]: [] for path in inputs if path.startswith("0/")}
    for read in _walk(body, sources, ()):
        reads[read.source.path].append(read)
    return reads, mark.calls, failure


def _walk(jaxpr: Any, sources: Sequence[_Source | None], within: tuple[int, ...]) -> list[_Read]:
    """Every read, in a program and the programs it calls, of the leaves that its inputs are."""
    known = {v: s for v, s in zip(jaxpr.invars, sources, strict=True) if s is not None}
    reads: list[_Read] = []
    for eqn in jaxpr.eqns:
        operands = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        if not any(operands):
            continue
        name = eqn.primitive.name
        if name == "convert_element_type" and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            known[eqn.outvars[0]] = operands[0]  # type: ignore[assignment]
        elif eqn.primitive is _mark:
            reads += _mark_reads(eqn, operands, within)
        elif name == "scan":
            slices, body = _scan_sources(eqn, operands), eqn.params["jaxpr"].jaxpr
            carried = range(eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"])
            reads += [_other(operands[i], name, within) for i in carried if operands[i]]  # type: ignore[arg-type]
            reads += _walk(body, slices, (*within, id(eqn)))
        elif name in _CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            reads += _walk(getattr(inner, "jaxpr", inner), operands, (*within, id(eqn)))
        else:
            reads += [_other(source, name, within) for source in operands if source]
    outputs = [known[v] for v in jaxpr.outvars if not isinstance(v, Literal) and v in known]
    return reads + [_other(source, "a result", within) for source in outputs]


def _scan_sources(eqn: Any, operands: Sequence[_Source | None]) -> list[_Source | None]:
    """What the inputs of a scan's body are: constants are read each time, the scanned are sliced."""
    constants, carry, length = (eqn.params[k] for k in ("num_consts", "num_carry", "length"))

    def inner(position: int, source: _Source | None) -> _Source | None:
        if source is None or constants <= position < constants + carry:
            return None
        if position < constants:
            return dataclasses.replace(source, repeats=source.repeats * length)
        return dataclasses.replace(source, stacked=source.stacked + 1)

    return [inner(position, source) for position, source in enumerate(operands)]


def _mark_reads(eqn: Any, operands: Sequence[_Source | None], within: tuple[int, ...]) -> list[_Read]:
    """A mark's reads of its leaf and of its probe; a leaf that only an inner vmap's input is counts as other."""
    leaf, inputs, probe = operands
    rank = eqn.params["rank"]
    reads = [_other(inputs, "a layer, as its input", within)] if inputs else []
    for source, variable, base in ((leaf, eqn.invars[0], rank), (probe, eqn.invars[2], 0)):
        if source:
            reads.append(
                _Read(
                    source=source,
                    call=eqn.params["call"],
                    leaf=eqn.params["leaf"],
                    stacked=source.stacked + variable.aval.ndim - base,
                    within=within,
                    lanes=eqn.params["lanes"],
                    differentiated=eqn.params["differentiated"],
                )
            )
    return reads


def _other(source: _Source, name: str, within: tuple[int, ...]) -> _Read:
    return _Read(source=source, call=None, leaf=name, stacked=source.stacked, within=within)


# ---- verdicts ---------------------------------------------------------------------------------------------


def _judge(
    module: str,
    trainable: Mapping[str, Any],
    reads: Mapping[str, list[_Read]],
    probe_reads: list[_Read],
    calls: list[capture.Call],
) -> Layer | dict[str, str]:
    """The covered layer that a module is, or why each of its leaves is not covered."""
    # A leaf that the loss does not depend on has no gradient, and says nothing about its module.
    paths = [path for path in trainable if parent(path) == module and reads.get(path, [""])]
    if not paths:
        return {}
    reasons = {path: why for path in paths if (why := _objection(path, reads.get(path, []), probe_reads, calls))}
    if reasons:
        return {path: reasons.get(path, "its module has an uncovered leaf") for path in paths}
    numbers = sorted({read.call for path in paths for read in reads[path]})  # type: ignore[type-var]
    kinds = tuple(calls[n].kind for n in numbers)
    stacked = {read.stacked for path in paths for read in (*reads[path], *probe_reads)}
    if len(stacked) > 1 or any(r.call not in numbers or r.differentiated for r in probe_reads):
        return {path: "its leaves are not sliced alike" for path in paths}
    return Layer(
        path=module,
        kind={("embed", "attend"): "tied", ("attend",): "head"}.get(kinds, kinds[0]),  # type: ignore[call-overload]
        leaves=tuple(path.rpartition("/")[2] for path in paths),
        stack=tuple(trainable[paths[0]].shape[: stacked.pop()]),
        calls=tuple(calls[n] for n in numbers),
    )


def _objection(
    path: str, reads: list[_Read], probe_reads: list[_Read], calls: list[capture.Call]
) -> str | None:
    """Why the leaf is not covered, or None."""
    others = [read.leaf for read in reads if read.call is None]
    if others:
        return f"read by {others[0]}" + (" besides a layer" if len(others) < len(reads) else "")
    probed = {read.call for read in probe_reads}
    if any(read.call not in probed or read.leaf != path.rpartition("/")[2] for read in reads):
        return "read by another module's layer"
    if any(read.call is None for read in probe_reads):
        return "loss_fn reads all entries of params"
    if any(read.source.repeats > 1 or read.lanes > 1 for read in reads):
        return "one layer reads it several times"
    if any(read.differentiated for read in reads):
        return "the loss differentiates through its layer"
    kinds = [calls[read.call].kind for read in sorted(reads, key=lambda read: read.call)]  # type: ignore
    if len(reads) == 1:
        return None
    if kinds != ["embed", "attend"]:
        return f"read by {len(reads)} layer calls"
    embed, attend = sorted(reads, key=lambda read: read.call)  # type: ignore[arg-type,return-value]
    if attend.within[: len(embed.within)] != embed.within:
        return "embedding and head stand in different inner functions"
    return None


def _stacked_axes(reads: list[_Read]) -> int:
    """Along how many leading axes every reader takes slices of the leaf."""
    return min((read.stacked for read in reads), default=0)


def _describe_uses(reads: list[_Read]) -> str:
    repeats = max((read.source.repeats * read.lanes for read in reads), default=1)
    return str(len(reads)) + (f" in a loop of {repeats}" if repeats > 1 else "")
