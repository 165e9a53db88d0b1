"""What leaving out the cross-term does to a tied model's norms, clipped gradients and updates.

Nothing here is private: all names of figures say so.

Dimension key: M measured examples, P examples of a physical batch.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from wtdp_jax.clipping import clipped_grad, merge, partition
from wtdp_jax.evaluate import padded_batches
from wtdp_jax.inputs import Inputs
from wtdp_jax.plan import Plan
from wtdp_jax.rules import TiedNorm
from wtdp_jax.streams import new_streams

Params = Any

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Of naive over exact norm."""


class Sums(NamedTuple):
    """What is added up over the measured examples.

    Attributes:
      naive: sum of gradients clipped by their naive norms.
      exact: likewise by their exact norms.
    """

    naive: Params
    exact: Params


class NormGap:
    """Measures the naive norm beside the exact one on fixed examples; compiled once."""

    def __init__(
        self, loss_fn: Any, data: dict[str, np.ndarray], *, l2_clip_norm: float, batch_size: int
    ) -> None:
        """Sets the measurement up.

        Args:
          loss_fn: of a tied model, `(params, batch) -> losses (P,)`.
          data: arrays (M, ...).
          l2_clip_norm: C.
          batch_size: examples at once, P.
        """
        self._data, self._batch_size, self._clip = data, batch_size, l2_clip_norm
        naive, exact = (self._grad_fn(loss_fn, tied_norm) for tied_norm in ("omit", "cross_term"))

        def measure(params: Params, batch: Any, is_padding: Array) -> tuple[Sums, Array, Array]:
            naive_sum, of_naive = naive(params, batch, is_padding)
            exact_sum, of_exact = exact(params, batch, is_padding)
            return Sums(naive_sum, exact_sum), of_naive.norm, of_exact.norm

        self.measure = jax.jit(measure)

    def _grad_fn(self, loss_fn: Any, tied_norm: TiedNorm) -> Any:
        return clipped_grad(loss_fn, engine="ghost", l2_clip_norm=self._clip, tied_norm=tied_norm)

    def __call__(self, params: Params) -> dict[str, Any]:
        """Returns the figures at some parameters; see `figures`."""
        total: Sums | None = None
        naive_norms, exact_norms = [], []
        for batch, is_padding in padded_batches(self._data, self._batch_size):
            sums, naive, exact = self.measure(params, batch, is_padding)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
            naive_norms.append(np.asarray(naive)[~is_padding])
            exact_norms.append(np.asarray(exact)[~is_padding])
        assert total is not None
        norms = np.concatenate(naive_norms), np.concatenate(exact_norms)
        return {**figures(*norms, self._clip), **_directions(total)}


def figures(
    naive: Float[np.ndarray, " M"], exact: Float[np.ndarray, " M"], l2_clip_norm: float
) -> dict[str, Any]:
    """Returns what two norms of the same examples' gradients say.

    A gradient of true norm e and naive norm n is scaled by min(1, C / n), and so contributes e min(1, C / n),
    which is more than C where n is below e and e is above C.

    Args:
      naive: norms without the cross-term.
      exact: true norms; examples where either is zero or not finite are left out.
      l2_clip_norm: C.

    Returns:
      The quantiles of naive over exact; the share of examples that contribute more than C, the mean of their
      contributions over C, and the largest contribution of all over C.
    """
    counts = np.isfinite(naive) & np.isfinite(exact) & (naive > 0) & (exact > 0)
    naive, exact = naive[counts].astype(np.float64), exact[counts].astype(np.float64)
    if not len(naive):
        raise ValueError("norms must be finite and positive in at least one example, got none")
    contribution = exact * np.minimum(1.0, l2_clip_norm / naive) / l2_clip_norm
    # Rounding of float32 norms is no excess.
    exceeds = contribution > 1 + 1e-5
    return {
        "non_private_ratio_quantiles": dict(
            zip(map(str, QUANTILES), np.quantile(naive / exact, QUANTILES).tolist(), strict=True)
        ),
        "non_private_share_over_c": float(np.mean(exceeds)),
        "non_private_mean_over_c": float(np.mean(contribution[exceeds])) if exceeds.any() else None,
        "non_private_largest_over_c": float(np.max(contribution)),
        "non_private_clipped_share": float(np.mean(exact > l2_clip_norm)),
        "non_private_examples": len(naive),
    }


def train_and_measure(plan: Plan, inputs: Inputs, gap: NormGap, *, every: int) -> Iterator[dict[str, Any]]:
    """Takes a plan's steps, and yields the figures before the first, after every so many, and after the last.

    Args:
      plan: of a private run of the tied model, all of it trained.
      inputs: what the plan was made for.
      gap: the measurement.
      every: steps between measurements.
    """
    streams = new_streams(plan.config.seed)
    sampler, batcher = plan.sampler(streams.entropy), plan.batcher(inputs.train_data)
    trained, frozen = partition(inputs.params, plan.trainable)
    opt_state = plan.optimizer(streams.noise_key).init(trained)
    trained, opt_state = jax.device_put((trained, opt_state), jax.local_devices()[0], may_alias=False)
    for done in range(plan.num_steps + 1):
        if done % every == 0 or done == plan.num_steps:
            params = merge(trained, frozen)
            accuracy = plan.evaluate(params).accuracy
            yield {"step": done, "eval_accuracy": accuracy, **gap(params)}
        if done == plan.num_steps:
            return
        batches = [
            (trained, frozen, arrays, is_padding) for _, arrays, is_padding in batcher(sampler.draw(done))
        ]
        sums = plan.step.sum_over(batches)
        trained, opt_state, checks = plan.step.update(trained, opt_state, sums.gradient, streams.noise_key)
        if not checks.is_finite:
            raise FloatingPointError(f"the parameters are not finite after step {done + 1}")


def _directions(sums: Sums) -> dict[str, float]:
    """Cosine between both clipped sums, and the naive one's length over the exact one's."""
    # In float64, so that what differs in the seventh digit is no rounding of this sum's own.
    naive, exact = (np.asarray(ravel_pytree(total)[0], np.float64) for total in sums)
    lengths = np.linalg.norm(naive), np.linalg.norm(exact)
    return {
        "non_private_cosine": float(naive @ exact / (lengths[0] * lengths[1])),
        "non_private_length_ratio": float(lengths[0] / lengths[1]),
    }
