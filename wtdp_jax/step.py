"""One training step, compiled once: physical batches are added up, then one update is made of the sum.

Dimension key: P examples of a physical batch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from wtdp_jax.clipping import PerExample, merge, partition

Params = Any
GradFn = Callable[..., tuple[Params, PerExample]]


class Statistics(NamedTuple):
    """Sums over the real examples of a step. They are not noised: nothing here may be released as private.

    Attributes:
      loss: sum of the finite losses.
      norm: sum of the finite gradient norms.
      clipped: examples whose norm exceeds the clip norm.
      not_finite: examples whose loss or gradient is not finite.
      examples: all real examples.
    """

    loss: Float[Array, ""]
    norm: Float[Array, ""]
    clipped: Int[Array, ""]
    not_finite: Int[Array, ""]
    examples: Int[Array, ""]


class Sums(NamedTuple):
    """What a step adds up over its physical batches.

    Attributes:
      gradient: sum of the (clipped) gradients; None at frozen leaves.
      statistics: sums of the per-example values.
    """

    gradient: Params
    statistics: Statistics


class Checks(NamedTuple):
    """What an update says of itself.

    Attributes:
      is_finite: whether all parameters are, after it.
      sum_norm: L2 norm of the sum that the update was made of, before noise; not private.
    """

    is_finite: Bool[Array, ""]
    sum_norm: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The compiled functions of a step; each compiles once, as long as physical batches have one shape.

    Attributes:
      start: `(trained, frozen, batch, is_padding) -> sums`, all zero.
      accumulate: `(sums, trained, frozen, batch, is_padding) -> sums`; the old sums' memory is reused.
      update: `(trained, opt_state, gradient, noise_key) -> (trained, opt_state, checks)`; likewise for the
        first two. The key is an argument, and so no constant of the program, which may be cached on disk.
    """

    start: Callable[..., Sums]
    accumulate: Callable[..., Sums]
    update: Callable[..., tuple[Params, optax.OptState, Checks]]

    def sum_over(self, batches: Sequence[tuple[Any, ...]]) -> Sums:
        """Adds up the physical batches of one logical batch, at least one.

        Args:
          batches: the arguments of `start` for each.
        """
        sums = self.start(*batches[0])
        for batch in batches:
            sums = self.accumulate(sums, *batch)
        return sums


def make_step(
    grad_fn: GradFn, make_optimizer: Callable[[Any], optax.GradientTransformation], l2_clip_norm: float
) -> Step:
    """Builds a step's functions.

    Args:
      grad_fn: `(params, batch, is_padding_example) -> (sum of gradients, PerExample)`.
      make_optimizer: `noise_key -> optimizer` of a step's sum; noise and mean are the optimizer's business.
      l2_clip_norm: above it an example counts as clipped.
    """

    def one_batch(
        trained: Params, frozen: Params, batch: Mapping[str, Array], is_padding: Bool[Array, " P"]
    ) -> Sums:
        gradient, per_example = grad_fn(merge(trained, frozen), batch, is_padding)
        return Sums(gradient, _statistics(per_example, is_padding, l2_clip_norm))

    def start(*args: Any) -> Sums:
        shapes = jax.eval_shape(one_batch, *args)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def accumulate(sums: Sums, *args: Any) -> Sums:
        return jax.tree.map(jnp.add, sums, one_batch(*args))

    def update(
        trained: Params, opt_state: optax.OptState, gradient: Params, noise_key: Any
    ) -> tuple[Params, optax.OptState, Checks]:
        sum_norm = optax.tree.norm(gradient)
        updates, opt_state = make_optimizer(noise_key).update(gradient, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        is_finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(trained)]))
        return trained, opt_state, Checks(is_finite, sum_norm)

    return Step(
        # The zeros depend on no argument, but must be bound to the arguments' device, as later sums are.
        start=jax.jit(start, keep_unused=True),
        accumulate=jax.jit(accumulate, donate_argnums=0),
        update=jax.jit(update, donate_argnums=(0, 1)),
    )


def measurements(
    statistics: Statistics, sum_norm: float, *, has_norms: bool
) -> dict[str, float | int | None]:
    """Returns a step's means for the log, None where no example was drawn; all un-noised, and named so.

    Args:
      statistics: the step's sums, on the host.
      sum_norm: L2 norm of the sum of clipped gradients.
      has_norms: whether norms were computed, and gradients clipped.
    """
    finite = int(statistics.examples) - int(statistics.not_finite)

    def mean(total: Any) -> float | None:
        return float(total) / finite if finite else None

    norms = {
        "non_private_mean_norm": mean(statistics.norm),
        "non_private_clipped_fraction": mean(statistics.clipped),
        "non_private_clipped_sum_norm": sum_norm,
    }
    return {
        "non_private_loss": mean(statistics.loss),
        **(norms if has_norms else {}),
        "non_private_not_finite": int(statistics.not_finite),
        "non_private_examples": int(statistics.examples),
    }


def plain_grad(
    loss_fn: Callable[[Params, Any], Array], trainable: Callable[[str], bool] | None = None
) -> GradFn:
    """Returns the gradient of the sum of losses in `clipped_grad`'s form: nothing is clipped, norms are zero.

    Args:
      loss_fn: `(params, batch) -> losses (P,)`.
      trainable: says of a leaf's path whether it is trained; None trains all.
    """

    def grad_fn(
        params: Params, batch: Mapping[str, Array], is_padding_example: Bool[Array, " P"]
    ) -> tuple[Params, PerExample]:
        trained, frozen = partition(params, trainable)

        def total(trained: Params) -> tuple[Array, Array]:
            losses = loss_fn(merge(trained, frozen), batch)
            losses = jnp.where(is_padding_example, 0.0, losses)
            return jnp.sum(losses), losses

        gradient, losses = jax.grad(total, has_aux=True)(trained)
        return gradient, PerExample(loss=losses, norm=jnp.zeros_like(losses))

    return grad_fn


def _statistics(per_example: PerExample, is_padding: Bool[Array, " P"], l2_clip_norm: float) -> Statistics:
    """Sums over the real examples of a physical batch."""
    is_finite = jnp.isfinite(per_example.loss) & jnp.isfinite(per_example.norm)

    def total(values: Array) -> Array:
        return jnp.sum(jnp.where(is_padding | ~is_finite, 0, values))

    return Statistics(
        loss=total(per_example.loss),
        norm=total(per_example.norm),
        clipped=total(per_example.norm > l2_clip_norm),
        not_finite=jnp.sum(~is_padding & ~is_finite),
        examples=jnp.sum(~is_padding),
    )
