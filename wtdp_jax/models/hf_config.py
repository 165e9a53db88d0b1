"""Hugging Face's config.json, read into a `GPT2Config` and written from one."""

from collections.abc import Mapping
from typing import Any

from wtdp_jax.models.gpt2 import INIT_STDDEV, GPT2Config

_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_fast")
"""Hugging Face's names for gelu's tanh approximation, differing only in how it is computed."""

_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_function": _TANH_GELUS,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}
"""Options that change the function computed, with the values this GPT-2 computes; absent means the first."""


def config_from_json(entries: Mapping[str, Any]) -> GPT2Config:
    """Reads the entries of a config.json.

    Args:
      entries: the decoded file. An entry that does not change the function computed is ignored.

    Returns:
      The configuration, with `tie_embeddings` as the file says (true where it is silent, as in transformers).

    Raises:
      ValueError: if an option is missing, malformed or unsupported; the message names it.
    """
    if entries.get("model_type") != "gpt2":
        raise ValueError(f"model_type must be gpt2, got {entries.get('model_type')!r}")
    for name, supported in _SUPPORTED.items():
        if entries.get(name, supported[0]) not in supported:
            allowed = " or ".join(repr(value) for value in supported)
            raise ValueError(f"{name} must be {allowed}, got {entries[name]!r}")
    sizes = {
        name: _typed(entries, name, int)
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    }
    if entries.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise ValueError(f"n_inner must be 4 n_embd = {4 * sizes['n_embd']}, got {entries['n_inner']!r}")
    rates = {_typed(entries, name, float, default=0.1) for name in _DROPOUTS}
    if len(rates) > 1:
        raise ValueError(f"{', '.join(_DROPOUTS)} must be equal, got {sorted(rates)}")
    return GPT2Config(
        **sizes,
        tie_embeddings=_typed(entries, "tie_word_embeddings", bool, default=True),
        dropout=rates.pop(),
        layer_norm_epsilon=_typed(entries, "layer_norm_epsilon", float, default=1e-5),
    )


def config_to_json(config: GPT2Config, tokenizer: Any = None) -> dict[str, Any]:
    """Returns the entries of a config.json that transformers' `AutoModelForCausalLM` accepts.

    Args:
      config: what to describe.
      tokenizer: names the ids that begin and end a text; they are null without one, because transformers' own
        default, 50256, need not be in the vocabulary.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.n_positions,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "initializer_range": INIT_STDDEV,
        "tie_word_embeddings": config.tie_embeddings,
        **dict.fromkeys(_DROPOUTS, config.dropout),
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "dtype": "float32",
    }


def _typed(entries: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The named entry, which must be of one kind; without a default it must be there."""
    value = entries.get(name, default)
    # A bool is an int to Python, and JSON writes the float 1.0 as 1.
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        found = repr(value) if name in entries else "nothing"
        raise ValueError(f"{name} in config.json must be {kind.__name__}, got {found}")
    return value
