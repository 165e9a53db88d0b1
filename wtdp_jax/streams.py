"""The independent random streams of a run: noise, dropout and sampling, each under its own key."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Key, UInt32

from wtdp_jax.noise import key_from_os, key_from_seed
from wtdp_jax.sampling import entropy_from_os

_ENTROPY_BYTES = 16


# Fields are Any: JAX also builds trees of placeholders in this form.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """Where all randomness of a run comes from; a step's own is found by folding its number in.

    Attributes:
      noise_key: key of the noise; a scalar key.
      dropout_key: key of dropout; a scalar key.
      entropy_words: the sampler's entropy as uint32 words (4,), which a checkpoint can hold.
    """

    noise_key: Any
    dropout_key: Any
    entropy_words: Any

    @property
    def entropy(self) -> int:
        """The sampler's entropy."""
        return int.from_bytes(np.asarray(self.entropy_words, "<u4").tobytes(), "little")


def new_streams(seed: int | None) -> Streams:
    """Returns streams from a seed, or without one from the operating system."""
    entropy = entropy_from_os() if seed is None else seed
    return Streams(
        noise_key=key_from_os() if seed is None else key_from_seed(seed, "noise"),
        dropout_key=key_from_os() if seed is None else key_from_seed(seed, "dropout"),
        entropy_words=np.frombuffer(entropy.to_bytes(_ENTROPY_BYTES, "little"), "<u4"),
    )


@functools.partial(jax.jit, static_argnames="size")
def dropout_keys(
    dropout_key: Key[Array, ""], step: int | Int[Array, ""], number: int | Int[Array, ""], size: int
) -> UInt32[Array, "size 2"]:
    """Returns one raw key for each example of a physical batch; no example of another one gets the same.

    Args:
      dropout_key: the dropout stream's key.
      step: the logical step.
      number: the physical batch's number in it.
      size: examples of the physical batch.
    """
    key = jax.random.fold_in(jax.random.fold_in(dropout_key, step), number)
    return jax.random.key_data(jax.random.split(key, size))
