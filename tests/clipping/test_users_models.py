"""Models as users bring them, after well-known Flax ones: exact, and what no rule covers refused by name.

None of them is written for this library: attention by `nn.DenseGeneral`, images cut up by a convolution, a
class token and positions that are raw parameters, layers over transposed axes, one-dimensional convolutions.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.clipping import oracle, small
from wtdp_jax.clipping import clipped_grad

VOCAB, CLASSES, WIDTH = 13, 3, 8


class Mlp(nn.Module):
    """Two dense layers over the last axis, back to its width."""

    hidden: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(x.shape[-1], name="out")(nn.gelu(nn.Dense(self.hidden, name="in")(x)))


class Attention(nn.Module):
    """Two heads, by Flax's general dense layers."""

    @nn.compact
    def __call__(self, x: Any, mask: Any = None) -> Any:
        q, k, v = (nn.DenseGeneral((2, WIDTH // 2), name=name)(x) for name in ("query", "key", "value"))
        attended = nn.dot_product_attention(q, k, v, mask=mask)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(attended)


class EncoderBlock(nn.Module):
    """Pre-norm attention, then an MLP."""

    @nn.compact
    def __call__(self, x: Any, mask: Any = None) -> Any:
        x = x + Attention(name="attention")(nn.LayerNorm()(x), mask)
        return x + Mlp(12, name="mlp")(nn.LayerNorm()(x))


class TransformerLM(nn.Module):
    """A language model with learned positions, causal masks, and the embedding as its head."""

    tie: bool

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        x = embed(ids) + nn.Embed(16, WIDTH, name="positions")(jnp.arange(ids.shape[1])[None])
        mask = nn.make_causal_mask(ids)
        x = EncoderBlock(name="block")(x, mask)
        x = nn.LayerNorm(name="norm")(x)
        return embed.attend(x) if self.tie else nn.Dense(VOCAB, name="head")(x)


class ViT(nn.Module):
    """Patches by a strided convolution, flattened; a class token in front; raw positions."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), padding="VALID", name="patches")(images)
        x = x.reshape(len(x), -1, WIDTH)
        token = self.param("token", nn.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(), (1, x.shape[1], WIDTH))
        x = EncoderBlock(name="block")(x)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="norm")(x)[:, 0])


class MlpMixer(nn.Module):
    """MLPs over tokens and over channels in turn."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), name="stem")(images)
        x = x.reshape(len(x), -1, WIDTH)
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(Mlp(6, name="tokens")(y), 1, 2)
        x = x + Mlp(12, name="channels")(nn.LayerNorm()(x))
        return nn.Dense(CLASSES, name="head")(jnp.mean(nn.LayerNorm(name="norm")(x), axis=1))


class TextCNN(nn.Module):
    """Convolutions of several widths over embedded tokens, each pooled by its maximum."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(VOCAB, WIDTH, name="embed")(ids)
        pooled = [
            jnp.max(nn.relu(nn.Conv(5, (width,), name=f"width_{width}")(x)), axis=1) for width in (2, 3)
        ]
        return nn.Dense(CLASSES, name="head")(jnp.concatenate(pooled, axis=-1))


def _tokens() -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (4, 6)), jnp.int32)


def _images() -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal((4, 8, 8, 3)))


def _next_token(logits: Any, batch: Any) -> Any:
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, batch["x"][:, 1:, None], -1)[..., 0], -1)


def _class(logits: Any, batch: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], -1)[:, 0]


# A general dense layer is read by no module that a rule knows: its gradients are formed per example.
_ATTENTION = {
    f"block/attention/{name}/{leaf}"
    for name in ("query", "key", "value", "out")
    for leaf in ("kernel", "bias")
}

# model, inputs, loss, leaves that have no rule
CASES: dict[str, tuple[nn.Module, Callable, Callable, set[str]]] = {
    "tied LM": (TransformerLM(tie=True), _tokens, _next_token, _ATTENTION),
    "untied LM": (TransformerLM(tie=False), _tokens, _next_token, _ATTENTION),
    "ViT": (ViT(), _images, _class, _ATTENTION | {"token", "positions", "patches/kernel", "patches/bias"}),
    "MLP-Mixer": (MlpMixer(), _images, _class, {"stem/kernel", "stem/bias"}),
    "text CNN": (
        TextCNN(),
        _tokens,
        _class,
        {f"width_{width}/{leaf}" for width in (2, 3) for leaf in ("kernel", "bias")},
    ),
}


def _case(name: str) -> tuple[Callable, Any, Any, set[str]]:
    model, inputs, loss, uncovered = CASES[name]
    batch = {"x": inputs(), "label": jnp.asarray([0, 1, 2, 1])}
    params = small.random_params(model, batch["x"], dtype=jnp.float64)
    return lambda p, b: loss(model.apply({"params": p}, b["x"]), b), params, batch, uncovered


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_exact(float64: None, name: str) -> None:
    loss_fn, params, batch, _ = _case(name)
    oracle.assert_exact(loss_fn, params, batch)


@pytest.mark.parametrize("name", CASES)
def test_what_no_rule_covers_is_known_and_refused_by_name(float64: None, name: str) -> None:
    loss_fn, params, batch, expected = _case(name)
    grad_fn = clipped_grad(loss_fn, engine="ghost", l2_clip_norm=1.0)
    coverage = grad_fn.check(params, batch)
    assert set(coverage.uncovered) == expected, str(coverage)
    if expected:
        strict = clipped_grad(loss_fn, engine="ghost", l2_clip_norm=1.0, uncovered="error")
        with pytest.raises(ValueError, match=f"no rule covers ({'|'.join(expected)})"):
            strict(params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied LM", "ViT"])
def test_a_frozen_part_has_no_share_in_the_norm(float64: None, name: str) -> None:
    loss_fn, params, batch, _ = _case(name)
    gradients = oracle.per_example_gradients(loss_fn, params, batch)
    part = "embed" if name == "tied LM" else "positions"
    rest = {key: leaf for key, leaf in gradients.items() if key != part}
    for engine in ("ghost", "bookkeeping"):
        grad_fn = clipped_grad(
            loss_fn, engine=engine, l2_clip_norm=0.1, trainable=lambda path: not path.startswith(part)
        )
        total, per_example = jax.jit(grad_fn)(params, batch)
        assert not jax.tree.leaves(total[part])
        assert oracle.relative_error(per_example.norm, oracle.norms(rest)) < 1e-10
