"""The programs that batches are drawn for: each is compiled once, whatever values it then meets."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.clipping import oracle, small
from wtdp_jax.clipping import ClippedGrad, clipped_grad
from wtdp_jax.losses import label_word_loss, lm_loss, next_token_loss

ROWS, TOKENS, VOCABULARY = 4, 5, 31
LABEL_WORDS = (4, 7)


class Bare(nn.Module):
    """A tied matrix with a parameter outside all layers, which no rule covers, between its two uses."""

    @nn.compact
    def __call__(self, ids: Any, positions: Any) -> Any:
        embed = nn.Embed(VOCABULARY, 8, name="embed")
        x = embed(ids) + self.param("positions", nn.initializers.normal(), (1, TOKENS, 8))
        x = nn.tanh(nn.Dense(8, name="hidden")(x))
        return embed.attend(jnp.take_along_axis(x, positions[:, None, None], axis=1)[:, 0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a program is compiled for. Clip norms lie amid the gradients' norms at parameters of size 1."""

    engine: Any
    family: str = "gpt2"
    tie: bool = True
    loss: str = "next_token"
    clipping: Any = "flat"
    tied_norm: Any = "cross_term"
    dtype: str = "float64"
    optimized: bool = False
    l2_clip_norm: float = 0.5

    def __str__(self) -> str:
        parts = (self.engine, self.family, "tied" if self.tie else "untied", self.loss, self.clipping)
        more = (self.tied_norm, self.dtype, "optimized" if self.optimized else "", f"C={self.l2_clip_norm}")
        usual = ("cross_term", "float64", "", "C=0.5")
        return "-".join((*parts, *(name for name in more if name not in usual)))

    @property
    def params_dtype(self) -> Any:
        """The parameters' type, in which norms and sums are formed."""
        return jnp.float64 if self.dtype == "float64" else jnp.float32

    @property
    def eps(self) -> float:
        """An ulp of 1 in the type of the sum."""
        return float(jnp.finfo(self.params_dtype).eps)

    @property
    def grad_fn(self) -> ClippedGrad:
        """What is tested."""
        return clipped_grad(
            _loss(self.family, self.tie, self.loss, self.dtype),
            engine=self.engine,
            l2_clip_norm=self.l2_clip_norm,
            clipping=self.clipping,
            tied_norm=self.tied_norm,
            microbatch_size=3,
        )

    @contextmanager
    def types(self) -> Iterator[None]:
        """64-bit types, where they are tested."""
        with jax.enable_x64(self.dtype == "float64"):
            yield


@functools.cache
def compiled(shape: Shape) -> Callable:
    """The engine's program."""
    return _lazily_optimized(jax.jit(shape.grad_fn)) if shape.optimized else jax.jit(shape.grad_fn)


def gradients(shape: Shape) -> Callable:
    """The oracle's program, (params, batch) -> per-example gradients: one for all engines."""
    return _gradients(shape.family, shape.tie, shape.loss, shape.dtype)


@functools.cache
def normal_params(shape: Shape, seed: int) -> Any:
    """Parameters whose entries are normal, in the shape's type."""
    model = _model(shape.family, shape.tie, "float32")
    ids = jnp.zeros((1, TOKENS), jnp.int32)
    inputs = (ids, jnp.zeros(1, jnp.int32)) if shape.family == "bare" else (ids,)
    return small.random_params(model, *inputs, dtype=shape.params_dtype, seed=seed, scale=1.0)


@functools.cache
def _gradients(family: str, tie: bool, loss: str, dtype: str) -> Callable:
    return oracle.gradients_fn(_loss(family, tie, loss, dtype))


@functools.cache
def _loss(family: str, tie: bool, name: str, dtype: str) -> Callable:
    """A loss with a float leaf, which scales an example's gradient and which a NaN can reach."""
    model = _model(family, tie, dtype)
    losses = {
        "next_token": next_token_loss,
        "lm": lm_loss,
        "label_words": lambda model: label_word_loss(model, LABEL_WORDS),
    }
    plain = losses[name](model)
    return lambda params, batch: batch["scale"] * plain(params, batch)


@functools.cache
def _model(family: str, tie: bool, dtype: str) -> nn.Module:
    if family == "bare":
        return Bare()
    model = small.decoder(family, tie=tie)
    narrow = dtype if dtype == "bfloat16" else None
    return type(model)(dataclasses.replace(model.config, dtype=narrow))


def _lazily_optimized(jitted: Callable) -> Callable:
    """The function, compiled at its first call as for a run: with the optimizations that tests go without."""
    programs: list[Callable] = []

    def call(*arguments: Any) -> Any:
        if not programs:
            jax.config.update("jax_disable_most_optimizations", False)
            try:
                programs.append(jitted.lower(*arguments).compile())
            finally:
                jax.config.update("jax_disable_most_optimizations", True)
        return programs[0](*arguments)

    return call
