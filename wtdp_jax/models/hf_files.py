"""The files of a Hugging Face model folder: read with suspicion, written all at once or not at all."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from wtdp_jax.messages import printable
from wtdp_jax.models.hf_family import TensorNames
from wtdp_jax.models.hf_tensors import to_float32

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_FLOATS = ("F64", "F32", "F16", "BF16")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that must hold one JSON object.

    Raises:
      ValueError: if it is missing or does not.
    """
    if not path.is_file():
        raise ValueError(f"model folder must hold {path.name}, got {path.parent} without it")
    try:
        decoded = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(decoded).__name__}")
    return decoded


def read_tensors(folder: Path, names: TensorNames) -> dict[str, np.ndarray]:
    """Reads a model folder's weights, in one file or in shards.

    Args:
      folder: holds model.safetensors, or shards and model.safetensors.index.json.
      names: the family's.

    Returns:
      float32 arrays by bare name, whether the export has the family's prefix or not, and without buffers.

    Raises:
      ValueError: if a file is missing or malformed, or one tensor comes twice.
    """
    if (folder / WEIGHTS).is_file():
        return _read_file(folder / WEIGHTS, names)
    if not (folder / WEIGHTS_INDEX).is_file():
        raise ValueError(f"model folder must hold {WEIGHTS} or {WEIGHTS_INDEX}, got {folder} without either")
    tensors: dict[str, np.ndarray] = {}
    for shard in _shards(folder):
        part = _read_file(shard, names)
        if twice := tensors.keys() & part:
            raise ValueError(f"tensor {min(twice)} must be in one shard, got it again in {shard.name}")
        tensors |= part
    return tensors


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokenizer: Any = None
) -> None:
    """Writes a model folder that either appears whole or not at all.

    Args:
      folder: new, empty, or an earlier export; each file of an earlier one must have its successor.
      config: the entries of config.json.
      tensors: contiguous arrays by name.
      tokenizer: written by its own `save_pretrained`, if given.

    Raises:
      ValueError: if `folder` holds a file that the export would not replace.
      OSError: if the disk is full.
    """
    with _replacing(folder) as staged, _own_errors_as_os_errors(folder):
        (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # transformers 4 refuses a file without this entry; "pt" is the layout torch models use.
        save_file(dict(tensors), staged / WEIGHTS, metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(staged)


def _shards(folder: Path) -> list[Path]:
    """The shard files that the index names, each plainly inside the folder."""
    weight_map = read_json(folder / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"weight_map in {folder / WEIGHTS_INDEX} must be an object of file names by tensor")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise ValueError(f"shard must be a .safetensors file in the model folder, got {name!r}")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _read_file(path: Path, names: TensorNames) -> dict[str, np.ndarray]:
    """The weights of one safetensors file, by bare name."""
    tensors: dict[str, np.ndarray] = {}
    if not path.is_file():
        raise ValueError(
            f"model folder must hold every shard of its index, got {path.parent} without {path.name}"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            for stored_name in file.keys():
                if not stored_name.isprintable():
                    raise ValueError(f"tensor in {path} must have a printable name, got {stored_name!r}")
                name = stored_name.removeprefix(names.prefix)
                if re.fullmatch(names.buffers, name):
                    continue
                dtype = file.get_slice(stored_name).get_dtype()
                if dtype not in _FLOATS:
                    raise ValueError(f"tensor {stored_name} must be one of {', '.join(_FLOATS)}, got {dtype}")
                if name in tensors:
                    raise ValueError(f"tensor {name} must be there once, got it with and without a prefix")
                tensors[name] = to_float32(file.get_tensor(stored_name))
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file: {printable(error)}") from error
    return tensors


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder beside the given one, and puts it in its place if the body succeeds."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"export must go to a folder, got the file {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        # Not the scratch folder itself: that one is closed to other users.
        staged, retired = Path(scratch, "staged"), Path(scratch, "retired")
        staged.mkdir()
        yield staged
        if folder.exists():
            _check_replaceable(folder, staged)
            folder.rename(retired)
        staged.rename(folder)


@contextlib.contextmanager
def _own_errors_as_os_errors(folder: Path) -> Iterator[None]:
    """Turns what safetensors and tokenizers raise about a disk into what Python does."""
    try:
        yield
    except Exception as error:
        if type(error) not in (SafetensorError, Exception):
            raise
        raise OSError(f"{folder} cannot be written: {error}") from error


def _check_replaceable(folder: Path, staged: Path) -> None:
    """Refuses to delete what has no successor."""
    kept = {path.name for path in folder.iterdir()} - {path.name for path in staged.iterdir()}
    if kept:
        raise ValueError(f"{folder} must be new, empty or an earlier export, got {min(kept)} in it")
