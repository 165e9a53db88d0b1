"""Standard per-example clipping: every per-example gradient is built (Abadi et al. 2016, arXiv 1607.00133).

"materialized" holds those of the whole batch at once, B x all parameters. "microbatched" holds those of a few
examples and scans over the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax.clipping import factors
from wtdp_jax.clipping.job import Job, Outcome, Params
from wtdp_jax.trees import leaf_paths


def materialized(job: Job) -> Outcome:
    """The clipped sum by vmap of grad."""
    return _vmapped(job, _leaf_groups(job))


def microbatched(job: Job) -> Outcome:
    """The clipped sum by a scan of vmaps of `job.microbatch_size` examples; for any B."""
    leaf_groups = _leaf_groups(job)
    rows = job.is_padding.shape[0]
    size = min(job.microbatch_size, rows)
    missing = -rows % size

    def split(leaf: Array) -> Array:
        filled = jnp.concatenate([leaf, jnp.broadcast_to(leaf[:1], (missing, *leaf.shape[1:]))])
        return filled.reshape(-1, size, *leaf.shape[1:])

    is_padding = jnp.pad(job.is_padding, (0, missing), constant_values=True).reshape(-1, size)

    def add(total: Params, microbatch: tuple) -> tuple[Params, tuple[Array, Array]]:
        batch, is_padding = microbatch
        outcome = _vmapped(dataclasses.replace(job, batch=batch, is_padding=is_padding), leaf_groups)
        return jax.tree.map(jnp.add, total, outcome.clipped_sum), (outcome.loss, outcome.norm)

    start = job.zero_outcome().clipped_sum
    total, per_example = jax.lax.scan(add, start, (jax.tree.map(split, job.batch), is_padding))
    return Outcome(total, *(values.reshape(-1)[:rows] for values in per_example))


def _vmapped(job: Job, leaf_groups: dict[str, factors.Group]) -> Outcome:
    losses, gradients = jax.vmap(jax.value_and_grad(job.example_loss), in_axes=(None, 0))(
        job.trained, job.batch
    )
    squared = factors.squared_norms(gradients, leaf_groups)
    clipped = factors.clip_factors(
        squared, job.is_padding, l2_clip_norm=job.l2_clip_norm, clipping=job.clipping
    )
    return job.outcome(factors.weighted_sum(gradients, leaf_groups, clipped), losses, clipped.norm)


def _leaf_groups(job: Job) -> dict[str, factors.Group]:
    """Groups matter to per-layer clipping alone; only then is the loss traced for its scans."""
    if job.clipping == "per_layer":
        return factors.groups(job.coverage().stacks)
    return factors.groups(dict.fromkeys(leaf_paths(job.trained), ()))
