"""A checkpoint that is not what was written, or is another run's, is named, and the one before it is used."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.resume import small
from tests.resume.conftest import Finetune
from wtdp_jax.checkpoint import CheckpointError, Checkpoints
from wtdp_jax.metrics import read_metrics
from wtdp_jax.run_folder import read_json, write_json

_SEED = 20260731


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    where = random.Random(_SEED).randrange(8 * len(content))
    content[where // 8] ^= 1 << where % 8
    path.write_bytes(content)


_DAMAGES: tuple[Callable[[Path], None], ...] = (Path.unlink, _truncate, _flip_a_bit)


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damage_to_any_file_is_noticed(
    tmp_path: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
):
    path, run = tmp_path / "checkpoints", {"settings": {"seed": 1}}
    with Checkpoints(path, run) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, small.state(step))
        files = sorted(file.relative_to(path) for file in (path / "4").rglob("*") if file.is_file())
        assert len(files) > 5
        shutil.copytree(path / "4", tmp_path / "whole")
        for file in files:
            damage(path / file)
            step, state = checkpoints.restore(like=small.state(0))
            assert step == 2 and int(state.opt_state[0]) == 2
            said = capfd.readouterr().err
            assert said.startswith("warning: checkpoint 4 is broken (") and said.count("\n") == 1
            assert said.endswith("; going on from step 2\n")
            assert checkpoints.steps == [2]
            shutil.copytree(tmp_path / "whole", path / "4")
        assert checkpoints.restore(like=small.state(0)).step == 4
    assert capfd.readouterr().err == ""


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    out = tmp_path / "run"
    with pytest.raises(small.Stopped):
        small.run(out, stop_before=5)
    return out


def _weights(checkpoint: Path) -> Path:
    """The file of a checkpoint that holds most."""
    return max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


@pytest.mark.parametrize("damage", _DAMAGES)
def test_ends_in_the_same_bits(
    stopped: Path,
    left_in_peace: Path,
    damage: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
):
    damage(_weights(stopped / "checkpoints" / "4"))
    small.run(stopped, resume=True)
    assert capsys.readouterr().err.startswith("warning: checkpoint 4 is broken (its files are not those that")
    assert small.ending(stopped) == small.ending(left_in_peace)


def test_log_and_guarantee_go_back_with_it(stopped: Path):
    _truncate(_weights(stopped / "checkpoints" / "4"))
    with pytest.raises(small.Stopped):
        small.run(stopped, resume=True, stop_before=1)
    assert [row["step"] for row in read_metrics(stopped / "metrics.jsonl")] == [0, 1, 2]
    assert read_json(stopped / "privacy.json")["steps"] == 2


def test_another_runs_checkpoint_is_not_taken(
    stopped: Path, left_in_peace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The shapes are the same, and Orbax would read it."""
    with pytest.raises(small.Stopped):
        small.run(tmp_path / "other", stop_before=5, seed=8)
    shutil.rmtree(stopped / "checkpoints" / "4")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "4", stopped / "checkpoints" / "4")
    small.run(stopped, resume=True)
    said = capsys.readouterr().err
    assert said.startswith(
        "warning: checkpoint 4 is of a run with another configuration (seed was 8, now 7); "
    )
    assert small.ending(stopped) == small.ending(left_in_peace)


def test_another_steps_checkpoint_is_not_taken(
    stopped: Path, left_in_peace: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(stopped / "checkpoints" / "2", stopped / "checkpoints" / "5")
    small.run(stopped, resume=True)
    assert "checkpoint 5 is broken (it was written as checkpoint 2); going on from" in capsys.readouterr().err
    assert small.ending(stopped) == small.ending(left_in_peace)


def test_an_edited_seal_does_not_fit(stopped: Path, left_in_peace: Path, capsys: pytest.CaptureFixture[str]):
    path = stopped / "checkpoints" / "4" / "seal.json"
    seal = read_json(path)
    seal["run"]["settings"]["seed"] = 8
    write_json(path, seal)
    small.run(stopped, resume=True)
    assert "checkpoint 4 is broken" in capsys.readouterr().err
    assert small.ending(stopped) == small.ending(left_in_peace)


def test_without_a_whole_one_nothing_is_touched(stopped: Path):
    for step in (2, 4):
        _truncate(_weights(stopped / "checkpoints" / str(step)))
    before = small.contents(stopped)
    with pytest.raises(
        CheckpointError, match="holds no checkpoint to go on from: 4 is broken .*; 2 is broken"
    ) as e:
        small.run(stopped, resume=True)
    assert "\n" not in str(e.value)
    assert small.contents(stopped) == before


@pytest.mark.slow
def test_the_script_says_so_in_one_line(finetune: Finetune, whole: Path, tmp_path: Path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    _flip_a_bit(_weights(out / "checkpoints" / "5"))
    (out / "results.json").unlink()
    ended = finetune(out, resume=True)
    assert ended.status == 0 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("warning: checkpoint 5 is broken")
    assert small.ending(out) == small.ending(whole)
    for step in (4, 5):
        _truncate(_weights(out / "checkpoints" / str(step)))
    ended = finetune(out, resume=True)
    assert ended.status == 2 and ended.stdout == ""
    assert ended.stderr.startswith(f"error: {out / 'checkpoints'} holds no checkpoint to go on from: ")
    assert ended.stderr.count("\n") == 1
