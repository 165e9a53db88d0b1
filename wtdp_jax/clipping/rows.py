"""Replacing rows of a batch that must not take part, before they meet the model."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def replace(batch: Any, unwanted: Array) -> Any:
    """The batch with each unwanted row replaced, in every leaf, by a copy of the first wanted one.

    A copy of a real row is a valid input where a row of zeros may not be. With no wanted row, nothing
    changes: what such a batch gives must not be used.

    Args:
        batch: a tree of (B, ...) arrays.
        unwanted: (B,) bool.
    """
    first = jnp.argmin(unwanted)
    index = jnp.where(unwanted, first, jnp.arange(unwanted.shape[0]))
    return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0), batch)


def size(batch: Any, is_padding_example: Array | None) -> int:
    """The number of rows of a batch.

    Raises:
        ValueError: when leaves disagree, there is no row, or the mask does not fit.
    """
    shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(shapes) != 1 or shapes & {(), (0,)}:
        found = sorted(str(jnp.shape(leaf)) for leaf in jax.tree.leaves(batch))
        raise ValueError(f"batch leaves must share a first axis of at least one row, got shapes {found}")
    (rows,) = shapes.pop()
    if is_padding_example is not None:
        dtype, shape = jnp.result_type(is_padding_example), jnp.shape(is_padding_example)
        if shape != (rows,) or not jnp.issubdtype(dtype, jnp.bool_):
            raise ValueError(
                f"is_padding_example must be bool of shape ({rows},), got {dtype} of shape {shape}"
            )
    return rows
