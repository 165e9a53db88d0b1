"""The layers of a plain Flax Linen model that a rule covers, and how their calls are seen.

Dimension key: T positions, I/O input and output features, D width, V vocabulary.

The model holds no DP code. While a loss is traced for one example, `nn.intercept_methods` hands each call of
such a layer to an interceptor, which marks what it reads (`wtdp_jax.reads`) or taps it (`wtdp_jax.taps`).

Probes travel inside the params dict, under a key beside the layer's own leaves. So they reach the layer
through `nn.scan`, `nn.remat`, `nn.vmap` or a user's own slicing, sliced along with the leaves they belong to;
a layer without a probe is not tapped.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import flax.linen.module as flax_module
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax import Array

from wtdp_jax import rules
from wtdp_jax.lm_head import Head, LossEmbed, promoted

Kind = Literal["dense", "norm", "embed", "attend", "dense_loss", "attend_loss"]

# Which leaves a layer of each kind reads, and how many axes each has when it is not stacked.
LEAF_RANKS: Mapping[Kind, Mapping[str, int]] = {
    "dense": {"kernel": 2, "bias": 1},
    "norm": {"scale": 1, "bias": 1},
    "embed": {"embedding": 2},
    "attend": {"embedding": 2},
    "dense_loss": {"kernel": 2},
    "attend_loss": {"embedding": 2},
}

# Heads that give a loss in place of logits, by what they do with their logits otherwise.
WITHOUT_LOSS: Mapping[Kind, Kind] = {"dense_loss": "dense", "attend_loss": "attend"}

_SUPPORTED = (nn.Dense, nn.LayerNorm, nn.RMSNorm, nn.Embed, LossEmbed, Head)

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
    if type(module) not in _SUPPORTED or any(jnp.size(arg) == 0 or jnp.iscomplexobj(arg) for arg in args):
        return None
    if method == "weighted_loss" and type(module) in (LossEmbed, Head):
        # One loss, which is linear in one cotangent: of one example, however the loss function holds it.
        alone = len(args) == 3 and not kwargs and math.prod(args[0].shape[:-2]) == 1
        return ("attend_loss" if type(module) is LossEmbed else "dense_loss") if alone else None
    if kwargs or len(args) != 1:
        return None
    if type(module) is Head and method == "__call__":
        return "dense"
    if type(module) is nn.Dense and method == "__call__":
        custom = module.dot_general is not None or module.dot_general_cls is not None
        return None if custom or module.promote_dtype is not promote_dtype else "dense"
    if type(module) in (nn.LayerNorm, nn.RMSNorm) and method == "__call__":
        last_axis = module.reduction_axes == -1 and module.feature_axes == -1
        return "norm" if last_axis and module.axis_name is None else None
    if type(module) in (nn.Embed, LossEmbed) and module.num_embeddings <= MAX_NUM_EMBEDDINGS:
        plain = type(module) is LossEmbed or module.promote_dtype is promote_dtype
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
    is_array = hasattr(losses, "dtype")
    if not is_array or jnp.shape(losses) != (1,) or not jnp.issubdtype(losses.dtype, jnp.floating):
        found = f"{losses.dtype} of shape {jnp.shape(losses)}" if is_array else type(losses).__name__
        raise ValueError(
            f"loss_fn must return one loss an example: real floats (1,) for a batch of one, got {found}"
        )
    return losses[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer, as an interceptor sees it: inside scan and vmap, so for one slice and one lane.

    Attributes:
        kind: what it is.
        module: the layer, unbound.
        inputs: its inputs, or their shape.
        outputs: the shape of its outputs; for a head that gives a loss, of the logits that it has.
    """

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
        return bool(np.unique(token_rows(self.inputs, self.module.num_embeddings)).size == self.inputs.size)


def describe(kind: Kind, module: nn.Module, x: Any, y: Any, params: Mapping) -> Call:
    """A layer's call, without the values of its inputs unless they are a NumPy array, known while tracing.

    Args:
        kind: its kind.
        module: the layer.
        x: its (first) input.
        y: its output.
        params: its leaves.
    """
    inputs = x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype)
    outputs = jax.ShapeDtypeStruct(y.shape, y.dtype)
    if kind in WITHOUT_LOSS:
        inner, matrix = promoted(module, x, params)
        outputs = jax.ShapeDtypeStruct((*x.shape[:-1], matrix.shape[0]), inner.dtype)
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
        ids = token_rows(jnp.asarray(call.inputs), call.module.num_embeddings).reshape(-1)
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


def token_rows(ids: Any, num_embeddings: int) -> Any:
    """The rows that ids name: negative ones count from the end, and a table of one row is broadcast."""
    numpy = np if isinstance(ids, np.ndarray) else jnp
    if np.iinfo(ids.dtype).max > np.iinfo(np.int32).max:  # keeps outside what is outside
        ids = numpy.minimum(ids, num_embeddings)
        ids = ids if np.iinfo(ids.dtype).min == 0 else numpy.maximum(ids, -num_embeddings - 1)
    ids = ids.astype("int32")
    return ids * 0 if num_embeddings == 1 else ids + num_embeddings * (ids < 0)


def _normalized(module: nn.Module, x: Array, dtype: jnp.dtype) -> Array:
    """xhat, by the layer's own code with its parameters switched off."""
    off = {"use_scale": False} if type(module) is nn.RMSNorm else {"use_scale": False, "use_bias": False}
    return module.clone(parent=None, dtype=dtype, **off).apply({}, x)


# ---- interceptors -----------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """A layer's probe: which layer's, and its value."""

    layer: int
    value: Any


class Interceptor:
    """Common to all: finds layers by their probes, and never looks inside one it has taken over."""

    def __init__(self) -> None:
        self._inside = False

    def __call__(self, next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        """Called by Flax for each method of each module."""
        # Another interceptor may change what a layer computes, and would change it in `run` once more.
        alone = all(other is self for other in flax_module._global_interceptor_stack)
        skip = self._inside or not alone
        kind = None if skip else layer_kind(context.module, context.method_name, args, kwargs)
        if kind is None:
            return next_fun(*args, **kwargs)
        params = context.module.variables.get("params", {})
        key = _probe_key(params)
        if key is None:
            return next_fun(*args, **kwargs)
        index = int(key.removeprefix(_PROBE_KEY).partition("_")[0])
        return self.layer(kind, context.module, args, params, Probe(index, params[key]), next_fun)

    def layer(
        self, kind: Kind, module: nn.Module, args: tuple, params: Mapping, probe: Probe, next_fun: Callable
    ) -> Array:
        """The output of one supported layer that has a probe."""
        raise NotImplementedError

    def run(
        self, kind: Kind, module: nn.Module, args: tuple, params: Mapping, dtype: jnp.dtype | None = None
    ) -> Array:
        """The layer's own method, with other values for its parameters; given a type, computed in it."""
        leaves = {name: params[name] for name in LEAF_RANKS[kind] if name in params}
        # In full precision, whatever the layer or the loss asks for: TF32 would break the bound on the sum.
        full: dict[str, Any] = {}
        if isinstance(module, nn.Dense):
            full["precision"] = jax.lax.Precision.HIGHEST
        if dtype is not None and module.dtype is not None:
            full["dtype"] = dtype
        method = "weighted_loss" if kind in WITHOUT_LOSS else "attend" if kind == "attend" else "__call__"
        self._inside = True
        try:
            with jax.default_matmul_precision("highest"):
                return module.clone(parent=None, **full).apply({"params": leaves}, *args, method=method)
        finally:
            self._inside = False
