"""A run's folder: what lies where, who may write it, and whether a run fits one that is already there.

Every file but metrics.jsonl is written whole or not at all, so a crash leaves each file as it was before.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wtdp_jax.config import WITHOUT_EFFECT_ON_VALUES

Record = Mapping[str, Mapping[str, Any]]
"""What a run is: {"settings": ..., "identity": data, model, software and device, "plan": steps and noise}."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """Settings and identity of the run."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line a step."""
        return self.path / "metrics.jsonl"

    @property
    def privacy(self) -> Path:
        """The privacy statement."""
        return self.path / "privacy.json"

    @property
    def results(self) -> Path:
        """The figures at the end; the run is complete when this file is there."""
        return self.path / "results.json"

    @property
    def checkpoints(self) -> Path:
        """Orbax checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model in Hugging Face form."""
        return self.path / "model"

    @property
    def predictions(self) -> Path:
        """For each evaluation example its label, and whether the trained model gets it right."""
        return self.path / "predictions.json"

    @property
    def curves(self) -> Path:
        """Training curves."""
        return self.path / "curves.png"

    def check(self, record: Record, *, resume: bool) -> None:
        """Refuses a folder that this run must not write to; writes nothing.

        Args:
          record: what the run is; a part that is not known yet may be left out.
          resume: whether the run may continue the one in the folder.

        Raises:
          ValueError: if the folder holds anything but the same run, or holds it and `resume` is off.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ValueError(f"out must be a folder, got the file {self.path}")
        if not self.config.exists():
            if others := sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".")):
                raise ValueError(f"out must be empty or hold a run, got {self.path} with {others[0]!r}")
            return
        differing = differences(read_json(self.config), record)
        if differing:
            raise ValueError(f"{self.path} holds a run with another configuration: {'; '.join(differing)}")
        if not resume:
            raise ValueError(f"{self.path} already holds this run: add --resume, or choose another out")

    @contextlib.contextmanager
    def claimed(self, record: Record, *, resume: bool) -> Iterator[None]:
        """Creates the folder and keeps other processes out, until this one ends in whatever way.

        Args:
          record: what the run is, whole.
          resume: whether the run may continue the one in the folder.

        Raises:
          ValueError: see `check`.
          BlockingIOError: if another process holds the folder.
        """
        self.check(record, resume=resume)
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(f"{self.path} is in use by another process") from None
            # Another process may have come and gone since the first look.
            self.check(record, resume=resume)
            yield


def differences(saved: Record, current: Record) -> list[str]:
    """Names what differs between two records, in the parts that both have, as `name: saved, now current`."""
    return [
        f"{name} was {saved[part].get(name)!r}, now {current[part].get(name)!r}"
        for part in saved.keys() & current.keys()
        for name in sorted(saved[part].keys() | current[part].keys())
        if name not in WITHOUT_EFFECT_ON_VALUES and saved[part].get(name) != current[part].get(name)
    ]


def read_json(path: Path) -> Any:
    """Returns a JSON file's content.

    Raises:
      ValueError: with file and line, if it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: must be JSON ({error.msg})") from None


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: a reader, or a crash, never sees half of it."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
