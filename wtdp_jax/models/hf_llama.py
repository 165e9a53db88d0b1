"""Llama and Qwen 2 in Hugging Face's form: the entries of their config.json, and their tensors' names."""

from collections.abc import Mapping
from typing import Any

from wtdp_jax.models.decoder import INIT_STDDEV
from wtdp_jax.models.hf_family import Entries, Family, TensorNames, check_supported, typed
from wtdp_jax.models.hf_rope import rope_from_json, rope_to_json
from wtdp_jax.models.llama import Llama, LlamaConfig

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}
"""Options that change the function computed, with the values this Llama computes; absent means the first."""

_SUPPORTED_OF_TYPE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    # Biases that a Llama may have. Qwen 2 has no such options.
    "llama": {"attention_bias": (False,), "mlp_bias": (False,), "sliding_window": (None,)},
    # Qwen 2 names a window even where it does not use it.
    "qwen2": {"use_sliding_window": (False,)},
}

_SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}


def _from_json(entries: Entries) -> LlamaConfig:
    """Reads a config.json; its head is free where it is silent, as in transformers."""
    check_supported(entries, _SUPPORTED | dict(_SUPPORTED_OF_TYPE[entries["model_type"]]))
    sizes = {field: typed(entries, name, int) for field, name in _SIZES.items()}
    # An absent or null number of heads is that of the queries; the tensors' shapes would show another.
    kv_heads = entries.get("num_key_value_heads")
    theta, scaling = rope_from_json(entries)
    config = LlamaConfig(
        **sizes,
        n_kv_head=sizes["n_head"] if kv_heads is None else typed(entries, "num_key_value_heads", int),
        qkv_bias=entries["model_type"] == "qwen2",
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_epsilon=typed(entries, "rms_norm_eps", float, default=1e-6),
        tie_embeddings=typed(entries, "tie_word_embeddings", bool, default=False),
        dropout=typed(entries, "attention_dropout", float, default=0.0),
    )
    check_supported(entries, {"head_dim": (None, config.head_size)})
    _check_layer_types(entries, config.n_layer)
    return config


def _check_layer_types(entries: Entries, n_layer: int) -> None:
    """Demands full attention in every layer, where the file names each layer's kind."""
    found = entries.get("layer_types")
    if found is None:
        return
    if not isinstance(found, list) or len(found) != n_layer or set(map(str, found)) != {"full_attention"}:
        raise ValueError(f"layer_types must be None or {n_layer} times 'full_attention', got {found!r}")


def _to_json(config: LlamaConfig) -> dict[str, Any]:
    """What `_from_json` reads."""
    return {
        "architectures": ["Qwen2ForCausalLM" if config.qkv_bias else "LlamaForCausalLM"],
        "model_type": "qwen2" if config.qkv_bias else "llama",
        **{name: getattr(config, field) for field, name in _SIZES.items()},
        "num_key_value_heads": config.n_kv_head,
        "hidden_act": "silu",
        "rope_parameters": rope_to_json(config),
        "rms_norm_eps": config.rms_norm_epsilon,
        "initializer_range": INIT_STDDEV,
        "attention_dropout": config.dropout,
    }


LLAMA_FAMILY = Family(
    model_types=("llama", "qwen2"),
    model=Llama,
    config=LlamaConfig,
    from_json=_from_json,
    to_json=_to_json,
    names=TensorNames(
        prefix="model.",
        modules={
            "wte": "embed_tokens",
            "h/ln_1": "layers.{}.input_layernorm",
            "h/q_proj": "layers.{}.self_attn.q_proj",
            "h/k_proj": "layers.{}.self_attn.k_proj",
            "h/v_proj": "layers.{}.self_attn.v_proj",
            "h/o_proj": "layers.{}.self_attn.o_proj",
            "h/ln_2": "layers.{}.post_attention_layernorm",
            "h/gate_proj": "layers.{}.mlp.gate_proj",
            "h/up_proj": "layers.{}.mlp.up_proj",
            "h/down_proj": "layers.{}.mlp.down_proj",
            "ln_f": "norm",
            "lm_head": "lm_head",
        },
        outputs_first=True,
        # Rotary frequencies.
        buffers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
)
