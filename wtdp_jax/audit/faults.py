"""Faults to plant, each a patch to the real code: an audit that does not find them is worth nothing."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax import noise
from wtdp_jax.clipping import Engine, factors
from wtdp_jax.clipping.job import Job, Outcome

_ADD_NOISE = noise._add_noise
_CLIP_FACTORS = factors.clip_factors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong, in words.
        patch: a context in which the real code has it.
        engine: in which engine it is planted.
    """

    name: str
    patch: Callable[[], contextlib.AbstractContextManager[None]]
    engine: Engine = "ghost"


def half_the_noise() -> contextlib.AbstractContextManager[None]:
    """Noise of half the standard deviation."""

    def add(leaf: Array, stddev: float, key: Array) -> Array:
        return _ADD_NOISE(leaf, stddev / 2, key)

    return _patched(noise, "_add_noise", add)


def no_noise_on_one_leaf() -> contextlib.AbstractContextManager[None]:
    """No noise on the last norm's scale and bias, the only leaves of one axis."""

    def add(leaf: Array, stddev: float, key: Array) -> Array:
        return leaf if leaf.ndim == 1 else _ADD_NOISE(leaf, stddev, key)

    return _patched(noise, "_add_noise", add)


def mean_of_the_actual_batch(expected_batch_size: int) -> contextlib.AbstractContextManager[None]:
    """The sum is divided by the rows drawn, and the noise by those expected."""

    def clip(squared: Any, is_padding: Array, **settings: Any) -> factors.Factors:
        clipped = _CLIP_FACTORS(squared, is_padding, **settings)
        wrong = expected_batch_size / jnp.maximum(jnp.sum(~is_padding), 1)
        return clipped._replace(factors={group: wrong * f for group, f in clipped.factors.items()})

    return _patched(factors, "clip_factors", clip)


def one_clip_for_the_batch() -> contextlib.AbstractContextManager[None]:
    """The sum of a microbatch is clipped as if it were one example's gradient."""

    def clipped_whole(job: Job, leaf_groups: Any) -> Outcome:
        def total(trained: Any) -> tuple[Array, Array]:
            losses = jax.vmap(job.example_loss, in_axes=(None, 0))(trained, job.batch)
            return jnp.sum(jnp.where(job.is_padding, 0, losses)), losses

        gradient, losses = jax.grad(total, has_aux=True)(job.trained)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)))
        factor = jnp.minimum(1, job.l2_clip_norm / norm)
        clipped = jax.tree.map(lambda leaf: factor * leaf, gradient)
        return job.outcome(clipped, losses, jnp.broadcast_to(norm, losses.shape))

    # By its name: in its package an engine's function hides the module of the same name.
    module = importlib.import_module("wtdp_jax.clipping.materialized")
    return _patched(module, "_vmapped", clipped_whole)


def faults(expected_batch_size: int) -> tuple[Fault, ...]:
    """All, but for the naive tied norm, which is a setting and needs no patch.

    Args:
        expected_batch_size: for which the noise of a mean is made.
    """

    def mean() -> contextlib.AbstractContextManager[None]:
        return mean_of_the_actual_batch(expected_batch_size)

    return (
        Fault(name="half the noise", patch=half_the_noise),
        Fault(name="no noise on one layer's leaves", patch=no_noise_on_one_leaf),
        Fault(name="divided by the actual batch size", patch=mean),
        Fault(name="one clip for a microbatch", patch=one_clip_for_the_batch, engine="microbatched"),
    )


@contextlib.contextmanager
def _patched(module: Any, name: str, replacement: Callable) -> Iterator[None]:
    # What was compiled before knows nothing of the patch, and what is compiled in it must not outlive it.
    jax.clear_caches()
    try:
        with mock.patch.object(module, name, replacement):
            yield
    finally:
        jax.clear_caches()
