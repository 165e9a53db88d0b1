"""Causal self-attention, all examples at once or one after the other.

Dimension key: B examples, T tokens, H heads of queries, G heads of keys and values, K features a head.

Each head of keys and values serves H / G heads of queries in turn (grouped-query attention, Ainslie et al.
2023, arXiv 2305.13245); in multi-head attention G is H.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

Heads = Float[Array, "B T H K"]
SharedHeads = Float[Array, "B T G K"]
Drop = Callable[[Array], Array] | None


def attention(q: Heads, k: SharedHeads, v: SharedHeads, drop: Drop = None, *, remat: bool) -> Heads:
    """Attention of each token to itself and those before it, in the way that suits a block of a decoder.

    Args:
        q: queries.
        k: keys.
        v: values.
        drop: dropout on the attention weights; None: none.
        remat: whether memory is worth more than time.
    """
    # Scores outgrow all else that a block holds where there are more tokens than features to a head.
    if remat and drop is None and q.shape[1] > 4 * q.shape[-1]:
        return causal_attention_by_example(q, k, v)
    return causal_attention(q, k, v, drop)


def causal_attention(q: Heads, k: SharedHeads, v: SharedHeads, drop: Drop = None) -> Heads:
    """Attention of each token to itself and those before it.

    Args:
        q: queries.
        k: keys.
        v: values.
        drop: dropout on the attention weights; None: none.

    On a GPU, in float16 or bfloat16 and without dropout, this is cuDNN's fused kernel. Elsewhere it is
    written out, because `jax.nn.dot_product_attention` takes its softmax in float32 whatever the inputs are,
    which would cap a float64 model at seven digits.
    """
    narrow, head_size = jnp.finfo(q.dtype).bits == 16, q.shape[-1]
    if drop is None and jax.default_backend() == "gpu" and narrow and head_size % 8 == 0 and head_size <= 128:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    if k.shape[2] < q.shape[2]:
        k, v = (jnp.repeat(heads, q.shape[2] // k.shape[2], axis=2) for heads in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    causal = jnp.tril(jnp.ones((1, 1, *scores.shape[2:]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
    weights = weights if drop is None else drop(weights)
    return jnp.einsum("bhts,bshk->bthk", weights.astype(v.dtype), v)


@jax.custom_vjp
def causal_attention_by_example(q: Heads, k: SharedHeads, v: SharedHeads) -> Heads:
    """`causal_attention` of one example after the other, under vmap too, with scores formed again backward.

    So the scores of one example, H T T, are all that is held of them.
    """
    return jax.vmap(sequential_vmap(_of_one))(q, k, v)


def _of_one(q: Array, k: Array, v: Array) -> Array:
    """One example's attention, (T, H, K); keys and values are (T, G, K)."""
    return causal_attention(q[None], k[None], v[None])[0]


def _cotangents_of_one(q: Array, k: Array, v: Array, d: Array) -> tuple[Array, Array, Array]:
    return jax.vjp(_of_one, q, k, v)[1](d)


causal_attention_by_example.defvjp(
    lambda q, k, v: (causal_attention_by_example(q, k, v), (q, k, v)),
    lambda residuals, d: jax.vmap(sequential_vmap(_cotangents_of_one))(*residuals, d),
)
