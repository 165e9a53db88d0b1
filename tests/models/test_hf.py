"""The Hugging Face folder: bit-exact round trips, and every refusal by its message."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.models.folders import assert_same, edit_config, edit_tensors
from wtdp_jax.models import GPT2, GPT2Config, from_pretrained, save_pretrained

TINY = GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=3, n_head=2, layer_norm_epsilon=1e-6)
IDS = np.zeros((1, 1), np.int32)


def make(**overrides):
    model = GPT2(dataclasses.replace(TINY, **overrides))
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)["params"]
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


@pytest.fixture
def tied(tmp_path):
    """A tied model's folder."""
    save_pretrained(tmp_path / "model", *make())
    return tmp_path / "model"


@pytest.fixture
def untied(tmp_path):
    """An untied model's folder, its head unlike the embedding."""
    save_pretrained(tmp_path / "model", *make(tie_embeddings=False))
    return tmp_path / "model"


def shard(folder, names=("a.safetensors", "b.safetensors")):
    """Splits the weights in two files and an index, as transformers does with large models."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: names[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_round_trip_is_exact(tmp_path, tie_embeddings):
    model, params = make(tie_embeddings=tie_embeddings, dropout=0.25)
    save_pretrained(tmp_path / "model", model, params)
    loaded, loaded_params = from_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    assert_same(loaded_params, params)


def test_orientation_and_order_of_stored_tensors(untied):
    _, params = make(tie_embeddings=False)
    tensors = load_file(untied / "model.safetensors")
    np.testing.assert_array_equal(tensors["lm_head.weight"], params["lm_head"]["kernel"].T)
    stored = tensors["transformer.h.2.mlp.c_proj.weight"]
    np.testing.assert_array_equal(stored, params["h"]["mlp_c_proj"]["kernel"][2])


def test_a_tied_head_is_not_stored(tied):
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert json.loads((tied / "config.json").read_text())["tie_word_embeddings"] is True


def test_weights_are_marked_as_transformers_4_demands(tied):
    with safe_open(tied / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_names_without_prefix_and_old_masks(tied):
    def as_in_2019(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = np.ones((1, 1, 8, 8), np.uint8)
            tensors[f"h.{layer}.attn.masked_bias"] = np.float32(-1e4)

    edit_tensors(tied, as_in_2019)
    assert_same(from_pretrained(tied)[1], make()[1])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_other_float_types_become_float32(tied, dtype):
    edit_tensors(tied, lambda t: t.update({k: v.astype(dtype) for k, v in t.items()}))
    expected = jax.tree.map(lambda p: p.astype(dtype).astype(np.float32), make()[1])
    assert_same(from_pretrained(tied)[1], expected)


def test_parameters_of_another_float_type_are_stored_in_float32(tmp_path):
    model, params = make()
    save_pretrained(tmp_path / "model", model, jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params))
    expected = jax.tree.map(lambda p: p.astype(ml_dtypes.bfloat16).astype(np.float32), params)
    assert_same(from_pretrained(tmp_path / "model")[1], expected)


def test_shards(tied):
    shard(tied)
    assert_same(from_pretrained(tied)[1], make()[1])


def test_absent_entries_mean_what_transformers_means(tied):
    pdrops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"))
    edit_config(tied, tie_word_embeddings=None, activation_function=None, layer_norm_epsilon=None, **pdrops)
    config = from_pretrained(tied)[0].config
    assert config == dataclasses.replace(TINY, layer_norm_epsilon=1e-5, dropout=0.1)


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "gelu_python_tanh"])
def test_other_names_of_the_same_gelu(tied, name):
    edit_config(tied, activation_function=name)
    from_pretrained(tied)


# The tie


def test_untying_copies_the_embedding(tied):
    model, params = from_pretrained(tied, tie_embeddings=False)
    assert not model.config.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"]["kernel"], params["wte"]["embedding"].T)


def test_tying_an_equal_head_drops_it(tmp_path):
    model, params = make(tie_embeddings=False)
    params["lm_head"]["kernel"] = params["wte"]["embedding"].T
    save_pretrained(tmp_path / "model", model, params)
    tied_model, tied_params = from_pretrained(tmp_path / "model", tie_embeddings=True)
    assert tied_model.config.tie_embeddings
    del params["lm_head"]
    assert_same(tied_params, params)


def test_tying_a_different_head_is_refused(untied):
    message = "tie_embeddings must be False, got True where lm_head.weight differs from wte.weight"
    with pytest.raises(ValueError, match=message):
        from_pretrained(untied, tie_embeddings=True)


@pytest.mark.parametrize("tie_embeddings", [None, True, False])
def test_a_tied_folder_may_store_its_head_only_if_equal(tied, tie_embeddings):
    edit_tensors(tied, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].copy()}))
    from_pretrained(tied, tie_embeddings)
    edit_tensors(tied, lambda t: t["lm_head.weight"].__setitem__((0, 0), 7.0))
    with pytest.raises(ValueError, match="tie_word_embeddings in config.json must be False, got True where"):
        from_pretrained(tied, tie_embeddings)


@pytest.mark.parametrize("tie_embeddings", [None, True])
def test_an_untied_folder_must_store_its_head(untied, tie_embeddings):
    edit_tensors(untied, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="tensor missing: lm_head.weight"):
        from_pretrained(untied, tie_embeddings)


# Refusals on import


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("model_type", "gpt_neo", "model_type must be gpt2, llama or qwen2, got 'gpt_neo'"),
        ("model_type", None, "model_type must be gpt2, llama or qwen2, got None"),
        ("activation_function", "gelu", "activation_function must be 'gelu_new' or .*, got 'gelu'"),
        ("scale_attn_weights", False, "scale_attn_weights must be True, got False"),
        ("scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx must be False, got True"),
        ("reorder_and_upcast_attn", True, "reorder_and_upcast_attn must be False, got True"),
        ("add_cross_attention", True, "add_cross_attention must be False, got True"),
        ("is_encoder_decoder", True, "is_encoder_decoder must be False, got True"),
        ("quantization_config", {"bits": 4}, "quantization_config must be None, got {'bits': 4}"),
        ("pruned_heads", {"0": [1]}, "pruned_heads must be None or {}, got {'0': "),
        ("n_inner", 24, "n_inner must be 4 n_embd = 48, got 24"),
        ("n_layer", None, "n_layer in config.json must be int, got nothing"),
        ("n_layer", "3", "n_layer in config.json must be int, got '3'"),
        ("n_layer", True, "n_layer in config.json must be int, got True"),
        ("n_layer", 0, "n_layer must be at least 1, got 0"),
        ("n_head", 5, "n_embd must be a multiple of n_head, got 12 and 5"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings in config.json must be bool, got 'yes'"),
        ("attn_pdrop", 0.5, r"resid_pdrop, embd_pdrop, attn_pdrop must be equal, got \[0.0, 0.5\]"),
    ],
)
def test_unsupported_options_are_named(tied, entry, value, message):
    edit_config(tied, **{entry: value})
    with pytest.raises(ValueError, match=message):
        from_pretrained(tied)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("transformer.h.1.ln_1.weight"), "tensor missing: h.1.ln_1.weight$"),
        (lambda t: t.pop("transformer.wte.weight"), "tensor missing: wte.weight"),
        (lambda t: t.update({"score.weight": np.zeros(2)}), "tensor surplus: score.weight$"),
        (
            lambda t: t.update({f"transformer.h.3.ln_{i}.bias": np.zeros(12) for i in (1, 2)}),
            "tensor surplus: h.3.ln_1.bias and 1 more$",
        ),
        (
            lambda t: t.update({"transformer.wpe.weight": np.zeros((9, 12))}),
            r"tensor wpe.weight must have shape \(8, 12\), got \(9, 12\)",
        ),
        (
            lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": np.zeros((48, 12))}),
            r"tensor h.0.mlp.c_fc.weight must have shape \(12, 48\), got \(48, 12\)",
        ),
        (
            lambda t: t["transformer.h.2.ln_1.bias"].__setitem__(3, np.nan),
            "tensor h.2.ln_1.bias must be finite, got NaN or infinity",
        ),
        (
            lambda t: t.update({"transformer.ln_f.bias": np.full(12, 1e300)}),
            "tensor ln_f.bias must be finite, got NaN or infinity",
        ),
        (
            lambda t: t.update({"transformer.ln_f.bias": np.zeros(12, np.int32)}),
            "tensor transformer.ln_f.bias must be one of F64, F32, F16, BF16, got I32",
        ),
        (
            lambda t: t.update({"ln_f.bias": np.zeros(12)}),
            "tensor ln_f.bias must be there once, got it with and without a prefix",
        ),
    ],
)
def test_tensors_must_fit(tied, edit, message):
    edit_tensors(tied, edit)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tied)


@pytest.mark.parametrize(
    "target", ["../a.safetensors", "/etc/a.safetensors", "x/a.safetensors", "a.bin", "..", 3]
)
def test_shards_stay_in_the_folder(tied, target):
    shard(tied)
    index = tied / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"]["transformer.wte.weight"] = target
    index.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="shard must be a .safetensors file in the model folder, got "):
        from_pretrained(tied)


def test_shards_must_be_there(tied):
    shard(tied)
    (tied / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="every shard of its index, got .* without b.safetensors"):
        from_pretrained(tied)


def test_a_tensor_in_two_shards_is_refused(tied):
    shard(tied)
    both = load_file(tied / "a.safetensors") | load_file(tied / "b.safetensors")
    save_file(both, tied / "a.safetensors")
    with pytest.raises(ValueError, match="must be in one shard, got it again in b.safetensors"):
        from_pretrained(tied)


@pytest.mark.parametrize("weight_map", [None, {}, ["a.safetensors"]])
def test_a_malformed_index_is_refused(tied, weight_map):
    shard(tied)
    (tied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="weight_map in .* must be an object of file names by tensor"):
        from_pretrained(tied)


def test_missing_and_malformed_files(tied):
    (tied / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="model.safetensors must be a safetensors file: "):
        from_pretrained(tied)
    (tied / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="must hold model.safetensors or model.safetensors.index.json"):
        from_pretrained(tied)
    for content, message in [("{", "must be JSON: "), ("[]", "must hold a JSON object, got list")]:
        (tied / "config.json").write_text(content)
        with pytest.raises(ValueError, match=f"config.json {message}"):
            from_pretrained(tied)
    (tied / "config.json").unlink()
    with pytest.raises(ValueError, match="model folder must hold config.json, got .* without it"):
        from_pretrained(tied)


@pytest.mark.parametrize("name", ["no/such/model", "gpt2"])
def test_neither_folder_nor_reachable(monkeypatch, name):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to the hub\nand a second line")

    if name == "gpt2":
        monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ValueError, match=f"a folder or a reachable hub name, got '{name}': ") as error:
        from_pretrained(name)
    assert "\n" not in str(error.value)


def test_a_hub_name_is_downloaded(monkeypatch, tied):
    def download(name, allow_patterns):
        assert name == "someone/model"
        assert "config.json" in allow_patterns
        return str(tied)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert_same(from_pretrained("someone/model")[1], make()[1])


# Export


def test_export_replaces_an_earlier_export(tied):
    model, params = make(n_layer=1)
    save_pretrained(tied, model, params)
    assert_same(from_pretrained(tied)[1], params)
    assert [path.name for path in tied.parent.iterdir()] == ["model"]


def test_export_deletes_nothing_else(tied):
    (tied / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="must be new, empty or an earlier export, got notes.txt in it"):
        save_pretrained(tied, *make(n_layer=1))
    assert (tied / "notes.txt").read_text() == "mine"
    assert from_pretrained(tied)[0].config.n_layer == 3


def test_export_onto_a_file_is_refused(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ValueError, match="export must go to a folder, got the file "):
        save_pretrained(tmp_path / "model", *make())


def test_a_failed_export_leaves_nothing(tmp_path):
    class BadTokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_pretrained(tmp_path / "model", *make(), tokenizer=BadTokenizer())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.pop("ln_f"), "tensor missing: ln_f/bias and 1 more"),
        (lambda p: p.update(lm_head={"kernel": np.zeros((12, 11))}), "tensor surplus: lm_head/kernel"),
        (
            lambda p: p["ln_f"].update(bias=np.zeros(3)),
            r"tensor ln_f/bias must have shape \(12,\), got \(3,\)",
        ),
        (lambda p: p["ln_f"].update(bias=np.full(12, np.inf)), "tensor ln_f/bias must be finite"),
    ],
)
def test_export_checks_the_parameters(tmp_path, edit, message):
    model, params = make()
    edit(params)
    with pytest.raises(ValueError, match=message):
        save_pretrained(tmp_path / "model", model, params)
    assert not list(tmp_path.iterdir())


def test_tokenizer_files_and_ids_are_stored(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"<eos>": 0, "good": 1, "bad": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    save_pretrained(tmp_path / "model", *make(), tokenizer=tokenizer)
    entries = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (entries["eos_token_id"], entries["bos_token_id"]) == (0, None)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded("bad good")["input_ids"] == [2, 1]
    from_pretrained(tmp_path / "model")
