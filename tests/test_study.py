"""study.py and report.py as a user meets them, and a study that is killed."""

import csv
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import report, study
from experiments.study import StudyConfig
from wtdp_jax import cli
from wtdp_jax.run_folder import read_json
from wtdp_jax.study import conduct
from wtdp_jax.study.cells import Purpose, cells_of

_SCRIPT = Path(study.__file__)
_SMALL = (
    *("--preset", "smoke", "--arms", "tied-exact", "untied-exact", "tied-naive", "tied-materialize"),
    *("--seeds", "1", "--learning-rates", "0.01", "0.02", "--steps", "4", "--batch-size", "64"),
)


def _script(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(_SCRIPT.parents[1])}
    return subprocess.Popen(
        [sys.executable, str(_SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study that nothing interrupted, with its report."""
    out = tmp_path_factory.mktemp("study") / "whole"
    ended = _script(*_SMALL, "--out", str(out))
    stdout, stderr = ended.communicate()
    assert ended.returncode == 0, stderr
    assert f"python experiments/report.py {out}" in stdout
    report.main(report.ReportConfig(folder=out))
    return out


@pytest.mark.slow
def test_cells_are_run_folders_and_arms_are_comparable(whole: Path) -> None:
    cells = [cell for cell in read_json(whole / "cells.json") if cell["purpose"] == "final"]
    assert len(cells) == 4
    privacy = {cell["arm"]: read_json(whole / cell["folder"] / "privacy.json") for cell in cells}
    assert len({p["noise_multiplier"] for p in privacy.values()}) == 1
    assert privacy["tied-exact"]["epsilon"] == pytest.approx(8.0, rel=2e-3)
    assert (
        privacy["tied-naive"]["epsilon"]
        > privacy["tied-naive"]["epsilon_claimed"]
        == pytest.approx(8.0, rel=2e-3)
    )
    for cell in cells:
        names = {path.name for path in (whole / cell["folder"]).iterdir()}
        assert {"config.json", "results.json", "metrics.jsonl", "curves.png", "model"} <= names
        assert "checkpoints" not in names


@pytest.mark.slow
def test_settings_were_chosen_on_training_rows(whole: Path) -> None:
    choices = read_json(whole / "choices.json")
    assert len(choices) == 3
    for choice in choices.values():
        assert len(choice["candidates"]) == 2
        for candidate in choice["candidates"]:
            settings = read_json(whole / candidate["folder"] / "config.json")["settings"]
            results = read_json(whole / candidate["folder"] / "results.json")
            assert settings["held_out_fraction"] == 0.05 and results["num_eval_examples"] == 500
            assert results["num_train_examples"] == 9500
            assert results["loss"] == candidate["held_out_loss"]
            assert (
                results["accuracy"] == candidate["held_out_accuracy"] <= choice["chosen"]["held_out_accuracy"]
            )


@pytest.mark.slow
def test_the_cross_term_and_materializing_are_one_mechanism(whole: Path) -> None:
    (row,) = _rows(whole / "same_update.csv")
    assert row["arm"] == "tied-materialize" and row["steps"] == "4" and row["same"] == "True"
    assert float(row["non_private_largest_loss_difference"]) < 1e-4


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_tables(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    process = _script(*_SMALL, "--out", str(out), "--jobs", "2")
    deadline = time.monotonic() + 300
    while not list(out.glob("selection/**/metrics.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(out.glob("cells/**/results.json"))
    time.sleep(2)  # the workers notice
    ended = _script(*_SMALL, "--out", str(out), "--jobs", "2")
    _, stderr = ended.communicate()
    assert ended.returncode == 0, stderr
    assert len(read_json(out / "study.json")["begun"]) == 1
    report.main(report.ReportConfig(folder=out))
    for name in ("accuracy", "untied_minus_tied", "factors", "choices"):
        assert _rows(out / f"{name}.csv") == _rows(whole / f"{name}.csv")


@pytest.mark.slow
def test_a_finished_study_does_nothing_again(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.glob("*/**/results.json")}
    ended = _script(*_SMALL, "--out", str(whole), "--jobs", "1")
    stdout, _ = ended.communicate()
    assert ended.returncode == 0 and "4 of 4 final runs were finished before" in stdout
    commands = [row["command"] for row in read_json(whole / "study.json")["begun"]]
    assert [command.endswith("--jobs 1") for command in commands] == [False, True]
    assert before == {path: path.stat().st_mtime_ns for path in before}
    ended = _script(*_SMALL, "--out", str(whole), "--steps", "5")
    _, stderr = ended.communicate()
    assert ended.returncode == 2 and stderr.startswith("error: ") and "steps was " in stderr


@pytest.mark.slow
def test_another_model_of_the_same_name_is_refused(whole: Path) -> None:
    """Here a trained one."""
    (cell,) = [
        cell for cell in read_json(whole / "cells.json") if cell["folder"].startswith("cells/embedded/")
    ][:1]
    other = whole / cell["folder"] / "model"
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    ended = _script(*_SMALL, "--models", f"embedded={other}", "--out", str(whole))
    stdout, stderr = ended.communicate()
    assert ended.returncode == 2 and not stdout and stderr.count("\n") == 1
    assert stderr.startswith("error: model embedded must be that of ") and f", got {other} (finger" in stderr
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*")}


@pytest.mark.slow
def test_a_dry_run_lists_and_estimates_and_writes_nothing(whole: Path, tmp_path: Path) -> None:
    ended = _script(*_SMALL, "--out", str(tmp_path / "none"), "--dry-run")
    stdout, stderr = ended.communicate()
    assert ended.returncode == 0, stderr
    lines = stdout.splitlines()
    assert sum(line.startswith(("cells/", "selection/")) for line in lines) == 10
    assert "10 runs, about " in stdout and "measured now for tied bookkeeping" in stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("diverged", "status", "line"),
    [
        ({"selection": 0}, 0, ""),
        ({"selection": 1}, 0, "note: 1 selection run diverged, whose settings are not chosen: selection/"),
        ({"final": 2}, 1, "error: 2 final runs diverged, and the same command does not try again: cells/"),
        ({"selection": 7}, 0, "note: 7 selection runs diverged, whose settings are not chosen: selection/"),
    ],
)
def test_a_final_run_that_diverged_is_no_success(
    diverged: dict[Purpose, int],
    status: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = StudyConfig(out=tmp_path, arms=("tied-exact",), seeds=7, clip_norms=(1.0, 2.0, 3.0, 4.0))
    cells = list(cells_of(config.grid()))
    gone = [
        cell for purpose, n in diverged.items() for cell in [c for c in cells if c.purpose == purpose][:n]
    ]
    for cell in gone:
        (tmp_path / cell.folder).mkdir(parents=True)
        (tmp_path / cell.folder / "diverged.json").touch()
    monkeypatch.setattr(conduct.Study, "conduct", lambda study: [])
    assert study.main(config) == status
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith("all runs are finished: ") == (status == 0)
    assert stderr.startswith(line) and stderr.count("\n") == bool(line)
    assert stderr.count("/tied-exact/") == min(len(gone), 5) and ("..." in stderr) == (len(gone) > 5)


def test_what_is_given_takes_the_presets_place() -> None:
    grid = StudyConfig(preset="paper", steps=7, seeds=1, tasks=("sst2",)).grid()
    assert (grid.steps, grid.epochs, grid.seeds, grid.tasks) == (7, None, 1, ("sst2",))
    assert grid.models == ("gpt2", "distilgpt2")
    assert len(grid.measured) == 3 and StudyConfig(preset="paper", measured=()).grid().measured == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "jobs must be at least 1, got 0"),
        (["--arms", "tied"], "arms must be among tied-nonprivate, "),
        (["--steps", "3", "--epochs", "1"], "give steps or epochs, not both"),
        (["--tasks", "sst2", "--data-dir", "nowhere"], "nowhere/SST-2/train.tsv: cannot be read"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["study.py", "--out", str(tmp_path / "out"), *arguments])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(_SCRIPT), run_name="__main__")
    assert leaving.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"error: {message}") and stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_report_of_nothing_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path)])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(report.__file__), run_name="__main__")
    assert leaving.value.code == 2
    assert capsys.readouterr().err == f"error: folder must hold a study (cells.json), got {tmp_path}\n"


def test_the_commands_in_the_docstring_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(study.__doc__).replace("\\\n", " ")
    commands = [
        line.split()[2:] for line in text.splitlines() if line.startswith("    python experiments/study")
    ]
    assert len(commands) == 2
    for arguments in commands:
        monkeypatch.setattr(sys, "argv", ["study.py", *arguments])
        assert cli.parse(StudyConfig).preset in ("smoke", "laptop")
