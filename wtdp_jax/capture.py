"""Method interceptors that see the activations and backprops of a plain Flax Linen model's layers.

Dimension key: T positions, I/O input and output features, D width, V vocabulary.

The model holds no DP code. While a loss is traced for one example, `nn.intercept_methods` puts an identity
`jax.custom_vjp`, a tap, on the OUTPUT of each covered layer. Forward, the layer is untouched. Backward, the
tap passes the cotangent d on unchanged and emits something made of the layer's input and d as the cotangent
of a zero array, the layer's probe.

Probes travel inside the params dict, under a key beside the layer's own leaves. So they reach the layer
through `nn.scan`, `nn.remat`, `nn.vmap` or a user's own slicing, sliced along with the leaves they belong to;
a layer without a probe is not tapped.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax import Array

from wtdp_jax import rules

Kind = Literal["dense", "norm", "embed", "attend"]

# Which leaves a layer of each kind reads, and how many axes each has when it is not stacked.
LEAF_RANKS: Mapping[Kind, Mapping[str, int]] = {
    "dense": {"kernel": 2, "bias": 1},
    "norm": {"scale": 1, "bias": 1},
    "embed": {"embedding": 2},
    "attend": {"embedding": 2},
}

# Ids leave a tap as float32, which is exact up to here.
MAX_NUM_EMBEDDINGS = 2**24

_PROBE_KEY = "~probe_"
_serials = itertools.count()


def probe_keys(count: int) -> list[str]:
    """New keys, beside the layers' leaves in the params dict, of the probes of layers 0 to count - 1.

    JAX remembers how it traced an inner jitted, rematerialized or scanned function, by the structure of its
    arguments; it knows nothing of interceptors. A serial number keeps one trace from getting another's taps.
    """
    serial = next(_serials)
    return [f"{_PROBE_KEY}{index}_{serial}" for index in range(count)]


def _probe_key(params: Mapping) -> str | None:
    """The key of a layer's probe, if it has one."""
    return next((key for key in params if key.startswith(_PROBE_KEY)), None)


def layer_kind(module: nn.Module, method: str, args: tuple, kwargs: dict) -> Kind | None:
    """The kind of a layer call that a rule covers, or None.

    Exact types only: a subclass may compute something else. So may a layer with its own product or other
        axes.
    """
    if kwargs or len(args) != 1:
        return None
    if type(module) is nn.Dense and method == "__call__":
        custom = module.dot_general is not None or module.dot_general_cls is not None
        return None if custom or module.promote_dtype is not promote_dtype else "dense"
    if type(module) in (nn.LayerNorm, nn.RMSNorm) and method == "__call__":
        last_axis = module.reduction_axes == -1 and module.feature_axes == -1
        return "norm" if last_axis and module.axis_name is None else None
    if type(module) is nn.Embed and module.num_embeddings <= MAX_NUM_EMBEDDINGS:
        plain = module.promote_dtype is promote_dtype
        if method in ("__call__", "attend") and plain:
            return "embed" if method == "__call__" else "attend"
    return None


def example_loss(
    loss_fn: Callable, params: Any, example: Any, interceptor: "Interceptor | None" = None
) -> Array:
    """The loss of one example, leaves without a batch axis; its layers' calls can be intercepted.

    Raises:
        ValueError: when loss_fn does not return one loss an example.
    """
    batch = jax.tree.map(lambda leaf: leaf[None], example)
    with nn.intercept_methods(interceptor) if interceptor else contextlib.nullcontext():
        losses = loss_fn(params, batch)
    if jnp.shape(losses) != (1,):
        raise ValueError(
            f"loss_fn must return one loss an example: shape (1,) for a batch of one, got {jnp.shape(losses)}"
        )
    return losses[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer, as an interceptor sees it: inside scan and vmap, so for one slice and one lane."""

    kind: Kind
    module: nn.Module
    inputs: Any
    outputs: jax.ShapeDtypeStruct

    @property
    def positions(self) -> int:
        """At how many positions the layer was applied."""
        features = 0 if self.kind == "embed" else 1
        return int(np.prod(np.shape(self.inputs)[: np.ndim(self.inputs) - features], dtype=int))

    @property
    def distinct_ids(self) -> bool:
        """Whether an embedding's ids are known, while tracing, to be distinct, as positions are."""
        if self.kind != "embed" or not isinstance(self.inputs, np.ndarray):
            return False
        return bool(np.unique(_rows(self.inputs, self.module.num_embeddings)).size == self.inputs.size)


def describe(kind: Kind, module: nn.Module, x: Any, y: Array) -> Call:
    """A layer's call, without the values of its inputs unless they are a NumPy array, known while tracing."""
    inputs = x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype)
    outputs = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return Call(kind=kind, module=module.clone(parent=None), inputs=inputs, outputs=outputs)


def record(call: Call, d: Array) -> dict[str, Array]:
    """What a layer's rule needs: its activations and backprops, each flattened to (positions, features).

    Args:
        call: the layer's call; `call.inputs` are its inputs.
        d: the cotangent of its outputs.

    Returns:
        dense, attend: {"a" (T, I), "d" (T, O)}. embed: {"ids" (T,), "d" (T, D)}, with ids as float32, since
            they
        leave as cotangents and those are never integers; the vocabulary is below 2^24. norm: the example's
        gradient {"scale" (D,), "bias" (D,)} and the sums of squares of what was summed, {"scale_parts",
        "bias_parts"}.
    """
    wide = rules.accumulation_dtype(d.dtype)
    flat = d.reshape(call.positions, d.shape[-1])
    if call.kind == "embed":
        ids = _rows(jnp.asarray(call.inputs), call.module.num_embeddings).reshape(-1)
        # jnp.take gives NaN, and no gradient, for an id outside the table.
        inside = (ids >= 0) & (ids < call.module.num_embeddings)
        return {"ids": ids.astype(jnp.float32), "d": jnp.where(inside[:, None], flat, 0)}
    if call.kind == "norm":
        flat = flat.astype(wide)
        scaled = _normalized(call.module, call.inputs, wide).reshape(flat.shape) * flat
        sums = {"scale": scaled, "bias": flat}
        return {name: jnp.sum(x, 0) for name, x in sums.items()} | {
            f"{name}_parts": jnp.sum(jnp.square(x)) for name, x in sums.items()
        }
    inputs = call.inputs.astype(d.dtype)  # as the product saw them
    return {"a": inputs.reshape(call.positions, inputs.shape[-1]), "d": flat}


def record_shapes(call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of `record`."""
    inputs = jax.ShapeDtypeStruct(np.shape(call.inputs), jnp.result_type(call.inputs))

    def shaped(inputs: Array, d: Array) -> dict[str, Array]:
        return record(dataclasses.replace(call, inputs=inputs), d)

    return jax.eval_shape(shaped, inputs, call.outputs)


def _rows(ids: Any, num_embeddings: int) -> Any:
    """The rows that ids name: negative ones count from the end, and a table of one row is broadcast."""
    ids = ids.astype("int32")
    return ids * 0 if num_embeddings == 1 else ids + num_embeddings * (ids < 0)


def _normalized(module: nn.Module, x: Array, dtype: jnp.dtype) -> Array:
    """xhat, by the layer's own code with its parameters switched off."""
    off = {"use_scale": False} if type(module) is nn.RMSNorm else {"use_scale": False, "use_bias": False}
    return module.clone(parent=None, dtype=dtype, **off).apply({}, x)


# ---- taps -------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(emit: Callable, y: Array, inputs: Array, probe: Any) -> Array:
    """Y itself; backward, the probe's cotangent is emit(inputs, d)."""
    return y


_tap.defvjp(
    lambda emit, y, inputs, probe: (y, inputs),
    lambda emit, inputs, d: (d, None, emit(inputs, d)),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap_embedding(emit: Callable, y: Array, inputs: Array, side: Array, probe: Any) -> tuple[Array, Array]:
    """Y, and the side array for the head's tap; backward, emit(inputs, d, the side's cotangent)."""
    return y, side


_tap_embedding.defvjp(
    lambda emit, y, inputs, side, probe: ((y, side), inputs),
    lambda emit, inputs, cotangents: (cotangents[0], None, None, emit(inputs, *cotangents)),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap_head(emit: Callable, y: Array, inputs: Array, ids: Array, side: Array, probe: Any) -> Array:
    """Y itself; backward, emit(inputs, ids, d) gives the probe's and the side's cotangents."""
    return y


def _tap_head_backward(emit: Callable, residuals: tuple, d: Array) -> tuple:
    to_probe, to_side = emit(*residuals, d)
    return d, None, None, to_side, to_probe


_tap_head.defvjp(lambda emit, y, inputs, ids, side, probe: (y, (inputs, ids)), _tap_head_backward)


# A weighed layer computes its output twice: from constant leaves, and from constant inputs. The second is
# never evaluated, only differentiated.
@jax.custom_vjp
def _weigh(y: Array, own: Array, factor: Array) -> Array:
    """Y itself; backward, the cotangent of the same output as a function of the leaves alone is scaled."""
    return y


_weigh.defvjp(
    lambda y, own, factor: (y, factor),
    lambda factor, d: (d, factor * d.astype(factor.dtype), None),
)


def _one_per_example(y: Array, probe: Any) -> Array:
    """`y`, made to depend on the probe, which every example has its own of.

    What does not depend on the example, such as position embeddings, is computed once for the whole batch
    under vmap, and its cotangent would be summed over the examples before a tap sees it. What is added is
    zero.
    """
    first = jax.lax.stop_gradient(jax.tree.leaves(probe)[0]).reshape(-1)[:1]
    return y + first.reshape((1,) * y.ndim).astype(y.dtype)


# ---- interceptors -----------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """A layer's probe: which layer's, and its value."""

    layer: int
    value: Any


class Weighed(NamedTuple):
    """A probe's value where the layer's own gradient is to be weighed.

    Attributes:
        emitted: zeros, whose cotangents are what the tap emits.
        factor: the weight of the example's gradient.
        leaves: the layer's leaves once more, by name. They are differentiated in place of those in params.
    """

    emitted: Any
    factor: Any
    leaves: Mapping[str, Any]


class Interceptor:
    """Common to all: finds layers by their probes, and never looks inside one it has taken over."""

    def __init__(self) -> None:
        self._inside = False

    def __call__(self, next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        """Called by Flax for each method of each module."""
        kind = None if self._inside else layer_kind(context.module, context.method_name, args, kwargs)
        if kind is None:
            return next_fun(*args, **kwargs)
        params = context.module.variables.get("params", {})
        key = _probe_key(params)
        if key is None:
            return next_fun(*args, **kwargs)
        index = int(key.removeprefix(_PROBE_KEY).partition("_")[0])
        return self.layer(kind, context.module, args[0], params, Probe(index, params[key]), next_fun)

    def layer(
        self, kind: Kind, module: nn.Module, x: Any, params: Mapping, probe: Probe, next_fun: Callable
    ) -> Array:
        """The output of one supported layer that has a probe."""
        raise NotImplementedError

    def run(self, kind: Kind, module: nn.Module, x: Any, params: Mapping) -> Array:
        """The layer's own method, with other values for its parameters."""
        leaves = {name: params[name] for name in LEAF_RANKS[kind] if name in params}
        method = "attend" if kind == "attend" else "__call__"
        self._inside = True
        try:
            return module.clone(parent=None).apply({"params": leaves}, x, method=method)
        finally:
            self._inside = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How the two taps of a matrix that is embedding and head work together, by a side array.

    The embedding's tap sends a side array forward to the head's; backward, the head's tap returns
    something made of its activations and backprops as the side's cotangent, and the embedding's tap sees
    that.

    Attributes:
        side_shape: the side array's shape, given the embedding's call.
        embedding: (call, d, side's cotangent) -> cotangents of the probe's "embedding" and "cross".
        head: (call, ids, d) -> cotangents of the probe's "head" and of the side array.
    """

    side_shape: Callable[[Call], tuple[int, ...]]
    embedding: Callable[[Call, Array, Array], tuple[Any, Any]]
    head: Callable[[Call, Array, Array], tuple[Any, Array]]


class Tap(Interceptor):
    """Taps every layer with a probe.

    The probe of a matrix that is embedding and head has the parts "embedding", "head" and, if linked,
    "cross". If it is `Weighed`, each of the two uses has its own factor.

    Args:
        emit: (index, call, d) -> the probe's cotangent.
        tied: indices of the layers that are embedding and head.
        link: what the two taps of such a layer emit; None: `emit`, each for itself.
    """

    def __init__(
        self,
        emit: Callable[[int, Call, Array], Any],
        tied: frozenset[int],
        link: Link | None = None,
    ) -> None:
        super().__init__()
        self._emit = emit
        self._tied = tied
        self._link = link
        self._embedded: dict[int, tuple[Array, Array]] = {}  # ids and side array, from embedding to head

    def layer(
        self, kind: Kind, module: nn.Module, x: Any, params: Mapping, probe: Probe, next_fun: Callable
    ) -> Array:
        """The layer's output, tapped."""
        index, value = probe
        use = "embedding" if kind == "embed" else "head"
        inputs = jax.lax.stop_gradient(jnp.asarray(x))  # one array, for JAX to keep it once
        y = next_fun(x)
        if isinstance(value, Weighed):
            factor = value.factor[use] if index in self._tied else value.factor
            own = self.run(kind, module, inputs, {**params, **value.leaves})
            value = value.emitted
            y = _weigh(_one_per_example(y, value), _one_per_example(own, value), factor)
        else:
            y = _one_per_example(y, value)
        call = describe(kind, module, x, y)
        if index in self._tied and self._link is not None:
            return self._linked(self._link, call, y, inputs, Probe(index, value))
        if index in self._tied:
            value = value[use]
        emit = _reading_residuals(functools.partial(self._emit, index), call)
        return _tap(emit, y, inputs, value)

    def _linked(self, link: Link, call: Call, y: Array, inputs: Array, probe: Probe) -> Array:
        index, value = probe
        if call.kind == "embed":
            # Its values are never read, but it must have every batch axis that y has.
            first = jax.lax.stop_gradient(y).reshape(-1)[0].astype(rules.accumulation_dtype(y.dtype))
            side = jnp.broadcast_to(first, link.side_shape(call))
            emit = _reading_residuals(link.embedding, call)
            y, side = _tap_embedding(emit, y, inputs, side, (value["embedding"], value["cross"]))
            self._embedded[index] = (_rows(inputs, call.module.num_embeddings).reshape(-1), side)
            return y
        return _tap_head(
            _reading_residuals(link.head, call), y, inputs, *self._embedded[index], value["head"]
        )


def _reading_residuals(emit: Callable, call: Call) -> Callable:
    """`emit` on the call with its inputs taken from the tap's residuals, unless they are known numbers."""

    def emitted(inputs: Array, *cotangents: Array) -> Any:
        known = isinstance(call.inputs, np.ndarray)
        return emit(call if known else dataclasses.replace(call, inputs=inputs), *cotangents)

    return emitted
