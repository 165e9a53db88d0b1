"""A model's parameters under Hugging Face's tensor names, strictly: nothing missing, surplus or misshapen.

Hugging Face keeps one tensor a layer where the scanned blocks hold a stack of them, and many a kernel the
other way round. Names here are those of the bare model (`wte.weight`, `h.0.ln_1.weight`, ...) and
`lm_head.weight`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from wtdp_jax.models.decoder import DecoderConfig
from wtdp_jax.models.hf_config import family_of
from wtdp_jax.models.hf_family import TensorNames, in_blocks

Params = dict[str, Any]

_HEAD = "lm_head.weight"


def params_from_tensors(tensors: Mapping[str, np.ndarray], config: DecoderConfig) -> Params:
    """Assembles the model's parameters.

    Args:
      tensors: float32 arrays by Hugging Face name, with `lm_head.weight` exactly if `config` is untied.
      config: the model that the tensors must fit.

    Returns:
      Parameters for the model of `config`.

    Raises:
      ValueError: if a tensor is missing, surplus, misshapen or not finite; the message names it.
    """
    names = family_of(config).names
    # Each layer has more than one. Without this a wrong number would be counted up to, name by name.
    if config.n_layer > len(tensors):
        raise ValueError(f"n_layer must fit the file's {len(tensors)} tensors, got {config.n_layer}")
    abstract = _abstract_leaves(config)
    _check_fit(tensors, jax.eval_shape(lambda leaves: _tensors_from_leaves(leaves, names), abstract))
    leaves = {path: _leaf_from_tensors(path, leaf.shape, tensors, names) for path, leaf in abstract.items()}
    return unflatten_dict(leaves, sep="/")


def tensors_from_params(params: Params, config: DecoderConfig) -> dict[str, np.ndarray]:
    """Takes the model's parameters apart into float32 tensors by Hugging Face name.

    Args:
      params: parameters of the model of `config`, in any float dtype.
      config: that model's.

    Returns:
      One contiguous array a tensor; a tied model has no `lm_head.weight`.

    Raises:
      ValueError: if a parameter is missing, surplus, misshapen or not finite; the message names it.
    """
    leaves = {path: to_float32(leaf) for path, leaf in flatten_dict(params, sep="/").items()}
    _check_fit(leaves, _abstract_leaves(config))
    tensors = _tensors_from_leaves(leaves, family_of(config).names)
    # safetensors writes a buffer as it lies in memory, whatever its strides say.
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def settle_head(
    tensors: Mapping[str, np.ndarray], *, embedding: str, stored_tied: bool, tied: bool
) -> dict[str, np.ndarray]:
    """Drops, keeps or copies the head, so that the tensors are those of a tied or an untied model.

    Args:
      tensors: what the file holds.
      embedding: the embedding's name.
      stored_tied: whether the file's configuration ties the head; the file may hold it all the same.
      tied: whether the model to be made does.

    Returns:
      The tensors, with `lm_head.weight` exactly if not `tied`.

    Raises:
      ValueError: if a tied head differs from the embedding, or one of the two is missing.
    """
    settled = dict(tensors)
    if stored_tied and embedding in settled:
        settled.setdefault(_HEAD, settled[embedding])
    for name in (embedding, _HEAD):
        if name not in settled:
            raise ValueError(f"tensor missing: {name}")
    # Two NaNs are alike here: that they are not finite is said of them later, by name.
    same = np.array_equal(settled[_HEAD], settled[embedding], equal_nan=True)
    if (stored_tied or tied) and not same:
        remedy = "tie_word_embeddings in config.json" if stored_tied else "tie_embeddings"
        raise ValueError(f"{remedy} must be False, got True where {_HEAD} differs from {embedding}")
    if tied:
        del settled[_HEAD]
    return settled


def to_float32(array: Any) -> np.ndarray:
    """Converts to float32; what that type cannot hold becomes infinite, without a warning."""
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(np.float32, copy=False)


def _abstract_leaves(config: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape of every parameter leaf by its path: the model itself is the one authority on them."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = jax.eval_shape(family_of(config).model(config).init, jax.random.key(0), ids)["params"]
    return flatten_dict(params, sep="/")


def _tensors_from_leaves(leaves: Mapping[str, Any], names: TensorNames) -> dict[str, Any]:
    """Unstacks the blocks' leaves and turns kernels. Takes arrays of any kind, abstract ones too."""
    tensors: dict[str, Any] = {}
    for path, leaf in leaves.items():
        layers = leaf if in_blocks(path) else [leaf]
        layers = [layer.T for layer in layers] if names.is_turned(path) else layers
        tensors.update(zip(names.of(path, len(layers)), layers, strict=True))
    return tensors


def _leaf_from_tensors(
    path: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray], names: TensorNames
) -> jax.Array:
    """Undoes `_tensors_from_leaves` for one leaf."""
    layers = [tensors[name] for name in names.of(path, shape[0])]
    layers = [layer.T for layer in layers] if names.is_turned(path) else layers
    return jnp.asarray(np.stack(layers) if in_blocks(path) else layers[0])


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
