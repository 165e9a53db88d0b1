"""GPT-2 (Radford et al. 2019) in plain Flax Linen, with the output head tied to the embedding or free.

Dimension key: B examples, T tokens, D width, H heads, K features a head, V vocabulary, L layers.

The tie is one flag, `GPT2Config.tie_embeddings`: the head is either `wte.attend`, which multiplies by the
embedding itself, or a bias-free dense layer that starts as a copy of it. Nothing here knows of privacy. The
model only keeps two promises that per-example gradients lean on: parameters are used through calls of
`nn.Dense`, `nn.LayerNorm`, `LossEmbed` and `Head` alone, and no operation mixes examples.
"""

import dataclasses
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from wtdp_jax.lm_head import Head, LossEmbed, cross_entropy
from wtdp_jax.models.attention import causal_attention, causal_attention_by_example

INIT_STDDEV = 0.02
"""Standard deviation of every weight matrix at initialization (Radford et al. 2019)."""

_PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
    "distilgpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 6, "n_head": 12},
    "gpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1600, "n_layer": 48, "n_head": 25},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The shape of a GPT-2, in Hugging Face's names.

    Attributes:
      vocab_size: number of token ids.
      n_positions: longest sequence, in tokens.
      n_embd: width of the hidden state.
      n_layer: number of blocks.
      n_head: attention heads a block; must divide `n_embd`.
      tie_embeddings: whether the output head is the input embedding.
      remat: what the backward pass computes again instead of keeping it. False: nothing; True: what is cheap
        in each block (LayerNorm, gelu, attention); "full": the dense layers too, so that three arrays of the
        residual stream's size are all that a block keeps. With either, long sequences have their attention
        scores formed one example at a time.
      dtype: the type that layers compute in; None: that of the parameters. With "bfloat16" the parameters,
        the softmaxes and the losses stay in float32.
      dropout: rate on embeddings, attention weights and residual branches; only with `deterministic=False`.
      layer_norm_epsilon: added to the variance in every LayerNorm.
    """

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    tie_embeddings: bool = True
    remat: bool | Literal["full"] = False
    dtype: Literal["float32", "bfloat16"] | None = None
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")
        if self.remat not in (False, True, "full"):
            raise ValueError(f'remat must be False, True or "full", got {self.remat!r}')
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype must be None, float32 or bfloat16, got {self.dtype!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not 0.0 < self.layer_norm_epsilon < math.inf:
            raise ValueError(f"layer_norm_epsilon must be positive and finite, got {self.layer_norm_epsilon}")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "GPT2Config":
        """Returns a published size by its name, with any field overridden.

        Args:
          name: one of tiny, distilgpt2, gpt2, gpt2-medium, gpt2-large, gpt2-xl.
          **overrides: fields that replace or complete the preset's.

        Raises:
          ValueError: if there is no such preset, or the overrides do not fit it.
        """
        if name not in _PRESETS:
            raise ValueError(f"preset must be one of {', '.join(_PRESETS)}, got {name!r}")
        return cls(**{**_PRESETS[name], **overrides})


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
            _dense(config, 3 * config.n_embd, "c_attn")(_layer_norm(config, "ln_1")(x)), 3, axis=-1
        )
        attended = checkpoint_name(self._attend(q, k, v, drop), "attended")
        x = x + drop(_dense(config, config.n_embd, "attn_c_proj", residual_stddev)(attended))
        x = checkpoint_name(x, "between")

        hidden = _dense(config, 4 * config.n_embd, "c_fc")(_layer_norm(config, "ln_2")(x))
        hidden = nn.gelu(hidden, approximate=True)
        return x + drop(_dense(config, config.n_embd, "mlp_c_proj", residual_stddev)(hidden))

    def _attend(
        self, q: Float[Array, "B T D"], k: Float[Array, "B T D"], v: Float[Array, "B T D"], drop: nn.Dropout
    ) -> Float[Array, "B T D"]:
        """Causal self-attention."""
        config = self.config
        drops = config.dropout > 0 and not drop.deterministic
        q_heads, k_heads, v_heads = (a.reshape(*a.shape[:-1], config.n_head, -1) for a in (q, k, v))
        # Scores outgrow all else that a block holds where there are more tokens than features to a head.
        if config.remat and not drops and q.shape[1] > 4 * config.n_embd // config.n_head:
            return causal_attention_by_example(q_heads, k_heads, v_heads).reshape(q.shape)
        return causal_attention(q_heads, k_heads, v_heads, drop if drops else None).reshape(q.shape)


class GPT2(nn.Module):
    """A decoder-only language model; parameters of the L blocks are stacked under `h`.

    Parameters: `wte/embedding` (V, D), `wpe/embedding` (n_positions, D), `h/...` (L, ...),
    `ln_f/{scale, bias}`, and `lm_head/kernel` (D, V) where untied.
    """

    config: GPT2Config

    def setup(self) -> None:
        """Names the layers as Hugging Face does."""
        config = self.config
        embedding_init = nn.initializers.normal(INIT_STDDEV)
        shared = {"embedding_init": embedding_init, "dtype": config.dtype}
        self.wte = LossEmbed(config.vocab_size, config.n_embd, **shared)
        self.wpe = nn.Embed(config.n_positions, config.n_embd, **shared)
        self.drop = nn.Dropout(config.dropout)
        self.h = Block(config)
        self.ln_f = _layer_norm(config)
        if not config.tie_embeddings:
            # The initializer alone reads the embedding, so a tied and an untied model start as one function.
            self.lm_head = Head(
                config.n_embd,
                config.vocab_size,
                kernel_init=lambda *_: self.wte.embedding.T,
                dtype=config.dtype,
            )

    def __call__(
        self,
        ids: Int[Array | np.ndarray, "B T"],
        positions: Int[Array | np.ndarray, " B"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"] | Float[Array, "B V"]:
        """Computes next-token logits.

        Args:
          ids: token ids, T at most `n_positions`; one outside the vocabulary makes its example NaN.
          positions: for each example the one position whose logits are wanted; the others are never computed.
          deterministic: whether dropout is off; if on, `apply` needs a "dropout" rng.

        Returns:
          Logits at every position, or at the one asked for.

        Raises:
          ValueError: if the sequence is longer than `n_positions`.
        """
        hidden = self._hidden(ids, deterministic)
        if positions is not None:
            hidden = jnp.take_along_axis(hidden, positions[:, None, None], axis=1)[:, 0]
        return self._logits(self.ln_f(hidden))

    def token_losses(
        self, ids: Int[Array | np.ndarray, "B T"], deterministic: bool = True
    ) -> Float[Array, "B T"]:
        """Computes the cross-entropy of each token given those before it, in nats.

        Args:
          ids: token ids, T at most `n_positions`.
          deterministic: whether dropout is off.

        Returns:
          Losses in float32 or wider; column t is the loss of predicting `ids[:, t]`, and column 0, which
          nothing precedes, is 0.

        Raises:
          ValueError: if the sequence is longer than `n_positions`.
        """
        hidden = self.ln_f(self._hidden(ids, deterministic))
        losses = cross_entropy(self._logits(hidden[:, :-1]), jnp.asarray(ids)[:, 1:])
        return jnp.pad(losses, ((0, 0), (1, 0)))

    def weighted_loss(
        self,
        ids: Int[Array | np.ndarray, "B T"],
        weights: Float[Array | np.ndarray, "B T"],
        deterministic: bool = True,
    ) -> Float[Array, " B"]:
        """Computes the weighted sum of `token_losses`, with logits that are never whole.

        Args:
          ids: token ids, T at most `n_positions`.
          weights: column t is the weight of predicting `ids[:, t]`; column 0 is unused.
          deterministic: whether dropout is off.

        Returns:
          Losses in float32 or wider.

        Raises:
          ValueError: if the sequence is longer than `n_positions`.
        """
        hidden = self.ln_f(self._hidden(ids, deterministic))
        head = self.wte if self.config.tie_embeddings else self.lm_head
        return head.weighted_loss(hidden[:, :-1], jnp.asarray(ids)[:, 1:], jnp.asarray(weights)[:, 1:])

    def _hidden(self, ids: Int[Array | np.ndarray, "B T"], deterministic: bool) -> Float[Array, "B T D"]:
        """The residual stream after the last block, before the final LayerNorm."""
        length = ids.shape[1]
        if length > self.config.n_positions:
            limit = f"n_positions={self.config.n_positions}"
            raise ValueError(f"sequence length must be at most {limit}, got {length}")
        # A concrete array, so that whoever traces the model can see that position ids are distinct.
        position_ids = np.arange(length, dtype=np.int32)[None]
        x = self.drop(self.wte(ids) + self.wpe(position_ids), deterministic=deterministic)
        return self._blocks(x, deterministic)

    def _blocks(self, x: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        """Scans the blocks, so that the program's size does not grow with the number of layers."""

        def body(block: Block, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], None]:
            return block(x, deterministic), None

        if self.config.remat:
            # Inside a scan there is nothing common to guard against.
            policies = jax.checkpoint_policies
            if self.config.remat == "full":
                policy = policies.save_only_these_names("attended", "between")
            else:
                policy = policies.dots_with_no_batch_dims_saveable
            body = nn.remat(body, policy=policy, prevent_cse=False)
        scan = nn.scan(
            body,
            # The two record collections let a caller capture every layer's activations and their cotangents.
            variable_axes={"params": 0, "intermediates": 0, "perturbations": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.config.n_layer,
        )
        return scan(self.h, x)[0]

    def _logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """The output head: the tie is here."""
        return self.wte.attend(hidden) if self.config.tie_embeddings else self.lm_head(hidden)


def _dense(config: GPT2Config, features: int, name: str, stddev: float = INIT_STDDEV) -> nn.Dense:
    """A dense layer with GPT-2's initialization."""
    return nn.Dense(features, kernel_init=nn.initializers.normal(stddev), dtype=config.dtype, name=name)


def _layer_norm(config: GPT2Config, name: str | None = None) -> nn.LayerNorm:
    """A LayerNorm whose variance is taken about the mean: E[x^2] - E[x]^2 cancels where |mean| is large."""
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon, use_fast_variance=False, dtype=config.dtype, name=name
    )
