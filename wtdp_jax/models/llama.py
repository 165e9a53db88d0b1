"""Llama-style decoders (Touvron et al. 2023, arXiv 2302.13971) in plain Flax Linen, tied or untied.

Dimension key: B examples, T tokens, D width, V vocabulary, L layers, H heads, K features a head.

Only what makes it a Llama is here: rotary positions, heads of keys and values that several heads of queries
share, RMSNorm, SwiGLU (Shazeer 2020, arXiv 2002.05202), and no biases but, in Qwen 2, those of queries, keys
and values. The rest, the tie with it, is in `wtdp_jax.models.decoder`.
"""

import dataclasses
from typing import Any

import flax.linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from wtdp_jax.models.attention import attention
from wtdp_jax.models.decoder import Decoder, DecoderConfig, dense
from wtdp_jax.models.rotary import Llama3Scaling, rotary_frequencies, rotated

_SMOLLM2: dict[str, Any] = dict(vocab_size=49152, n_positions=8192, rope_theta=1e5)
_QWEN2_5: dict[str, Any] = dict(
    vocab_size=151936, n_positions=32768, qkv_bias=True, rope_theta=1e6, rms_norm_epsilon=1e-6
)
_LLAMA_3_2: dict[str, Any] = dict(
    vocab_size=128256,
    n_positions=131072,
    rope_theta=5e5,
    rope_scaling=Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_n_positions=8192
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The shape of a Llama; dropout is on the attention weights alone, as in transformers.

    Attributes:
      n_kv_head: heads of keys and values a block; must divide `n_head`.
      n_inner: width of the MLP.
      qkv_bias: whether queries, keys and values have a bias, which makes it a Qwen 2.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama 3's change to them, if any.
      rms_norm_epsilon: added to the mean square in every RMSNorm.
    """

    PRESETS = {
        "tiny-llama": dict(
            vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4, n_kv_head=2, n_inner=88
        ),
        "smollm2-135m": dict(_SMOLLM2, n_embd=576, n_layer=30, n_head=9, n_kv_head=3, n_inner=1536),
        "smollm2-360m": dict(_SMOLLM2, n_embd=960, n_layer=32, n_head=15, n_kv_head=5, n_inner=2560),
        "qwen2.5-0.5b": dict(_QWEN2_5, n_embd=896, n_layer=24, n_head=14, n_kv_head=2, n_inner=4864),
        "llama-3.2-1b": dict(_LLAMA_3_2, n_embd=2048, n_layer=16, n_head=32, n_kv_head=8, n_inner=8192),
    }

    n_kv_head: int
    n_inner: int
    qkv_bias: bool = False
    rope_theta: float = 1e4
    rope_scaling: Llama3Scaling | None = None
    rms_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counts("n_kv_head", "n_inner")
        self._check_positive("rope_theta", "rms_norm_epsilon")
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head must be a multiple of n_kv_head, got {self.n_head} and {self.n_kv_head}"
            )
        if self.head_size % 2:
            raise ValueError(f"n_embd / n_head must be even, got {self.head_size}")

    @property
    def head_size(self) -> int:
        """Features of an attention head, K."""
        return self.n_embd // self.n_head


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a gated MLP, each added to the residual stream."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        """Returns the residual stream after the block."""
        config = self.config
        attended = self._attend(_rms_norm(config, "ln_1")(x), deterministic)
        attended = checkpoint_name(attended.reshape(x.shape), "attended")
        x = x + dense(config, config.n_embd, "o_proj", use_bias=False)(attended)
        x = checkpoint_name(x, "between")

        normed = _rms_norm(config, "ln_2")(x)
        gate = nn.silu(dense(config, config.n_inner, "gate_proj", use_bias=False)(normed))
        hidden = gate * dense(config, config.n_inner, "up_proj", use_bias=False)(normed)
        return x + dense(config, config.n_embd, "down_proj", use_bias=False)(hidden)

    def _attend(self, x: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T H K"]:
        """Causal self-attention with rotary positions."""
        config = self.config
        q = self._heads(x, config.n_head, "q_proj")
        k = self._heads(x, config.n_kv_head, "k_proj")
        v = self._heads(x, config.n_kv_head, "v_proj")
        frequencies = rotary_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        drops = config.dropout > 0 and not deterministic
        drop = nn.Dropout(config.dropout, deterministic=False) if drops else None
        return attention(rotated(q, frequencies), rotated(k, frequencies), v, drop, remat=bool(config.remat))

    def _heads(self, x: Float[Array, "B T D"], heads: int, name: str) -> Float[Array, "B T H K"]:
        """A projection, split into heads."""
        config = self.config
        projected = dense(config, heads * config.head_size, name, use_bias=config.qkv_bias)(x)
        return projected.reshape(*x.shape[:-1], heads, config.head_size)


class Llama(Decoder):
    """A Llama.

    Parameters: `wte/embedding` (V, D), `h/...` (L, ...), `ln_f/scale`, and `lm_head/kernel` (D, V) where
    untied.
    """

    config: LlamaConfig

    def setup(self) -> None:
        """Adds the blocks and the last RMSNorm."""
        super().setup()
        self.h = Block(self.config)
        self.ln_f = _rms_norm(self.config)


def _rms_norm(config: LlamaConfig, name: str | None = None) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=config.rms_norm_epsilon, dtype=config.dtype, name=name)
