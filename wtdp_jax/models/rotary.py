"""Rotary positions: queries and keys turned by their position's angle (Su et al. 2021, arXiv 2104.09864).

Dimension key: B examples, T tokens, H heads, K features a head, P = K / 2 pairs of them.

Features i and i + P are the two coordinates of a point, which at position t is turned by t times the i-th
frequency. The product of a query and a key then depends on positions through their distance alone.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """How Llama 3.1 and later slow the slowest turns down, for texts longer than those first trained on.

    Attributes:
      factor: what a frequency is divided by that makes fewer than `low_freq_factor` turns.
      low_freq_factor: turns within `original_n_positions`.
      high_freq_factor: turns from which on a frequency stays as it is; between the two it is interpolated.
      original_n_positions: the longest sequence first trained on, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_n_positions: int

    def __post_init__(self) -> None:
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"factor must be at least 1 and finite, got {self.factor}")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            found = f"{self.low_freq_factor} and {self.high_freq_factor}"
            raise ValueError(f"low_freq_factor must be positive and below high_freq_factor, got {found}")
        if self.original_n_positions < 1:
            raise ValueError(f"original_n_positions must be at least 1, got {self.original_n_positions}")

    def __call__(self, frequencies: Float[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
        """Frequencies, scaled."""
        turns = self.original_n_positions * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


def rotary_frequencies(
    head_size: int, theta: float, scaling: Llama3Scaling | None = None
) -> Float[np.ndarray, " P"]:
    """Returns how far each pair of features turns a token, in radians: theta^(-2i/K), scaled if asked for.

    Args:
      head_size: features a head, K; even.
      theta: the base.
      scaling: applied if given.
    """
    frequencies = theta ** (-np.arange(0, head_size, 2) / head_size)
    return frequencies if scaling is None else scaling(frequencies)


def rotated(x: Float[Array, "B T H K"], frequencies: Float[np.ndarray, " P"]) -> Float[Array, "B T H K"]:
    """Turns queries or keys according to their positions 0 to T - 1, in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # Angles of thousands of radians: taken in float64, while tracing, so that they lose no digits.
    angles = np.arange(x.shape[1])[None, :, None, None] * frequencies
    cos, sin = (jnp.asarray(table, wide) for table in (np.cos(angles), np.sin(angles)))
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
