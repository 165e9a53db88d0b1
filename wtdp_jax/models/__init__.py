"""Decoder-only language models in plain Flax Linen, and their Hugging Face form."""

from wtdp_jax.models.gpt2 import GPT2, GPT2Config
from wtdp_jax.models.hf import from_pretrained, save_pretrained

__all__ = ["GPT2", "GPT2Config", "from_pretrained", "save_pretrained"]
