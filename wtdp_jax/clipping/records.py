"""What book-keeping keeps of one example at one call of a layer.

Dimension key: T positions, I/O input and output features, S tokens, D width, V vocabulary.

Mixed book-keeping: activations and backprops where they are smaller than the example's gradient, T (I + O) <
I O, else the gradient itself, whose products then give the norm and the sum for free.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wtdp_jax import capture, rules
from wtdp_jax.head_rules import HeadStatistics, squared_norm_at

_HIGHEST = jax.lax.Precision.HIGHEST


def of_call(call: capture.Call, d: Array) -> dict[str, Array]:
    """The record of a call, as `wtdp_jax.capture.record`; or the gradient of a dense layer.

    Args:
        call: the layer's call; `call.inputs` are its inputs.
        d: the cotangent of its outputs.

    Returns:
        For a dense layer whose gradient is the smaller, {"kernel" (I, O), "kernel_parts", "bias" (O,),
        "bias_parts"}; the parts are what `wtdp_jax.rules.summed_squared_norm` takes.
    """
    record = capture.record(call, d)
    if call.kind != "dense":
        return record
    positions, features_in = record["a"].shape
    if not rules.gradient_is_smaller(positions, features_in, d.shape[-1]):
        return record
    wide = rules.accumulation_dtype(d.dtype)
    a, d = record["a"].astype(wide), record["d"].astype(wide)
    a_squares, d_squares = (jnp.sum(jnp.square(x), -1) for x in (a, d))
    return {
        "kernel": jnp.dot(a.T, d, precision=_HIGHEST),
        "kernel_parts": jnp.sum(a_squares * d_squares),
        "bias": jnp.sum(d, 0),
        "bias_parts": jnp.sum(d_squares),
    }


def of_loss(statistics: HeadStatistics, g: Array) -> tuple[dict[str, Array], None]:
    """The record of a head that gives a loss: its gradient at cotangent 1, and the cotangent.

    Returns:
        {"gradient" (V, D), "squared_norm", "rows" (S, D), "g"}: norm and rows, for a tied head alone, are at
            cotangent g. And nothing for a side array.
    """
    record: dict[str, Any] = {
        "gradient": statistics.gradient,
        "squared_norm": squared_norm_at(g, statistics),
        "g": g,
    }
    if statistics.rows is not None:
        record["rows"] = g * statistics.rows
    return record, None


def has_whole_logits(call: capture.Call) -> bool:
    """Whether a loss head's logits (T, V) are smaller than its gradient (V, D)."""
    return call.positions < call.inputs.shape[-1]


def shapes(call: capture.Call, num_tokens: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a call's record.

    Args:
        call: the call.
        num_tokens: S, for a head that is the embedding; else None.
    """
    if call.kind in capture.WITHOUT_LOSS and not has_whole_logits(call):
        return _shapes_of_loss(call, num_tokens)
    inputs = jax.ShapeDtypeStruct(np.shape(call.inputs), jnp.result_type(call.inputs))
    call = dataclasses.replace(call, kind=capture.WITHOUT_LOSS.get(call.kind, call.kind))

    def shaped(inputs: Array, d: Array) -> dict[str, Array]:
        return of_call(dataclasses.replace(call, inputs=inputs), d)

    return jax.eval_shape(shaped, inputs, call.outputs)


def _shapes_of_loss(call: capture.Call, num_tokens: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    wide = rules.accumulation_dtype(call.outputs.dtype)
    width, vocabulary = call.inputs.shape[-1], call.outputs.shape[-1]
    sizes: dict[str, tuple[int, ...]] = {"gradient": (vocabulary, width), "squared_norm": (), "g": ()}
    if num_tokens is not None:
        sizes["rows"] = (num_tokens, width)
    return {name: jax.ShapeDtypeStruct(size, wide) for name, size in sizes.items()}
