"""Who reads each leaf of the params: from the traced loss of one example.

Each supported layer marks its leaves and its probe where it reads them. Then dead code is removed, and every
leaf is followed from the params through calls, casts and the slices of a scan to whatever reads it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, partial_eval

from wtdp_jax import capture
from wtdp_jax.trees import insert, leaf_paths

OTHER = -1
"""In place of a layer call's number: the reader is something else."""

# Primitives that run a program on their operands, once.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """One read of a leaf or probe.

    Attributes:
        path: the leaf's path in params.
        reader: the name that a layer gives the leaf, "kernel"; the primitive's name for another reader.
        call: number of the layer call, or `OTHER`.
        stacked: along how many leading axes the reader sees slices.
        within: which inner programs the read is in, outermost first.
        times: how often it happens: in a loop, or in lanes of a vmap that share the leaf.
        dtype: the narrowest type on its way to the reader, which may have been cast back.
        differentiated: whether the loss itself differentiates through it.
    """

    path: str
    reader: str
    call: int
    stacked: int
    within: tuple[int, ...]
    times: int
    dtype: jnp.dtype
    differentiated: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """All reads by path, and the layer calls they refer to.

    Attributes:
        by_path: reads of every leaf and probe.
        calls: the calls by number.
        seen: (number of probe, kind) -> calls of that layer, with those whose outputs the loss does not use.
        failure: why the params could not be marked, if so.
    """

    by_path: Mapping[str, list[Read]]
    calls: Sequence[capture.Call] = ()
    seen: Mapping[tuple[int, str], int] = dataclasses.field(default_factory=dict)
    failure: str = ""

    def of(self, path: str) -> list[Read]:
        """Reads of a leaf or probe, in program order."""
        return sorted(self.by_path.get(path, []), key=lambda read: read.call)


def trace_reads(loss_fn: Callable, params: Any, probes: Mapping[str, dict], example: Any) -> Reads:
    """Traces the loss of one example.

    Args:
        loss_fn: ``loss_fn(params, batch) -> losses (B,)``.
        params: nested dicts of arrays or `jax.ShapeDtypeStruct`.
        probes: module path -> {probe key: shape}.
        example: leaves without a batch axis.

    Raises:
        ValueError: when loss_fn does not return one loss an example; and whatever loss_fn raises.
    """
    mark = _Mark()
    inputs = (insert(params, dict(probes)), example)

    def loss(params: Any, example: Any) -> jax.Array:
        return capture.example_loss(loss_fn, params, example, mark)

    try:
        with jax.disable_jit(False):  # op by op, a scan would be traced as its unrolled steps
            program = jax.make_jaxpr(loss)(*inputs).jaxpr
    except Exception as error:
        jax.eval_shape(loss, params, example)  # an error on the caller's own params is the one to show
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Reads(by_path={}, failure=f"loss_fn does not run with extra entries in params ({message})")
    program, used = partial_eval.dce_jaxpr(program, True)
    in_params = [(prefix == "0", path) for prefix, _, path in (p.partition("/") for p in leaf_paths(inputs))]
    by_path: dict[str, list[Read]] = {path: [] for is_param, path in in_params if is_param}
    sources = [
        _Source(path=path, dtype=leaf.dtype) if is_param else None
        for (is_param, path), leaf, keep in zip(in_params, jax.tree.leaves(inputs), used, strict=True)
        if keep
    ]
    for read in _walk(program, sources, ()):
        by_path[read.path].append(read)
    return Reads(by_path=by_path, calls=mark.calls, seen=mark.seen)


# ---- marks ------------------------------------------------------------------------------------------------

# mark(leaf, inputs, probe) -> the leaf. It is traced and never run, so it needs no lowering.
_mark = Primitive("wtdp_mark")
_mark.def_abstract_eval(lambda marked, inputs, probe, **_: marked)


def _batch_mark(args: Sequence, axes: Sequence, *, lanes: int, **settings: Any) -> tuple[Any, Any]:
    """Lanes of an inner vmap that share a leaf sum their gradients before any norm could be taken."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    leaf_axis, _, probe_axis = axes
    if leaf_axis is None or probe_axis is None:
        lanes *= size
    elif leaf_axis != probe_axis:  # lanes along an axis that is not a leading one of the leaf: no rule for it
        lanes *= max(size, 2)
    return _mark.bind(*args, lanes=lanes, **settings), leaf_axis


def _differentiate_mark(primals: Sequence, tangents: Sequence, **settings: Any) -> tuple[Any, Any]:
    """An inner differentiation makes a second use of the leaf that no tap sees."""
    return _mark.bind(*primals, **settings | {"differentiated": True}), tangents[0]


batching.primitive_batchers[_mark] = _batch_mark
ad.primitive_jvps[_mark] = _differentiate_mark


class _Mark(capture.Interceptor):
    """Marks each leaf of each supported layer that has a probe, where the layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[capture.Call] = []
        self.seen: Counter = Counter()

    def layer(
        self,
        kind: capture.Kind,
        module: nn.Module,
        args: tuple,
        params: Mapping,
        probe: capture.Probe,
        next_fun: Callable,
    ) -> jax.Array:
        """The layer's output, from marked leaves."""
        call = len(self.calls)
        self.seen[probe.layer, kind] += 1
        marked = {
            name: _mark.bind(
                params[name],
                jnp.asarray(args[0]),
                probe.value,
                call=call,
                reader=name,
                rank=rank,
                lanes=1,
                differentiated=False,
            )
            for name, rank in capture.LEAF_RANKS[kind].items()
            if name in params
        }
        y = self.run(kind, module, args, marked)
        self.calls.append(capture.describe(kind, module, args[0], y, params))
        return y


# ---- the walk ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """What a variable is: a leaf, or a slice along its first axes, in a program that runs some times."""

    path: str
    dtype: jnp.dtype
    stacked: int = 0
    times: int = 1

    def cast_to(self, dtype: jnp.dtype) -> "_Source":
        return dataclasses.replace(self, dtype=min(self.dtype, dtype, key=lambda d: d.itemsize))

    def read_by(self, reader: str, within: tuple[int, ...]) -> Read:
        return Read(
            path=self.path,
            reader=reader,
            call=OTHER,
            stacked=self.stacked,
            within=within,
            times=self.times,
            dtype=self.dtype,
        )


def _walk(program: Any, sources: Sequence[_Source | None], within: tuple[int, ...]) -> list[Read]:
    """Every read, in a program and in those it calls, of the leaves that its inputs are."""
    known = {v: s for v, s in zip(program.invars, sources, strict=True) if s is not None}
    reads: list[Read] = []
    for eqn in program.eqns:
        operands = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        present = [source for source in operands if source is not None]
        name = eqn.primitive.name
        if not present:
            continue
        if name == "convert_element_type" and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            known[eqn.outvars[0]] = present[0].cast_to(eqn.outvars[0].aval.dtype)
        elif eqn.primitive is _mark:
            reads += _mark_reads(eqn, operands, within)
        elif name == "scan":
            reads += _walk(_inner(eqn), _scan_sources(eqn, operands), (*within, id(eqn)))
        elif name in _CALLS:
            reads += _walk(_inner(eqn), operands, (*within, id(eqn)))
        else:
            reads += [source.read_by(name, within) for source in present]
    results = [known[v] for v in program.outvars if not isinstance(v, Literal) and v in known]
    return reads + [source.read_by("an inner function's result", within) for source in results]


def _inner(eqn: Any) -> Any:
    """The program that a call or a loop runs."""
    program = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return getattr(program, "jaxpr", program)


def _scan_sources(eqn: Any, operands: Sequence[_Source | None]) -> list[_Source | None]:
    """What the inputs of a scan's body are: what has an axis less there is sliced, the rest read each time.

    A carry counts as read each time too, though only the first step sees the leaf itself; either way no rule
    covers it.
    """

    def inside(source: _Source | None, operand: Any, variable: Any) -> _Source | None:
        if source is None:
            return None
        if operand.aval.ndim > variable.aval.ndim:
            return dataclasses.replace(source, stacked=source.stacked + 1)
        return dataclasses.replace(source, times=source.times * eqn.params["length"])

    return [inside(*each) for each in zip(operands, eqn.invars, _inner(eqn).invars, strict=True)]


def _mark_reads(eqn: Any, operands: Sequence[_Source | None], within: tuple[int, ...]) -> list[Read]:
    """A mark's reads of its leaf and its probe; a leaf that is the layer's input is read otherwise."""
    leaf, inputs, probe = operands
    reads = [inputs.read_by("a layer, as its input", within)] if inputs else []
    for source, variable, rank in ((leaf, eqn.invars[0], eqn.params["rank"]), (probe, eqn.invars[2], 0)):
        if source:
            reads.append(
                Read(
                    path=source.path,
                    reader=eqn.params["reader"],
                    call=eqn.params["call"],
                    stacked=source.stacked + variable.aval.ndim - rank,
                    within=within,
                    times=source.times * eqn.params["lanes"],
                    dtype=source.dtype,
                    differentiated=eqn.params["differentiated"],
                )
            )
    return reads
