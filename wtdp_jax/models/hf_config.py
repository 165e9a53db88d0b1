"""Hugging Face's config.json, read into a model's configuration and written from one, by `model_type`."""

from typing import Any

from wtdp_jax.models.decoder import DecoderConfig
from wtdp_jax.models.hf_family import Entries, Family
from wtdp_jax.models.hf_gpt2 import GPT2_FAMILY
from wtdp_jax.models.hf_llama import LLAMA_FAMILY

_FAMILIES = (GPT2_FAMILY, LLAMA_FAMILY)


def family_of(config: DecoderConfig) -> Family:
    """Returns the family that a configuration belongs to."""
    return next(family for family in _FAMILIES if type(config) is family.config)


def config_from_json(entries: Entries) -> DecoderConfig:
    """Reads the entries of a config.json.

    Args:
      entries: the decoded file. An entry that does not change the function computed is ignored.

    Returns:
      The configuration, with `tie_embeddings` as the file says.

    Raises:
      ValueError: if an option is missing, malformed or unsupported; the message names it.
    """
    found = entries.get("model_type")
    for family in _FAMILIES:
        if found in family.model_types:
            return family.from_json(entries)
    known = [name for family in _FAMILIES for name in family.model_types]
    raise ValueError(f"model_type must be {', '.join(known[:-1])} or {known[-1]}, got {found!r}")


def config_to_json(config: DecoderConfig, tokenizer: Any = None) -> dict[str, Any]:
    """Returns the entries of a config.json that transformers' `AutoModelForCausalLM` accepts.

    Args:
      config: what to describe.
      tokenizer: names the ids that begin and end a text; they are null without one, because transformers' own
        defaults, such as 50256, need not be in the vocabulary.
    """
    return {
        **family_of(config).to_json(config),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "dtype": "float32",
    }
