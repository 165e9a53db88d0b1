"""Attention one example after the other is attention all at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wtdp_jax.models.attention import causal_attention, causal_attention_by_example

B, T, H, K = 3, 7, 2, 4


def _heads(*counts: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, T, n, K)), jnp.float32) for n in counts or (H, H, H)]


def _value_and_gradients(attention: Any) -> Any:
    def total(*heads: Any) -> Any:
        return jnp.sum(jnp.sin(attention(*heads)))

    return jax.value_and_grad(total, argnums=(0, 1, 2))


def _assert_close(found: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, right)


def test_values_and_gradients() -> None:
    right = _value_and_gradients(causal_attention)(*_heads())
    _assert_close(_value_and_gradients(causal_attention_by_example)(*_heads()), right)


def test_under_vmap_too() -> None:
    def one_by_one(*heads: Any) -> Any:
        return jax.vmap(lambda *one: causal_attention_by_example(*(a[None] for a in one))[0])(*heads)

    right = _value_and_gradients(causal_attention)(*_heads())
    _assert_close(_value_and_gradients(one_by_one)(*_heads()), right)
    program = jax.jit(_value_and_gradients(one_by_one)).lower(*_heads()).as_text()
    assert f"{H}x{T}x{T}" in program and f"{B}x{H}x{T}x{T}" not in program and f"{B}x1x{H}x{T}" not in program


def test_no_token_sees_a_later_one() -> None:
    q, k, v = _heads()
    for attention in (causal_attention, causal_attention_by_example):
        before = attention(q, k, v)
        after = attention(q, k.at[:, -1].add(1), v.at[:, -1].add(1))
        np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
        assert jnp.any(before[:, -1] != after[:, -1])


def test_shared_heads_are_those_repeated_in_turn() -> None:
    heads = _heads(6, 2, 2)

    def repeated(q: Any, k: Any, v: Any) -> Any:
        apart = ([x[:, :, head // 3] for head in range(6)] for x in (k, v))
        return causal_attention(q, *(jnp.stack(x, axis=2) for x in apart))

    right = _value_and_gradients(repeated)(*heads)
    for attention in (causal_attention, causal_attention_by_example):
        _assert_close(_value_and_gradients(attention)(*heads), right)
