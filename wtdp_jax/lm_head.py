"""Output heads with a loss of their own, whose logits are never whole.

Dimension key: B examples, T positions, D width, V vocabulary, N positions of a chunk.

The largest arrays of a language model are its logits (B, T, V) and their cotangents. A head that is asked for
the loss, and not for the logits, can take them a chunk of positions at a time, and form them again in the
backward pass. The loss of an example is one number, so it is linear in one cotangent, which lets a caller of
`weighted_loss` do all of the head's work at cotangent 1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

MAX_CHUNK = 2**25
"""Most logits that are held at a time: 128 MiB in float32."""


class LossEmbed(nn.Module):
    """An embedding that is its own output head: `nn.Embed`, of parameter `embedding` (V, D), and a loss.

    Attributes:
        num_embeddings: V.
        features: D.
        embedding_init: initializer of the embedding.
        dtype: the type to compute in; None: that of inputs and embedding.
    """

    num_embeddings: int
    features: int
    embedding_init: Callable = nn.initializers.normal(1.0)
    dtype: DTypeLike | None = None

    def setup(self) -> None:
        """Makes the embedding."""
        self.embedding = self.param("embedding", self.embedding_init, (self.num_embeddings, self.features))

    def __call__(self, ids: Int[Array | np.ndarray, "*B"]) -> Float[Array, "*B D"]:
        """The tokens' rows; NaN for one outside [-V, V)."""
        (embedding,) = promote_dtype(self.embedding, dtype=self.dtype)
        return jnp.take(embedding, ids, axis=0)

    def attend(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits."""
        hidden, matrix = promoted(self, hidden, {"embedding": self.embedding})
        return jnp.dot(hidden, matrix.T)

    def weighted_loss(
        self, hidden: Float[Array, "*B T D"], targets: Int[Array, "*B T"], weights: Float[Array, "*B T"]
    ) -> Float[Array, "*B"]:
        """The weighted sum of an example's cross-entropies, see `weighted_loss`."""
        hidden, matrix = promoted(self, hidden, {"embedding": self.embedding})
        return weighted_loss(hidden, matrix, targets, weights)


class Head(nn.Module):
    """An output head without bias: a dense layer of parameter `kernel` (D, V).

    Attributes:
        width: D.
        features: V.
        kernel_init: initializer of the kernel.
        dtype: the type to compute in; None: that of inputs and kernel.
    """

    width: int
    features: int
    kernel_init: Callable = nn.initializers.lecun_normal()
    dtype: DTypeLike | None = None

    def setup(self) -> None:
        """Makes the kernel."""
        self.kernel = self.param("kernel", self.kernel_init, (self.width, self.features))

    def __call__(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits."""
        hidden, kernel = promote_dtype(hidden, self.kernel, dtype=self.dtype)
        return jnp.dot(hidden, kernel)

    def weighted_loss(
        self, hidden: Float[Array, "*B T D"], targets: Int[Array, "*B T"], weights: Float[Array, "*B T"]
    ) -> Float[Array, "*B"]:
        """The weighted sum of an example's cross-entropies, see `weighted_loss`."""
        hidden, matrix = promoted(self, hidden, {"kernel": self.kernel})
        return weighted_loss(hidden, matrix, targets, weights)


def promoted(module: LossEmbed | Head, hidden: Array, leaves: Mapping[str, Any]) -> tuple[Array, Array]:
    """A head's inputs and its matrix (V, D), in the type in which it computes."""
    hidden, matrix = promote_dtype(hidden, rows_of(module, leaves), dtype=module.dtype)
    return hidden, matrix


def rows_of(module: LossEmbed | Head, leaves: Mapping[str, Any]) -> Array:
    """A head's matrix (V, D), one row a token."""
    return leaves["embedding"] if isinstance(module, LossEmbed) else leaves["kernel"].T


def weighted_loss(
    hidden: Float[Array, "*B T D"],
    matrix: Float[Array, "V D"],
    targets: Int[Array, "*B T"],
    weights: Float[Array, "*B T"],
) -> Float[Array, "*B"]:
    """sum_t weights_t (logsumexp(matrix hidden_t) - (matrix hidden_t)[targets_t]), in chunks of positions.

    Args:
        hidden: the head's inputs.
        matrix: its rows, one a token of the vocabulary.
        targets: tokens; one outside [0, V) makes its example's loss NaN.
        weights: weights of the positions.

    Returns:
        The sum for each example, in float32 or wider.
    """
    batch_and_length = hidden.shape[:-1]
    positions = math.prod(batch_and_length)
    rows, wanted = hidden.reshape(positions, -1), targets.reshape(positions)
    size = max(1, MAX_CHUNK // matrix.shape[0])
    if positions <= size:
        losses = _cross_entropy(rows, matrix, wanted)
    else:
        losses = _in_chunks(rows, matrix, wanted, size)
    return jnp.sum(weights.astype(losses.dtype) * losses.reshape(batch_and_length), -1)


def cross_entropy(logits: Float[Array, "*B V"], targets: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """-log softmax(logits)[target], in float32 or wider; NaN, with its gradient, outside [0, V)."""
    logits = logits.astype(jnp.promote_types(jnp.float32, logits.dtype))
    known = (targets >= 0) & (targets < logits.shape[-1])
    chosen = jnp.take_along_axis(logits, jnp.where(known, targets, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return losses * jnp.where(known, 1, jnp.nan).astype(losses.dtype)


def _cross_entropy(hidden: Array, matrix: Array, targets: Array) -> Array:
    return cross_entropy(jnp.dot(hidden, matrix.T), targets)


def _in_chunks(hidden: Array, matrix: Array, targets: Array, size: int) -> Array:
    """`_cross_entropy` of `size` positions at a time; the backward pass forms each chunk's logits again."""
    positions = hidden.shape[0]
    chunks = -(-positions // size)
    pad = chunks * size - positions
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(chunks, size, -1)
    targets = jnp.pad(targets, (0, pad)).reshape(chunks, size)

    @jax.checkpoint
    def one(chunk: tuple[Array, Array]) -> Array:
        return _cross_entropy(chunk[0], matrix, chunk[1])

    return jax.lax.map(one, (hidden, targets)).reshape(-1)[:positions]
