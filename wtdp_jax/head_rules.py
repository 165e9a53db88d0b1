"""One example's loss at an output head, with all that backward pass and norm need, in vocabulary tiles.

Dimension key: T positions, S tokens, D width, V vocabulary, N tiles of K tokens each.

With logits l_t = E h_t, weights w_t and targets y_t the loss is sum_t w_t (logsumexp(l_t) - l_t[y_t]) and its
gradient in the logits r_t = w_t (softmax(l_t) - onehot(y_t)). Then

    in h_t:  E^T r_t        in E:  G = sum_t r_t h_t^T        row x_s of G:  c_s = sum_t r_t[x_s] h_t

All of it is linear in the cotangent of the loss, one number, so it is formed at cotangent 1 together with
the loss, tile by tile of E's rows: r and G are never whole unless G is asked for. Only the logits of one
example are.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from wtdp_jax import rules

_HIGHEST = jax.lax.Precision.HIGHEST

# Tokens of a tile, about: a tile's r and G are small beside an example's logits, and products stay efficient.
_TILE = 2048


class HeadStatistics(NamedTuple):
    """What one example's loss leaves, at cotangent 1.

    Attributes:
        loss: the weighted loss.
        token_losses: (T,) unweighted.
        d_hidden: (T, D) the gradient in the head's inputs.
        log_normalizers: (T,) logsumexp of the logits.
        squared_norm: ||G||^2, rounded up.
        rows: (S, D) rows of G that the example's tokens name; None where no tokens are given.
        gradient: (V, D) G itself; None unless asked for.
    """

    loss: Float[Array, ""]
    token_losses: Float[Array, " T"]
    d_hidden: Float[Array, "T D"]
    log_normalizers: Float[Array, " T"]
    squared_norm: Float[Array, ""]
    rows: Float[Array, "S D"] | None
    gradient: Float[Array, "V D"] | None


def head_statistics(
    hidden: Float[Array, "T D"],
    matrix: Float[Array, "V D"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    ids: Int[Array, " S"] | None,
    *,
    hold: bool,
) -> HeadStatistics:
    """The statistics of one example; under vmap one example after the other.

    Args:
        hidden: the head's inputs.
        matrix: its rows.
        targets: one outside [0, V) makes everything NaN.
        weights: weights of the positions.
        ids: tokens whose rows of G are wanted.
        hold: whether G is wanted.
    """
    return _one_after_the_other(hold)(hidden, matrix, targets, weights, ids)


def squared_norm_at(g: Float[Array, ""], statistics: HeadStatistics) -> Float[Array, ""]:
    """||g G||^2 at cotangent g. The product comes first: where g^2 alone underflows, it need not."""
    # XLA would multiply the squares.
    return jnp.square(jax.lax.optimization_barrier(g * jnp.sqrt(statistics.squared_norm)))


@functools.cache
def _one_after_the_other(hold: bool) -> Callable[..., HeadStatistics]:
    return sequential_vmap(functools.partial(_statistics, hold))


def _statistics(
    hold: bool, hidden: Array, matrix: Array, targets: Array, weights: Array, ids: Array | None
) -> HeadStatistics:
    tiles, starts = _tiles(matrix)
    size = tiles.shape[1]
    known = (targets >= 0) & (targets < matrix.shape[0])
    weights = jnp.where(known, weights.astype(rules.accumulation_dtype(hidden.dtype)), jnp.nan)
    targets = jnp.where(known, targets, 0)
    logits = jax.lax.map(lambda tile: _logits(hidden, tile[0], tile[1], matrix.shape[0]), (tiles, starts))
    log_normalizers = jax.nn.logsumexp(logits, axis=(0, 2))
    positions = jnp.arange(hidden.shape[0])
    token_losses = log_normalizers - logits[targets // size, positions, targets % size]

    def add_tile(sums: Any, tile: Any) -> tuple[Any, Array | None]:
        d_hidden, squares, parts = sums
        rows, start, tile_logits = tile
        r = _backprops(tile_logits, start, log_normalizers, targets, weights)
        g = jnp.dot(r.T, hidden.astype(r.dtype), precision=_HIGHEST)
        sums = (
            d_hidden + jnp.dot(r.astype(rows.dtype), rows).astype(r.dtype),
            squares + rules.squared_norm(g),
            parts + jnp.sum(jnp.square(r), -1),
        )
        return sums, g if hold else None

    zeros = jnp.zeros_like(hidden, weights.dtype)
    start_sums = (zeros, jnp.zeros((), weights.dtype), jnp.zeros_like(weights))
    (d_hidden, squares, parts), g = jax.lax.scan(add_tile, start_sums, (tiles, starts, logits))
    rows = None
    if ids is not None:
        of_ids = logits[ids // size, :, ids % size]  # (S, T)
        is_target = targets[None] == ids[:, None]
        r = (jnp.exp(of_ids - log_normalizers[None]) - is_target) * weights[None]
        rows = jnp.dot(r, hidden.astype(r.dtype), precision=_HIGHEST)
    hidden_squares = jnp.sum(jnp.square(hidden.astype(parts.dtype)), -1)
    # Squares that underflow here may count at a large cotangent; each lacks less than the smallest normal
    # number.
    missing = matrix.size * float(jnp.finfo(squares.dtype).tiny)
    return HeadStatistics(
        loss=jnp.sum(weights * token_losses),
        token_losses=token_losses,
        d_hidden=d_hidden,
        log_normalizers=log_normalizers,
        squared_norm=rules.rounded_up(squares, jnp.sum(parts * hidden_squares)) + missing,
        rows=rows,
        gradient=None if g is None else g.reshape(-1, matrix.shape[1])[: matrix.shape[0]],
    )


def gradient_carrier(
    leaf: Float[Array, "V D"],
    hidden: Float[Array, "T D"],
    matrix: Float[Array, "V D"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    log_normalizers: Float[Array, " T"],
) -> Float[Array, ""]:
    """A number whose gradient in `leaf` is G, and whose value is of no use.

    Its backward pass forms the products r^T h of a whole batch together, a tile at a time, where the loss's
    own would need an array (V, D) for each example. r is formed again, by the same products of the same shape
    as in `head_statistics`, so that what is summed is what the norm was taken of.

    Args:
        leaf: the matrix once more, in the type in which gradients are summed.
        hidden: the head's inputs; a constant, as is all that follows.
        matrix: its rows, as the head computes with them.
        targets: as in `head_statistics`.
        weights: likewise.
        log_normalizers: as it gave them.
    """
    wide = rules.accumulation_dtype(hidden.dtype)
    weights = weights.astype(wide)

    @jax.checkpoint
    def add_tile(total: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        rows, constant, start = tile
        logits = _sequential_logits(hidden, constant, start, matrix.shape[0])
        r = _backprops(logits, start, log_normalizers, targets, weights)
        products = jnp.dot(hidden.astype(wide), rows.astype(wide).T, precision=_HIGHEST)
        return total + jnp.sum(r * products), None

    return jax.lax.scan(add_tile, jnp.zeros((), wide), (_tiles(leaf)[0], *_tiles(matrix)))[0]


def _tiles(matrix: Array) -> tuple[Array, Array]:
    """The matrix in tiles (N, K, D), and each tile's first row. Zero rows fill the last tile up."""
    vocabulary = matrix.shape[0]
    size = _tile_size(vocabulary)
    number = -(-vocabulary // size)
    padded = jnp.pad(matrix, ((0, number * size - vocabulary), (0, 0)))
    return padded.reshape(number, size, -1), size * jnp.arange(number, dtype=jnp.int32)


def _tile_size(vocabulary: int) -> int:
    """A divisor of the vocabulary if it has one of a fitting size, so that its matrix need not be padded."""
    whole = (size for size in range(min(2 * _TILE, vocabulary), _TILE // 2, -1) if vocabulary % size == 0)
    return next(whole, min(_TILE, vocabulary))


def _logits(hidden: Array, rows: Array, start: Array, vocabulary: int) -> Array:
    """Logits (T, K) of one tile; -inf where the tile was filled up."""
    # Unrounded: in 16 bits they would be kept in 32 at one place and rounded at another.
    logits = jnp.dot(hidden, rows.T, preferred_element_type=rules.accumulation_dtype(hidden.dtype))
    if vocabulary % rows.shape[0] == 0:
        return logits
    return jnp.where((start + jnp.arange(rows.shape[0]) < vocabulary)[None], logits, -math.inf)


def _sequential_logits(hidden: Array, rows: Array, start: Array, vocabulary: int) -> Array:
    return sequential_vmap(functools.partial(_logits, vocabulary=vocabulary))(hidden, rows, start)


def _backprops(logits: Array, start: Array, log_normalizers: Array, targets: Array, weights: Array) -> Array:
    """R (T, K) of one tile."""
    is_target = targets[:, None] == (start + jnp.arange(logits.shape[1]))[None]
    return (jnp.exp(logits - log_normalizers[:, None]) - is_target) * weights[:, None]
