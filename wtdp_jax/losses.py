"""Per-example losses of a decoder-only language model, in the form that `clipped_grad` takes.

Dimension key: B examples, T tokens, V vocabulary, K label words.

Each function turns a model into ``loss_fn(params, batch) -> losses (B,)``. No operation crosses examples, as
per-example clipping demands. A model is any Flax Linen module called like `wtdp_jax.models.Decoder`. A batch
may carry "dropout_key" (B, 2) uint32, one raw key an example; dropout is then on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Batch = Mapping[str, Array]
LossFn = Callable[[Any, Batch], Float[Array, " B"]]


def next_token_loss(model: nn.Module) -> LossFn:
    """Cross-entropy over the whole vocabulary at one position an example.

    Args:
        model: called as ``model.apply({"params": params}, ids, positions)`` -> logits (B, V).

    Returns:
        A loss of batches {"ids" (B, T) int32, "positions" (B,) int32, "targets" (B,) int32}.
    """

    def loss_fn(params: Any, batch: Batch) -> Float[Array, " B"]:
        return _cross_entropy(_logits_at_positions(model, params, batch), batch["targets"])

    return loss_fn


def label_word_loss(model: nn.Module, label_ids: Sequence[int]) -> LossFn:
    """As `next_token_loss`, with the softmax over the label words alone.

    Only the label words' rows of the head get gradient.

    Args:
        model: as for `next_token_loss`.
        label_ids: token ids of the K label words. A target is one of these.

    Raises:
        ValueError: when fewer than two label words are given, or one twice.
    """
    if len(label_ids) < 2 or len(set(label_ids)) != len(label_ids):
        raise ValueError(f"label_ids must be at least two different token ids, got {list(label_ids)}")

    def loss_fn(params: Any, batch: Batch) -> Float[Array, " B"]:
        words = jnp.asarray(label_ids, dtype=jnp.int32)
        logits = _logits_at_positions(model, params, batch)[:, words]
        is_target = batch["targets"][:, None] == words[None, :]
        # A target that is no label word has no loss: NaN says so, where a 0 would pass unseen.
        known = jnp.where(jnp.any(is_target, -1), 1.0, jnp.nan).astype(logits.dtype)
        return known * _cross_entropy(logits, jnp.argmax(is_target, -1))

    return loss_fn


def lm_loss(model: nn.Module) -> LossFn:
    """Weighted mean cross-entropy over the tokens of each example.

    The model forms the mean itself, from weights that sum to 1, because one number an example, and not one a
    token, is what lets it do without whole logits: see `wtdp_jax.lm_head`.

    Args:
        model: has a method ``weighted_loss(ids, weights) -> (B,)``, see
            `wtdp_jax.models.Decoder.weighted_loss`.

    Returns:
        A loss of batches {"ids" (B, T) int32, "weights" (B, T) float}: weights[:, t] is the weight of
        predicting token t; column 0 is unused. An example whose weights are all 0 has loss 0.
    """

    def loss_fn(params: Any, batch: Batch) -> Float[Array, " B"]:
        weights = batch["weights"]
        weights = weights.astype(jnp.promote_types(jnp.float32, weights.dtype))
        total = jnp.sum(weights[:, 1:], -1, keepdims=True)
        mean = dict(batch) | {"weights": weights / jnp.where(total == 0, 1, total)}
        return _apply(model, params, mean, "ids", "weights", method="weighted_loss")

    return loss_fn


def _logits_at_positions(model: nn.Module, params: Any, batch: Batch) -> Array:
    return _apply(model, params, batch, "ids", "positions")


def _cross_entropy(logits: Array, targets: Array) -> Array:
    """-log softmax(logits)[target] for logits (B, V), in float32 or wider."""
    logits = logits.astype(jnp.promote_types(jnp.float32, logits.dtype))
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _apply(model: nn.Module, params: Any, batch: Batch, *inputs: str, method: str = "__call__") -> Array:
    """The model on a batch's named leaves; with dropout, each example under its own key."""
    leaves = [batch[name] for name in inputs]
    if "dropout_key" not in batch:
        return model.apply({"params": params}, *leaves, method=method)

    def one(key_data: Array, *leaves: Array) -> Array:
        key = jax.random.wrap_key_data(key_data)
        rows = [leaf[None] for leaf in leaves]
        return model.apply(
            {"params": params}, *rows, method=method, deterministic=False, rngs={"dropout": key}
        )[0]

    return jax.vmap(one)(batch["dropout_key"], *leaves)
