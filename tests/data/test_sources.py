"""Rows from files and from the hub, and one clear line for each way a file can be wrong."""

import datasets
import pytest

from wtdp_jax.data import HubSource, Rows, Task, load_split, load_task


def _write(data_dir, folder, content, split="train"):
    path = data_dir / folder / f"{split}.tsv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def test_sst2_keeps_quotes_and_spaces_as_they_are(tmp_path):
    _write(tmp_path, "SST-2", b'sentence\tlabel\n"an open quote \t1\nit \'s " odd " \t0\n')
    rows = load_split(load_task("sst2"), "train", tmp_path)
    assert rows == Rows(texts={"sentence": ['"an open quote ', 'it \'s " odd " ']}, labels=[1, 0])


def test_qnli_maps_labels_in_the_tasks_order(tmp_path):
    content = b'question\tsentence\tlabel\nWho?\tHe said "I".\tnot_entailment\nWhy?\tSo.\tentailment\n'
    _write(tmp_path, "QNLI", content, "dev")
    rows = load_split(load_task("qnli"), "dev", tmp_path)
    assert rows.texts == {"question": ["Who?", "Why?"], "sentence": ['He said "I".', "So."]}
    assert rows.labels == [1, 0]


def test_qqp_finds_columns_by_name_whatever_their_order(tmp_path):
    _write(tmp_path, "QQP", b'id\tis_duplicate\tquestion2\tquestion1\n7\t1\t"b"\ta\n')
    rows = load_split(load_task("qqp"), "train", tmp_path)
    assert rows == Rows(texts={"question1": ["a"], "question2": ['"b"']}, labels=[1])


def test_only_a_newline_ends_a_line(tmp_path):
    # U+2028, U+0085 and form feed end lines for str.splitlines, a carriage return for bytes.splitlines.
    # Windows line ends do no harm, nor does a byte order mark.
    content = b"\xef\xbb\xbf" + "sentence\tlabel\r\na\u2028b\x85c\x0cd\re\t1\r\n".encode()
    _write(tmp_path, "SST-2", content)
    assert load_split(load_task("sst2"), "train", tmp_path).texts == {"sentence": ["a\u2028b\x85c\x0cd\re"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"sentence\tlabel\na\t1\nb c\n", ":3: must have 2 columns, got 1"),
        (b"sentence\tlabel\na\tb\t1\n", ":2: must have 2 columns, got 3"),
        (b"sentence\tlabel\n\na\t1\n", ":2: must have 2 columns, got 1"),
        (b"sentence\tlabels\na\t1\n", ":1: header must name column 'label', got 'sentence', 'labels'"),
        (b"text\tlabel\na\t1\n", ":1: header must name column 'sentence'"),
        (b"", ":1: header must name column 'sentence', got ''"),
        (b"sentence\tlabel\na\t1\nb\t2\n", ":3: label must be one of '0', '1', got '2'"),
        (b"sentence\tlabel\nok\t1\n\xff\t1\n", ":3: must be UTF-8"),
        (b"sentence\tlabel\n", ": rows must be at least one, got none"),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path, content, message):
    path = _write(tmp_path, "SST-2", content)
    with pytest.raises(ValueError) as caught:
        load_split(load_task("sst2"), "train", tmp_path)
    assert str(caught.value).startswith(str(path) + message)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"SST-2/dev\.tsv: cannot be read \(No such file or directory\)"):
        load_split(load_task("sst2"), "dev", tmp_path)


def test_a_users_own_folder_works_through_a_task_file(tmp_path):
    task_file = tmp_path / "films.json"
    task_file.write_text('{"prompt": "{review} So", "label_words": {"neg": " bad", "pos": " good"}}')
    for split, line in (("train", b"fine\tpos\n"), ("dev", b"dull\tneg\n")):
        _write(tmp_path, ".", b"review\tlabel\n" + line, split)
    task = load_task(str(task_file))
    assert load_split(task, "train", tmp_path) == Rows(texts={"review": ["fine"]}, labels=[1])
    assert load_split(task, "dev", tmp_path) == Rows(texts={"review": ["dull"]}, labels=[0])


def test_a_task_without_any_source_asks_for_data_dir():
    task = Task(name="own", prompt="{a} so", label_words={"0": " no", "1": " yes"})
    with pytest.raises(ValueError, match="task 'own' needs --data-dir"):
        load_split(task, "train")


def test_a_generated_task_is_generated_unless_files_are_given(tmp_path):
    made = Rows(texts={"a": ["made"]}, labels=[1])
    task = Task(
        name="own", prompt="{a} so", label_words={"0": " no", "1": " yes"}, generate=lambda split: made
    )
    _write(tmp_path, ".", b"a\tlabel\nread\t0\n")
    assert load_split(task, "train") is made
    assert load_split(task, "train", tmp_path).texts == {"a": ["read"]}


@pytest.fixture
def hub(monkeypatch):
    """Puts a small table in the hub's place and records what was asked for."""
    asked = []

    def serve(columns):
        def load_dataset(path, config, split):
            asked.append((path, config, split))
            return datasets.Dataset.from_dict(columns)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return serve


def test_hub_labels_may_be_numbers_in_the_tasks_order(hub):
    asked = hub({"question": ["q", "r"], "sentence": ["s", "t"], "label": [1, 0], "idx": [0, 1]})
    rows = load_split(load_task("qnli"), "dev")
    assert rows == Rows(texts={"question": ["q", "r"], "sentence": ["s", "t"]}, labels=[1, 0])
    assert asked == [("nyu-mll/glue", "qnli", "validation")]


def test_hub_labels_may_be_spelled(hub):
    hub({"a": ["x"], "label": ["yes"]})
    task = Task(
        name="own",
        prompt="{a} so",
        label_words={"no": " no", "yes": " yes"},
        hub=HubSource(path="someone/own"),
    )
    assert load_split(task, "train").labels == [1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"sentence": ["a", "b"], "label": [0, -1]},
            "nyu-mll/glue/sst2, row 1: label must be one of .* got '-1'",
        ),
        ({"text": ["a"], "label": [0]}, "nyu-mll/glue/sst2: must have column 'sentence'"),
        ({"sentence": [], "label": []}, "nyu-mll/glue/sst2: rows must be at least one"),
    ],
)
def test_bad_hub_table_is_refused(hub, columns, message):
    hub(columns)
    with pytest.raises(ValueError, match=message):
        load_split(load_task("sst2"), "train")


def test_unreachable_hub_says_to_give_data_dir(monkeypatch):
    def load_dataset(path, config, split):
        raise ConnectionError("Couldn't reach the hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError) as caught:
        load_split(load_task("sst2"), "train")
    assert str(caught.value) == (
        "hub data set nyu-mll/glue/sst2: cannot be loaded, give --data-dir instead (Couldn't reach the hub)"
    )


@pytest.mark.parametrize(
    ("name", "split", "num_rows", "num_of_label_1"),
    [("sst2", "dev", 872, 444), ("qnli", "dev", 5463, 2761), ("qqp", "dev", 1000, 377)],
)
def test_reference_files_have_their_known_counts(reference_data, name, split, num_rows, num_of_label_1):
    rows = load_split(load_task(name), split, reference_data)
    assert (len(rows), sum(rows.labels)) == (num_rows, num_of_label_1)
