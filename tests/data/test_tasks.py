"""Tasks as data: the built-in ones, the user's overrides, the user's own JSON file."""

import json
from pathlib import Path

import pytest

from wtdp_jax.data import TASK_NAMES, HubSource, Rows, Task, held_out_size, hold_out, load_task

TASK = Task(name="own", prompt="{title}: {body} Overall:", label_words={"neg": " bad", "pos": " good"})


def test_prompt_parts_alternate_words_and_columns():
    task = Task(name="own", prompt="{{{a}}} {b} so", label_words=TASK.label_words)
    assert task.prompt_parts() == (("{", "} ", " so"), ("a", "b"))
    assert task.text_columns == ("a", "b")


@pytest.mark.parametrize("name", TASK_NAMES)
def test_built_in_tasks_have_their_name_and_two_labels(name):
    task = load_task(name)
    assert (task.name, len(task.labels)) == (name, 2)


def test_unknown_task_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"reviews, sst2, qnli, qqp or a \.json file, got 'mnli'"):
        load_task("mnli")


def test_overrides_replace_prompt_and_label_words_in_label_order():
    task = TASK.with_overrides(prompt="{body} In short:", label_words=[" poor", " rich"])
    assert task.text_columns == ("body",)
    assert task.label_words == {"neg": " poor", "pos": " rich"}
    assert TASK.with_overrides() == TASK


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"prompt": "It was"}, "at least one text column"),
        ({"prompt": "{body"}, "balanced braces"),
        ({"prompt": "{body!r} so"}, "only column names"),
        ({"prompt": "{} so"}, "only column names"),
        ({"prompt": "{body} so "}, "must not end in white space"),
        ({"label_words": [" bad"]}, "one word for each of"),
        ({"label_words": ["bad", " good"]}, "after a space, got 'bad'"),
        ({"label_words": [" ", " good"]}, "after a space, got ' '"),
        ({"label_words": [" good", " good"]}, "must all differ"),
    ],
)
def test_bad_wording_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        TASK.with_overrides(**overrides)


def test_a_task_needs_two_labels():
    with pytest.raises(ValueError, match="at least two labels"):
        Task(name="own", prompt="{body} so", label_words={"neg": " bad"})


def test_rows_must_have_a_text_for_each_label():
    with pytest.raises(ValueError, match="'body' must have one text for each label, got 1 for 2"):
        Rows(texts={"body": ["a"]}, labels=[0, 1])


def test_rows_must_not_be_empty():
    with pytest.raises(ValueError, match="at least one"):
        Rows(texts={"body": []}, labels=[])


def _write(tmp_path: Path, content: object) -> str:
    path = tmp_path / "films.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_json_file_gives_a_whole_task(tmp_path):
    content = {
        "prompt": "{review} Overall:",
        "label_words": {"neg": " bad", "pos": " good"},
        "label_column": "opinion",
        "folder": "films",
        "hub": {"path": "someone/films", "dev_split": "test"},
    }
    assert load_task(_write(tmp_path, content)) == Task(
        name="films",
        prompt="{review} Overall:",
        label_words={"neg": " bad", "pos": " good"},
        label_column="opinion",
        folder="films",
        hub=HubSource(path="someone/films", dev_split="test"),
    )


WORDS = {"neg": " bad", "pos": " good"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt":\n "a" "b"}', r"films\.json:2: must be JSON"),
        ("[]", r"films\.json: films\.json must be a JSON object"),
        ({"prompt": "{a} so"}, "field 'label_words' must be given"),
        ({"label_words": WORDS}, "field 'prompt' must be given"),
        ({"prompt": "{a} so", "label_words": WORDS, "generate": "x"}, "got 'generate'"),
        ({"prompt": "{a} so", "label_words": WORDS, "folder": 1}, "must hold strings, got 'folder': 1"),
        ({"prompt": "{a} so", "label_words": [" bad", " good"]}, "label_words must be a JSON object"),
        ({"prompt": "{a} so", "label_words": {"neg": 0}}, "must hold strings, got 'neg': 0"),
        ({"prompt": "{a} so", "label_words": WORDS, "hub": {}}, "field 'path' must be given"),
        ({"prompt": "{a} so", "label_words": WORDS, "hub": {"path": "x", "y": "z"}}, "got 'y'"),
        ({"prompt": "{a} so ", "label_words": WORDS}, r"films\.json: prompt must not end in white space"),
    ],
)
def test_bad_json_file_is_refused_by_name(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_task(_write(tmp_path, content))
    assert "films.json" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_json_file():
    with pytest.raises(ValueError, match=r"nowhere\.json: cannot be read \(No such file"):
        load_task("nowhere.json")


def test_rows_are_held_out_once_and_always_the_same():
    rows = Rows(texts={"a": [f"text {i}" for i in range(20)]}, labels=[i % 2 for i in range(20)])
    kept, held_out = hold_out(rows, 0.26)
    assert (len(kept), len(held_out)) == (15, 5) and held_out_size(20, 0.26) == 5
    texts = [*kept.texts["a"], *held_out.texts["a"]]
    assert sorted(texts) == sorted(rows.texts["a"])
    assert all(
        int(text[5:]) % 2 == label
        for part in (kept, held_out)
        for text, label in zip(part.texts["a"], part.labels, strict=True)
    )
    assert hold_out(rows, 0.26) == (kept, held_out)
    assert [held_out_size(20, fraction) for fraction in (1e-9, 1 - 1e-9)] == [1, 19]
    with pytest.raises(ValueError, match="rows must be at least two to hold some out, got 1"):
        hold_out(Rows(texts={"a": ["x"]}, labels=[0]), 0.5)
