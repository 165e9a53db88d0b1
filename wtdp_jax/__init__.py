"""Exact, fast private fine-tuning of decoder-only language models, weight-tied or untied."""

from wtdp_jax.clipping import ClippedGrad, PerExample, clipped_grad
from wtdp_jax.version import __version__

__all__ = ["ClippedGrad", "PerExample", "__version__", "clipped_grad"]
