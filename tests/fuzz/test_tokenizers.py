"""Damaged tokenizers: one that encodes, or one line that says so."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tests.fuzz.cases import count, drawn
from tests.fuzz.loading import damaged_bytes, damaged_objects, loaded_or_refused, strings, to_json
from tests.fuzz.model_folders import sound
from wtdp_jax.data import Rows, Task, encode, load_tokenizer

TASK = Task(name="own", prompt="{a} it was", label_words={"0": " terrible", "1": " great"})
ROWS = Rows(texts={"a": ["good film", "\0 never seen", "", "😀"]}, labels=[0, 1, 0, 1])


@pytest.fixture(autouse=True, scope="module")
def sound_folder() -> None:
    sound("gpt2")


_kinds = st.sampled_from(("BPE", "WordLevel", "WordPiece", "Unigram", "ByteLevel", "Lowercase", "", 1))
_nearly = {
    "type": _kinds,
    "vocab": st.one_of(
        st.dictionaries(strings, st.integers(-2, 2**33), max_size=3), st.just({"great": 1, "terrible": 1})
    ),
    "unk_token": st.one_of(strings, st.none(), st.just("[UNK]")),
    "id": st.sampled_from((-1, 0, 9, 2**31, 2**32, "1")),
    "merges": st.lists(strings, max_size=2),
    "version": strings,
    "tokenizer_class": st.sampled_from(
        ("PreTrainedTokenizerFast", "GPT2Tokenizer", "None", "Nowhere", "../x", 1)
    ),
    "auto_map": st.just({"AutoTokenizer": ["tokenizer.Own", None]}),
    "model_max_length": st.sampled_from((0, -1, 10**30, "x", None)),
    "eos_token": strings,
}


@st.composite
def _files(draw: Any) -> tuple[str, bytes]:
    name = draw(st.sampled_from(("tokenizer.json", "tokenizer.json", "tokenizer_config.json")))
    content = sound("gpt2")[name]
    if draw(st.integers(0, 2)) == 0:
        return name, draw(damaged_bytes(st.just(content)))
    return name, to_json(draw(damaged_objects(st.just(json.loads(content)), some=_nearly)))


@pytest.mark.slow
@drawn("tokenizer files", file=_files())
def test_a_tokenizer_is_loaded_or_refused(file: tuple[str, bytes]) -> None:
    count("tokenizer files")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {**sound("gpt2"), file[0]: file[1]}.items():
            if name not in ("model.safetensors", "config.json"):
                Path(folder, name).write_bytes(content)
        tokenizer = loaded_or_refused(lambda: load_tokenizer(folder), "tokenizer")
    if tokenizer is not None:
        _assert_encodes(tokenizer)


def _assert_encodes(tokenizer: PreTrainedTokenizerBase) -> None:
    names = ("label word", "max_length", "row", "tokenizer")
    encoded = loaded_or_refused(lambda: encode(ROWS, TASK, tokenizer, max_length=16), *names)
    if encoded is not None:
        assert len(encoded) == len(ROWS) and encoded.arrays["ids"].dtype == np.int32
        assert (encoded.arrays["ids"] >= 0).all() and (encoded.label_ids >= 0).all()
