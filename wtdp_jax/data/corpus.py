"""Plain text to pretrain on: files, a part held out, a tokenizer of its own, rows of one length.

Dimension key: N rows, T tokens.
"""

import glob
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

WIKITEXT_FILES = ("wikitext-2/valid.txt", "wikitext-2/test.txt")
"""WikiText-2's parts that a data directory holds."""

# Long enough to hold whole paragraphs, so that few held-out rows continue a text that is trained on.
_STRETCH_CHARACTERS = 4000

# WikiText marks the joints of numbers and compounds, and words it left out.
_WIKITEXT_MARKS = ((re.compile(r" @([-,.])@ "), r"\1"), (re.compile(r" ?<unk>"), ""))


def find_text_files(patterns: Sequence[str], data_dir: Path | None) -> list[Path]:
    """Returns the files that paths and globs name, and WikiText-2's from a data directory, each once.

    Args:
      patterns: paths or globs, `**` included.
      data_dir: folder with `WIKITEXT_FILES`; None: none.

    Raises:
      ValueError: if a pattern names no file, or there is no file at all.
    """
    named = [] if data_dir is None else [str(data_dir / name) for name in WIKITEXT_FILES]
    files: dict[Path, None] = {}  # A set that keeps its order.
    for pattern in (*named, *patterns):
        found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
        if not found:
            raise ValueError(f"text must name existing files, got {pattern!r}")
        files |= dict.fromkeys(found)
    if not files:
        raise ValueError("text must name at least one file, or data_dir must be given, got neither")
    return list(files)


def read_stretches(files: Sequence[Path]) -> list[str]:
    """Reads files as stretches of whole lines, each about as long as a page.

    Raises:
      ValueError: if a file cannot be read, is not UTF-8, or all are empty.
    """
    stretches = [stretch for path in files for stretch in _stretches(_read(path))]
    if not stretches:
        raise ValueError(f"text must have at least one line that is not empty, got none in {files[0]}")
    return stretches


def hold_out(stretches: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """Splits stretches into those to train on and those held out: every k-th, so that all files have some.

    Args:
      stretches: at least two.
      fraction: the share to hold out, in (0, 1/2].

    Raises:
      ValueError: if there is only one.
    """
    if len(stretches) < 2:
        raise ValueError(f"text must be long enough for a held-out part, got {len(stretches)} page")
    every = min(round(1 / fraction), len(stretches))
    is_held_out = [number % every == every - 1 for number in range(len(stretches))]
    return (
        [text for text, held in zip(stretches, is_held_out, strict=True) if not held],
        [text for text, held in zip(stretches, is_held_out, strict=True) if held],
    )


def train_tokenizer(
    texts: Sequence[str], *, vocab_size: int, words: Sequence[str] = (), lowercase: bool = True
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE, as GPT-2's but of the texts' own.

    Args:
      texts: what it is trained on.
      vocab_size: the most entries, of which 256 are bytes and one ends a text; few texts give fewer.
      words: words, each after a space, that must become one token, such as a task's label words.
      lowercase: whether texts are made lower case first, which a small vocabulary gains by.

    Raises:
      ValueError: if a word is not one token in the end.
    """
    backend = Tokenizer(models.BPE())
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # A word becomes a token where it is frequent; these are made so for the tokenizer alone.
    often = max(1000, sum(map(len, texts)) // 100)
    backend.train_from_iterator(_with_words(texts, words, often), trainer)
    for word in words:
        if len(pieces := backend.encode(word).tokens) != 1:
            raise ValueError(f"vocab_size must leave room for the word {word!r}, got pieces {pieces}")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )


def pack(
    stretches: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Int32[np.ndarray, "N T"]:
    """Packs texts into rows of one length, an end-of-text after each; what fills no row is dropped.

    Args:
      stretches: the texts, in order.
      tokenizer: has an end-of-text token.
      length: tokens a row, T.

    Raises:
      ValueError: if they do not fill one row.
    """
    encoded = tokenizer(list(stretches), add_special_tokens=False, verbose=False)["input_ids"]
    ids = np.fromiter(_joined(encoded, tokenizer.eos_token_id), np.int32)
    if len(ids) < length:
        raise ValueError(f"text must fill one row of {length} tokens, got {len(ids)} tokens")
    return ids[: len(ids) // length * length].reshape(-1, length)


def fingerprint(stretches: Sequence[str]) -> str:
    """The SHA-256 of texts, in order."""
    digest = hashlib.sha256()
    for stretch in stretches:
        digest.update(f"{len(stretch)};{stretch}".encode())
    return digest.hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8 ({error.reason} at byte {error.start})") from None


def _stretches(text: str) -> Iterator[str]:
    """Yields whole lines together until they are long enough."""
    for mark, replacement in _WIKITEXT_MARKS:
        text = mark.sub(replacement, text)
    lines: list[str] = []
    length = 0
    for line in filter(None, map(str.strip, text.split("\n"))):
        lines.append(line)
        length += len(line)
        if length >= _STRETCH_CHARACTERS:
            yield "\n".join(lines)
            lines, length = [], 0
    if lines:
        yield "\n".join(lines)


def _with_words(texts: Sequence[str], words: Sequence[str], often: int) -> Iterator[str]:
    """Yields the texts, and the words as often as it takes."""
    yield from texts
    for word in words:
        yield word * often


def _joined(encoded: Sequence[Sequence[int]], end_of_text: int) -> Iterator[int]:
    for ids in encoded:
        yield from ids
        yield end_of_text
