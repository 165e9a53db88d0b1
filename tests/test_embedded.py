"""The embedded task: fixed, private apart from public, and out of reach for a bag of words."""

import dataclasses

import numpy as np
import pytest

from wtdp_jax import embedded
from wtdp_jax.bag_of_words import bag_of_words_accuracy
from wtdp_jax.data import Encoded, encode, encode_text, load_split, load_task, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return embedded.tokenizer()


@pytest.fixture(scope="module")
def encoded(tokenizer):
    task = load_task("reviews")
    return {
        split: encode(load_split(task, split), task, tokenizer, max_length=64, objective="lm")
        for split in ("train", "dev")
    }


def test_the_language_never_changes(tokenizer, encoded):
    # The quickstart's figures hang on the text: whoever changes it on purpose measures them again.
    public = encode_text(embedded.public_text(), tokenizer, max_length=64)
    data = Encoded(arrays=public, label_ids=encoded["dev"].label_ids, num_cut=0)
    prints = [data.fingerprint()[:12], *(encoded[split].fingerprint()[:12] for split in ("train", "dev"))]
    assert prints == ["a59d725f6307", "4a198c87094d", "b7f8f82bba4e"]


def test_every_word_has_its_own_token(tokenizer):
    rows = [embedded.private_rows(split) for split in ("train", "dev")]
    text = " ".join([*rows[0].texts["review"], *rows[1].texts["review"], *embedded.public_text()])
    words = sorted(set(text.split()))
    ids = tokenizer.convert_tokens_to_ids(words)
    assert tokenizer.unk_token_id not in ids and len(set(ids)) == len(words)
    assert {*words, tokenizer.eos_token} == tokenizer.get_vocab().keys()


def test_tokenizer_is_the_same_after_saving(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = embedded.public_text()[0]
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text


def test_reviews_are_all_different_and_classes_balanced():
    rows = {split: embedded.private_rows(split) for split in ("train", "dev")}
    sizes = {split: (len(rows[split]), sum(rows[split].labels)) for split in rows}
    assert sizes == {"train": (10000, 5000), "dev": (500, 250)}
    assert len({*rows["train"].texts["review"], *rows["dev"].texts["review"]}) == 10500


def test_no_private_review_is_part_of_the_public_text():
    public = "\n".join(embedded.public_text())
    reviews = [*embedded.private_rows("train").texts["review"], *embedded.private_rows("dev").texts["review"]]
    assert not [review for review in reviews if review in public]


_GOOD = set("good brilliant charming fresh lovely clever superb warm loved liked enjoyed admired".split())
_BAD = set("bad dull awful boring clumsy stale weak cold hated disliked loathed regretted".split())


def _verdict(review):
    """The author's verdict, by rules written here anew."""
    words = review.split()
    if "i" in words:
        words = words[words.index("i") :][:2]
    elif "but" in words:
        words = words[words.index("but") :]
    elif "," in words:
        words = words[words.index(",") :]
    elif "although" in words:
        words = words[: words.index("although")]
    (opinion,) = (word for word in words if word in _GOOD | _BAD)
    return int((opinion in _GOOD) != bool({"not", "never"} & {*words}))


@pytest.mark.parametrize("split", ["train", "dev"])
def test_labels_are_the_authors_verdicts(split):
    rows = embedded.private_rows(split)
    assert [_verdict(review) for review in rows.texts["review"]] == list(rows.labels)


def test_public_text_gives_away_no_verdict_on_contrast():
    lines = [line.split() for line in embedded.public_text()]
    contrast = [words for words in lines if {"but", "although"} & {*words}]
    assert contrast and not any("felt" in words for words in contrast)
    told = [line.removesuffix(f" it felt {word}") for line, word in _told(embedded.public_text())]
    words = [word for _, word in _told(embedded.public_text())]
    assert len(told) > 10000
    assert [("terrible", "great")[_verdict(line.split(" and ")[0])] for line in told] == words


def _told(lines):
    """The lines that end in a verdict, each with the verdict's word."""
    return [(line, line.split()[-1]) for line in lines if " it felt " in line]


def test_examples_fit_a_short_sequence(encoded):
    assert max(data.arrays["ids"].shape[1] for data in encoded.values()) == 18


def test_a_bag_of_words_falls_clearly_short(encoded):
    assert 0.55 < bag_of_words_accuracy(encoded["train"], encoded["dev"]) < 0.7


def _with_labels(encoded: Encoded, labels: np.ndarray) -> Encoded:
    return dataclasses.replace(encoded, arrays={**encoded.arrays, "labels": labels.astype(np.int32)})


def test_a_bag_of_words_does_learn_what_words_alone_tell(encoded):
    # A label that is whether a review mentions "the plot" or "the cast" at all.
    ids = [embedded.tokenizer().convert_tokens_to_ids(word) for word in ("plot", "cast")]
    told = {
        split: _with_labels(data, np.isin(data.arrays["ids"], ids).any(axis=1))
        for split, data in encoded.items()
    }
    assert bag_of_words_accuracy(told["train"], told["dev"]) == 1.0


def test_a_bag_of_words_does_not_see_the_label_word(encoded):
    # With objective "lm" the label word follows the prompt; random labels must stay random.
    coin = np.random.default_rng(0)
    random = {split: _with_labels(data, coin.integers(0, 2, len(data))) for split, data in encoded.items()}
    assert bag_of_words_accuracy(random["train"], random["dev"]) < 0.6


def test_a_bag_of_words_takes_two_labels_only(encoded):
    three = dataclasses.replace(encoded["dev"], label_ids=np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="two labels to tell apart, got 3"):
        bag_of_words_accuracy(three, three)
