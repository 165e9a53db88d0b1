"""Real processes, killed with SIGKILL wherever it hurts, and resumed: the bits of a run in peace."""

import contextlib
import random
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.resume import small
from tests.resume.conftest import Finetune
from tests.resume.faults import (
    KillBeforeChange,
    KillWhileSaving,
    KillWithinFile,
    KillWithinLine,
    KillWithinModel,
    before_each_change,
)

_SEED = 20260731

# Each is planted in the process that resumes after the one before: a run that is killed again and again.
_EVERYWHERE = (
    KillWithinFile("config.json"),
    KillWithinLine(0),
    KillWhileSaving(1, 0.0),
    KillWithinFile("privacy.json"),
    KillWithinLine(2),
    KillWhileSaving(1, 0.02),
    KillWithinFile("seal.json", 2),
    KillWithinModel(),
    KillWithinFile("results.json"),
)


def _resumed(finetune: Finetune, out: Path) -> dict:
    """What a run ends in that is now left in peace."""
    ended = finetune(out, resume=True)
    assert ended.status == 0 and ended.stderr == ""
    return small.ending(out)


@pytest.mark.slow
def test_killed_in_every_place(finetune: Finetune, whole: Path, tmp_path: Path):
    out = tmp_path / "run"
    for fault in _EVERYWHERE:
        ended = finetune(out, fault, resume=True)
        assert ended.status == -signal.SIGKILL, (fault, ended)
    assert _resumed(finetune, out) == small.ending(whole)


@pytest.mark.slow
def test_killed_at_random(finetune: Finetune, whole: Path, tmp_path: Path):
    """Before any change of a file, or at any moment of Orbax's writing: its threads make no Python calls."""
    rng, out, kills = random.Random(_SEED), tmp_path / "run", 0
    while kills < 6:
        change = KillBeforeChange(rng.randint(1, 50), out)
        moment = KillWhileSaving(rng.randint(1, 2), rng.uniform(0.0, 0.15))
        ended = finetune(out, rng.choice((change, moment)), resume=True)
        if ended.status == 0:
            break
        assert ended.status == -signal.SIGKILL, ended
        kills += 1
    assert kills >= 3
    assert _resumed(finetune, out) == small.ending(whole)


class _Snapshots:
    """Copies of a run folder as it is before each change, which is what a kill at that moment leaves."""

    def __init__(self, out: Path, copies: Path) -> None:
        self._out, self._copies, self._lock = out, copies, threading.Lock()
        self._seen: set[int] = set()
        self.is_on = True

    def take(self) -> None:
        if not self.is_on:
            return
        with self._lock:
            copy = self._copies / str(len(self._seen))
            # Orbax's threads may rename a file meanwhile.
            shutil.copytree(self._out, copy, copy_function=_copy_if_there)
            files = small.contents(copy)
            # What is not finished goes at once, so one copy of each stage of it is enough.
            names = tuple(sorted(name.split("state")[0] if ".staged" in name else name for name in files))
            content = hash((names, *(files[name] for name in sorted(files) if ".staged" not in name)))
            if content in self._seen:
                shutil.rmtree(copy)
            self._seen.add(content)


def _copy_if_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(source, target)


@pytest.mark.slow
def test_killed_before_any_change(tmp_path: Path):
    """In one process, from copies of the folder: all that a kill could leave, as far as Python can tell."""
    out, copies = tmp_path / "run", tmp_path / "copies"
    copies.mkdir()
    snapshots = _Snapshots(out, copies)
    out.mkdir()
    before_each_change(str(out), snapshots.take)
    small.run(out)
    snapshots.is_on = False
    left = list(copies.iterdir())
    assert len(left) > 5
    for folder in left:
        small.run(folder, resume=True)
        assert small.ending(folder) == small.ending(out)
