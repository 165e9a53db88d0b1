"""GPT-2 in Hugging Face's form: the entries of its config.json, and its tensors' names."""

from typing import Any

from wtdp_jax.models.decoder import INIT_STDDEV
from wtdp_jax.models.gpt2 import GPT2, GPT2Config
from wtdp_jax.models.hf_family import Entries, Family, TensorNames, check_supported, typed

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


def _from_json(entries: Entries) -> GPT2Config:
    """Reads a config.json; it ties the head where it is silent, as in transformers."""
    check_supported(entries, _SUPPORTED)
    sizes = {
        name: typed(entries, name, int)
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    }
    if entries.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise ValueError(f"n_inner must be 4 n_embd = {4 * sizes['n_embd']}, got {entries['n_inner']!r}")
    rates = {typed(entries, name, float, default=0.1) for name in _DROPOUTS}
    if len(rates) > 1:
        raise ValueError(f"{', '.join(_DROPOUTS)} must be equal, got {sorted(rates)}")
    return GPT2Config(
        **sizes,
        tie_embeddings=typed(entries, "tie_word_embeddings", bool, default=True),
        dropout=rates.pop(),
        layer_norm_epsilon=typed(entries, "layer_norm_epsilon", float, default=1e-5),
    )


def _to_json(config: GPT2Config) -> dict[str, Any]:
    """What `_from_json` reads."""
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
        **dict.fromkeys(_DROPOUTS, config.dropout),
    }


GPT2_FAMILY = Family(
    model_types=("gpt2",),
    model=GPT2,
    config=GPT2Config,
    from_json=_from_json,
    to_json=_to_json,
    names=TensorNames(
        prefix="transformer.",
        modules={
            "wte": "wte",
            "wpe": "wpe",
            "h/ln_1": "h.{}.ln_1",
            "h/c_attn": "h.{}.attn.c_attn",
            "h/attn_c_proj": "h.{}.attn.c_proj",
            "h/ln_2": "h.{}.ln_2",
            "h/c_fc": "h.{}.mlp.c_fc",
            "h/mlp_c_proj": "h.{}.mlp.c_proj",
            "ln_f": "ln_f",
            "lm_head": "lm_head",
        },
        outputs_first=False,
        # Causal masks.
        buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    ),
)
