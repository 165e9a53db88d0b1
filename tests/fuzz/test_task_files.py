"""Task files with anything in them: a task that can be used, or one line that names the file."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests import tiny
from tests.fuzz.cases import count, drawn
from tests.fuzz.loading import damaged_bytes, damaged_objects, loaded_or_refused, strings, to_json
from wtdp_jax.data import Task, encode, load_split, load_task

SECRET = "outside"

_sound = st.fixed_dictionaries(
    {"prompt": st.just("{a} it was"), "label_words": st.just({"0": " terrible", "1": " great"})},
    optional={
        "label_column": st.just("label"),
        "folder": st.just("films"),
        "hub": st.just({"path": "someone/films", "dev_split": "test"}),
    },
)
_nearly = {
    "prompt": st.one_of(
        strings,
        st.text("{}!:a[].\n 0", max_size=8),
        st.sampled_from(
            (
                "{a",
                "a}",
                "{}",
                "{a!r}",
                "{a:b}",
                "{a} ",
                "{a}{a}",
                "{{a}}",
                "{a[0]}",
                "{{{a}",
                "{label}",
                "{a} \ud800",
            )
        ),
    ),
    "label_words": st.dictionaries(strings, strings, max_size=3),
    "folder": st.sampled_from(
        ("../outside", "films/../../outside", "/etc", "..", ".", "", "films", "\0", "~", "films/x")
    ),
    "label_column": st.sampled_from(("label", "", "a", "\ud800", "two\nlines", "x" * 5000)),
    "name": strings,
    "hub": st.dictionaries(st.sampled_from(("path", "config", "label_column", "dev_split", "x")), strings),
    "0": st.one_of(strings, strings.map(" {}".format)),
    "1": st.one_of(strings, st.sampled_from((" \ud800", " great", " terrible", " no such word"))),
    "path": strings,
}

_task_files = damaged_bytes(damaged_objects(_sound, some=_nearly).map(to_json))


@drawn("task files", content=_task_files)
def test_a_task_file_is_read_or_refused(content: bytes) -> None:
    count("task files")
    with tempfile.TemporaryDirectory() as folder:
        path, data_dir = Path(folder, "films.json"), Path(folder, "data")
        path.write_bytes(content)
        for where, text in (("data", "good"), ("data/films", "good film"), ("outside", SECRET)):
            Path(folder, where).mkdir()
            Path(folder, where, "train.tsv").write_text(f"a\tlabel\n{text}\t0\n")
        task = loaded_or_refused(lambda: load_task(str(path)), str(path))
        if task is not None:
            _assert_valid(task, data_dir)


def _assert_valid(task: Task, data_dir: Path) -> None:
    json.dumps({"name": task.name, "prompt": task.prompt, "label_words": dict(task.label_words)})
    assert len(task.prompt_parts()[0]) == len(task.text_columns) + 1 >= 2 and len(task.labels) >= 2
    rows = loaded_or_refused(lambda: load_split(task, "train", data_dir), str(data_dir))
    if rows is None:
        return
    assert SECRET not in rows.texts["a"]
    names = ("label word", "max_length", "row")
    encoded = loaded_or_refused(lambda: encode(rows, task, tiny.tokenizer(), max_length=16), *names)
    assert encoded is None or len(encoded) == 1


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"prompt": ' * 100_000, b"1" * 5000, b"\xff", b""])
def test_files_that_are_no_task(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "films.json"
    path.write_bytes(content)
    assert loaded_or_refused(lambda: load_task(str(path)), str(path)) is None
