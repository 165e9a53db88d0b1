"""Taps on the outputs of a plain Flax Linen model's layers.

Dimension key: T positions, S tokens, D width, V vocabulary.

A tap is an identity `jax.custom_vjp` on the OUTPUT of a layer. Forward, the layer is untouched. Backward, the
tap passes the cotangent d on unchanged and emits something made of the layer's input and d as the cotangent
of a zero array, the layer's probe.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wtdp_jax import rules
from wtdp_jax.capture import WITHOUT_LOSS, Call, Interceptor, Kind, Probe, describe, token_rows
from wtdp_jax.head_rules import HeadStatistics, gradient_carrier, head_statistics
from wtdp_jax.lm_head import cross_entropy, promoted, rows_of

# ---- taps -------------------------------------------------------------------------------------------------


def _settled(x: Array) -> Array:
    """`x`; if it is narrower than float32, one array for all that read it.

    XLA may keep a value of 16 bits in 32 inside of what it fuses, and so give each reader another.
    """
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return jax.lax.optimization_barrier(x) if narrow else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(emit: Callable, y: Array, inputs: Array, probe: Any) -> Array:
    """Y itself; backward, the probe's cotangent is emit(inputs, d)."""
    return y


def _tap_backward(emit: Callable, inputs: Array, d: Array) -> tuple:
    d = _settled(d)
    return d, None, emit(inputs, d)


_tap.defvjp(lambda emit, y, inputs, probe: (y, inputs), _tap_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tap_and_clip(
    emit: Callable, clip: Callable, y: Array, own: Array, inputs: Array, counts: Array, probe: Array
) -> Array:
    """Y itself; backward, the squared norm emit(inputs, d) goes to the probe, and d, clipped by it, to `own`.

    `own` is the same output as a function of the leaves alone, as in `_weigh`.
    """
    return y


def _tap_and_clip_backward(emit: Callable, clip: Callable, residuals: tuple, d: Array) -> tuple:
    inputs, counts = residuals
    d = _settled(d)
    squared_norm = emit(inputs, d)
    return d, _scaled(clip(squared_norm, counts), d), None, None, squared_norm


_tap_and_clip.defvjp(
    lambda emit, clip, y, own, inputs, counts, probe: (y, (inputs, counts)), _tap_and_clip_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap_embedding(emit: Callable, y: Array, inputs: Array, side: Array, probe: Any) -> tuple[Array, Array]:
    """Y, and the side array for the head's tap; backward, emit(inputs, d, the side's cotangent)."""
    return y, side


def _tap_embedding_backward(emit: Callable, inputs: Array, cotangents: tuple[Array, Array]) -> tuple:
    d, of_side = _settled(cotangents[0]), cotangents[1]
    return d, None, None, emit(inputs, d, of_side)


_tap_embedding.defvjp(lambda emit, y, inputs, side, probe: ((y, side), inputs), _tap_embedding_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap_head(emit: Callable, y: Array, inputs: Array, ids: Array, side: Array, probe: Any) -> Array:
    """Y itself; backward, emit(inputs, ids, d) gives the probe's and the side's cotangents."""
    return y


def _tap_head_backward(emit: Callable, residuals: tuple, d: Array) -> tuple:
    d = _settled(d)
    to_probe, to_side = emit(*residuals, d)
    return d, None, None, to_side, to_probe


_tap_head.defvjp(lambda emit, y, inputs, ids, side, probe: (y, (inputs, ids)), _tap_head_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tap_loss(
    emit: Callable,
    hold: bool,
    hidden: Array,
    matrix: Array,
    targets: Array,
    weights: Array,
    ids: Array | None,
    side: Array | None,
    probe: Any,
) -> tuple[Array, Array]:
    """A head's loss and (T,) log normalizers; backward, emit(statistics, g) to the probe and the side."""
    statistics = head_statistics(hidden, matrix, targets, weights, ids, hold=hold)
    return statistics.loss, statistics.log_normalizers


def _tap_loss_forward(
    emit: Callable, hold: bool, hidden: Array, matrix: Array, targets: Array, weights: Array, *others: Any
) -> tuple[tuple[Array, Array], tuple]:
    statistics = head_statistics(hidden, matrix, targets, weights, others[0], hold=hold)
    types = (jnp.zeros((), hidden.dtype), jnp.zeros((), weights.dtype))
    return (statistics.loss, statistics.log_normalizers), (statistics, types)


def _tap_loss_backward(emit: Callable, hold: bool, residuals: tuple, cotangents: tuple) -> tuple:
    statistics, (hidden, weights) = residuals
    g = cotangents[0]
    to_probe, to_side = emit(statistics, g)
    to_hidden = (g * statistics.d_hidden).astype(hidden.dtype)
    to_weights = (g * statistics.token_losses).astype(weights.dtype)
    return to_hidden, None, None, to_weights, None, to_side, to_probe


_tap_loss.defvjp(_tap_loss_forward, _tap_loss_backward)


# A weighed layer computes its output twice: from constant leaves, and from constant inputs. The second is
# never evaluated, only differentiated.
@jax.custom_vjp
def _weigh(y: Array, own: Array, factor: Array) -> Array:
    """Y itself; backward, the cotangent of the same output as a function of the leaves alone is scaled."""
    return y


_weigh.defvjp(
    lambda y, own, factor: (y, factor),
    lambda factor, d: (d, _scaled(factor, d), None),
)


def _scaled(factor: Array, d: Array) -> Array:
    """Backprops times a factor: 0 for a row that does not count, whose d may be NaN."""
    return jnp.where(factor == 0, 0, factor * d.astype(factor.dtype))


def _one_per_example(y: Array, probe: Any) -> Array:
    """`y`, made to depend on the probe, which every example has its own of.

    What does not depend on the example, such as position embeddings, is computed once for the whole batch
    under vmap, and its cotangent would be summed over the examples before a tap sees it. What is added is
    zero.
    """
    first = jax.lax.stop_gradient(jax.tree.leaves(probe)[0]).reshape(-1)[:1]
    return y + first.reshape((1,) * y.ndim).astype(y.dtype)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossHeads:
    """What is done at a head that gives a loss in place of logits.

    Attributes:
        whole_logits: call -> whether to form its logits whole, and to tap those as another head's.
        hold: whether the head is the embedding -> else, whether the example's gradient of it is wanted.
        emit: (statistics, g) -> cotangents of the probe and of the side array.
    """

    whole_logits: Callable[[Call], bool]
    hold: Callable[[bool], bool]
    emit: Callable[[HeadStatistics, Array], tuple[Any, Any]]


class Tap(Interceptor):
    """Taps every layer with a probe.

    A probe is a dict: "emitted", zeros, whose cotangents are what the tap emits; and, if the sum of the
    layer's own gradients is wanted of the same pass, "leaves", the layer's leaves once more, by name and in
    float32 or wider, which are differentiated in place of those in params, and either "factor", the weight of
    the example's gradient, or "counts", 0 for a row that does not count: then what is emitted must be the
    squared norm, and `clip` gives the weight. For a matrix that is embedding and head "emitted" has the parts
    "embedding", "head" and, if linked, "cross", and each use has its own factor.

    Args:
        emit: (index, call, d) -> the probe's cotangent.
        clip: (squared norm, counts) -> factor.
        tied: indices of the layers that are embedding and head.
        loss_heads: the same for heads that give a loss.
        link: what the two taps of a tied layer emit; None: `emit`, each for itself.
    """

    def __init__(
        self,
        emit: Callable[[int, Call, Array], Any],
        tied: frozenset[int],
        loss_heads: LossHeads,
        link: Link | None = None,
        clip: Callable[[Array, Array], Array] | None = None,
    ) -> None:
        super().__init__()
        self._emit = emit
        self._clip = clip
        self._tied = tied
        self._loss_heads = loss_heads
        self._link = link
        self._embedded: dict[int, tuple[Array, Any]] = {}  # ids and side array, from embedding to head

    def layer(
        self, kind: Kind, module: nn.Module, args: tuple, params: Mapping, probe: Probe, next_fun: Callable
    ) -> Array:
        """The layer's output, tapped."""
        if kind in WITHOUT_LOSS:
            return self._loss(kind, module, args, params, probe)
        index, emitted = probe.layer, probe.value["emitted"]
        use = "embedding" if kind == "embed" else "head"
        # One array, for JAX to keep it once.
        inputs = _settled(jax.lax.stop_gradient(jnp.asarray(args[0])))
        y = _one_per_example(next_fun(*args), emitted)
        call = describe(kind, module, args[0], y, params)
        if "leaves" in probe.value:
            own = _one_per_example(self._own(kind, module, inputs, y, params, probe), emitted)
            if "counts" in probe.value:
                emit = _reading_residuals(functools.partial(self._emit, index), call)
                return _tap_and_clip(emit, self._clip, y, own, inputs, probe.value["counts"], emitted)
            y = self._weigh(y, own, use, probe)
        if index not in self._tied:
            return _tap(_reading_residuals(functools.partial(self._emit, index), call), y, inputs, emitted)
        if self._link is not None:
            return self._linked(self._link, call, y, inputs, Probe(index, emitted))
        if kind == "embed":
            self._embedded[index] = (token_rows(inputs, module.num_embeddings).reshape(-1), None)
        return _tap(_reading_residuals(functools.partial(self._emit, index), call), y, inputs, emitted[use])

    def _own(
        self, kind: Kind, module: nn.Module, inputs: Array, y: Array, params: Mapping, probe: Probe
    ) -> Array:
        """The output as a function of the probe's leaves alone, in float32 or wider, as sums are."""
        params = {**params, **probe.value["leaves"]}
        wide = rules.accumulation_dtype(y.dtype)
        if wide == y.dtype:
            return self.run(kind, module, (inputs,), params)
        inputs = inputs.astype(wide) if jnp.issubdtype(inputs.dtype, jnp.floating) else inputs
        return self.run(kind, module, (inputs,), params, dtype=wide)

    def _weigh(self, y: Array, own: Array, use: str, probe: Probe) -> Array:
        """`y`, whose cotangent goes, times the factor, to `own` too: the same as a function of the leaves."""
        factor = probe.value["factor"]
        return _weigh(y, own, factor[use] if probe.layer in self._tied else factor)

    def _linked(self, link: Link, call: Call, y: Array, inputs: Array, probe: Probe) -> Array:
        index, value = probe
        if call.kind == "embed":
            # Its values are never read, but it must have every batch axis that y has.
            first = jax.lax.stop_gradient(y).reshape(-1)[0].astype(rules.accumulation_dtype(y.dtype))
            side = jnp.broadcast_to(first, link.side_shape(call))
            emit = _reading_residuals(link.embedding, call)
            y, side = _tap_embedding(emit, y, inputs, side, (value["embedding"], value["cross"]))
            self._embedded[index] = (token_rows(inputs, call.module.num_embeddings).reshape(-1), side)
            return y
        return _tap_head(
            _reading_residuals(link.head, call), y, inputs, *self._embedded[index], value["head"]
        )

    def _loss(self, kind: Kind, module: nn.Module, args: tuple, params: Mapping, probe: Probe) -> Array:
        """The loss of a head that gives one."""
        heads = self._loss_heads
        call = describe(kind, module, args[0], args[0], params)
        if heads.whole_logits(call):
            return self._loss_of_logits(WITHOUT_LOSS[kind], module, args, params, probe)
        index, emitted = probe.layer, probe.value["emitted"]
        hidden = _one_per_example(args[0].reshape(call.positions, -1), emitted)
        targets, weights = (jnp.asarray(x).reshape(-1) for x in args[1:])
        ids, side = self._embedded[index] if index in self._tied else (None, None)
        inputs, matrix = promoted(module, hidden, params)
        loss, log_normalizers = _tap_loss(
            heads.emit,
            heads.hold(index in self._tied),
            inputs,
            matrix,
            targets,
            weights,
            ids,
            side,
            emitted["head"] if index in self._tied else emitted,
        )
        if "factor" in probe.value:
            constant = jax.lax.stop_gradient((inputs, matrix, targets, weights, log_normalizers))
            own = gradient_carrier(rows_of(module, probe.value["leaves"]), *constant)
            loss = self._weigh(loss, _one_per_example(own, emitted), "head", probe)
        return loss.reshape(args[0].shape[:-2])

    def _loss_of_logits(
        self, kind: Kind, module: nn.Module, args: tuple, params: Mapping, probe: Probe
    ) -> Array:
        """The loss of a head that gives one, from its logits, which are tapped."""
        hidden, targets, weights = args
        logits = self.layer(
            kind, module, (hidden,), params, probe, lambda x: self.run(kind, module, (x,), params)
        )
        losses = cross_entropy(logits, targets)
        return jnp.sum(weights.astype(losses.dtype) * losses, -1)


def _reading_residuals(emit: Callable, call: Call) -> Callable:
    """`emit` on the call with its inputs taken from the tap's residuals, unless they are known numbers."""

    def emitted(inputs: Array, *cotangents: Array) -> Any:
        known = isinstance(call.inputs, np.ndarray)
        return emit(call if known else dataclasses.replace(call, inputs=inputs), *cotangents)

    return emitted
