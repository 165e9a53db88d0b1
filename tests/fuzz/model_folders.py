"""Sound model folders, as their parts, for tests to damage."""

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from tests import tiny
from wtdp_jax.models import GPT2, Decoder, GPT2Config, Llama, LlamaConfig, from_pretrained, save_pretrained

Kind = Literal["gpt2", "untied", "llama", "qwen2"]
KINDS: tuple[Kind, ...] = ("gpt2", "untied", "llama", "qwen2")

_SIZES: dict[str, Any] = {
    "vocab_size": len(tiny.WORDS),
    "n_positions": 8,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
}


def _model(kind: Kind) -> Decoder:
    if kind in ("llama", "qwen2"):
        return Llama(LlamaConfig(**_SIZES, n_kv_head=1, n_inner=12, qkv_bias=kind == "qwen2"))
    return GPT2(GPT2Config(**_SIZES, tie_embeddings=kind == "gpt2"))


@functools.cache
def sound(kind: Kind) -> Mapping[str, bytes]:
    """The files of a folder by name. Made before examples are drawn, which must not use random names."""
    model = _model(kind)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(Path(folder, "model"), model, params, tiny.tokenizer())
        return {path.name: path.read_bytes() for path in Path(folder, "model").iterdir()}


def entries(kind: Kind) -> dict[str, Any]:
    """What config.json holds."""
    return json.loads(sound(kind)["config.json"])


def load_with(changes: Mapping[str, bytes], kind: Kind = "gpt2") -> tuple[Decoder, Any]:
    """Loads a folder whose files are sound but for those given, and which loading must leave as it is."""
    files = {**sound(kind), **changes}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        try:
            return from_pretrained(folder)
        finally:
            assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == files


def assert_usable(loaded: tuple[Decoder, Any]) -> None:
    """That a loaded model's parameters are finite and those of its configuration."""
    model, params = loaded
    assert jax.tree.map(np.shape, params) == _param_shapes(type(model), model.config)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@functools.cache
def _param_shapes(kind: type[Decoder], config: Any) -> Any:
    """Shapes of a model's parameters, which it can also be called with."""
    model, ids = kind(config), np.zeros((1, 1), np.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
    logits = jax.eval_shape(model.apply, {"params": params}, ids)
    assert logits.shape == (1, 1, config.vocab_size)
    return jax.tree.map(np.shape, params)
