"""Tables of rows, and plain texts, with anything in them: read as what they say, or refused by their line."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example
from hypothesis import strategies as st

from tests import tiny
from tests.fuzz.cases import count, drawn
from tests.fuzz.loading import damaged_bytes, loaded_or_refused
from wtdp_jax.data import Rows, Task, encode, load_split
from wtdp_jax.data.corpus import find_text_files, pack, read_stretches

TASK = Task(name="own", prompt="{a} then {b} it was", label_words={"0": " terrible", "1": " great"})

_fields = st.one_of(
    st.sampled_from(
        ("good", "bad film", "", " ", "a", "0", "1", "2", "\0", '"open', "\ufeff", "\u2028", "\x85")
    ),
    st.text(max_size=6),
    st.just("word " * 2000),
)
_headers = st.one_of(
    st.just(["a", "b", "label"]),
    st.permutations(["a", "b", "label", "more"]),
    st.lists(st.sampled_from(("a", "b", "label", "A", "", "two\rlines", "x" * 5000)), max_size=5),
)


@st.composite
def _tables(draw: Any) -> bytes:
    header = draw(_headers)
    lines = [header]
    for _ in range(draw(st.integers(0, 4))):
        row = [draw(st.sampled_from(("0", "1"))) if name == "label" else draw(_fields) for name in header]
        if draw(st.integers(0, 4)) == 0:
            row = draw(st.lists(_fields, max_size=5))
        lines.append(row)
    end = draw(st.sampled_from(("\n", "\r\n", "\r")))
    start = draw(st.sampled_from(("", "", "\ufeff")))
    last = draw(st.sampled_from((end, "", end * 2)))
    return (start + end.join("\t".join(line) for line in lines) + last).encode(errors="surrogatepass")


@drawn("tables", content=damaged_bytes(_tables()))
@example(content=b"")
@example(content=b"\n")
@example(content=b"a\tb\tlabel\n" + b"x" * 5000 + b"\tb\t" + b"2" * 5000 + b"\n")
@example(content=b"a\tb\tlabel\na\tb\t\x1b[31m\n")
def test_a_table_is_read_or_refused(content: bytes) -> None:
    count("tables")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.tsv")
        path.write_bytes(content)
        rows = loaded_or_refused(lambda: load_split(TASK, "train", folder), str(path))
        if rows is not None:
            _assert_valid(rows, content)
        assert [each.name for each in Path(folder).iterdir()] == ["train.tsv"]


_tokenizer = functools.cache(tiny.tokenizer)


def _assert_valid(rows: Rows, content: bytes) -> None:
    assert len(rows) == content.removesuffix(b"\n").count(b"\n") >= 1
    assert set(rows.labels) <= {0, 1} and set(rows.texts) == {"a", "b"}
    texts = [text for column in rows.texts.values() for text in column]
    assert len(texts) == 2 * len(rows) and not any("\t" in text or "\n" in text for text in texts)
    encoded = loaded_or_refused(lambda: encode(rows, TASK, _tokenizer(), max_length=16), "max_length", "row")
    assert encoded is not None and len(encoded) == len(rows)
    assert encoded.arrays["ids"].shape[1] <= 16
    assert encoded.arrays["positions"].max() < encoded.arrays["ids"].shape[1]


_texts = st.lists(_fields, max_size=5).map(lambda lines: "\n".join(lines).encode(errors="surrogatepass"))


@drawn("texts", contents=st.lists(damaged_bytes(_texts), min_size=1, max_size=2), pattern=st.text(max_size=4))
def test_texts_are_read_or_refused(contents: list[bytes], pattern: str) -> None:
    count("texts")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.txt") for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        names = [str(path) for path in paths]
        stretches = loaded_or_refused(
            lambda: read_stretches(find_text_files([f"{folder}/*.txt"], None)), *names
        )
        if stretches is not None:
            assert stretches and all(stretch.strip() for stretch in stretches)
            ids = loaded_or_refused(lambda: pack(stretches, _tokenizer(), 4), "text must fill one row")
            assert ids is None or ids.shape[1] == 4
        loaded_or_refused(
            lambda: find_text_files([f"{folder}/none-{pattern}"], None), "text must name existing files"
        )


@pytest.mark.parametrize("folder", ["../up", "/etc", "a/../../b", "..", "\0", "\ud800"])
def test_a_tasks_folder_stays_in_the_data_directory(tmp_path: Path, folder: str) -> None:
    message = "folder must be a path inside the data directory, got "
    assert loaded_or_refused(lambda: _load_from(folder, tmp_path), message) is None


def _load_from(folder: str, data_dir: Path) -> Rows:
    return load_split(
        Task(name="own", prompt="{a}", label_words=TASK.label_words, folder=folder), "train", data_dir
    )
