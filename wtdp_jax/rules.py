"""Squared gradient norms of one layer on one example, from its activations and backprops.

Dimension key: T tokens (or any positions the layer was applied at), S head positions, I/O input and
output features, D width, V vocabulary.

Each rule takes ONE example; the engines vmap it over the batch, so no rule can mix examples. Let a layer
compute ``y = a @ W`` at T positions and let ``d`` be the gradient of the example's loss in ``y`` (its
backprops). The example's gradient in ``W`` is ``a^T d``, and its squared norm is had without building it
(ghost norms: Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679; the shared embedding in
closed form: Ding et al. 2024, arXiv 2405.18194).

Rounding may only over-clip. A computed norm that is too small would let the clipped gradient exceed the
sensitivity, so every rule adds ``SLACK_ULPS`` units in the last place of the sum of the squared norms of its
parts, see `rounded_up`.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TiedNorm = Literal["cross_term", "materialize", "omit", "triangle"]

# A squared norm of a sum of parts p_t is a sum of products p_t . p_s. Each is rounded by about an ulp of
# |p_t||p_s|, independently, so the whole is off by about an ulp of sum_t |p_t|^2, however much the parts
# cancel, times a small factor for the order of summation. 16 leaves room for that factor, which tests try on
# cancelling inputs, and moves a well-conditioned float32 norm by only 1e-6.
SLACK_ULPS = 16

# In how many tiles the direct product a^T d is formed where it takes fewer operations than the Gram matrices.
_TILES = 8

_HIGHEST = jax.lax.Precision.HIGHEST  # TF32 and bfloat16 units would be wrong by 1e-3


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type in which norms and sums of values of `dtype` are formed: float32 or wider."""
    return jnp.promote_types(jnp.float32, dtype)


def squared_norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Sum of squares of all entries."""
    x = x.astype(accumulation_dtype(x.dtype))
    return jnp.sum(jnp.square(x))


def dense_squared_norm(a: Float[Array, "T I"], d: Float[Array, "T O"]) -> Float[Array, ""]:
    """||a^T d||^2: the kernel of a dense layer, and the output head.

    Takes whichever needs fewer operations: the two T x T Gram matrices, or the product itself in tiles, so
    that no I x O array is ever held for an example.

    Args:
        a: the layer's inputs.
        d: its backprops.

    Returns:
        The squared norm, rounded up.
    """
    a, d = _wide(a), _wide(d)
    positions, features_in = a.shape
    features_out = d.shape[1]
    # A product that underflows misses less than the smallest normal number, times what it is multiplied by.
    tiny = float(jnp.finfo(a.dtype).tiny)
    a_squares = jnp.sum(jnp.square(a), -1) + features_in * tiny
    d_squares = jnp.sum(jnp.square(d), -1) + features_out * tiny
    parts = a_squares * d_squares
    if positions == 1:
        return parts[0]
    if gradient_is_smaller(positions, features_in, features_out):
        return rounded_up(_tiled_squared_norm(a, d), jnp.sum(parts))
    total = rounded_up(jnp.sum(_dot(a, a.T) * _dot(d, d.T)), jnp.sum(parts))
    missing = features_out * tiny * jnp.sum(a_squares) + features_in * tiny * jnp.sum(d_squares)
    return total + positions * missing


def gradient_is_smaller(positions: int, features_in: int, features_out: int) -> bool:
    """Whether a dense layer's gradient (I, O) is smaller than inputs (T, I) and backprops (T, O) together.

    Then the product that forms it also takes fewer operations than the two Gram matrices.
    """
    return features_in * features_out < positions * (features_in + features_out)


def bias_squared_norm(d: Float[Array, "T O"]) -> Float[Array, ""]:
    """||sum_t d_t||^2: a bias."""
    d = _wide(d)
    return summed_squared_norm(jnp.sum(d, 0), squared_norm(d))


def summed_squared_norm(g: Float[Array, "..."], parts: Float[Array, ""]) -> Float[Array, ""]:
    """||g||^2 of a gradient that is already summed over positions, rounded up.

    Args:
        g: the sum over positions, e.g. of xhat_t * d_t for a LayerNorm's scale.
        parts: the sum over positions of the squared norms of what was summed.
    """
    return rounded_up(squared_norm(g), parts)


def embedding_squared_norm(ids: Int[Array, " T"], d: Float[Array, "T D"]) -> Float[Array, ""]:
    """sum_{t,s} [x_t = x_s] d_t . d_s: an embedding, where a row's gradient is summed over its tokens."""
    d = _wide(d)
    same = (ids[:, None] == ids[None, :]).astype(d.dtype)
    return rounded_up(jnp.sum(same * _dot(d, d.T)), squared_norm(d))


def distinct_embedding_squared_norm(d: Float[Array, "T D"]) -> Float[Array, ""]:
    """sum_t ||d_t||^2: an embedding whose ids are known to be distinct, such as positions."""
    return squared_norm(d)


def head_gradient_rows(
    ids: Int[Array, " T"], h: Float[Array, "S D"], r: Float[Array, "S V"]
) -> Float[Array, "T D"]:
    """Rows x_t of the head's gradient r^T h, without the other V - T rows.

    Args:
        ids: tokens x_t, in [0, V).
        h: the head's inputs.
        r: gradients of the loss in the logits.

    Returns:
        c with c_t = sum_s r_s[x_t] h_s.
    """
    return _dot(_wide(r)[:, ids].T, _wide(h))


def cross_term(d: Float[Array, "T D"], c: Float[Array, "T D"]) -> Float[Array, ""]:
    """<g_in, g_out> = sum_t d_t . c_t of a matrix that is both embedding and head.

    Args:
        d: backprops of the embedding's outputs.
        c: `head_gradient_rows` at the same tokens.
    """
    return jnp.sum(_wide(d) * _wide(c))


def tied_squared_norm(
    squared_in: Float[Array, "..."],
    squared_out: Float[Array, "..."],
    cross: Float[Array, "..."],
    tied_norm: TiedNorm,
) -> Float[Array, "..."]:
    """||g_in + g_out||^2 of the shared matrix, or what `tied_norm` puts in its place.

    Args:
        squared_in: ||g_in||^2; for "materialize" the exact joint norm.
        squared_out: ||g_out||^2; for "materialize" 0.
        cross: <g_in, g_out>; read by "cross_term" alone.
        tied_norm: "cross_term" exact; "omit" without the cross-term, too small by up to a factor of 2;
            "triangle" (||g_in|| + ||g_out||)^2, an upper bound; "materialize" as said above.
    """
    separate = squared_in + squared_out
    if tied_norm == "triangle":
        return separate + 2 * jnp.sqrt(squared_in) * jnp.sqrt(squared_out)
    if tied_norm == "cross_term":
        # Where g_in is nearly -g_out the three terms can sum to a negative number.
        return rounded_up(jnp.maximum(separate + 2 * cross, 0), separate)
    return separate


def rounded_up(total: Array, parts: Array) -> Array:
    """`total` raised by more than its rounding error, given the sum of its parts' squared norms."""
    return total + SLACK_ULPS * jnp.finfo(total.dtype).eps * parts


def _wide(x: Array) -> Array:
    return x.astype(accumulation_dtype(x.dtype))


def _dot(x: Array, y: Array) -> Array:
    return jnp.dot(x, y, precision=_HIGHEST)


def _tiled_squared_norm(a: Array, d: Array) -> Array:
    """||a^T d||^2, a few columns of `a` at a time."""
    tile = -(-a.shape[1] // _TILES)
    padded = jnp.pad(a, ((0, 0), (0, tile * _TILES - a.shape[1])))

    def of_tile(number: Array) -> Array:
        columns = jax.lax.dynamic_slice_in_dim(padded, number * tile, tile, axis=1)
        return squared_norm(_dot(columns.T, d))

    return jnp.sum(jax.lax.map(of_tile, jnp.arange(_TILES)))
