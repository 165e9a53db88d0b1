"""Folders of Llama and Qwen 2: bit-exact round trips, old and new entries, each refusal by its message."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models import small
from tests.models.folders import assert_same, edit_config, edit_tensors
from wtdp_jax.models import from_pretrained, save_pretrained

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def make(**overrides):
    return small.make(small.TINY_LLAMA, **overrides)


@pytest.fixture
def tied(tmp_path):
    """A tied Llama's folder."""
    save_pretrained(tmp_path / "model", *make())
    return tmp_path / "model"


@pytest.fixture
def qwen(tmp_path):
    """A tied Qwen 2's folder."""
    save_pretrained(tmp_path / "model", *make(qkv_bias=True))
    return tmp_path / "model"


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("rope_scaling", [None, small.SCALING])
def test_round_trip_is_exact(tmp_path, tie_embeddings, qkv_bias, rope_scaling):
    model, params = make(
        tie_embeddings=tie_embeddings,
        qkv_bias=qkv_bias,
        rope_scaling=rope_scaling,
        rope_theta=500.0,
        rms_norm_epsilon=1e-4,
        dropout=0.25,
    )
    save_pretrained(tmp_path / "model", model, params)
    loaded, loaded_params = from_pretrained(tmp_path / "model")
    assert loaded == model
    assert_same(loaded_params, params)


def test_model_type_tells_the_biases_apart(tied, tmp_path):
    assert json.loads((tied / "config.json").read_text())["model_type"] == "llama"
    save_pretrained(tmp_path / "qwen", *make(qkv_bias=True))
    assert json.loads((tmp_path / "qwen" / "config.json").read_text())["model_type"] == "qwen2"


def test_names_and_orientation_of_stored_tensors(qwen):
    _, params = make(qkv_bias=True)
    tensors = load_file(qwen / "model.safetensors")
    assert "lm_head.weight" not in tensors and len(tensors) == 2 + 3 * 12
    block = params["h"]
    for name, leaf in {
        "model.embed_tokens.weight": params["wte"]["embedding"],
        "model.norm.weight": params["ln_f"]["scale"],
        "model.layers.1.input_layernorm.weight": block["ln_1"]["scale"][1],
        "model.layers.2.self_attn.k_proj.weight": block["k_proj"]["kernel"][2].T,
        "model.layers.0.self_attn.v_proj.bias": block["v_proj"]["bias"][0],
        "model.layers.2.mlp.down_proj.weight": block["down_proj"]["kernel"][2].T,
    }.items():
        np.testing.assert_array_equal(tensors[name], leaf, err_msg=name)


def test_names_without_prefix_and_old_frequencies(tied):
    def as_in_2023(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    edit_tensors(tied, as_in_2023)
    assert_same(from_pretrained(tied)[1], make()[1])


def test_untying_copies_the_embedding(tied):
    model, params = from_pretrained(tied, tie_embeddings=False)
    assert not model.config.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"]["kernel"], params["wte"]["embedding"].T)


def test_tying_a_different_head_is_refused(tmp_path):
    save_pretrained(tmp_path / "model", *make(tie_embeddings=False))
    with pytest.raises(ValueError, match="got True where lm_head.weight differs from embed_tokens.weight"):
        from_pretrained(tmp_path / "model", tie_embeddings=True)


def test_absent_entries_mean_what_transformers_means(tmp_path):
    save_pretrained(tmp_path / "model", *make(n_kv_head=4, tie_embeddings=False))
    absent = ("num_key_value_heads", "rope_parameters", "rms_norm_eps", "hidden_act", "attention_dropout")
    edit_config(tmp_path / "model", tie_word_embeddings=None, **dict.fromkeys(absent))
    config = from_pretrained(tmp_path / "model")[0].config
    assert (config.n_kv_head, config.rope_theta, config.rms_norm_epsilon) == (4, 1e4, 1e-6)
    assert (config.tie_embeddings, config.dropout, config.rope_scaling) == (False, 0.0, None)


@pytest.mark.parametrize(
    ("entries", "theta", "original"),
    [
        ({"rope_theta": 500}, 500.0, None),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "default"}}, 500.0, None),
        ({"rope_scaling": {**LLAMA3, "rope_type": "llama3", "original_max_position_embeddings": 4}}, 1e4, 4),
        ({"rope_theta": 500.0, "rope_scaling": {**LLAMA3, "type": "llama3"}}, 500.0, 8),
        ({"rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 9.0}}, 9.0, 8),
        ({"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, 9.0, None),
    ],
)
def test_old_and_new_rotary_entries(tied, entries, theta, original):
    edit_config(tied, **{"rope_parameters": None, **entries})
    config = from_pretrained(tied)[0].config
    assert config.rope_theta == theta and type(config.rope_theta) is float
    found = config.rope_scaling and config.rope_scaling.original_n_positions
    assert found == original


@pytest.mark.parametrize("head_dim", [None, 4])
def test_the_usual_head_dim_may_be_said(tied, head_dim):
    edit_config(tied, head_dim=head_dim, layer_types=["full_attention"] * 3)
    from_pretrained(tied)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("model_type", "mistral", "model_type must be gpt2, llama or qwen2, got 'mistral'"),
        ("hidden_act", "gelu", "hidden_act must be 'silu' or 'swish', got 'gelu'"),
        ("attention_bias", True, "attention_bias must be False, got True"),
        ("mlp_bias", True, "mlp_bias must be False, got True"),
        ("sliding_window", 4096, "sliding_window must be None, got 4096"),
        ("quantization_config", {"bits": 4}, "quantization_config must be None, got {'bits': 4}"),
        ("head_dim", 8, "head_dim must be None or 4, got 8"),
        (
            "layer_types",
            ["sliding_attention"] * 3,
            r"layer_types must be None or 3 times 'full_attention', got \['sliding",
        ),
        ("num_hidden_layers", None, "num_hidden_layers in config.json must be int, got nothing"),
        ("num_key_value_heads", 3, "n_head must be a multiple of n_kv_head, got 4 and 3"),
        ("num_key_value_heads", 1, r"self_attn.k_proj.weight must have shape \(4, 16\), got \(8, 16\)"),
        ("attention_dropout", "no", "attention_dropout in config.json must be float, got 'no'"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor must be 1.0 or None, got 0.5"),
        ("original_max_position_embeddings", 4, "original_max_position_embeddings must be None, got 4"),
        ("rope_theta", "big", "rope_theta in config.json must be float, got 'big'"),
        ("rope_scaling", "llama3", "rope_scaling in config.json must be an object, got 'llama3'"),
        (
            "rope_scaling",
            {"type": "linear", "factor": 2.0},
            "rope_type must be default or llama3, got 'linear'",
        ),
        ("rope_scaling", {"rope_type": "yarn"}, "rope_type must be default or llama3, got 'yarn'"),
        ("rope_scaling", {"rope_type": "llama3"}, "factor in rope_scaling must be float, got nothing"),
        ("rope_scaling", {**LLAMA3, "type": "llama3", "factor": 0.5}, "factor must be at least 1"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0 or None"),
        (
            "rope_parameters",
            {"full_attention": {"rope_type": "llama3"}},
            "rope_parameters must have no entries but rope_type, .*, got 'full_attention'",
        ),
    ],
)
def test_unsupported_options_are_named(tied, entry, value, message):
    if entry in ("rope_theta", "partial_rotary_factor"):
        edit_config(tied, rope_parameters=None)
    edit_config(tied, **{entry: value})
    with pytest.raises(ValueError, match=message) as error:
        from_pretrained(tied)
    assert "\n" not in str(error.value)


def test_a_window_of_qwen_2_is_refused_where_it_is_used(qwen):
    edit_config(qwen, sliding_window=4096, use_sliding_window=False)
    from_pretrained(qwen)
    edit_config(qwen, use_sliding_window=True)
    with pytest.raises(ValueError, match="use_sliding_window must be False, got True"):
        from_pretrained(qwen)


def test_biases_come_with_the_model_type(tied, tmp_path):
    edit_config(tied, model_type="qwen2")
    with pytest.raises(ValueError, match="tensor missing: layers.0.self_attn.k_proj.bias and 8 more"):
        from_pretrained(tied)
    save_pretrained(tmp_path / "qwen", *make(qkv_bias=True))
    edit_config(tmp_path / "qwen", model_type="llama")
    with pytest.raises(ValueError, match="tensor surplus: layers.0.self_attn.k_proj.bias and 8 more"):
        from_pretrained(tmp_path / "qwen")
