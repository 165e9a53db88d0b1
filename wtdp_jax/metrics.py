"""The measurements of a run: metrics.jsonl, one JSON object a line, one line a step."""

import json
import math
import os
from pathlib import Path
from typing import Any

from wtdp_jax.run_folder import write_bytes


class MetricsLog:
    """Appends to metrics.jsonl; a value that is not finite is logged as null, all that JSON has for it."""

    def __init__(self, path: Path, *, keep_through_step: int = -1) -> None:
        """Opens the log, and first cuts it back.

        Args:
          path: the file; created if absent.
          keep_through_step: last step whose line stays. What later steps had logged goes, as does a line that
            a crash cut short.
        """
        kept = [_to_line(row) for row in read_metrics(path) if row["step"] <= keep_through_step]
        write_bytes(path, "".join(kept).encode())
        self._file = path.open("a", encoding="utf-8")

    def append(self, step: int, **values: float | int | None) -> None:
        """Adds one line, which a reader sees at once."""
        self._file.write(_to_line({"step": step, **values}))
        self._file.flush()

    def sync(self) -> None:
        """Waits until every line is on the disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a metrics.jsonl; an absent file has none, an unfinished line is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _to_line(row: dict[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
