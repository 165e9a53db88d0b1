"""Norm and weighted gradient sum of one covered layer, from its records.

A record is what `wtdp_jax.capture.record` or `wtdp_jax.clipping.records` makes of a layer's call for one
example; that of a matrix that is embedding and head has the parts "embedding" and "head".
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax import capture, rules
from wtdp_jax.coverage import Layer
from wtdp_jax.rules import TiedNorm

Record = Mapping

_HIGHEST = jax.lax.Precision.HIGHEST


def squared_norm(layer: Layer, record: Record, tied_norm: TiedNorm) -> Array:
    """The squared norm of one example's gradient in a layer's trainable leaves."""
    if layer.kind != "tied":
        return call_squared_norm(layer.calls[0], layer.leaves, record)
    embed, attend = layer.calls
    embedding, head = record["embedding"], record["head"]
    ids = _ids(embedding)
    cross = jnp.zeros((), rules.accumulation_dtype(embedding["d"].dtype))
    if tied_norm == "materialize":
        return rules.squared_norm(joint_gradient(embedding, head_gradient(head)))
    if tied_norm == "cross_term":
        rows = head["rows"] if "rows" in head else rules.head_gradient_rows(ids, head["a"], head["d"])
        cross = rules.cross_term(embedding["d"], rows)
    squared_in = call_squared_norm(embed, layer.leaves, embedding)
    squared_out = call_squared_norm(attend, layer.leaves, head)
    return rules.tied_squared_norm(squared_in, squared_out, cross, tied_norm)


def call_squared_norm(call: capture.Call, leaves: tuple[str, ...], record: Record) -> Array:
    """The squared norm of one example's gradient in the named leaves, from one call of a layer."""
    norms = [_leaf_squared_norm(call, name, record) for name in leaves]
    return sum(norms[1:], start=norms[0])


def _leaf_squared_norm(call: capture.Call, name: str, record: Record) -> Array:
    if call.kind == "embed" and call.distinct_ids:
        return rules.distinct_embedding_squared_norm(record["d"])
    if call.kind == "embed":
        return rules.embedding_squared_norm(_ids(record), record["d"])
    if "squared_norm" in record:
        return record["squared_norm"]
    if f"{name}_parts" in record:
        return rules.summed_squared_norm(record[name], record[f"{name}_parts"])
    if name == "bias":
        return rules.bias_squared_norm(record["d"])
    return rules.dense_squared_norm(record["a"], record["d"])


def gradient_sums(layer: Layer, records: Record, factors: Array) -> dict[str, Array]:
    """The sum over examples of a layer's gradients, each times the example's factor.

    Args:
        layer: the layer.
        records: records with a leading axis of B examples.
        factors: (B,).

    Returns:
        The sum for each of the layer's leaves, by name.
    """
    if layer.kind == "tied":
        head = gradient_sums_of_call(layer.calls[1], records["head"], factors)["embedding"]
        embedding = records["embedding"]
        return {"embedding": _scatter_add(head, embedding, factors)}
    sums = gradient_sums_of_call(layer.calls[0], records, factors)
    return {name: sums[name] for name in layer.leaves}


def gradient_sums_of_call(call: capture.Call, records: Record, factors: Array) -> dict[str, Array]:
    """`gradient_sums` for one call of a layer; all leaves that such a layer can have."""
    if "gradient" in records:
        weighted = jnp.tensordot(factors * records["g"], records["gradient"], 1, precision=_HIGHEST)
        return {"embedding": weighted, "kernel": weighted.T}
    summed = [name for name in ("scale", "kernel", "bias") if f"{name}_parts" in records]
    if summed:
        return {name: jnp.tensordot(factors, records[name], 1, precision=_HIGHEST) for name in summed}
    if call.kind == "embed":
        d = records["d"]
        empty = jnp.zeros((call.module.num_embeddings, d.shape[-1]), rules.accumulation_dtype(d.dtype))
        return {"embedding": _scatter_add(empty, records, factors)}
    weighted = _weighted(records["d"], factors)
    # In full precision: what is summed must be what the norm is of.
    kernel = jnp.einsum("bti,bto->io", records["a"].astype(weighted.dtype), weighted, precision=_HIGHEST)
    return {"kernel": kernel, "embedding": kernel.T, "bias": jnp.sum(weighted, (0, 1))}


def joint_gradient(embedding: Record, head: Array) -> Array:
    """One example's gradient (V, D) of a matrix that is embedding and head, from the head's part of it."""
    return head.at[_ids(embedding)].add(embedding["d"].astype(head.dtype))


def head_gradient(record: Record) -> Array:
    """One example's gradient of the head, (V, D)."""
    if "gradient" in record:
        return record["g"] * record["gradient"]
    wide = rules.accumulation_dtype(record["d"].dtype)
    return jnp.dot(record["d"].astype(wide).T, record["a"].astype(wide), precision=_HIGHEST)


def _ids(record: Record) -> Array:
    return record["ids"].astype(jnp.int32)


def _weighted(d: Array, factors: Array) -> Array:
    """Backprops (B, T, O), each example's times its factor, in the accumulation type."""
    return d.astype(factors.dtype) * factors[:, None, None]


def _scatter_add(total: Array, records: Record, factors: Array) -> Array:
    """Adds each token's weighted backprop to its row of `total` (V, D)."""
    weighted = _weighted(records["d"], factors)
    return total.at[_ids(records).reshape(-1)].add(weighted.reshape(-1, total.shape[1]))
