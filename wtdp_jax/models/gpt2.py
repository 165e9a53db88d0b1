"""GPT-2 (Radford et al. 2019) in plain Flax Linen, with the output head tied to the embedding or free.

Dimension key: B examples, T tokens, D width, V vocabulary, L layers.

Only what makes it a GPT-2 is here: learned positions, LayerNorm, gelu, biases. The rest, the tie with it, is
in `wtdp_jax.models.decoder`.
"""

import dataclasses
import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from wtdp_jax.models.attention import attention
from wtdp_jax.models.decoder import INIT_STDDEV, Decoder, DecoderConfig, dense


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """The shape of a GPT-2, in Hugging Face's names; dropout is on embeddings, attention and both branches.

    Attributes:
      layer_norm_epsilon: added to the variance in every LayerNorm.
    """

    PRESETS = {
        "tiny": {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
        "distilgpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 6, "n_head": 12},
        "gpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
        "gpt2-medium": {
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 1024,
            "n_layer": 24,
            "n_head": 16,
        },
        "gpt2-large": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1280, "n_layer": 36, "n_head": 20},
        "gpt2-xl": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    }

    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("layer_norm_epsilon")


class Block(nn.Module):
    """One pre-norm transformer block: attention, then an MLP, each added to the residual stream."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        """Returns the residual stream after the block."""
        config = self.config
        # The residual stream sums 2 L projections; this keeps its variance at initialization.
        residual_stddev = INIT_STDDEV / math.sqrt(2 * config.n_layer)
        drop = nn.Dropout(config.dropout, deterministic=deterministic)

        q, k, v = jnp.split(
            dense(config, 3 * config.n_embd, "c_attn")(_layer_norm(config, "ln_1")(x)), 3, axis=-1
        )
        attended = checkpoint_name(self._attend(q, k, v, drop), "attended")
        x = x + drop(dense(config, config.n_embd, "attn_c_proj", stddev=residual_stddev)(attended))
        x = checkpoint_name(x, "between")

        hidden = dense(config, 4 * config.n_embd, "c_fc")(_layer_norm(config, "ln_2")(x))
        hidden = nn.gelu(hidden, approximate=True)
        return x + drop(dense(config, config.n_embd, "mlp_c_proj", stddev=residual_stddev)(hidden))

    def _attend(
        self, q: Float[Array, "B T D"], k: Float[Array, "B T D"], v: Float[Array, "B T D"], drop: nn.Dropout
    ) -> Float[Array, "B T D"]:
        """Causal self-attention."""
        config = self.config
        drops = config.dropout > 0 and not drop.deterministic
        q_heads, k_heads, v_heads = (a.reshape(*a.shape[:-1], config.n_head, -1) for a in (q, k, v))
        drop_weights, remat = drop if drops else None, bool(config.remat)
        return attention(q_heads, k_heads, v_heads, drop_weights, remat=remat).reshape(q.shape)


class GPT2(Decoder):
    """A GPT-2.

    Parameters: `wte/embedding` (V, D), `wpe/embedding` (n_positions, D), `h/...` (L, ...),
    `ln_f/{scale, bias}`, and `lm_head/kernel` (D, V) where untied.
    """

    config: GPT2Config

    def setup(self) -> None:
        """Names the layers as Hugging Face does."""
        super().setup()
        config = self.config
        embedding_init = nn.initializers.normal(INIT_STDDEV)
        self.wpe = nn.Embed(
            config.n_positions, config.n_embd, embedding_init=embedding_init, dtype=config.dtype
        )
        self.drop = nn.Dropout(config.dropout)
        self.h = Block(config)
        self.ln_f = _layer_norm(config)

    def _embed(self, ids: Int[Array | np.ndarray, "B T"], deterministic: bool) -> Float[Array, "B T D"]:
        """Tokens and their positions."""
        # A concrete array, so that whoever traces the model can see that position ids are distinct.
        position_ids = np.arange(ids.shape[1], dtype=np.int32)[None]
        return self.drop(self.wte(ids) + self.wpe(position_ids), deterministic=deterministic)


def _layer_norm(config: GPT2Config, name: str | None = None) -> nn.LayerNorm:
    """A LayerNorm whose variance is taken about the mean: E[x^2] - E[x]^2 cancels where |mean| is large."""
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon, use_fast_variance=False, dtype=config.dtype, name=name
    )
