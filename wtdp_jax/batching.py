"""Rows as physical batches of fixed shapes, which compiled functions take.

Dimension key: N rows, T tokens, P rows of a physical batch.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from wtdp_jax.sampling import physical_batches


class Batch(NamedTuple):
    """Rows that go through the model together.

    Attributes:
      indices: their numbers (P,); some row's where padded.
      arrays: what is known of them, each (P, ...).
      is_padding: True where a row is only filling.
    """

    indices: Int[np.ndarray, " P"]
    arrays: dict[str, np.ndarray]
    is_padding: Bool[np.ndarray, " P"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batcher:
    """Makes physical batches of any rows of a split.

    With `length_multiple` rows of like lengths come together, and a batch is cut where its longest text ends.
    A loss reads nothing behind a text, so its gradient stays what it was; what changes is the order in which
    a sum is formed, and the time. A function is then compiled once for each length that occurs.

    Attributes:
      arrays: of the split, each (N, ...): "ids" (N, T), "positions" (N,), perhaps "weights" (N, T).
      physical_batch_size: P.
      length_multiple: lengths are rounded up to its multiples; None: rows stay in order, and all have T.
    """

    arrays: Mapping[str, np.ndarray]
    physical_batch_size: int
    length_multiple: int | None

    def __call__(self, rows: Int[np.ndarray, " k"]) -> Iterator[Batch]:
        """Yields the physical batches of some rows, at least one, the last filled up."""
        if self.length_multiple is not None:
            rows = rows[np.argsort(self._lengths[rows], kind="stable")]
        for indices, is_padding in physical_batches(rows, self.physical_batch_size):
            yield Batch(indices, self._take(indices), is_padding)

    def _take(self, indices: Int[np.ndarray, " P"]) -> dict[str, np.ndarray]:
        """The rows of all arrays, the tokens cut."""
        taken = {name: leaf[indices] for name, leaf in self.arrays.items()}
        if self.length_multiple is None:
            return taken
        length = -(-int(np.max(self._lengths[indices])) // self.length_multiple) * self.length_multiple
        return {name: leaf[:, :length] if name in _BY_TOKEN else leaf for name, leaf in taken.items()}

    @functools.cached_property
    def _lengths(self) -> Int[np.ndarray, " N"]:
        """Tokens of each row that a loss reads."""
        lengths = self.arrays["positions"] + 1
        if "weights" in self.arrays:
            columns = np.arange(1, self.arrays["weights"].shape[1] + 1)
            lengths = np.maximum(lengths, np.max(columns * (self.arrays["weights"] != 0), axis=1))
        return lengths


_BY_TOKEN = ("ids", "weights")
