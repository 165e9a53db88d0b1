"""Model folders whose files say anything: a model that can be used, or one line that names file or field."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.fuzz.cases import count, drawn
from tests.fuzz.loading import damaged_bytes, damaged_objects, loaded_or_refused, strings, to_json, values
from tests.fuzz.model_folders import KINDS, Kind, assert_usable, entries, load_with, sound


@pytest.fixture(autouse=True, scope="module")
def sound_folders() -> None:
    for kind in KINDS:
        sound(kind)


_sizes = st.sampled_from(
    (0, -1, 1, 2, 3, 8, 10, 12, 10**5, 10**9, 2**31 - 1, 2**31, 2**40, 2**63, 10**25, "8", 8.0, True, None)
)
_rates = st.sampled_from((0, 0.1, -0.1, 1, 1.0, 1e-5, 1e400, float("nan"), 10**400, "0", None))
_NEARLY = {
    **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"), _sizes),
    **dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), _sizes
    ),
    **dict.fromkeys(("intermediate_size", "max_position_embeddings", "head_dim"), _sizes),
    **dict.fromkeys(
        ("resid_pdrop", "attn_pdrop", "layer_norm_epsilon", "rms_norm_eps", "attention_dropout"), _rates
    ),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "partial_rotary_factor"), _rates),
    "model_type": st.sampled_from(("gpt2", "llama", "qwen2", "gpt_neo", "", None, [], {}, 1)),
    "rope_type": st.sampled_from(("default", "llama3", "yarn", None)),
    "rope_scaling": st.sampled_from(
        ({"type": "linear"}, {"rope_type": "llama3"}, {"two\nlines": 1}, [], "x")
    ),
    "tie_word_embeddings": st.sampled_from((True, False, None, 0, 1, "true")),
    "layer_types": st.sampled_from((["full_attention"] * 2, ["full_attention"], ["sliding"] * 2, 2)),
}


@st.composite
def _config_files(draw: Any) -> tuple[Kind, bytes]:
    kind = draw(st.sampled_from(KINDS))
    return kind, draw(damaged_bytes(damaged_objects(st.just(entries(kind)), some=_NEARLY).map(to_json)))


@pytest.mark.slow
@drawn("model configurations", case=_config_files())
def test_a_configuration_is_read_or_refused(case: tuple[Kind, bytes]) -> None:
    count("model configurations")
    kind, content = case
    # Where the configuration is sound the tensors may not fit it.
    names = ("config.json", "tensor", "lm_head.weight", *entries(kind), *_NEARLY, *_FIELDS)
    loaded = loaded_or_refused(lambda: load_with({"config.json": content}, kind), *names)
    if loaded is not None:
        assert_usable(loaded)


# What the package calls a setting that has another name in the file, and what it reads besides.
_FIELDS = (
    "n_kv_head",
    "dropout",
    "rope_parameters",
    "quantization_config",
    "activation_function",
    "hidden_act",
)

_dtypes = st.sampled_from(("F32", "F64", "F16", "BF16", "I32", "BOOL", "F8_E4M3", "f32", "", 1, None))
_shapes = st.one_of(
    st.lists(st.sampled_from((0, 1, 2, 8, 10, 24, 2**40, 2**63, -1, "8")), max_size=4), values
)
_offsets = st.one_of(st.lists(st.sampled_from((0, 4, 32, 320, 2**20, 2**63, -1, 1.5)), max_size=3), values)
_tensors = {"dtype": _dtypes, "shape": _shapes, "data_offsets": _offsets, "__metadata__": values}


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its data."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@st.composite
def _safetensors_files(draw: Any) -> bytes:
    content = sound("gpt2")["model.safetensors"]
    header, data = _split(content)
    what = draw(st.sampled_from(("bytes", "start", "header", "header", "data", "length", "deep", "renamed")))
    if what == "bytes":
        return draw(damaged_bytes(st.just(content)))
    if what == "start":  # where a random place seldom is
        return draw(damaged_bytes(st.just(content[:1000]))) + content[1000:]
    if what == "header":
        return _joined(to_json(draw(damaged_objects(st.just(header), some=_tensors))), data)
    if what == "deep":
        return _joined(draw(st.sampled_from((b"[", b'{"a":'))) * 10_000, data)
    if what == "renamed":
        old, new = draw(st.sampled_from(sorted(header))), draw(strings)
        return _joined(to_json({new if name == old else name: entry for name, entry in header.items()}), data)
    if what == "length":
        length = draw(st.sampled_from((0, 1, 7, 2**20, 10**8, 2**32, 2**63, 2**64 - 1)))
        return length.to_bytes(8, "little") + content[8:]
    numbers = np.frombuffer(data, np.float32).copy()
    where = draw(st.integers(0, len(numbers) - 1))
    numbers[where] = draw(st.sampled_from((np.nan, np.inf, -np.inf)))
    return _joined(to_json(header), numbers.tobytes())


@pytest.mark.slow
@drawn("safetensors files", content=_safetensors_files())
def test_weights_are_read_or_refused(content: bytes) -> None:
    count("safetensors files")
    loaded = loaded_or_refused(
        lambda: load_with({"model.safetensors": content}), "model.safetensors", "tensor"
    )
    if loaded is not None:
        assert_usable(loaded)


def _not_finite(header: dict[str, Any], data: bytes) -> set[str]:
    """Names of tensors that hold a number that is not finite."""
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {
        name
        for name, (start, end) in spans.items()
        if not np.isfinite(np.frombuffer(data[start:end], np.float32)).all()
    }


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_its_tensors_name(value: float) -> None:
    header, data = _split(sound("gpt2")["model.safetensors"])
    for where in range(0, len(data) // 4, 97):
        numbers = np.frombuffer(data, np.float32).copy()
        numbers[where] = value
        (name,) = _not_finite(header, numbers.tobytes())
        message = f"tensor {name.removeprefix('transformer.')} must be finite, got NaN or infinity"
        damaged = {"model.safetensors": _joined(to_json(header), numbers.tobytes())}
        assert loaded_or_refused(lambda damaged=damaged: load_with(damaged), message) is None


_shard_names = st.one_of(
    st.sampled_from(
        ("a.safetensors", "b.safetensors", "../a.safetensors", "/etc/a.safetensors", "none.safetensors")
    ),
    st.sampled_from(("a.safetensors\n", ".safetensors", "a.bin", "..", "", "é.safetensors", "A.SAFETENSORS")),
    values,
)


@st.composite
def _indices(draw: Any) -> bytes:
    names = [name for name in _split(sound("gpt2")["model.safetensors"])[0] if name != "__metadata__"]
    weight_map: Any = {name: "ab"[number % 2] + ".safetensors" for number, name in enumerate(sorted(names))}
    for _ in range(draw(st.integers(0, 2))):
        weight_map[draw(st.one_of(st.sampled_from(names), strings))] = draw(_shard_names)
    index = draw(st.sampled_from(({"weight_map": weight_map}, {"weight_map": weight_map}, weight_map)))
    if draw(st.booleans()):
        index = draw(damaged_objects(st.just(index)))
    return draw(damaged_bytes(st.just(to_json(index))))


@pytest.mark.slow
@drawn("indices of shards", content=_indices())
def test_an_index_is_read_or_refused(content: bytes) -> None:
    count("indices of shards")
    header, data = _split(sound("gpt2")["model.safetensors"])
    names = ("model.safetensors.index.json", "tensor", "weight_map", "shard")
    loaded = loaded_or_refused(lambda: _load_shards(header, data, content), *names)
    if loaded is not None:
        assert_usable(loaded)


def _load_shards(header: dict[str, Any], data: bytes, index: bytes) -> Any:
    """Loads the weights from two shards, by an index; a sound model beside the folder must not be reached."""
    from safetensors.numpy import save

    from wtdp_jax.models import from_pretrained

    spans = sorted((name, entry) for name, entry in header.items() if name != "__metadata__")
    tensors = {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in spans
    }
    parts = [{name: tensors[name] for name in sorted(tensors)[which::2]} for which in (0, 1)]
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer, "model")
        folder.mkdir()
        (folder / "config.json").write_bytes(sound("gpt2")["config.json"])
        (folder / "model.safetensors.index.json").write_bytes(index)
        for name, part in zip("ab", parts, strict=True):
            (folder / f"{name}.safetensors").write_bytes(save(part))
        Path(outer, "a.safetensors").write_bytes(save(tensors))
        return from_pretrained(folder)
