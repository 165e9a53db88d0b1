"""From rows to arrays: joining, positions, cutting, label words."""

import dataclasses

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wtdp_jax.data import (
    Rows,
    Task,
    encode,
    encode_text,
    label_token_ids,
    load_split,
    load_task,
    load_tokenizer,
)

# One id a word, in this order, so that expected ids can be read off.
WORDS = "? Q : A so no yes a b c d e f g h".split()
ID = {word: index for index, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel(ID, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")


ONE = Task(name="one", prompt="{x} so", label_words={"0": " no", "1": " yes"})
TWO = Task(name="two", prompt="Q : {x} A : {y} so", label_words={"0": " no", "1": " yes"})
ONE_ROWS = Rows(texts={"x": ["a b c", "d"]}, labels=[1, 0])


def _ids(words):
    return [ID[word] for word in words.split()]


def test_arrays_of_the_next_token_objective(tokenizer):
    encoded = encode(ONE_ROWS, ONE, tokenizer, max_length=9)
    expected = {
        "ids": [_ids("a b c so"), _ids("d so") + [0, 0]],
        "positions": [3, 1],
        "targets": _ids("yes no"),
        "labels": [1, 0],
    }
    assert {name: array.tolist() for name, array in encoded.arrays.items()} == expected
    assert all(array.dtype == np.int32 for array in encoded.arrays.values())
    assert encoded.label_ids.tolist() == _ids("no yes")
    assert (len(encoded), encoded.num_cut) == (2, 0)


def test_lm_objective_appends_the_label_word_and_weighs_all_but_the_first_token(tokenizer):
    arrays = encode(ONE_ROWS, ONE, tokenizer, max_length=9, objective="lm").arrays
    assert arrays["ids"].tolist() == [_ids("a b c so yes"), _ids("d so no") + [0, 0]]
    assert arrays["weights"].tolist() == [[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert arrays["weights"].dtype == np.float32
    assert arrays["positions"].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("max_length", "expected", "num_cut"),
    [
        # The fixed words take 5; "a b c d" and "e f" share the rest, the longer one is cut first.
        (11, "Q : a b c d A : e f so", 0),
        (10, "Q : a b c A : e f so", 1),
        (9, "Q : a b A : e f so", 1),
        (8, "Q : a b A : e so", 1),
        (7, "Q : a A : e so", 1),
    ],
)
def test_the_longer_text_is_cut_first_and_fixed_words_never(tokenizer, max_length, expected, num_cut):
    rows = Rows(texts={"x": ["a b c d"], "y": ["e f"]}, labels=[0])
    encoded = encode(rows, TWO, tokenizer, max_length=max_length)
    assert encoded.arrays["ids"].tolist() == [_ids(expected)]
    assert encoded.arrays["positions"].tolist() == [len(expected.split()) - 1]
    assert encoded.num_cut == num_cut


def test_cutting_counts_examples_and_leaves_the_short_ones(tokenizer):
    rows = Rows(texts={"x": ["a", "a b c d e", "a b c", "a b c d"]}, labels=[0, 1, 0, 1])
    encoded = encode(rows, ONE, tokenizer, max_length=4)
    expected = ["a so", "a b c so", "a b c so", "a b c so"]
    ids, positions = encoded.arrays["ids"], encoded.arrays["positions"]
    assert [row[: end + 1].tolist() for row, end in zip(ids, positions, strict=True)] == list(
        map(_ids, expected)
    )
    assert encoded.num_cut == 2


def test_the_label_word_needs_room_too(tokenizer):
    encoded = encode(ONE_ROWS, ONE, tokenizer, max_length=4, objective="lm")
    assert encoded.arrays["ids"][0].tolist() == _ids("a b so yes")


@pytest.mark.parametrize(("objective", "needed"), [("next_token", 7), ("lm", 8)])
def test_too_short_a_max_length_is_refused(tokenizer, objective, needed):
    rows = Rows(texts={"x": ["a"], "y": ["b"]}, labels=[0])
    encode(rows, TWO, tokenizer, max_length=needed, objective=objective)
    with pytest.raises(ValueError, match=f"max_length must be at least {needed} for task 'two'"):
        encode(rows, TWO, tokenizer, max_length=needed - 1, objective=objective)


def test_an_empty_text_leaves_the_fixed_words(tokenizer):
    rows = Rows(texts={"x": ["  "], "y": ["b"]}, labels=[0])
    assert encode(rows, TWO, tokenizer, max_length=9).arrays["ids"].tolist() == [_ids("Q : A : b so")]


def test_a_row_without_a_token_is_refused(tokenizer):
    bare = Task(name="bare", prompt="{x}", label_words=ONE.label_words)
    with pytest.raises(ValueError, match="at least one token, got none in row 1"):
        encode(Rows(texts={"x": ["a", " "]}, labels=[0, 1]), bare, tokenizer, max_length=9)


@pytest.mark.parametrize(
    ("label_words", "message"),
    [
        ([" no", " a b"], r"must be one token of the tokenizer, got ' a b': \['a', 'b'\]"),
        ([" no", " unheard"], r"must be one token of the tokenizer, got ' unheard'"),
        ([" no", "  no"], "must be different tokens"),
    ],
)
def test_label_words_must_be_different_single_tokens(tokenizer, label_words, message):
    with pytest.raises(ValueError, match=message):
        label_token_ids(ONE.with_overrides(label_words=label_words), tokenizer)


def test_fingerprint_depends_on_every_array_and_on_nothing_else(tokenizer):
    encoded = encode(ONE_ROWS, ONE, tokenizer, max_length=9)
    assert encode(ONE_ROWS, ONE, tokenizer, max_length=99).fingerprint() == encoded.fingerprint()
    for name, array in encoded.arrays.items():
        changed = array.copy()
        changed.flat[-1] += 1
        other = dataclasses.replace(encoded, arrays={**encoded.arrays, name: changed})
        assert other.fingerprint() != encoded.fingerprint(), name


@pytest.mark.parametrize("name", ["sst2", "qnli", "qqp"])
def test_joined_pieces_are_gpt2s_tokens_of_the_whole_prompt(reference_data, name):
    tokenizer = load_tokenizer(reference_data / "tokenizer_gpt2")
    task = load_task(name)
    rows = load_split(task, "dev", reference_data)
    encoded = encode(rows, task, tokenizer, max_length=1024)
    for row in range(0, len(rows), 7):
        texts = {column: values[row].strip() for column, values in rows.texts.items()}
        length = encoded.arrays["positions"][row] + 1
        assert (
            encoded.arrays["ids"][row, :length].tolist()
            == tokenizer(task.prompt.format(**texts))["input_ids"]
        )


def test_gpt2s_label_words_follow_the_prompt_as_single_tokens(reference_data):
    tokenizer = load_tokenizer(reference_data / "tokenizer_gpt2")
    assert label_token_ids(load_task("sst2"), tokenizer).tolist() == [7818, 1049]  # " terrible", " great"
    assert tokenizer("It was great")["input_ids"][-1] == 1049
    with pytest.raises(ValueError, match="one token"):
        label_token_ids(load_task("sst2").with_overrides(label_words=[" unwatchable", " great"]), tokenizer)


def test_plain_text_is_weighed_from_the_second_token_on(tokenizer):
    arrays = encode_text(["a b c d", "e f"], tokenizer, max_length=3)
    assert arrays["ids"].tolist() == [_ids("a b c"), _ids("e f") + [0]]
    assert arrays["weights"].tolist() == [[0, 1, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    ("lines", "message"), [([], "lines must be at least one"), (["a b", "c"], "at least two tokens, got 1")]
)
def test_lines_with_nothing_to_predict_are_refused(tokenizer, lines, message):
    with pytest.raises(ValueError, match=message):
        encode_text(lines, tokenizer, max_length=3)
