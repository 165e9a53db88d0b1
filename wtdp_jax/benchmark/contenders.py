"""One model's work, and the ways to do it in JAX: this package's engines, and jax-privacy's.

Dimension key: B examples, T tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wtdp_jax import clipped_grad
from wtdp_jax.clipping import Engine
from wtdp_jax.losses import next_token_loss
from wtdp_jax.models import GPT2, GPT2Config
from wtdp_jax.noise import add_gaussian_noise, divide_by, key_from_seed
from wtdp_jax.step import plain_grad

Model = Literal["tied", "untied"]

LEARNING_RATE = 1e-14
"""So small that no float32 weight changes: every step of every library starts from the same ones."""

JAX_CONTENDERS: Mapping[str, str] = {
    "non-private": "jax",
    "bookkeeping": "wtdp-jax",
    "ghost": "wtdp-jax",
    "vmap": "jax-privacy",
    "microbatch_size=1": "jax-privacy",
}
"""By name the library: first the baseline, then what is measured against it."""


class Task:
    """One model with weights and data, for all contenders.

    Attributes:
        model: in Flax.
        params: its weights; a step in JAX replaces them by its own.
        l2_clip_norm: C.
        batch: ids (B, T), positions (B,), targets (B,).
        one: one example whose tokens are all its target, where the cross-term is largest.
        losses: (params, batch) -> losses (B,), in JAX.
    """

    def __init__(
        self, model: Model, *, preset: str, batch_size: int, length: int, l2_clip_norm: float, seed: int
    ) -> None:
        self.model = GPT2(GPT2Config.preset(preset, tie_embeddings=model == "tied"))
        self.l2_clip_norm, self.seed = l2_clip_norm, seed
        rng = np.random.default_rng(seed)
        rows, vocabulary = batch_size, self.model.config.vocab_size
        self.batch = {
            "ids": rng.integers(0, vocabulary, (rows, length), np.int32),
            "positions": rng.integers(0, length, rows, np.int32),
            "targets": rng.integers(0, vocabulary, rows, np.int32),
        }
        word = np.full(1, vocabulary // 2, np.int32)
        last = np.full(1, length - 1, np.int32)
        self.one = {"ids": np.tile(word, (1, length)), "positions": last, "targets": word}
        key = jax.random.key(seed)
        self.params = jax.jit(self.model.init)(key, self.batch["ids"][:1])["params"]
        self.losses = jax.jit(next_token_loss(self.model))


class Contender(NamedTuple):
    """A way to a private step.

    Attributes:
        loss: the mean loss of the batch.
        gradient: computes the (clipped) sum; returns what is to be waited for.
        step: the same with noise and SGD.
        clipped_norm: the norm of the task's one example, clipped; None where nothing is clipped.
    """

    loss: Callable[[], float]
    gradient: Callable[[], Any]
    step: Callable[[], Any]
    clipped_norm: Callable[[], float] | None


def jax_contender(task: Task, name: str) -> Contender:
    """A step in JAX, one compiled program; "vmap" and "microbatch_size=1" are jax-privacy's."""
    loss_fn, rows = next_token_loss(task.model), len(task.batch["ids"])
    noise_key = key_from_seed(task.seed, "noise")
    batch, one = jax.device_put((task.batch, task.one))
    noise = add_gaussian_noise(task.l2_clip_norm, noise_key)
    grad_fn: Any
    if name == "non-private":
        no_padding = jnp.zeros(rows, bool)
        plain, noise = plain_grad(loss_fn), optax.identity()

        def grad_fn(params: Any, batch: Any) -> Any:
            return plain(params, batch, no_padding)[0]

    elif JAX_CONTENDERS[name] == "jax-privacy":
        import jax_privacy

        grad_fn = jax_privacy.clipped_grad(
            lambda params, batch: loss_fn(params, batch)[0],  # called on batches of one
            l2_clip_norm=task.l2_clip_norm,
            microbatch_size=1 if name == "microbatch_size=1" else None,
        )
        noise = jax_privacy.noise_addition.gaussian_privatizer(
            stddev=grad_fn.sensitivity(), prng_key=noise_key
        )
    else:
        ours = clipped_grad(loss_fn, engine=cast(Engine, name), l2_clip_norm=task.l2_clip_norm)

        def grad_fn(params: Any, batch: Any) -> Any:
            return ours(params, batch)[0]

    optimizer = optax.chain(noise, divide_by(rows), optax.sgd(LEARNING_RATE))
    gradient = jax.jit(grad_fn)

    def update(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grad_fn(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    compiled = jax.jit(update, donate_argnums=(0, 1))
    opt_state = optimizer.init(task.params)

    def step() -> Any:
        nonlocal opt_state
        task.params, opt_state = compiled(task.params, opt_state, batch)
        return task.params

    return Contender(
        loss=lambda: float(jnp.mean(task.losses(task.params, batch))),
        gradient=lambda: gradient(task.params, batch),
        step=step,
        clipped_norm=(
            None if name == "non-private" else lambda: float(optax.tree.norm(gradient(task.params, one)))
        ),
    )
