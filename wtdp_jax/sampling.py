"""Which rows a step trains on: Poisson draws for private runs, shuffled epochs for the others.

Both samplers give a step's rows as physical batches of one fixed shape with a padding mask, so that a
training step compiles once. A step's rows depend only on the sampler's fields and the step's number: a
resumed run draws the same rows again, in any order of asking.

The entropy decides the draws. The privacy analysis supposes that no observer knows them, so a private run's
entropy comes from `entropy_from_os` and is kept like the data.
"""

import math
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class PhysicalBatch(NamedTuple):
    """Rows that go through the model together.

    Attributes:
        indices: Row numbers, P of them; 0, a valid row, where padded.
        is_padding: True where the row is only filling.
    """

    indices: Int[np.ndarray, " P"]
    is_padding: Bool[np.ndarray, " P"]


@dataclass(frozen=True, kw_only=True)
class PoissonSampler:
    """Draws every row independently with one probability, at every step anew.

    Attributes:
        num_examples: Rows, n, at least 1.
        sampling_prob: The probability, in [0, 1], that a step draws a row: the number the accountant reads.
        physical_batch_size: Rows that go through the model together, at least 1.
        entropy: The randomness, at least 0: 128 bits from `entropy_from_os`, or a seed.
    """

    num_examples: int
    sampling_prob: float
    physical_batch_size: int
    entropy: int

    def __post_init__(self) -> None:
        _check_sizes(self.num_examples, self.physical_batch_size, self.entropy)
        if not 0 <= self.sampling_prob <= 1:
            raise ValueError(f"sampling_prob must be in [0, 1], got {self.sampling_prob}")

    def draw(self, step: int) -> Int[np.ndarray, " k"]:
        """Returns the rows that a step draws, in increasing order; there may be none."""
        _check_step(step)
        # random() is uniform on the multiples of 2^-53 in [0, 1), so 0 draws none and 1 draws all.
        uniforms = _generator(self.entropy, step).random(self.num_examples)
        return np.flatnonzero(uniforms < self.sampling_prob)

    def batches(self, step: int) -> list[PhysicalBatch]:
        """Returns a step's draw as physical batches: as many as it needs, at least one, nothing left out."""
        return physical_batches(self.draw(step), self.physical_batch_size)


@dataclass(frozen=True, kw_only=True)
class ShuffledBatches:
    """Goes through all rows once an epoch in a new random order: for runs without privacy.

    An epoch's last batch holds what is left over, and may be smaller than the others.

    Attributes:
        num_examples: Rows, n, at least 1.
        batch_size: Rows a step, at least 1; more than n counts as n.
        physical_batch_size: Rows that go through the model together, at least 1.
        entropy: The randomness, at least 0.
    """

    num_examples: int
    batch_size: int
    physical_batch_size: int
    entropy: int

    def __post_init__(self) -> None:
        _check_sizes(self.num_examples, self.physical_batch_size, self.entropy)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps that go through all rows once."""
        return math.ceil(self.num_examples / self.batch_size)

    def draw(self, step: int) -> Int[np.ndarray, " k"]:
        """Returns the rows of a step, in their shuffled order."""
        _check_step(step)
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _epoch_order(self.entropy, epoch, self.num_examples)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def batches(self, step: int) -> list[PhysicalBatch]:
        """Returns a step's rows as physical batches."""
        return physical_batches(self.draw(step), self.physical_batch_size)


def physical_batches(rows: Int[np.ndarray, " k"], physical_batch_size: int) -> list[PhysicalBatch]:
    """Returns rows as physical batches: as many as it needs, at least one, the last filled up with row 0."""
    num_batches = max(1, math.ceil(len(rows) / physical_batch_size))
    indices = np.zeros(num_batches * physical_batch_size, dtype=rows.dtype)
    indices[: len(rows)] = rows
    is_padding = np.arange(len(indices)) >= len(rows)
    shape = (num_batches, physical_batch_size)
    return [
        PhysicalBatch(*batch) for batch in zip(indices.reshape(shape), is_padding.reshape(shape), strict=True)
    ]


def entropy_from_os() -> int:
    """Returns 128 bits from the operating system, which no one can know or repeat."""
    return secrets.randbits(128)


def _check_sizes(num_examples: int, physical_batch_size: int, entropy: int) -> None:
    """What both samplers demand."""
    if num_examples < 1:
        raise ValueError(f"num_examples must be at least 1, got {num_examples}")
    if physical_batch_size < 1:
        raise ValueError(f"physical_batch_size must be at least 1, got {physical_batch_size}")
    if entropy < 0:
        raise ValueError(f"entropy must be at least 0, got {entropy}")


def _check_step(step: int) -> None:
    """Steps count from 0."""
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")


def _generator(entropy: int, number: int) -> np.random.Generator:
    """An independent generator for each number (a step or an epoch)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy, spawn_key=(number,))))


@lru_cache(maxsize=2)
def _epoch_order(entropy: int, epoch: int, num_examples: int) -> Int[np.ndarray, " n"]:
    """An epoch's order, kept because every one of its steps asks for it."""
    order = _generator(entropy, epoch).permutation(num_examples)
    order.flags.writeable = False
    return order
