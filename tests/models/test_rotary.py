"""Rotary positions by hand, and what they are for: products that know distances alone."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import SCALING
from wtdp_jax.models.rotary import rotary_frequencies, rotated


def test_frequencies_by_hand() -> None:
    # 10000^(-2i/8) = 10^-i
    np.testing.assert_allclose(rotary_frequencies(8, 1e4), [1, 0.1, 0.01, 0.001], rtol=1e-12)


def test_a_pair_turns_by_its_angle() -> None:
    """Features 0 and 2 are one pair, 1 and 3 the other; at position 2 they turn by 2 f."""
    x = jnp.zeros((1, 3, 1, 4)).at[0, :, 0, 0].set(1.0).at[0, :, 0, 3].set(2.0)
    turned = rotated(x, np.array([0.5, 0.25]))[0, 2, 0]
    expected = [math.cos(1.0), -2 * math.sin(0.5), math.sin(1.0), 2 * math.cos(0.5)]
    np.testing.assert_allclose(turned, expected, rtol=1e-6)


def test_products_depend_on_the_distance_alone(float64: None) -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(np.tile(rng.standard_normal(8), (1, 9, 1, 1))) for _ in range(2))
    frequencies = rotary_frequencies(8, 1e4)
    products = np.einsum("tk,sk->ts", rotated(q, frequencies)[0, :, 0], rotated(k, frequencies)[0, :, 0])
    for distance in range(-8, 9):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12)
    assert np.ptp(products[:, 0]) > 0.1


def test_narrow_types_are_turned_in_float32() -> None:
    x = jnp.ones((1, 300, 1, 2), jnp.bfloat16)
    turned = rotated(x, np.array([1.0]))
    assert turned.dtype == jnp.bfloat16
    # bfloat16 has no odd numbers above 256, so an angle of 299 would not even be there.
    np.testing.assert_allclose(turned[0, 299, 0, 1].astype(float), math.cos(299) + math.sin(299), atol=4e-3)


def test_llama_3_scales_by_the_number_of_turns() -> None:
    turns = np.array([8.0, 4.0, 2.5, 1.0, 0.3])  # within the 16 positions first trained on
    # From 4 turns on nothing changes, up to 1 the turns are a quarter; 2.5 is halfway.
    factors = [1, 1, 0.5 + 0.5 / 4, 1 / 4, 1 / 4]
    frequencies = 2 * math.pi * turns / 16
    np.testing.assert_allclose(SCALING(frequencies), frequencies * factors, rtol=1e-12)
    scaled = rotary_frequencies(8, 1e4, SCALING)
    np.testing.assert_allclose(scaled, SCALING(rotary_frequencies(8, 1e4)), rtol=1e-12)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("factor", 0.5, "factor must be at least 1 and finite, got 0.5"),
        ("factor", float("nan"), "factor must be at least 1 and finite, got nan"),
        ("low_freq_factor", 0.0, "low_freq_factor must be positive and below .*, got 0.0 and 4.0"),
        ("high_freq_factor", 1.0, "must be positive and below high_freq_factor, got 1.0 and 1.0"),
        ("original_n_positions", 0, "original_n_positions must be at least 1, got 0"),
    ],
)
def test_scaling_is_validated(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SCALING, **{field: value})
