"""Each rule against the gradient it is the norm of, built in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wtdp_jax import rules

T, V = 7, 13


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def _embedding_gradient(ids: jax.Array, d: jax.Array) -> np.ndarray:
    gradient = np.zeros((V, d.shape[1]))
    for token, row in zip(np.asarray(ids), np.asarray(d), strict=True):
        gradient[token] += row
    return gradient


@pytest.mark.parametrize(
    ("positions", "features_in", "features_out"),
    [
        (1, 5, 9),  # a head that reads one position
        (3, 30, 40),  # 3 * 70 <= 1200: Gram
        (20, 5, 9),  # 20 * 14 > 45: tiles, 5 columns in 8 tiles of 1
        (20, 17, 9),  # tiles of 3, the last ones beyond the end
    ],
)
def test_dense(float64: None, positions: int, features_in: int, features_out: int) -> None:
    a, d = _normal(positions, features_in), _normal(positions, features_out, seed=1)
    expected = np.sum(np.square(np.asarray(a).T @ np.asarray(d)))
    np.testing.assert_allclose(rules.dense_squared_norm(a, d), expected, rtol=1e-12)


def test_bias(float64: None) -> None:
    d = _normal(T, 4)
    np.testing.assert_allclose(rules.bias_squared_norm(d), np.sum(np.square(np.sum(d, 0))), rtol=1e-12)


def test_embedding(float64: None) -> None:
    ids, d = jnp.asarray([3, 3, 0, 5, 3, 12, 0]), _normal(T, 4)
    expected = np.sum(np.square(_embedding_gradient(ids, d)))
    np.testing.assert_allclose(rules.embedding_squared_norm(ids, d), expected, rtol=1e-12)


def test_embedding_with_distinct_ids(float64: None) -> None:
    ids, d = jnp.arange(T), _normal(T, 4)
    expected = rules.embedding_squared_norm(ids, d)
    np.testing.assert_allclose(rules.distinct_embedding_squared_norm(d), expected, rtol=1e-12)


@pytest.mark.parametrize("positions", [1, 4])
def test_tied_matrix(float64: None, positions: int) -> None:
    ids, d = jnp.asarray([3, 3, 0, 5, 3, 12, 0]), _normal(T, 4)
    h, r = _normal(positions, 4, seed=1), _normal(positions, V, seed=2)
    g_in, g_out = _embedding_gradient(ids, d), np.asarray(r).T @ np.asarray(h)
    rows = rules.head_gradient_rows(ids, h, r)
    np.testing.assert_allclose(rows, g_out[np.asarray(ids)], rtol=1e-12)
    cross = rules.cross_term(d, rows)
    np.testing.assert_allclose(cross, np.sum(g_in * g_out), rtol=1e-12)
    squared = [jnp.asarray(np.sum(np.square(g))) for g in (g_in, g_out)]
    np.testing.assert_allclose(
        rules.tied_squared_norm(*squared, cross, "cross_term"), np.sum(np.square(g_in + g_out)), rtol=1e-12
    )


@pytest.mark.parametrize(
    ("tied_norm", "expected"),
    [
        ("cross_term", 9 + 4 + 2 * 5),
        ("omit", 9 + 4),
        ("triangle", (3 + 2) ** 2),
        ("materialize", 9 + 4),  # the joint norm comes whole, in the first
    ],
)
def test_tied_modes_by_hand(float64: None, tied_norm: rules.TiedNorm, expected: float) -> None:
    # ||g_in|| = 3, ||g_out|| = 2, <g_in, g_out> = 5
    parts = (jnp.asarray(9.0), jnp.asarray(4.0), jnp.asarray(5.0))
    np.testing.assert_allclose(rules.tied_squared_norm(*parts, tied_norm), expected, rtol=1e-12)


def test_a_cancelling_tied_pair_never_rounds_to_less_than_it_is() -> None:
    """g_in is -g_out but for a trifle: the plain float32 sum of three terms comes out too small."""
    plain_too_small = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        ids = jnp.arange(T, dtype=jnp.int32)
        h, r = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 4), (3, V)))
        rows = rules.head_gradient_rows(ids, h, r)
        d = -rows * (1 + 1e-4 * rng.standard_normal(rows.shape).astype(np.float32))
        r = r.at[:, T:].set(0)  # so that the head's gradient has the tokens' rows alone
        squared = (rules.embedding_squared_norm(ids, d), rules.dense_squared_norm(h, r))
        cross = rules.cross_term(d, rows)
        wide = [np.asarray(x, np.float64) for x in (d, h, r)]
        true = np.sum(np.square(wide[0] + (wide[2].T @ wide[1])[:T]))
        assert float(rules.tied_squared_norm(*squared, cross, "cross_term")) >= true
        plain_too_small += float(rules.squared_norm(d) + rules.squared_norm(r.T @ h) + 2 * cross) < true
    assert plain_too_small > 20  # else this test could not fail


@pytest.mark.parametrize("positions", [3, 60])
def test_a_cancelling_dense_gradient_never_rounds_to_less_than_it_is(positions: int) -> None:
    """Tokens come in pairs whose gradients nearly cancel."""
    squared_norm = jax.jit(rules.dense_squared_norm)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        a, d = (rng.standard_normal((positions, n)).astype(np.float32) for n in (16, 24))
        a = np.concatenate([a, a])
        d = np.concatenate([d, -d * (1 + 1e-3 * rng.standard_normal(d.shape).astype(np.float32))])
        true = np.sum(np.square(a.astype(np.float64).T @ d.astype(np.float64)))
        assert float(squared_norm(jnp.asarray(a), jnp.asarray(d))) >= true * (1 - 1e-6)


def test_half_precision_is_summed_in_float32() -> None:
    a, d = (jnp.ones((300, n), jnp.bfloat16) for n in (4, 5))
    # 20 entries of 300 each; bfloat16 cannot count beyond 256
    for value in (rules.dense_squared_norm(a, d), rules.dense_squared_norm(a[:, :1], d[:, :1]) * 20):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, 20 * 300**2, rtol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, 8, 8), False), ((4, 8, 8), False), ((5, 8, 8), True), ((3, 4, 12), False), ((4, 4, 12), True)],
)
def test_which_is_smaller(sizes: tuple[int, int, int], expected: bool) -> None:
    assert rules.gradient_is_smaller(*sizes) == expected


@pytest.mark.parametrize("sizes", [(3, 7, 5), (9, 4, 3), (1, 7, 5)])
@pytest.mark.parametrize("large_is_a", [True, False])
def test_squares_that_underflow_are_not_lost(sizes: tuple[int, int, int], large_is_a: bool) -> None:
    # In float32 the squares of 1e-21 are below the smallest normal number, their products with 1e36 are not.
    positions, features_in, features_out = sizes
    scales = (1e18, 1e-21) if large_is_a else (1e-21, 1e18)
    a, d = (np.full((positions, n), x) for n, x in zip((features_in, features_out), scales, strict=True))
    found = rules.dense_squared_norm(jnp.asarray(a, jnp.float32), jnp.asarray(d, jnp.float32))
    assert float(found) >= np.sum((a.T @ d) ** 2)
