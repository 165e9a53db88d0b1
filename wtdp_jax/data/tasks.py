"""Tasks as data: what a row holds, how it becomes a prompt, and which word stands for which label.

A task is next-token classification. The prompt names the text columns in braces and ends where the label word
follows: ``"{sentence} It was"``, then ``" great"`` or ``" terrible"``.
"""

import dataclasses
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Literal

import numpy as np

Split = Literal["train", "dev"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one split, column by column.

    Attributes:
      texts: for each text column's name, one text for each row.
      labels: for each row, the index of its label in the task's ``labels``.
    """

    texts: Mapping[str, Sequence[str]]
    labels: Sequence[int]

    def __post_init__(self) -> None:
        if not self.labels:
            raise ValueError("rows must be at least one, got none")
        for column, values in self.texts.items():
            if len(values) != len(self.labels):
                raise ValueError(
                    f"column {column!r} must have one text for each label, "
                    f"got {len(values)} for {len(self.labels)} labels"
                )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Sequence[int]) -> "Rows":
        """Returns the rows of given numbers, in their order."""
        texts = {column: [values[i] for i in indices] for column, values in self.texts.items()}
        return Rows(texts=texts, labels=[self.labels[i] for i in indices])


def hold_out(rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Splits rows into those that stay and those held out, always the same ones.

    Args:
      rows: at least two.
      fraction: the share to hold out, in (0, 1); at least one row, and not all.

    Raises:
      ValueError: if there is only one row.
    """
    if len(rows) < 2:
        raise ValueError(f"rows must be at least two to hold some out, got {len(rows)}")
    size = held_out_size(len(rows), fraction)
    order = np.random.default_rng(0).permutation(len(rows))
    return rows.take(sorted(order[size:].tolist())), rows.take(sorted(order[:size].tolist()))


def held_out_size(num_rows: int, fraction: float) -> int:
    """Returns how many rows `hold_out` holds out: the fraction, rounded, but at least one and not all."""
    return min(max(1, round(fraction * num_rows)), num_rows - 1)


def _is_inside(folder: str) -> bool:
    """Whether a relative path goes nowhere but down, and is one that a file system can have."""
    path = PurePath(folder)
    return not path.is_absolute() and ".." not in path.parts and folder.isprintable()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubSource:
    """Where the ``datasets`` library finds a task.

    Attributes:
      path: the data set's name on the hub.
      config: the configuration's name, where the data set has several.
      label_column: the label's column there. An integer i in it means the task's i-th label.
      dev_split: the name there of the split to evaluate on.
    """

    path: str
    config: str | None = None
    label_column: str = "label"
    dev_split: str = "validation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A classification task posed as predicting the next token.

    Attributes:
      name: what reports and errors call it.
      prompt: text columns in braces, fixed words around them (``{{`` is a literal brace); it must not end in
        white space, which belongs to the label word.
      label_words: for each label as the files spell it, the word that stands for it. Each begins with a
        space, and must be one token (checked where a tokenizer is at hand). Their order numbers the labels.
      label_column: the label's column in the files.
      folder: the folder inside the data directory that holds ``train.tsv`` and ``dev.tsv``.
      hub: where to find the task without a data directory.
      generate: makes the rows of a task that is generated instead of read.
    """

    name: str
    prompt: str
    label_words: Mapping[str, str]
    label_column: str = "label"
    folder: str = "."
    hub: HubSource | None = None
    generate: Callable[[Split], Rows] | None = None

    def __post_init__(self) -> None:
        if not self.text_columns:
            raise ValueError(f"prompt must name at least one text column in braces, got {self.prompt!r}")
        if self.prompt != self.prompt.rstrip():
            raise ValueError(
                f"prompt must not end in white space (the label word brings it), got {self.prompt!r}"
            )
        if not _is_inside(self.folder):
            raise ValueError(f"folder must be a path inside the data directory, got {self.folder!r}")
        if len(self.label_words) < 2:
            raise ValueError(f"label_words must map at least two labels, got {dict(self.label_words)}")
        for text in (self.prompt, *self.label_words.values()):
            # Half of a surrogate pair, such as stands for a byte that is not UTF-8 on a command line.
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"prompt and label words must be valid Unicode, got {text!r}")
        for word in self.label_words.values():
            if not word[:1].isspace() or not word.strip():
                raise ValueError(f"label word must be a word after a space, got {word!r}")
        if len(set(self.label_words.values())) < len(self.label_words):
            raise ValueError(f"label_words must all differ, got {list(self.label_words.values())}")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels as the files spell them, in the order that numbers them."""
        return tuple(self.label_words)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that the prompt names, in its order."""
        return self.prompt_parts()[1]

    def prompt_parts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Splits the prompt into fixed words and text columns, which alternate.

        Returns:
          The fixed words before each column and at the end (perhaps empty), and the columns: one fewer.

        Raises:
          ValueError: if the braces are unbalanced or hold anything but a column's name.
        """
        try:
            parsed = list(string.Formatter().parse(self.prompt))
        except ValueError as error:
            raise ValueError(f"prompt must have balanced braces, got {self.prompt!r} ({error})") from None
        fixed, columns = [""], []
        for words, column, spec, conversion in parsed:
            if column == "" or spec or conversion:
                raise ValueError(f"prompt must have only column names in braces, got {self.prompt!r}")
            fixed[-1] += words
            if column is not None:
                columns.append(column)
                fixed.append("")
        return tuple(fixed), tuple(columns)

    def with_overrides(
        self, *, prompt: str | None = None, label_words: Sequence[str] | None = None
    ) -> "Task":
        """Returns the task with the user's own wording.

        Args:
          prompt: replaces the prompt.
          label_words: replace the label words, in the order of ``labels``.

        Raises:
          ValueError: if there is not one word for each label, or the result is not a valid task.
        """
        words = tuple(self.label_words.values()) if label_words is None else tuple(label_words)
        if len(words) != len(self.labels):
            raise ValueError(f"label_words must give one word for each of {self.labels}, got {words}")
        return dataclasses.replace(
            self,
            prompt=self.prompt if prompt is None else prompt,
            label_words=dict(zip(self.labels, words, strict=True)),
        )
