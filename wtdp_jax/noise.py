"""Gaussian noise for a sum of clipped gradients, as optax transformations, and the keys it comes from.

Privacy rests on the tails: what noise can never reach, an observer can rule out. `jax.random.normal` in
float32 never leaves [-5.42, 5.22], which alone costs a delta near 1e-4 at one coordinate of one step at noise
multiplier 0.6. The normals here reach 7.44 standard deviations in float32 (9.99 in float64) and are symmetric
by construction. They cost less than those of `jax.random.normal`, because a pair takes one block of random
words where `jax.random` draws one for each word, and a chunk stays in the processor's cache until it is added
to its leaf: `experiments/bench_noise.py` measures both.
"""

import hashlib
import math
import os
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt

# How a pair's second word is spent: 7 bits lengthen the radius, 3 choose the octant, the rest is the angle in
# it.
_RADIUS_BITS = 7
_OCTANT_BITS = 3

# Normals that are drawn and added at a time; even, for pairs. So many keep a device busy, and a few MB of
# memory are all that noise needs. Part of the stream: other chunks give other noise.
_CHUNK = 2**19


class GaussianNoiseState(NamedTuple):
    """State of `add_gaussian_noise`.

    Attributes:
        step: How often noise was added, the number folded into the key next.
    """

    step: Int[Array, ""]


def add_gaussian_noise(stddev: float, key: Key[Array, ""]) -> optax.GradientTransformation:
    """Adds independent Gaussian noise to every coordinate of every leaf.

    For the SUM of clipped gradients, before anything is divided: `stddev` is noise_multiplier * l2_clip_norm
    in units of that sum. Step t uses fold_in(key, t), and of that one key a leaf, so no key serves two leaves
    or steps; a state restored from a checkpoint, with the same key, draws the same noise again. The key is
    not part of the
    state: whoever holds it can take the noise off.

    Args:
        stddev: The noise's standard deviation, finite and at least 0, in units of the sum.
        key: One key, from `key_from_os` or `key_from_seed`, used for nothing else.

    Returns:
        A transformation. Leaves must be real floats, each comes back in the wider of its own type and
        float32; None leaves (frozen parameters) stay None.

    Raises:
        ValueError: If `stddev` is out of range, or, at the update, if a leaf is not a real float.
    """
    if not 0 <= stddev < math.inf:
        raise ValueError(f"stddev must be finite and at least 0, got {stddev}")

    def init(params: PyTree) -> GaussianNoiseState:
        del params
        return GaussianNoiseState(step=jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: GaussianNoiseState, params: PyTree = None
    ) -> tuple[PyTree, GaussianNoiseState]:
        del params
        leaves, structure = jax.tree.flatten(updates)
        step_key = jax.random.fold_in(key, state.step)
        noised = [
            _add_noise(leaf, stddev, jax.random.fold_in(step_key, number))
            for number, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, noised), GaussianNoiseState(step=state.step + 1)

    return optax.GradientTransformation(init, update)


def divide_by(expected_batch_size: float | int) -> optax.GradientTransformation:
    """Turns a noised sum into a mean by the EXPECTED batch size, a public constant.

    The batch actually drawn must not divide it: its size depends on the rows.

    Args:
        expected_batch_size: sampling_prob * num_examples, positive and finite; need not be whole.

    Returns:
        A transformation without state.

    Raises:
        ValueError: If the size is out of range.
    """
    if not 0 < expected_batch_size < math.inf:
        raise ValueError(f"expected_batch_size must be positive and finite, got {expected_batch_size}")
    return optax.scale(1.0 / expected_batch_size)


def key_from_os() -> Key[Array, ""]:
    """Returns a key of 64 bits from the operating system, which no one can know or repeat."""
    return _key_from_bytes(os.urandom(8))


def key_from_seed(seed: int, stream: str) -> Key[Array, ""]:
    """Returns the key of one named stream of a seeded, reproducible run.

    Seed and name are hashed together (SHA-256), so every bit of the seed counts whether or not 64-bit types
    are on (`jax.random.key` keeps 32 with them off), and streams such as "noise" and "dropout" share no key.

    Args:
        seed: At least 0, below 2^64.
        stream: What the key is for.

    Returns:
        The key.

    Raises:
        ValueError: If the seed is out of range.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2^64), got {seed}")
    return _key_from_bytes(hashlib.sha256(f"{seed}:{stream}".encode()).digest()[:8])


def _key_from_bytes(key_bytes: bytes) -> Key[Array, ""]:
    """The 8 bytes as the two words of a threefry key."""
    words = np.frombuffer(key_bytes, dtype="<u4").astype(np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


@partial(jax.jit, static_argnames=("shape", "dtype"))
def standard_normal(
    key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Draws standard normals with tails to 7.44 (float32) or 9.99 (float64) standard deviations.

    Args:
        key: A key, used for nothing else.
        shape: The result's shape.
        dtype: float32, or float64 where 64-bit types are on.

    Returns:
        Independent normals of that shape and type, the same that noise under this key is made of.
    """
    return _add_normals(jnp.zeros(shape, dtype), 1.0, key)


def _add_noise(leaf: Array, stddev: float, key: Key[Array, ""]) -> Float[Array, "..."]:
    """The leaf plus noise, in float32 or wider."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(f"leaves to be noised must be real floats, got {leaf.dtype}")
    return _add_normals(leaf.astype(jnp.promote_types(jnp.float32, leaf.dtype)), stddev, key)


@jax.jit
def _add_normals(leaf: Array, stddev: float | Array, key: Key[Array, ""]) -> Float[Array, "..."]:
    """The leaf plus normals times `stddev`, chunk after chunk in its own memory."""
    flat = leaf.reshape(-1)
    size = min(_CHUNK, flat.size)

    def add(number: Array, flat: Array) -> Array:
        # The last chunk ends where the leaf does; what it shares with the one before already has noise.
        first = number * _CHUNK
        start = jnp.minimum(first, flat.size - size)
        is_new = jnp.arange(size) >= first - start
        normals = jnp.where(is_new, _normals_of_chunk(key, number, size, flat.dtype), 0)
        part = jax.lax.dynamic_slice(flat, (start,), (size,))
        return jax.lax.dynamic_update_slice(flat, part + jnp.asarray(stddev, flat.dtype) * normals, (start,))

    return jax.lax.fori_loop(0, -(-flat.size // _CHUNK), add, flat).reshape(leaf.shape)


def _normals_of_chunk(
    key: Key[Array, ""], number: Array, size: int, dtype: DTypeLike
) -> Float[Array, " size"]:
    """The first normals of one chunk: pair i of the key's stream is made of its block i."""
    pairs = (size + 1) // 2
    counters = number.astype(jnp.uint32) * (_CHUNK // 2) + jnp.arange(pairs, dtype=jnp.uint32)
    pair = normals_from_bits(*_random_words(key, counters, dtype))
    return jnp.concatenate(pair)[:size]


def _random_words(
    key: Key[Array, ""], counters: UInt[Array, " n"], dtype: DTypeLike
) -> tuple[UInt[Array, " n"], UInt[Array, " n"]]:
    """Two random words for each counter, of 32 bits for float32 and of 64 for float64.

    These are the two words of a threefry block, where `jax.random.bits` makes a block for each.
    """

    def block(upper: int) -> tuple[Array, Array]:
        blocks = jnp.stack([jnp.full_like(counters, upper), counters])
        words = threefry_2x32(jax.random.key_data(key), blocks)
        return words[0], words[1]

    if dtype != jnp.float64:
        return block(0)
    radius, angle = ((low, high) for low, high in zip(block(0), block(1), strict=True))
    return _join(*radius), _join(*angle)


def _join(low: UInt[Array, " n"], high: UInt[Array, " n"]) -> UInt[Array, " n"]:
    """64-bit words of 32-bit halves."""
    return low.astype(jnp.uint64) | (high.astype(jnp.uint64) << 32)


def normals_from_bits(
    radius_words: UInt[Array, " n"], angle_words: UInt[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Maps random words to pairs of independent normals (Box and Muller 1958).

    The squared radius over 2 is exponential, -log(u) of a uniform u on the midpoints of 2^(W + 7) cells, W
    bits a word; its largest value is (W + 8) log 2. The angle falls on the midpoints of an eighth of the
    circle, turned to one of eight octants, so that x and y have the same distribution, symmetric about 0. The
    smaller of u and 1 - u is what the words hold, so rounding is relative to the distance from either end:
    small radii are not coarser than large ones, and no pair is exactly 0.

    Args:
        radius_words: Random uint32 or uint64 words.
        angle_words: As many again.

    Returns:
        x and y, in float32 for 32-bit words and float64 for 64-bit words.
    """
    word_bits = jnp.iinfo(radius_words.dtype).bits
    dtype = jnp.float32 if word_bits == 32 else jnp.float64

    def low_bits(words: UInt[Array, " n"], count: int) -> UInt[Array, " n"]:
        return words & ((1 << count) - 1)

    cell = low_bits(radius_words, word_bits - 1).astype(dtype) * 2**_RADIUS_BITS
    cell += low_bits(angle_words, _RADIUS_BITS).astype(dtype) + 0.5
    tail = cell * 2.0 ** -(word_bits + _RADIUS_BITS)  # in (0, 1/2]: u, or 1 - u where the top bit is set
    radius = jnp.sqrt(-2 * _log_of_uniform(tail, _bit(radius_words, word_bits - 1)))

    angle_bits = word_bits - _RADIUS_BITS - _OCTANT_BITS
    angle = (angle_words >> (_RADIUS_BITS + _OCTANT_BITS)).astype(dtype) + 0.5
    cos, sin = _cos_sin(angle * (math.pi / 4 * 2.0**-angle_bits))
    near, far = radius * cos, radius * sin

    swap, negate_x, negate_y = (_bit(angle_words, _RADIUS_BITS + i) for i in range(_OCTANT_BITS))
    x, y = jnp.where(swap, far, near), jnp.where(swap, near, far)
    return jnp.where(negate_x, -x, x), jnp.where(negate_y, -y, y)


def _log_of_uniform(tail: Float[Array, " n"], is_upper: Bool[Array, " n"]) -> Float[Array, " n"]:
    """log(1 - tail) where the tail is the upper one, else log(tail), by one logarithm.

    1 - tail is rounded to v; log(v) times tail / (1 - v), whose divisor is exact, makes good for that.
    """
    v = jnp.where(is_upper, 1 - tail, tail)
    log = jnp.log(v)
    rounded_away = v == 1
    corrected = log * (tail / jnp.where(rounded_away, 1, 1 - v))
    return jnp.where(is_upper, jnp.where(rounded_away, -tail, corrected), log)


def _cos_sin(angle: Float[Array, " n"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Both for angles in [0, pi / 4], by Taylor's series, whose rest is below the type's precision there."""
    terms = 6 if angle.dtype == jnp.float32 else 10
    square = jnp.square(angle)

    def series(first: int) -> Array:
        coefficients = [(-1) ** k / math.factorial(2 * k + first) for k in range(terms)]
        return jnp.polyval(jnp.asarray(coefficients[::-1], angle.dtype), square, unroll=terms)

    return series(0), angle * series(1)


def _bit(words: UInt[Array, " n"], place: int) -> Array:
    """Whether the bit at a place, counted from the lowest, is set."""
    return ((words >> place) & 1) == 1
