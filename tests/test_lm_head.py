"""Heads that give a loss: as the layers they stand for, and in chunks as at once."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wtdp_jax import lm_head
from wtdp_jax.lm_head import Head, LossEmbed, cross_entropy, weighted_loss

V, D, T = 11, 4, 5
RNG = np.random.default_rng(0)
MATRIX = jnp.asarray(RNG.standard_normal((V, D)), jnp.float32)
HIDDEN = jnp.asarray(RNG.standard_normal((3, T, D)), jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, V, (3, T)), jnp.int32)
WEIGHTS = jnp.asarray(RNG.uniform(0.1, 2, (3, T)), jnp.float32)


def _by_hand(hidden: Any, matrix: Any) -> Any:
    log_probs = jax.nn.log_softmax(hidden @ matrix.T)
    return -jnp.sum(WEIGHTS * jnp.take_along_axis(log_probs, TARGETS[..., None], -1)[..., 0], -1)


@pytest.mark.parametrize("chunk", [1, 2 * V, 7 * V, 1000 * V])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(lm_head, "MAX_CHUNK", chunk)

    def value_and_gradients(loss: Any) -> Any:
        return jax.value_and_grad(lambda h, m: jnp.sum(loss(h, m)), argnums=(0, 1))(HIDDEN, MATRIX)

    found = value_and_gradients(lambda h, m: weighted_loss(h, m, TARGETS, WEIGHTS))
    right = value_and_gradients(_by_hand)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, right)


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "MAX_CHUNK", 2 * V)
    gradient = jax.grad(lambda h: jnp.sum(weighted_loss(h, MATRIX, TARGETS, WEIGHTS)))
    program = str(jax.make_jaxpr(gradient)(HIDDEN))
    assert f"f32[2,{V}]" in program
    assert f"f32[{3 * T},{V}]" not in program and f"f32[3,{T},{V}]" not in program


@pytest.mark.parametrize("target", [-1, V])
def test_a_token_outside_the_vocabulary_has_no_loss(target: int) -> None:
    assert jnp.isnan(cross_entropy(jnp.zeros((1, V)), jnp.asarray([target])))[0]


def test_the_layers_they_stand_for() -> None:
    ids = jnp.asarray([[0, V - 1, -1, V]])
    variables = {"params": {"embedding": MATRIX}}
    for method, x in (("__call__", ids), ("attend", HIDDEN)):
        ours, flaxs = (layer(V, D).apply(variables, x, method=method) for layer in (LossEmbed, nn.Embed))
        np.testing.assert_array_equal(ours, flaxs)
    kernel = {"params": {"kernel": MATRIX.T}}
    np.testing.assert_array_equal(
        Head(D, V).apply(kernel, HIDDEN), nn.Dense(V, use_bias=False).apply(kernel, HIDDEN)
    )
