"""A full disk stops a run in one line and loses nothing; with room again, the run ends in the same bits.

A limit on the size of files stands for the disk: Orbax's own threads meet it too, and no test needs a mount.
"""

import functools
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.resume import small
from tests.resume.conftest import Finetune
from tests.resume.faults import full_disk, limit_files
from wtdp_jax.checkpoint import CheckpointError, Checkpoints
from wtdp_jax.metrics import read_metrics
from wtdp_jax.models.hf_files import write_folder
from wtdp_jax.run_folder import read_json


def _run_out_of_room(out: Path, place: str, number: int) -> str:
    """Runs until the disk is full; returns what is said then, and makes room."""
    with pytest.MonkeyPatch.context() as patch:
        full_disk(place, number, patch=patch.setattr)
        try:
            with pytest.raises(OSError) as raised:
                small.run(out)
        finally:
            limit_files(-1)
    return str(raised.value)


# The nine files: config, privacy twice, the seals of steps 0, 2, 4 and 5, predictions, results.
@pytest.mark.parametrize(
    ("place", "number"),
    [
        *(("checkpoint", number) for number in (1, 2, 4)),
        *(("metrics", number) for number in (1, 2, 6)),
        *(("file", number) for number in range(1, 10)),
        ("curves", 1),
        ("model", 1),
    ],
)
def test_goes_on_when_there_is_room(left_in_peace: Path, tmp_path: Path, place: str, number: int):
    out = tmp_path / "run"
    message = _run_out_of_room(out, place, number)
    assert "File too large" in message and "\n" not in message
    small.run(out, resume=True)
    assert small.ending(out) == small.ending(left_in_peace)


def test_what_was_there_stays(tmp_path: Path):
    out = tmp_path / "run"
    assert _run_out_of_room(out, "checkpoint", 3).startswith("checkpoint 4 cannot be written: ")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["0", "2"]
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    # There was no room either to say that the run stopped: what is planned is no smaller.
    assert read_json(out / "privacy.json")["status"].startswith("planned")


@pytest.mark.parametrize("tokenizer", [None, tiny.tokenizer()])
def test_what_a_models_writers_raise_is_an_os_error(tmp_path: Path, tokenizer: Any):
    weights = np.zeros(50 if tokenizer else 5000, np.float32)
    limit_files(1000)
    try:
        with pytest.raises(OSError, match="model cannot be written: .*too large"):
            write_folder(tmp_path / "model", {}, {"a": weights}, tokenizer)
    finally:
        limit_files(-1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("size", [1, 100, 700, 5000, 30_000])
def test_what_orbax_raises_comes_as_one_line(tmp_path: Path, size: int, capfd: pytest.CaptureFixture[str]):
    """From some sizes on its threads are the ones to fail, each with a page to say."""
    with Checkpoints(tmp_path / "checkpoints", {}) as checkpoints:
        checkpoints.save(0, small.state(0))
        limit_files(size)
        try:
            with pytest.raises(CheckpointError, match="^checkpoint 1 cannot be written: .*") as raised:
                checkpoints.save(1, small.state(1))
        finally:
            limit_files(-1)
        assert checkpoints.restore(like=small.state(1)).step == 0
        checkpoints.save(1, small.state(1))
        assert checkpoints.restore(like=small.state(0)).step == 1
    gc.collect()
    assert "File too large" in str(raised.value) and "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_the_script_says_why_in_one_line(finetune: Finetune, whole: Path, tmp_path: Path):
    out = tmp_path / "run"
    unwritten = "error: checkpoint 2 cannot be written: "
    for place, number, size, message in (
        ("checkpoint", 2, 1, unwritten),
        ("checkpoint", 1, 1400, unwritten),
        ("metrics", 2, 1, "error: [Errno 27] File too large\n"),
        ("model", 1, 1000, f"error: {out / 'model'} cannot be written: "),
    ):
        ended = finetune(out, functools.partial(full_disk, place, number, size), resume=True)
        assert ended.status == 2 and ended.stdout == ""
        assert ended.stderr.startswith(message) and "File too large" in ended.stderr
        assert ended.stderr.count("\n") == 1
    assert finetune(out, resume=True).status == 0
    assert small.ending(out) == small.ending(whole)
