"""Tiny models of each family, with parameters far from their initial values, and what runs them."""

import dataclasses
import functools

import jax
import numpy as np

from wtdp_jax.models import GPT2, GPT2Config, Llama, LlamaConfig
from wtdp_jax.models.rotary import Llama3Scaling

TINY_GPT2 = GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=3, n_head=2)
TINY_LLAMA = LlamaConfig(
    vocab_size=11, n_positions=8, n_embd=16, n_layer=3, n_head=4, n_kv_head=2, n_inner=20
)
SCALING = Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_n_positions=16)
IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]], np.int32)


def key(seed):
    """A key whose generator compiles in a moment, which threefry does not."""
    return jax.random.key(seed, impl="unsafe_rbg")


def of(config):
    """The model of a configuration."""
    return {GPT2Config: GPT2, LlamaConfig: Llama}[type(config)](config)


def make(config, **overrides):
    """A model with every parameter far from its initial value, so that no zero bias hides a fault."""
    model = of(dataclasses.replace(config, **overrides))
    shapes = jax.eval_shape(model.init, key(0), IDS)["params"]
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda s: rng.normal(0.0, 0.2, s.shape).astype(np.float32), shapes)


@functools.partial(jax.jit, static_argnames=("model", "deterministic", "method"))
def apply(model, params, ids, *args, rngs=None, **static):
    """The model, compiled once for each set of shapes."""
    return model.apply({"params": params}, ids, *args, rngs=rngs, **static)


@functools.partial(jax.jit, static_argnames=("model", "select"))
def init(model, seed, select):
    """The leaves that `select` picks of the initial parameters; the others are never computed."""
    return select(model.init(key(seed), IDS)["params"])


@functools.partial(jax.jit, static_argnums=0)
def grad(model, params):
    return jax.grad(lambda p: model.apply({"params": p}, IDS, method="token_losses").sum())(params)


def number_of_parameters(model):
    params = jax.eval_shape(model.init, key(0), IDS)["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(params))
