"""Checkpoints: everything that the steps to come depend on, in Orbax, each under a seal.

A checkpoint holds the random keys too, and whoever has them can take the noise off: the folder is its owner's
alone. The seal says which step of which run it is, with a digest of its files, because Orbax reads flipped
bytes without complaint, and another run's checkpoint if the shapes are the same.
"""

import contextlib
import dataclasses
import gc
import hashlib
import io
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from wtdp_jax.run_folder import Record, differences, read_json, write_json

NUM_KEPT = 2
"""Checkpoints kept, so that there is another if one turns out to be broken."""

_STATE, _SEAL, _STAGED = "state", "seal.json", ".staged"

# Orbax's threads go on for a moment after one has failed.
_SECONDS_TO_FALL_SILENT = 0.5


class CheckpointError(OSError):
    """A checkpoint cannot be written, or a run has none that it could go on from."""


# Fields are Any: JAX also builds trees of placeholders in this form.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state of a run after a number of whole steps.

    Attributes:
      trained: the trained parameters; frozen leaves are None.
      opt_state: the optimizer chain's state, with the noise's step count.
      streams: the keys of all randomness, see `wtdp_jax.streams.Streams`.
    """

    trained: Any
    opt_state: Any
    streams: Any


class Restored(NamedTuple):
    """A state, and the number of steps that led to it."""

    step: int
    state: TrainState


class Checkpoints:
    """The checkpoints of one run, by step; a context manager."""

    def __init__(self, path: Path, record: Record) -> None:
        """Opens the folder of checkpoints, which the first one creates.

        Args:
          path: the folder; readable by its owner alone from now on.
          record: what the run is, as JSON values.
        """
        self._path, self._record = path.absolute(), record
        self._orbax = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        if self._path.exists():
            self._path.chmod(0o700)
        shutil.rmtree(self._path / _STAGED, ignore_errors=True)  # what a crash left unfinished

    @property
    def steps(self) -> list[int]:
        """Steps that there is a checkpoint of, whole or broken, in order."""
        paths = self._path.iterdir() if self._path.exists() else ()
        return sorted(int(path.name) for path in paths if path.name.isdecimal())

    def save(self, step: int, state: TrainState) -> None:
        """Writes a state, whole or not at all; one that is already there for this step stays.

        Raises:
          CheckpointError: if it cannot be written; all that was there before is there still.
        """
        if step in self.steps:
            return
        staged = self._path / _STAGED
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
            with _failing_quietly():
                self._orbax.save(staged / _STATE, args=ocp.args.StandardSave(state))
            digest = _digest(staged, step, self._record)
            write_json(staged / _SEAL, {"step": step, "run": self._record, "sha256": digest})
            staged.rename(self._path / str(step))
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise CheckpointError(f"checkpoint {step} cannot be written: {error}") from error
        for old in self.steps[:-NUM_KEPT]:
            shutil.rmtree(self._path / str(old))

    def restore(self, like: TrainState) -> Restored | None:
        """Returns the newest whole state, or None if there is no checkpoint at all.

        Newer ones that are broken, or another run's, are named on stderr and removed: the steps after the one
        returned will be taken again, to the same bits.

        Args:
          like: gives structure, shapes, dtypes and placement.

        Raises:
          CheckpointError: if there are checkpoints, and none is whole and of this run; nothing is removed.
        """
        faults: dict[int, str] = {}
        for step in reversed(self.steps):
            fault = self._fault(step)
            if fault is not None:
                faults[step] = fault
                continue
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            args = ocp.args.StandardRestore(abstract)
            state = self._orbax.restore(self._path / str(step) / _STATE, args=args)
            for broken, reason in faults.items():
                print(f"warning: checkpoint {broken} {reason}; going on from step {step}", file=sys.stderr)
                shutil.rmtree(self._path / str(broken))
            return Restored(step, state)
        if faults:
            reasons = "; ".join(f"{step} {fault}" for step, fault in faults.items())
            raise CheckpointError(f"{self._path} holds no checkpoint to go on from: {reasons}")
        return None

    def _fault(self, step: int) -> str | None:
        """What is wrong with a checkpoint, in words that follow its number; None if nothing is."""
        folder = self._path / str(step)
        try:
            seal = read_json(folder / _SEAL)
            if seal["sha256"] != _digest(folder, seal["step"], seal["run"]):
                return "is broken (its files are not those that were written)"
            if seal["step"] != step:
                return f"is broken (it was written as checkpoint {seal['step']})"
        except (OSError, ValueError, TypeError, KeyError) as error:
            return f"is broken (its {_SEAL} cannot be read: {error})"
        if differing := differences(seal["run"], self._record):
            return f"is of a run with another configuration ({', '.join(differing)})"
        return None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._orbax.close()


@contextlib.contextmanager
def _failing_quietly() -> Iterator[None]:
    """Turns what Orbax raises into an OSError, and keeps off stderr what its threads say of it: pages."""
    said, reason, disabled = io.StringIO(), None, logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(said):
            try:
                yield
            except Exception as error:  # a full disk comes as one of many types
                reason = str(error).partition("\n")[0]
            if reason is not None:
                time.sleep(_SECONDS_TO_FALL_SILENT)
                gc.collect()  # futures whose error no one asked for speak when they go
    finally:
        logging.disable(disabled)
    if reason is not None:
        raise OSError(reason)
    sys.stderr.write(said.getvalue())


def _digest(folder: Path, step: int, record: Record) -> str:
    """The SHA-256 of names and contents of a checkpoint's files, and of what it is said to be."""
    digest = hashlib.sha256(json.dumps([step, record], sort_keys=True).encode())
    for path in sorted((folder / _STATE).rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f";{path.relative_to(folder).as_posix()} {content}".encode())
    return digest.hexdigest()
