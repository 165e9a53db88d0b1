"""Accuracy and loss on held-out data, each example counted once.

Dimension key: B examples of the evaluation set, P examples of a physical batch, K label words, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from wtdp_jax.batching import Batcher

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the evaluation set.

    Attributes:
      loss: mean per-example loss, in nats.
      accuracy: share of examples whose own label word has the largest logit of all label words, in [0, 1].
      right: whether each example's own label word has.
    """

    loss: float
    accuracy: float
    right: Bool[np.ndarray, " B"] = dataclasses.field(repr=False, compare=False)


class Evaluator:
    """Evaluates parameters on one fixed set, in physical batches; compiled once a shape."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Array],
        label_ids: tuple[int, ...],
        batches: Batcher,
    ) -> None:
        """Sets the evaluation up.

        Args:
          model: called as ``model.apply({"params": params}, ids, positions)`` -> logits (B, V).
          loss_fn: ``(params, batch) -> losses (B,)``.
          label_ids: token ids of the K label words, in the order of the labels.
          batches: of the set's arrays (B, ...): "ids", "positions", "labels" and what `loss_fn` reads.
        """
        self._batches = batches

        def example_values(
            params: Any, batch: Mapping[str, Array], is_padding: Bool[Array, " P"]
        ) -> tuple[Float[Array, " P"], Bool[Array, " P"]]:
            logits = model.apply({"params": params}, batch["ids"], batch["positions"])
            is_right = predicted_labels(logits, label_ids) == batch["labels"]
            losses = loss_fn(params, batch)
            return jnp.where(is_padding, 0.0, losses), is_right & ~is_padding

        self.example_values = jax.jit(example_values)

    def __call__(self, params: Any) -> Evaluation:
        """Returns the means over the whole set, padding left out."""
        size = len(self.labels)
        # Sums in float64 on the host: a mean over many examples keeps its digits.
        losses, right = np.zeros(size), np.zeros(size, bool)
        for indices, batch, is_padding in self._batches(np.arange(size)):
            of_batch = jax.device_get(self.example_values(params, batch, is_padding))
            real = indices[~is_padding]
            losses[real], right[real] = (values[~is_padding] for values in of_batch)
        return Evaluation(
            loss=float(np.sum(losses)) / size,
            accuracy=int(np.sum(right)) / size,
            right=right,
        )

    @property
    def labels(self) -> Int[np.ndarray, " B"]:
        """The index of each example's label."""
        return np.asarray(self._batches.arrays["labels"])


def predicted_labels(logits: Float[Array, "P V"], label_ids: tuple[int, ...]) -> Int[Array, " P"]:
    """Returns for each example the index of the label word with the largest logit."""
    return jnp.argmax(logits[:, jnp.asarray(label_ids, jnp.int32)], axis=-1)


def padded_batches(data: Arrays, batch_size: int) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yields the rows in order in batches of one shape, with a mask (P,) of the rows that only fill the last.

    Args:
      data: arrays (B, ...), B at least 1.
      batch_size: rows a batch, P.
    """
    size = len(next(iter(data.values())))
    for start in range(0, size, batch_size):
        indices = np.arange(start, start + batch_size)
        rows = np.minimum(indices, size - 1)
        yield {name: leaf[rows] for name, leaf in data.items()}, indices >= size
