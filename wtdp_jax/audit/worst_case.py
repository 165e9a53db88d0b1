"""Parameters at which the naive tied norm is far too small, found by gradient ascent.

At random parameters the cross-term of the tied norm is near 0, and a norm without it nearly right. But a
guarantee must hold at all parameters, those that training or an adversary may reach too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

Params = Any


def norm_ratio(
    loss: Callable[[Params, Array, Array], Array], params: Params, tied: tuple[str, ...]
) -> Float[Array, ""]:
    """The true norm of a gradient over the naive one, which adds the squared norms of a matrix's two uses.

    Args:
        loss: (params, embedding, head) -> the loss, the tied matrix given once for either use.
        params: all parameters.
        tied: the path of the tied matrix in them.
    """
    matrix = _leaf(params, tied)
    of_params, of_embedding, of_head = jax.grad(loss, argnums=(0, 1, 2))(params, matrix, matrix)
    others = optax.tree.norm(of_params, squared=True)
    naive = others + jnp.sum(jnp.square(of_embedding)) + jnp.sum(jnp.square(of_head))
    true = others + jnp.sum(jnp.square(of_embedding + of_head))
    return jnp.sqrt(true / naive)


def ascend(ratio: Callable[[Params], Array], params: Params, *, steps: int, learning_rate: float) -> Params:
    """Parameters with a larger ratio, by Adam.

    Args:
        ratio: of parameters.
        params: where to start.
        steps: how many.
        learning_rate: Adam's.
    """
    optimizer = optax.adam(learning_rate)

    def step(state: tuple[Params, Any], _: None) -> tuple[tuple[Params, Any], None]:
        params, opt_state = state
        updates, opt_state = optimizer.update(jax.grad(lambda p: -ratio(p))(params), opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), None, length=steps)[0][0]


def _leaf(params: Params, path: tuple[str, ...]) -> Array:
    for name in path:
        params = params[name]
    return params
