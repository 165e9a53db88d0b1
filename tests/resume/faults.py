"""Faults for `tests.resume.child`: each is a call that plants one in the process it is made in."""

import dataclasses
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from wtdp_jax import metrics, report, run_folder, train
from wtdp_jax.models import hf_files

_CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


def kill() -> None:
    """Ends this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal takes a moment, in which nothing more must happen


def before_each_change(folder: str, call: Callable[[], None]) -> None:
    """Has a function called before each change below a folder, as long as the process lives."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            changes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        else:
            path, changes = args[0] if args else None, event in _CHANGES
        if changes and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(folder):
            call()

    sys.addaudithook(hook)


@dataclasses.dataclass(frozen=True)
class KillBeforeChange:
    """Before the run folder is changed for the n-th time, counted from 1."""

    number: int
    out: Path

    def __call__(self) -> None:
        numbers = itertools.count(1)
        before_each_change(str(self.out), lambda: kill() if next(numbers) == self.number else None)


@dataclasses.dataclass(frozen=True)
class KillWhileSaving:
    """Some seconds after Orbax begins to write the n-th checkpoint of this process, counted from 1."""

    number: int
    seconds: float

    def __call__(self) -> None:
        numbers, save = itertools.count(1), ocp.Checkpointer.save

        def saving(*args: Any, **kwargs: Any) -> None:
            if next(numbers) == self.number:
                threading.Timer(self.seconds, kill).start()
            save(*args, **kwargs)

        ocp.Checkpointer.save = saving


@dataclasses.dataclass(frozen=True)
class KillWithinLine:
    """When half of a step's line is in metrics.jsonl."""

    step: int

    def __call__(self) -> None:
        append = metrics.MetricsLog.append

        def half(log: metrics.MetricsLog, step: int, **values: Any) -> None:
            if step != self.step:
                return append(log, step, **values)
            line = metrics._to_line({"step": step, **values})
            log._file.write(line[: len(line) // 2])
            log._file.flush()
            kill()

        metrics.MetricsLog.append = half


@dataclasses.dataclass(frozen=True)
class KillWithinFile:
    """When half of a JSON file is written for the n-th time, counted from 1."""

    name: str
    number: int = 1

    def __call__(self) -> None:
        numbers, write_bytes = itertools.count(1), run_folder.write_bytes

        def half(path: Path, content: bytes) -> None:
            if path.name == self.name and next(numbers) == self.number:
                path.with_name(f".{path.name}.partial").write_bytes(content[: len(content) // 2])
                kill()
            write_bytes(path, content)

        run_folder.write_bytes = half


@dataclasses.dataclass(frozen=True)
class KillWithinModel:
    """When half of the model's weights are written."""

    def __call__(self) -> None:
        save_file = hf_files.save_file

        def half(tensors: Any, path: Path, **kwargs: Any) -> None:
            save_file(tensors, path, **kwargs)
            os.truncate(path, path.stat().st_size // 2)
            kill()

        hf_files.save_file = half


def limit_files(size: int) -> None:
    """Has no file grow beyond a size in bytes from now on, as on a full disk; -1: no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size < 0 else size, hard))


PLACES: dict[str, tuple[Any, str]] = {
    "checkpoint": (ocp.Checkpointer, "save"),
    "metrics": (metrics.MetricsLog, "append"),
    "file": (run_folder, "write_bytes"),
    "curves": (report, "plot_curves"),
    "model": (train, "save_pretrained"),
}
"""Functions that write, by what they write."""


def full_disk(
    place: str, number: int, size: int = 1, patch: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Lets the disk be full when one of `PLACES` is to write for the n-th time.

    Args:
      place: of `PLACES`.
      number: counted from 1.
      size: in bytes; no file grows beyond it.
      patch: plants the fault.
    """
    owner, name = PLACES[place]
    numbers, write = itertools.count(1), getattr(owner, name)

    def writing(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            limit_files(size)
        return write(*args, **kwargs)

    patch(owner, name, writing)


@dataclasses.dataclass(frozen=True)
class WaitAtLine:
    """Before a step's line is logged, until a file is there; says so by another."""

    step: int
    waiting: Path
    go_on: Path

    def __call__(self) -> None:
        append = metrics.MetricsLog.append

        def wait(log: metrics.MetricsLog, step: int, **values: Any) -> None:
            if step == self.step:
                self.waiting.touch()
                while not self.go_on.exists():
                    time.sleep(0.05)
            append(log, step, **values)

        metrics.MetricsLog.append = wait
