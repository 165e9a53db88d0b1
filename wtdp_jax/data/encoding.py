"""From rows to the arrays a model is trained on.

Dimension key: N examples, T tokens, K labels.

How prompt pieces and texts join: each is tokenized alone and the ids are concatenated. A text is stripped,
and the white space before its place in the prompt moves to the text's front. So every piece but the first
begins with white space (or with the prompt's own punctuation), which is where byte-level BPE, and GPT-2's
in particular, starts a new token anyway: the result is the tokenization of the whole string. Cutting a text
is then cutting its ids, and the prompt's fixed words stay as they are, whatever the text.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

from wtdp_jax.data.tasks import Rows, Task
from wtdp_jax.messages import printable

Objective = Literal["next_token", "label_words", "lm"]

# Any valid id does: attention is causal, so padding on the right reaches no position that a loss reads.
_PADDING_ID = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """A split as arrays of one shape.

    Attributes:
      arrays: ``ids`` (N, T) int32, padded on the right; ``positions`` (N,) int32, the prompt's last token,
        whose logits predict the label word; ``targets`` (N,) int32, the label word's id; ``labels`` (N,)
        int32, the label's index. For objective ``"lm"`` also ``weights`` (N, T) float32: in column t the
        weight of predicting token t, which is 1 from the second token to the label word, else 0.
      label_ids: the label words' ids, in the order of the task's labels.
      num_cut: the number of examples whose text was cut to fit.
    """

    arrays: dict[str, np.ndarray]
    label_ids: Int32[np.ndarray, " K"]
    num_cut: int

    def __len__(self) -> int:
        return len(self.arrays["labels"])

    def fingerprint(self) -> str:
        """The SHA-256 of names, types, shapes and values: equal if and only if the arrays are."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def encode(
    rows: Rows,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    objective: Objective = "next_token",
) -> Encoded:
    """Encodes rows as prompts, or for objective ``"lm"`` as prompts followed by their label words.

    T is the longest example's length, at most ``max_length``. A longer example loses the end of its longest
    text until it fits, never the prompt's fixed words.

    Args:
      rows: the examples.
      task: gives prompt and label words.
      tokenizer: any tokenizer of transformers; special tokens are not added.
      max_length: the most tokens of an example, e.g. the model's n_positions.
      objective: the loss that the arrays are for.

    Raises:
      ValueError: if a label word is not one token, two share one, ``max_length`` leaves no room for the
        texts, or an example has no token at all.
    """
    label_ids = label_token_ids(task, tokenizer)
    fixed, texts = _tokenize(rows, task, tokenizer)
    has_label_word = objective == "lm"
    room = max_length - sum(map(len, fixed)) - has_label_word
    if room < len(texts):
        raise ValueError(
            f"max_length must be at least {max_length - room + len(texts)} for task {task.name!r} "
            f"(the prompt's fixed words and a token of each text), got {max_length}"
        )
    prompts, num_cut = [], 0
    for row_texts in zip(*texts, strict=True):
        kept = _fit([len(text) for text in row_texts], room)
        num_cut += sum(kept) < sum(map(len, row_texts))
        prompts.append(_join(fixed, [text[:length] for text, length in zip(row_texts, kept, strict=True)]))
    if [] in prompts:
        raise ValueError(f"each row must have at least one token, got none in row {prompts.index([])}")
    labels = np.asarray(rows.labels, np.int32)
    arrays = _pad(prompts, labels, label_ids[labels], has_label_word)
    return Encoded(arrays=arrays, label_ids=label_ids, num_cut=num_cut)


def encode_text(
    lines: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> dict[str, np.ndarray]:
    """Encodes plain text, each line a sequence of its own, for training on every token.

    Args:
      lines: the text; what exceeds ``max_length`` tokens of a line is cut.
      tokenizer: any tokenizer of transformers; special tokens are not added.
      max_length: the most tokens of a sequence, e.g. the model's n_positions.

    Returns:
      ``ids`` and ``weights`` as in ``Encoded`` for objective ``"lm"``.

    Raises:
      ValueError: if there is no line, or a line has fewer than two tokens and so nothing to predict.
    """
    if not lines:
        raise ValueError("lines must be at least one, got none")
    sequences = [ids[:max_length] for ids in _token_ids(lines, tokenizer)]
    shortest = min(map(len, sequences))
    if shortest < 2:
        raise ValueError(f"each line must have at least two tokens, got {shortest}")
    return _sequence_arrays(sequences)


def label_token_ids(task: Task, tokenizer: PreTrainedTokenizerBase) -> Int32[np.ndarray, " K"]:
    """Returns the label words' token ids, in the order of the task's labels.

    Raises:
      ValueError: if a label word is not exactly one known token, or two label words are the same token.
    """
    ids = []
    for word in task.label_words.values():
        tokens = _token_ids([word], tokenizer)[0]
        if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
            pieces = tokenizer.convert_ids_to_tokens(tokens)
            raise ValueError(f"label word must be one token of the tokenizer, got {word!r}: {pieces}")
        ids.append(tokens[0])
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"label words must be different tokens, got {list(task.label_words.values())}: {ids}"
        )
    return np.asarray(ids, np.int32)


def _tokenize(
    rows: Rows, task: Task, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Ids of the prompt's fixed words, and for each text column between them the ids of every row."""
    words, columns = task.prompt_parts()
    fixed = _token_ids([part.rstrip() for part in words], tokenizer)
    texts = []
    for before, column in zip(words, columns, strict=False):
        space = before[len(before.rstrip()) :]
        stripped = [text.strip() for text in rows.texts[column]]
        texts.append(_token_ids([space + text if text else "" for text in stripped], tokenizer))
    return fixed, texts


def _token_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenizes in bulk, without special tokens, nor a warning about long texts (cut later)."""
    try:
        return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    # The tokenizers library raises plain Exceptions, such as where no token stands for an unknown word.
    except Exception as error:
        raise ValueError(f"tokenizer must encode every text, got {printable(error)}") from error


def _fit(lengths: Sequence[int], room: int) -> list[int]:
    """Shortens the longest lengths until the sum is at most room."""
    kept = list(lengths)
    for done, index in enumerate(sorted(range(len(kept)), key=kept.__getitem__)):
        # From the shortest on: what it leaves of its equal share goes to the longer ones.
        kept[index] = min(kept[index], room // (len(kept) - done))
        room -= kept[index]
    return kept


def _join(fixed: Sequence[list[int]], texts: Sequence[list[int]]) -> list[int]:
    """Alternates fixed words and texts, beginning and ending with fixed words."""
    ids = list(fixed[0])
    for text, words in zip(texts, fixed[1:], strict=True):
        ids += text + words
    return ids


def _pad(
    prompts: Sequence[list[int]], labels: np.ndarray, targets: np.ndarray, has_label_word: bool
) -> dict[str, np.ndarray]:
    """Builds the arrays described at ``Encoded``."""
    positions = np.asarray([len(prompt) - 1 for prompt in prompts], np.int32)
    arrays = {"positions": positions, "targets": targets, "labels": labels}
    if not has_label_word:
        return {"ids": _pad_ids(prompts), **arrays}
    sequences = [[*prompt, target] for prompt, target in zip(prompts, targets.tolist(), strict=True)]
    return {**_sequence_arrays(sequences), **arrays}


def _sequence_arrays(sequences: Sequence[list[int]]) -> dict[str, np.ndarray]:
    """Padded ids, and weights for predicting every token but the first."""
    ids = _pad_ids(sequences)
    column = np.arange(ids.shape[1])
    length = np.asarray([len(sequence) for sequence in sequences])[:, None]
    return {"ids": ids, "weights": ((column > 0) & (column < length)).astype(np.float32)}


def _pad_ids(sequences: Sequence[list[int]]) -> Int32[np.ndarray, "N T"]:
    ids = np.full((len(sequences), max(map(len, sequences))), _PADDING_ID, np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return ids
