"""Decoder-only language models in plain Flax Linen, and their Hugging Face form."""

from wtdp_jax.models.decoder import Decoder, DecoderConfig
from wtdp_jax.models.gpt2 import GPT2, GPT2Config
from wtdp_jax.models.hf import from_pretrained, save_pretrained
from wtdp_jax.models.llama import Llama, LlamaConfig

__all__ = [
    "GPT2",
    "Decoder",
    "DecoderConfig",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "from_pretrained",
    "save_pretrained",
]
