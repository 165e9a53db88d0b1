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
    """Evaluates parameters on one fixed set, in batches of one shape; compiled once."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Array],
        label_ids: tuple[int, ...],
        data: Arrays,
        batch_size: int,
    ) -> None:
        """Sets the evaluation up.

        Args:
          model: called as ``model.apply({"params": params}, ids, positions)`` -> logits (B, V).
          loss_fn: ``(params, batch) -> losses (B,)``.
          label_ids: token ids of the K label words, in the order of the labels.
          data: arrays (B, ...): "ids", "positions", "labels" and what `loss_fn` reads.
          batch_size: examples at once, P; the last batch is filled up with padding.
        """
        self._data = data
        self._batch_size = batch_size

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
        values = [
            self.example_values(params, batch, is_padding)
            for batch, is_padding in padded_batches(self._data, self._batch_size)
        ]
        size = len(self._data["labels"])
        losses, right = (
            np.concatenate([np.asarray(v) for v in column])[:size] for column in zip(*values, strict=True)
        )
        # Sums in float64 on the host: a mean over many examples keeps its digits.
        return Evaluation(
            loss=float(np.sum(losses, dtype=np.float64)) / size,
            accuracy=int(np.sum(right)) / size,
            right=right,
        )

    @property
    def labels(self) -> Int[np.ndarray, " B"]:
        """The index of each example's label."""
        return np.asarray(self._data["labels"])


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
