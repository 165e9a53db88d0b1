"""The normals' distribution and extremes; noise on every leaf, step by step; keys."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array
from scipy import special

from wtdp_jax import noise
from wtdp_jax.noise import (
    add_gaussian_noise,
    divide_by,
    key_from_os,
    key_from_seed,
    normals_from_bits,
    standard_normal,
)

KEY = key_from_seed(0, "test")
NORMALS = jax.jit(normals_from_bits)  # compiled whole, which is faster than each operation by itself
ALL_ONES = {np.uint32: 2**32 - 1, np.uint64: 2**64 - 1}


def words(*values: int, dtype: type = np.uint32) -> Array:
    return jnp.asarray(np.array(values, dtype))


def kolmogorov_smirnov(sample: Array) -> float:
    """sqrt(n) times the largest distance to the normal distribution: above 1.95 once in a thousand."""
    ordered = np.sort(np.asarray(sample, np.float64).ravel())
    n = len(ordered)
    below = np.arange(n) / n
    distribution = special.ndtr(ordered)
    return math.sqrt(n) * float(max((distribution - below).max(), (below + 1 / n - distribution).max()))


# --- the map from random words to normals ---------------------------------------------------------------


def test_all_zero_words_give_the_largest_normal() -> None:
    # u is the middle of the first of 2^39 cells, 2^-40: radius sqrt(80 log 2) = 7.4467. The angle is half of
    # pi / 4 * 2^-22, 9.4e-8, so y = 7.4467 * 9.4e-8 = 6.97e-7.
    x, y = NORMALS(words(0), words(0))
    assert x.dtype == y.dtype == jnp.float32
    assert float(x[0]) == pytest.approx(math.sqrt(80 * math.log(2)), rel=1e-6)
    assert float(y[0]) == pytest.approx(6.972e-7, rel=1e-3)


def test_all_one_words() -> None:
    # u = 1 - 1/2 to rounding: radius sqrt(2 log 2) = 1.1774; at pi / 4, both negated: -1.1774 / sqrt(2).
    x, y = NORMALS(words(ALL_ONES[np.uint32]), words(ALL_ONES[np.uint32]))
    assert float(x[0]) == pytest.approx(-0.832555, rel=1e-6)
    assert float(y[0]) == pytest.approx(-0.832555, rel=1e-6)


def test_the_smallest_radius_is_not_zero() -> None:
    # The top bit alone: 1 - u = 2^-40, so radius sqrt(2^-39) = 1.3487e-6.
    x, y = NORMALS(words(2**31), words(0))
    assert float(x[0]) == pytest.approx(2.0**-19.5, rel=1e-6)
    assert float(y[0]) > 0


def test_the_radius_is_the_exact_quantile_over_its_whole_range() -> None:
    cells = np.unique(np.geomspace(1, 2**31 - 1, 3000).astype(np.uint64))
    near_zero = jnp.asarray(cells.astype(np.uint32))
    near_one = jnp.asarray((cells + 2**31).astype(np.uint32))
    tail = (cells * 128.0 + 0.5) / 2.0**39
    for radius_words, half_square in [(near_zero, -np.log(tail)), (near_one, -np.log1p(-tail))]:
        x, y = NORMALS(radius_words, jnp.zeros_like(radius_words))
        np.testing.assert_allclose(np.hypot(x, y), np.sqrt(2 * half_square), rtol=1e-6)


def test_the_octants_cover_the_circle_symmetrically() -> None:
    # Bits 7, 8 and 9 of the second word swap and negate; the radius' 7 bits and the angle stay.
    octants = np.arange(8, dtype=np.uint32) << 7
    angle = np.uint32(0x12345 << 10)
    x, y = NORMALS(words(*[12345] * 8), jnp.asarray(octants + angle))
    points = {(float(a), float(b)) for a, b in zip(x, y, strict=True)}
    near, far = abs(float(x[0])), abs(float(y[0]))
    signs = (1, -1)
    assert near > far > 0
    assert points == {(s * a, t * b) for a, b in ((near, far), (far, near)) for s in signs for t in signs}


@pytest.mark.usefixtures("float64")
def test_64_bit_words_give_float64() -> None:
    # 2^-72: radius sqrt(144 log 2) = 9.9907.
    x, _ = NORMALS(words(0, dtype=np.uint64), words(0, dtype=np.uint64))
    assert x.dtype == jnp.float64
    assert float(x[0]) == pytest.approx(math.sqrt(144 * math.log(2)), rel=1e-14)
    last = words(ALL_ONES[np.uint64], dtype=np.uint64)
    x, _ = NORMALS(last, last)
    assert float(x[0]) == pytest.approx(-math.sqrt(math.log(2)), rel=1e-14)


# --- the distribution -----------------------------------------------------------------------------------


def test_normals_are_normal_and_a_wrong_scale_is_seen() -> None:
    sample = standard_normal(KEY, (200_000,))
    assert kolmogorov_smirnov(sample) < 1.95
    assert kolmogorov_smirnov(1.05 * sample) > 1.95
    assert kolmogorov_smirnov(0.95 * sample) > 1.95
    assert kolmogorov_smirnov(sample + 0.02) > 1.95


@pytest.mark.usefixtures("float64")
def test_float64_normals_are_normal() -> None:
    sample = standard_normal(KEY, (200_000,), jnp.float64)
    assert sample.dtype == jnp.float64
    assert kolmogorov_smirnov(sample) < 1.95


def test_moments_and_tails() -> None:
    # n = 10^6: the mean of z^2 has standard deviation sqrt(2 / n), of z^4 sqrt(96 / n); 4 of each. Beyond
    # 3.5: 465.3 expected, standard deviation 21.6.
    sample = np.asarray(standard_normal(KEY, (2, 500_000)), np.float64)
    assert abs(sample.mean()) < 4e-3
    assert abs((sample**2).mean() - 1) < 4 * math.sqrt(2e-6)
    assert abs((sample**4).mean() - 3) < 4 * math.sqrt(96e-6)
    assert abs((np.abs(sample) > 3.5).sum() - 465.3) < 4 * 21.6


def test_the_two_of_a_pair_are_independent() -> None:
    x, y = np.asarray(standard_normal(KEY, (2, 500_000)), np.float64)
    for f, g in [(x, y), (x**2, y**2), (np.abs(x), y), (x, np.abs(y))]:
        assert abs(np.corrcoef(f, g)[0, 1]) < 4 / math.sqrt(500_000)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_every_shape_is_served(shape: tuple[int, ...]) -> None:
    sample = standard_normal(KEY, shape)
    assert sample.shape == shape and sample.dtype == jnp.float32
    assert len(np.unique(sample)) == sample.size


def test_chunks_are_one_stream_without_repetition() -> None:
    size = noise._CHUNK
    sample = np.asarray(standard_normal(KEY, (2 * size + 7,)))
    # Programs of other sizes may be compiled otherwise, and round the same normals an ulp apart.
    np.testing.assert_allclose(sample[:size], standard_normal(KEY, (size,)), rtol=1e-5, atol=1e-6)
    chunks = [sample[:size], sample[size : 2 * size], sample[2 * size :]]
    assert abs(np.corrcoef(chunks[0], chunks[1])[0, 1]) < 5 / math.sqrt(size)
    both = standard_normal(KEY, (2 * size,))
    np.testing.assert_allclose(chunks[1], both[size:], rtol=1e-5, atol=1e-6)
    assert not np.isin(chunks[2], sample[: 2 * size]).all()
    assert kolmogorov_smirnov(chunks[1]) < 1.95
    # Among 2^20 float32 normals some are equal by chance; a repeated chunk would halve their number.
    assert len(np.unique(sample)) > 0.9 * len(sample)


def test_words_are_threefrys_of_key_and_counter() -> None:
    # Known answers of threefry2x32-20 (Salmon et al. 2011), key 0 and counter 0; the counter is (0, i).
    zero = jax.random.wrap_key_data(words(0, 0), impl="threefry2x32")
    radius, angle = noise._random_words(zero, words(0), jnp.float32)
    assert (int(radius[0]), int(angle[0])) == (0x6B200159, 0x99BA4EFE)
    first, second = (noise._random_words(zero, words(i), jnp.float32) for i in (0, 1))
    both = noise._random_words(zero, words(0, 1), jnp.float32)
    np.testing.assert_array_equal(np.stack(both), np.concatenate([first, second], 1))


@pytest.mark.usefixtures("float64")
def test_64_bit_words_are_of_two_blocks() -> None:
    zero = jax.random.wrap_key_data(words(0, 0), impl="threefry2x32")
    radius, angle = noise._random_words(zero, words(0), jnp.float64)
    assert (int(radius[0]) & 0xFFFFFFFF, int(angle[0]) & 0xFFFFFFFF) == (0x6B200159, 0x99BA4EFE)
    assert (int(radius[0]) >> 32, int(angle[0]) >> 32) not in [(0, 0), (0x6B200159, 0x99BA4EFE)]


def test_noise_needs_no_second_leaf() -> None:
    leaf = jax.ShapeDtypeStruct((5_000, 1_000), jnp.float32)
    transform = add_gaussian_noise(1.0, KEY)

    def noised(leaf: Array) -> Array:
        return transform.update(leaf, transform.init(leaf))[0]

    memory = jax.jit(noised, donate_argnums=0).lower(leaf).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * 5_000_000
    assert memory.temp_size_in_bytes < 0.5 * memory.alias_size_in_bytes


def test_jit_and_vmap_change_nothing() -> None:
    keys = jax.random.split(KEY, 3)
    one_by_one = jnp.stack([standard_normal(key, (7,)) for key in keys])
    np.testing.assert_allclose(jax.vmap(lambda key: standard_normal(key, (7,)))(keys), one_by_one, rtol=1e-6)
    jitted = jax.jit(standard_normal, static_argnums=1)
    np.testing.assert_allclose(jitted(keys[0], (7,)), one_by_one[0], rtol=1e-6)


# --- noise on a tree of gradients -----------------------------------------------------------------------


def noise_of(stddev: float, tree: object, steps: int = 1) -> list:
    """What the first few updates add to a tree."""
    transform = add_gaussian_noise(stddev, KEY)
    state = transform.init(tree)
    added = []
    for _ in range(steps):
        noised, state = transform.update(tree, state)
        added.append(jax.tree.map(lambda new, old: new - old, noised, tree))
    return added


def test_noise_has_the_stddev_in_the_sums_units() -> None:
    (added,) = noise_of(2.5, {"w": jnp.full((200_000,), 3.0)})
    assert kolmogorov_smirnov(added["w"] / 2.5) < 1.95
    assert kolmogorov_smirnov(added["w"] / 2.375) > 1.95
    assert kolmogorov_smirnov(added["w"] / 2.625) > 1.95


def test_every_coordinate_of_every_leaf_is_noised_even_where_the_sum_is_zero() -> None:
    tree = {"a": jnp.zeros((3, 5)), "b": [jnp.zeros(()), jnp.zeros((7,))], "c": jnp.zeros((3, 5))}
    (added,) = noise_of(1.0, tree)
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(added)])
    assert (values != 0).all()
    assert len(np.unique(values)) == len(values) == 15 + 1 + 7 + 15


def test_no_two_leaves_or_steps_share_noise() -> None:
    n = 10_000
    added = noise_of(1.0, {"a": jnp.zeros((n,)), "b": jnp.zeros((n,)), "c": jnp.zeros((n,))}, steps=3)
    streams = np.stack([np.ravel(leaf) for step in added for leaf in jax.tree.leaves(step)])
    correlations = np.corrcoef(streams) - np.eye(9)
    assert np.abs(correlations).max() < 5 / math.sqrt(n)


def test_a_restored_state_draws_the_same_noise() -> None:
    transform, tree = add_gaussian_noise(1.0, KEY), {"w": jnp.zeros((7,))}
    state = transform.init(tree)
    for _ in range(3):
        saved = state
        noised, state = transform.update(tree, state)
    again, _ = add_gaussian_noise(1.0, KEY).update(tree, jax.tree.map(jnp.array, saved))
    assert int(saved.step) == 2
    np.testing.assert_array_equal(again["w"], noised["w"])


def test_frozen_leaves_stay_none() -> None:
    tree = {"frozen": None, "trained": jnp.zeros((7,))}
    transform = add_gaussian_noise(1.0, KEY)
    noised, _ = transform.update(tree, transform.init(tree))
    assert noised["frozen"] is None
    assert (noised["trained"] != 0).all()
    assert transform.update({"frozen": None}, transform.init(tree))[0] == {"frozen": None}


def test_narrow_leaves_get_float32_noise() -> None:
    (added,) = noise_of(1.0, {"w": jnp.zeros((7,), jnp.bfloat16)})
    assert added["w"].dtype == jnp.float32
    assert (added["w"] != added["w"].astype(jnp.bfloat16)).any()


@pytest.mark.usefixtures("float64")
def test_float64_leaves_get_float64_noise() -> None:
    (added,) = noise_of(1.0, {"w": jnp.zeros((7,), jnp.float64), "v": jnp.zeros((7,), jnp.float32)})
    assert added["w"].dtype == jnp.float64
    assert (added["w"] != added["w"].astype(jnp.float32)).any()
    assert added["v"].dtype == jnp.float32


def test_zero_stddev_adds_nothing_but_counts_the_step() -> None:
    tree = {"w": jnp.full((7,), 2.0)}
    transform = add_gaussian_noise(0.0, KEY)
    noised, state = transform.update(tree, transform.init(tree))
    np.testing.assert_array_equal(noised["w"], tree["w"])
    assert int(state.step) == 1


@pytest.mark.parametrize("stddev", [-1.0, math.inf, math.nan])
def test_noise_refuses_a_stddev_out_of_range(stddev: float) -> None:
    with pytest.raises(ValueError, match=f"^stddev must be finite and at least 0, got {stddev}$"):
        add_gaussian_noise(stddev, KEY)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_noise_refuses_leaves_that_are_not_real_floats(dtype: jnp.dtype) -> None:
    tree = {"w": jnp.zeros((3,), dtype)}
    transform = add_gaussian_noise(1.0, KEY)
    with pytest.raises(
        ValueError, match=f"^leaves to be noised must be real floats, got {jnp.dtype(dtype).name}$"
    ):
        transform.update(tree, transform.init(tree))


def test_a_private_step_is_noise_on_the_sum_then_the_expected_mean() -> None:
    # Sum 6 and noise z of stddev 2, over an expected batch of 4: 1.5 + z / 4.
    tree = {"w": jnp.full((7,), 6.0)}
    (added,) = noise_of(2.0, tree)
    chain = optax.chain(add_gaussian_noise(2.0, KEY), divide_by(4))
    mean, _ = jax.jit(chain.update)(tree, chain.init(tree))
    np.testing.assert_allclose(mean["w"], 1.5 + added["w"] / 4, rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, -2.0, math.inf, math.nan])
def test_divide_by_refuses_a_size_out_of_range(size: float) -> None:
    with pytest.raises(ValueError, match=f"^expected_batch_size must be positive and finite, got {size}$"):
        divide_by(size)


def test_updates_compile_once() -> None:
    tree = {"w": jnp.zeros((7,))}
    transform = add_gaussian_noise(1.0, KEY)
    update, state = jax.jit(transform.update), transform.init(tree)
    for _ in range(3):
        _, state = update(tree, state)
    assert update._cache_size() == 1


# --- keys -----------------------------------------------------------------------------------------------


def test_every_bit_of_a_seed_counts_and_streams_differ() -> None:
    seeds = [0, *(2**bit for bit in range(64)), 2**64 - 1]
    data = {
        tuple(jax.random.key_data(key_from_seed(seed, stream)).tolist()) for seed in seeds for stream in "ab"
    }
    assert len(data) == 2 * 66


def test_a_seeds_key_does_not_depend_on_64_bit_types() -> None:
    narrow = jax.random.key_data(key_from_seed(2**63 + 5, "noise"))
    with jax.enable_x64(True):
        wide = jax.random.key_data(key_from_seed(2**63 + 5, "noise"))
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"^seed must be in \[0, 2\^64\), got {seed}$"):
        key_from_seed(seed, "noise")


def test_a_key_from_the_system_holds_64_of_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (jax.random.key_data(key_from_os()) != jax.random.key_data(key_from_os())).any()
    monkeypatch.setattr(noise.os, "urandom", lambda count: bytes(range(1, count + 1)))
    # Bytes 1 to 8, low byte first.
    assert jax.random.key_data(key_from_os()).tolist() == [0x04030201, 0x08070605]
