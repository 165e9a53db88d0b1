"""Rows of a task: from tab-separated files, from the hub, or generated.

The files are GLUE's: UTF-8, a header line, fields split on tabs alone (a quote is an ordinary character).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from wtdp_jax.data.tasks import HubSource, Rows, Split, Task


def load_split(task: Task, split: Split, data_dir: str | Path | None = None) -> Rows:
    """Returns one split's rows.

    Args:
      task: the task, see ``load_task``.
      split: ``"train"`` or ``"dev"``.
      data_dir: reads ``<data_dir>/<task.folder>/<split>.tsv``; e.g. ``../shared/data``. Without it a
        generated task is generated, and any other one comes from the hub.

    Raises:
      ValueError: in one line, with file and line number where there is one: a missing or malformed file, an
        unknown label, no rows, or a hub that cannot be reached.
    """
    if data_dir is not None:
        return read_tsv(Path(data_dir) / task.folder / f"{split}.tsv", task)
    if task.generate is not None:
        return task.generate(split)
    if task.hub is None:
        raise ValueError(f"task {task.name!r} needs --data-dir: it names no data set on the hub")
    return _load_from_hub(task, task.hub, split)


def read_tsv(path: Path, task: Task) -> Rows:
    """Reads a task's rows from one tab-separated file.

    Raises:
      ValueError: see ``load_split``.
    """
    lines = _decoded_lines(path)
    header = next(lines, [""])
    where = {
        column: _column_index(path, header, column) for column in (*task.text_columns, task.label_column)
    }
    texts: dict[str, list[str]] = {column: [] for column in task.text_columns}
    labels: list[int] = []
    for number, fields in enumerate(lines, start=2):
        if len(fields) != len(header):
            raise ValueError(f"{path}:{number}: must have {len(header)} columns, got {len(fields)}")
        labels.append(_label_index(f"{path}:{number}", task.labels, fields[where[task.label_column]]))
        for column, values in texts.items():
            values.append(fields[where[column]])
    return _rows(str(path), texts, labels)


def _decoded_lines(path: Path) -> Iterator[list[str]]:
    """Yields each line's fields. Only a newline ends a line: texts may hold other line separators."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            # A byte order mark can only stand at the start of the file.
            text = line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: must be UTF-8 ({error.reason})") from None
        yield text.split("\t")


def _column_index(path: Path, header: list[str], column: str) -> int:
    if column not in header:
        raise ValueError(f"{path}:1: header must name column {column!r}, got {', '.join(map(repr, header))}")
    return header.index(column)


def _label_index(place: str, labels: Sequence[str], label: str) -> int:
    if label not in labels:
        raise ValueError(f"{place}: label must be one of {', '.join(map(repr, labels))}, got {label!r}")
    return labels.index(label)


def _rows(place: str, texts: Mapping[str, Sequence[str]], labels: Sequence[int]) -> Rows:
    """Says in an error where the rows come from."""
    try:
        return Rows(texts=texts, labels=labels)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _load_from_hub(task: Task, hub: HubSource, split: Split) -> Rows:
    """Reads a split through ``datasets``, from its cache or the hub."""
    import datasets  # Imported late: it takes seconds, and a run on files never needs it.

    place = f"hub data set {'/'.join(filter(None, (hub.path, hub.config)))}"
    name = {"train": "train", "dev": hub.dev_split}[split]
    try:
        table = datasets.load_dataset(hub.path, hub.config, split=name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{place}: cannot be loaded, give --data-dir instead ({reason})") from None
    if missing := {*task.text_columns, hub.label_column} - set(table.column_names):
        raise ValueError(f"{place}: must have column {min(missing)!r}, got {table.column_names}")
    labels = [
        _label_index(f"{place}, row {row}", task.labels, _spelled(task, label))
        for row, label in enumerate(table[hub.label_column])
    ]
    texts = {column: list(table[column]) for column in task.text_columns}
    return _rows(place, texts, labels)


def _spelled(task: Task, label: int | str) -> str:
    """A hub's label as the files spell it; a number out of range stays one, to be refused by its value."""
    if isinstance(label, int) and 0 <= label < len(task.labels):
        return task.labels[label]
    return str(label)
