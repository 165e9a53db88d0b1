"""What the decoder-only models have in common: embedding, scanned blocks, and an output head, tied or free.

Dimension key: B examples, T tokens, D width, V vocabulary, L layers.

The tie is one flag, `DecoderConfig.tie_embeddings`: the head is either `wte.attend`, which multiplies by the
embedding itself, or a bias-free dense layer that starts as a copy of it. Nothing here knows of privacy. The
models only keep two promises that per-example gradients lean on: parameters are used through calls of
`nn.Dense`, `nn.Embed`, `nn.LayerNorm`, `nn.RMSNorm`, `LossEmbed` and `Head` alone, and no operation mixes
examples.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from wtdp_jax.lm_head import Head, LossEmbed, cross_entropy

INIT_STDDEV = 0.02
"""Standard deviation of every weight matrix at initialization (Radford et al. 2019)."""

_Config = TypeVar("_Config", bound="DecoderConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every family's configuration has, in the names of Hugging Face's GPT-2.

    Attributes:
      vocab_size: number of token ids.
      n_positions: longest sequence, in tokens.
      n_embd: width of the hidden state.
      n_layer: number of blocks.
      n_head: attention heads a block; must divide `n_embd`.
      tie_embeddings: whether the output head is the input embedding.
      remat: what the backward pass computes again instead of keeping it. False: nothing; True: what is cheap
        in each block (normalization, activation, attention); "full": the dense layers too, so that three
        arrays of the residual stream's size are all that a block keeps. With either, long sequences have
        their attention scores formed one example at a time.
      dtype: the type that layers compute in; None: that of the parameters. With "bfloat16" the parameters,
        the softmaxes and the losses stay in float32.
      dropout: rate, where the family has dropout; only with `deterministic=False`.
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Published sizes by name."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    tie_embeddings: bool = True
    remat: bool | Literal["full"] = False
    dtype: Literal["float32", "bfloat16"] | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self._check_counts("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")
        if self.remat not in (False, True, "full"):
            raise ValueError(f'remat must be False, True or "full", got {self.remat!r}')
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype must be None, float32 or bfloat16, got {self.dtype!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @classmethod
    def preset(cls: type[_Config], name: str, **overrides: Any) -> _Config:
        """Returns a published size by its name, with any field overridden.

        Args:
          name: one of the family's `PRESETS`.
          **overrides: fields that replace or complete the preset's.

        Raises:
          ValueError: if there is no such preset, or the overrides do not fit it.
        """
        if name not in cls.PRESETS:
            raise ValueError(f"preset must be one of {', '.join(cls.PRESETS)}, got {name!r}")
        return cls(**{**cls.PRESETS[name], **overrides})

    def _check_counts(self, *names: str) -> None:
        """Refuses a field that is below 1, or that a 32-bit index does not reach."""
        for name in names:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if value >= 2**31:
                raise ValueError(f"{name} must be below 2**31, got {value}")

    def _check_positive(self, *names: str) -> None:
        """Refuses a field that is not a positive number."""
        for name in names:
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")


class Decoder(nn.Module):
    """A decoder-only language model; parameters of the L blocks are stacked under `h`.

    A family's `setup` adds its block `h` and its last normalization `ln_f`.

    Parameters: `wte/embedding` (V, D), `h/...` (L, ...), `ln_f/...`, and `lm_head/kernel` (D, V) where
    untied.
    """

    config: DecoderConfig

    def setup(self) -> None:
        """Makes embedding and head."""
        config = self.config
        embedding_init = nn.initializers.normal(INIT_STDDEV)
        self.wte = LossEmbed(
            config.vocab_size, config.n_embd, embedding_init=embedding_init, dtype=config.dtype
        )
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
        """The residual stream after the last block, before the last normalization."""
        length = ids.shape[1]
        if length > self.config.n_positions:
            limit = f"n_positions={self.config.n_positions}"
            raise ValueError(f"sequence length must be at most {limit}, got {length}")
        return self._blocks(self._embed(ids, deterministic), deterministic)

    def _embed(self, ids: Int[Array | np.ndarray, "B T"], deterministic: bool) -> Float[Array, "B T D"]:
        """The residual stream before the first block."""
        return self.wte(ids)

    def _blocks(self, x: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        """Scans the blocks, so that the program's size does not grow with the number of layers."""

        def body(block: nn.Module, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], None]:
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


def dense(
    config: DecoderConfig, features: int, name: str, *, stddev: float = INIT_STDDEV, use_bias: bool = True
) -> nn.Dense:
    """A dense layer of a block."""
    return nn.Dense(
        features,
        use_bias=use_bias,
        kernel_init=nn.initializers.normal(stddev),
        dtype=config.dtype,
        name=name,
    )
