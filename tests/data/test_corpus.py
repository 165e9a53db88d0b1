from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from wtdp_jax.data import corpus, load_tokenizer

_LINES = ["the cat sat on the mat .", "a dog was great and a film was terrible .", "no cat is a dog ."]


def _tokenizer(**changes: object) -> PreTrainedTokenizerFast:
    return corpus.train_tokenizer(_LINES, **{"vocab_size": 320, "words": (" great", " yes"), **changes})


def test_files_are_named_by_path_glob_and_data_dir_each_once(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    names = ["wikitext-2/valid.txt", "wikitext-2/test.txt", "b.txt", "a.txt"]
    for name in names:
        (tmp_path / name).touch()
    found = corpus.find_text_files([str(tmp_path / "b.txt"), str(tmp_path / "*.txt")], tmp_path)
    assert found == [tmp_path / name for name in names]
    with pytest.raises(ValueError, match="text must name existing files, got 'nowhere/"):
        corpus.find_text_files(["nowhere/*.txt"], None)
    with pytest.raises(ValueError, match="data_dir must be given, got neither"):
        corpus.find_text_files([], None)


def test_stretches_hold_whole_lines_and_everything(tmp_path: Path) -> None:
    lines = [f"line {number} " + "x" * 200 for number in range(100)]
    (tmp_path / "a.txt").write_text("\n\n".join(lines), encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text(" A 1 @,@ 000 @-@ mile <unk> run . \n")
    stretches = corpus.read_stretches([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert "\n".join(stretches).split("\n") == [*lines, "A 1,000-mile run ."]
    assert all(4000 <= len(stretch) < 4300 for stretch in stretches[:-2])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "must be UTF-8 .* at byte 0"), (b"\n \n", "must have at least one line")],
)
def test_unreadable_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus.read_stretches([tmp_path / "a.txt"])


def test_a_part_is_held_out_of_every_stretch_of_text() -> None:
    train, held_out = corpus.hold_out([str(number) for number in range(10)], 0.25)
    assert held_out == ["3", "7"] and train == ["0", "1", "2", "4", "5", "6", "8", "9"]
    # So rare that no stretch would be its turn: the last one is held out.
    assert corpus.hold_out(["a", "b"], 0.02) == (["a"], ["b"])
    with pytest.raises(ValueError, match="got 1 page"):
        corpus.hold_out(["a"], 0.5)


def test_the_tokenizer_survives_its_folder(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "The CAT was great , yes ; naïve ."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert again(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == text.lower() and len(again) == len(tokenizer) <= 320
    assert again.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_the_tokenizer_knows_the_words_it_must() -> None:
    tokenizer = _tokenizer(vocab_size=270)
    for word in (" great", " yes"):
        assert len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1
    assert len(tokenizer(" terrible", add_special_tokens=False)["input_ids"]) > 1
    with pytest.raises(ValueError, match="vocab_size must leave room for the word ' great'"):
        _tokenizer(vocab_size=258)


def test_case_is_kept_if_asked() -> None:
    tokenizer = _tokenizer(lowercase=False)
    assert tokenizer.decode(tokenizer("The Cat", add_special_tokens=False)["input_ids"]) == "The Cat"


def test_packed_rows_are_the_texts_in_order() -> None:
    tokenizer = _tokenizer()
    rows = corpus.pack(_LINES, tokenizer, 7)
    expected: list[int] = []
    for line in _LINES:
        expected += [*tokenizer(line, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert rows.shape == (len(expected) // 7, 7) and rows.dtype == np.int32
    assert rows.ravel().tolist() == expected[: rows.size]
    with pytest.raises(ValueError, match="text must fill one row of 999 tokens"):
        corpus.pack(_LINES, tokenizer, 999)


def test_a_fingerprint_tells_texts_apart() -> None:
    prints = {corpus.fingerprint(texts) for texts in (["ab"], ["a", "b"], ["a", "c"])}
    assert len(prints) == 3 and corpus.fingerprint(["a", "c"]) in prints
