"""Models from and to Hugging Face's form: a folder of config.json, model.safetensors and tokenizer files."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from wtdp_jax.models.decoder import Decoder
from wtdp_jax.models.hf_config import config_from_json, config_to_json, family_of
from wtdp_jax.models.hf_files import CONFIG, WEIGHTS_INDEX, read_json, read_tensors, write_folder
from wtdp_jax.models.hf_tensors import Params, params_from_tensors, settle_head, tensors_from_params


def from_pretrained(
    folder_or_hub_name: str | os.PathLike[str], tie_embeddings: bool | None = None
) -> tuple[Decoder, Params]:
    """Loads a GPT-2, Llama or Qwen 2 strictly: whatever it would not compute exactly is refused by name.

    Args:
      folder_or_hub_name: a local folder, or a name on the Hugging Face hub such as `distilgpt2` or
        `HuggingFaceTB/SmolLM2-135M`.
      tie_embeddings: None ties as config.json says. False unties a tied model: the head starts as a copy of
        the embedding. True ties an untied model, if its head still equals the embedding.

    Returns:
      The model and its parameters in float32, converted from float64, float16 or bfloat16 if need be.

    Raises:
      ValueError: if there is no such model; an option is unsupported; a tensor is missing, surplus, misshapen
        or not finite; or the head cannot be tied.
    """
    folder = _locate(folder_or_hub_name)
    stored = config_from_json(read_json(folder / CONFIG))
    family = family_of(stored)
    tied = stored.tie_embeddings if tie_embeddings is None else tie_embeddings
    config = dataclasses.replace(stored, tie_embeddings=tied)
    tensors = settle_head(
        read_tensors(folder, family.names),
        embedding=family.names.embedding,
        stored_tied=stored.tie_embeddings,
        tied=tied,
    )
    return family.model(config), params_from_tensors(tensors, config)


def save_pretrained(
    folder: str | os.PathLike[str], model: Decoder, params: Params, tokenizer: Any = None
) -> None:
    """Writes a folder that `from_pretrained` and transformers' `AutoModelForCausalLM` load.

    The folder appears whole or not at all. Weights are stored in float32; a tied head is not stored.

    Args:
      folder: new, empty, or an earlier export to be replaced.
      model: the model whose configuration is stored; `remat` and `dtype` are not part of it.
      params: its parameters.
      tokenizer: a transformers tokenizer whose files go into the folder too.

    Raises:
      ValueError: if the parameters are not the model's or not finite, or `folder` holds other files.
    """
    prefix = family_of(model.config).names.prefix
    tensors = {
        name if name.startswith("lm_head.") else f"{prefix}{name}": tensor
        for name, tensor in tensors_from_params(params, model.config).items()
    }
    write_folder(Path(folder), config_to_json(model.config, tokenizer), tensors, tokenizer)


def _locate(folder_or_hub_name: str | os.PathLike[str]) -> Path:
    """The local folder, downloaded from the hub unless it is one already."""
    folder = Path(folder_or_hub_name)
    if folder.is_dir():
        return folder
    # Imported here: a model from a folder, or made from a config, needs no network client.
    from huggingface_hub import snapshot_download

    try:
        patterns = [CONFIG, "model*.safetensors", WEIGHTS_INDEX]
        return Path(snapshot_download(str(folder_or_hub_name), allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"model must be a folder or a reachable hub name, got {str(folder_or_hub_name)!r}: {reason}"
        ) from error
