"""What a loss head's statistics say, against derivatives of the plain loss, in float64."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wtdp_jax import head_rules
from wtdp_jax.head_rules import gradient_carrier, head_statistics

T, S, D, V = 5, 4, 3, 23


@pytest.fixture(params=[23, 11, 8, 1], ids="tiles of {}".format)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Tiles that divide the vocabulary, and that do not: one row is left over, or many."""
    monkeypatch.setattr(head_rules, "_TILE", request.param)
    yield request.param


def _example(seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    hidden, matrix = (jnp.asarray(rng.standard_normal(shape)) for shape in ((T, D), (V, D)))
    targets = jnp.asarray(rng.integers(0, V, T), jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 2, T))
    ids = jnp.asarray([int(targets[0]), 3, 3, V - 1], jnp.int32)
    return hidden, matrix, targets, weights, ids


def _loss(hidden: Any, matrix: Any, targets: Any, weights: Any) -> Any:
    log_probs = jax.nn.log_softmax(hidden @ matrix.T)
    return -jnp.sum(weights * log_probs[jnp.arange(T), targets])


@pytest.mark.parametrize("hold", [True, False])
def test_statistics(float64: None, tile: int, hold: bool) -> None:
    hidden, matrix, targets, weights, ids = _example()
    found = jax.jit(lambda *args: head_statistics(*args, hold=hold))(hidden, matrix, targets, weights, ids)
    loss, (d_hidden, gradient, token_losses) = jax.value_and_grad(_loss, argnums=(0, 1, 3))(
        hidden, matrix, targets, weights
    )
    np.testing.assert_allclose(found.loss, loss, rtol=1e-12)
    np.testing.assert_allclose(found.d_hidden, d_hidden, rtol=1e-11)
    np.testing.assert_allclose(found.token_losses, token_losses, rtol=1e-12)
    np.testing.assert_allclose(found.squared_norm, jnp.sum(gradient**2), rtol=1e-12)
    np.testing.assert_allclose(found.rows, gradient[ids], rtol=1e-11)
    if hold:
        np.testing.assert_allclose(found.gradient, gradient, rtol=1e-10, atol=1e-14)
    else:
        assert found.gradient is None


def test_the_norm_is_raised_by_more_than_its_rounding(float64: None, tile: int) -> None:
    hidden, matrix, targets, weights, ids = _example()
    found = jax.jit(lambda *args: head_statistics(*args, hold=False))(hidden, matrix, targets, weights, ids)
    r = (jax.nn.softmax(hidden @ matrix.T) - jax.nn.one_hot(targets, V)) * weights[:, None]
    gradient = np.asarray(r.T, np.longdouble) @ np.asarray(hidden, np.longdouble)
    parts = float(jnp.sum(jnp.sum(r**2, -1) * jnp.sum(hidden**2, -1)))
    raised = np.longdouble(float(found.squared_norm)) - np.sum(gradient**2)
    assert 12 < raised / (np.finfo(np.float64).eps * parts) < 20  # 16, but for the rounding itself


def test_the_carrier_sums_a_batch(float64: None, tile: int) -> None:
    examples = [_example(seed) for seed in range(3)]
    matrix = examples[0][1]
    hidden, targets, weights = (jnp.stack([e[i] for e in examples]) for i in (0, 2, 3))
    factors = jnp.asarray([0.5, 0.0, 2.0])

    def carried(matrix: Any) -> Any:
        log_normalizers = jax.nn.logsumexp(hidden @ matrix.T, -1)
        one = jax.vmap(gradient_carrier, in_axes=(None, 0, None, 0, 0, 0))
        constants = jax.lax.stop_gradient((hidden, matrix, targets, weights, log_normalizers))
        return factors @ one(matrix, *constants)

    def plain(matrix: Any) -> Any:
        return factors @ jax.vmap(_loss, in_axes=(0, None, 0, 0))(hidden, matrix, targets, weights)

    np.testing.assert_allclose(jax.jit(jax.grad(carried))(matrix), jax.grad(plain)(matrix), rtol=1e-11)


def test_a_target_outside_the_vocabulary_spoils_all(tile: int) -> None:
    hidden, matrix, targets, weights, ids = _example()
    found = head_statistics(hidden, matrix, targets.at[1].set(V), weights, ids, hold=False)
    assert jnp.isnan(found.loss) and jnp.isnan(found.squared_norm)
