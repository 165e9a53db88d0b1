"""GPT-2's parameters under Hugging Face's tensor names, strictly: nothing missing, surplus or misshapen.

Hugging Face keeps one tensor a layer where the scanned blocks hold a stack of them. Its attention and MLP
weights are stored inputs x outputs, as a Flax kernel is; the head alone is outputs x inputs. Names here are
those of the bare model (`wte.weight`, `h.0.ln_1.weight`, ...) and `lm_head.weight`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from wtdp_jax.models.gpt2 import GPT2, GPT2Config

Params = dict[str, Any]

_EMBEDDING = "wte.weight"
_HEAD = "lm_head.weight"
_BLOCK_MODULES = {
    "ln_1": "ln_1",
    "c_attn": "attn.c_attn",
    "attn_c_proj": "attn.c_proj",
    "ln_2": "ln_2",
    "c_fc": "mlp.c_fc",
    "mlp_c_proj": "mlp.c_proj",
}


def params_from_tensors(tensors: Mapping[str, np.ndarray], config: GPT2Config) -> Params:
    """Assembles the model's parameters.

    Args:
      tensors: float32 arrays by Hugging Face name, with `lm_head.weight` exactly if `config` is untied.
      config: the model that the tensors must fit.

    Returns:
      Parameters for `GPT2(config)`.

    Raises:
      ValueError: if a tensor is missing, surplus, misshapen or not finite; the message names it.
    """
    abstract = _abstract_leaves(config)
    _check_fit(tensors, jax.eval_shape(_tensors_from_leaves, abstract))
    leaves = {path: _leaf_from_tensors(path, leaf.shape, tensors) for path, leaf in abstract.items()}
    return unflatten_dict(leaves, sep="/")


def tensors_from_params(params: Params, config: GPT2Config) -> dict[str, np.ndarray]:
    """Takes the model's parameters apart into float32 tensors by Hugging Face name.

    Args:
      params: parameters of `GPT2(config)`, in any float dtype.
      config: the model they belong to.

    Returns:
      One contiguous array a tensor; a tied model has no `lm_head.weight`.

    Raises:
      ValueError: if a parameter is missing, surplus, misshapen or not finite; the message names it.
    """
    leaves = {path: to_float32(leaf) for path, leaf in flatten_dict(params, sep="/").items()}
    _check_fit(leaves, _abstract_leaves(config))
    # safetensors writes a buffer as it lies in memory, whatever its strides say.
    return {name: np.ascontiguousarray(tensor) for name, tensor in _tensors_from_leaves(leaves).items()}


def settle_head(tensors: Mapping[str, np.ndarray], *, stored_tied: bool, tied: bool) -> dict[str, np.ndarray]:
    """Drops, keeps or copies the head, so that the tensors are those of a tied or an untied model.

    Args:
      tensors: what the file holds.
      stored_tied: whether the file's configuration ties the head; the file may hold it all the same.
      tied: whether the model to be made does.

    Returns:
      The tensors, with `lm_head.weight` exactly if not `tied`.

    Raises:
      ValueError: if a tied head differs from the embedding, or one of the two is missing.
    """
    settled = dict(tensors)
    if stored_tied and _EMBEDDING in settled:
        settled.setdefault(_HEAD, settled[_EMBEDDING])
    for name in (_EMBEDDING, _HEAD):
        if name not in settled:
            raise ValueError(f"tensor missing: {name}")
    if (stored_tied or tied) and not np.array_equal(settled[_HEAD], settled[_EMBEDDING]):
        remedy = "tie_word_embeddings in config.json" if stored_tied else "tie_embeddings"
        raise ValueError(f"{remedy} must be False, got True where {_HEAD} differs from {_EMBEDDING}")
    if tied:
        del settled[_HEAD]
    return settled


def to_float32(array: Any) -> np.ndarray:
    """Converts to float32; what that type cannot hold becomes infinite, without a warning."""
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(np.float32, copy=False)


def _abstract_leaves(config: GPT2Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape of every parameter leaf by its path: the model itself is the one authority on them."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = jax.eval_shape(GPT2(config).init, jax.random.key(0), ids)["params"]
    return flatten_dict(params, sep="/")


def _tensors_from_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Unstacks the blocks' leaves and turns the head. Takes arrays of any kind, abstract ones too."""
    tensors: dict[str, Any] = {}
    for path, leaf in leaves.items():
        layers = leaf if path.startswith("h/") else [leaf.T if path == "lm_head/kernel" else leaf]
        tensors.update(zip(_tensor_names(path, len(layers)), layers, strict=True))
    return tensors


def _leaf_from_tensors(path: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray]) -> jax.Array:
    """Undoes `_tensors_from_leaves` for one leaf."""
    if path == "lm_head/kernel":
        return jnp.asarray(tensors[_HEAD].T)
    names = _tensor_names(path, shape[0] if path.startswith("h/") else 1)
    return jnp.asarray(np.stack([tensors[name] for name in names]).reshape(shape))


def _tensor_names(path: str, layers: int) -> list[str]:
    """Hugging Face's names for a leaf, one a layer."""
    *_, module, leaf = path.split("/")
    suffix = "bias" if leaf == "bias" else "weight"
    if path.startswith("h/"):
        return [f"h.{layer}.{_BLOCK_MODULES[module]}.{suffix}" for layer in range(layers)]
    return [f"{module}.{suffix}"]


def _check_fit(found: Mapping[str, np.ndarray], expected: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Demands the expected names and shapes, and finite values."""
    for complaint, names in (("missing", expected.keys() - found), ("surplus", found.keys() - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"tensor {complaint}: {min(names)}{more}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(f"tensor {name} must have shape {expected[name].shape}, got {tensor.shape}")
        if not np.isfinite(tensor).all():
            raise ValueError(f"tensor {name} must be finite, got NaN or infinity")
