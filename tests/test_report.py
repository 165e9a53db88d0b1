import subprocess
from pathlib import Path

import pytest

from wtdp_jax import report

_ROWS = [
    {"step": 0, "eval_loss": 1.0, "eval_accuracy": 0.5},
    {"step": 1, "seconds": 9.0, "non_private_loss": 1.5},  # with compilation
    {"step": 2, "seconds": 0.5, "non_private_loss": None},
    {"step": 3, "seconds": 0.25, "non_private_loss": 1.0, "eval_loss": None, "eval_accuracy": 0.75},
]


def test_speed_is_the_median_steps():
    assert report.speed(_ROWS, batch_size=8) == {
        "median_step_seconds": 0.5,
        "steps_per_second": 2.0,
        "examples_per_second": 16.0,
    }
    assert set(report.speed(_ROWS[:1], batch_size=8).values()) == {None}


@pytest.mark.parametrize("rows", [_ROWS, _ROWS[:1], []])
def test_curves_are_drawn_from_whatever_was_measured(tmp_path: Path, rows: list[dict]):
    report.plot_curves(tmp_path / "curves.png", rows)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1


def test_memory_and_device_are_named():
    size, owner = report.peak_memory()
    assert size > 2**20 and owner in ("device", "process")
    assert report.device().keys() == {"kind", "platform", "count"}
    assert report.versions()["wtdp-jax"] == report.computation()["wtdp_jax"]


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit() -> str | None:
        return report.commit.__wrapped__()

    source = tmp_path / "report.py"
    source.touch()
    monkeypatch.setattr(report, "__file__", str(source))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    git("init")
    assert commit() is None  # a repository, but of other files
    git("add", "report.py")
    git("commit", "-m", "first")
    assert commit() == git("rev-parse", "HEAD")
    source.write_text("changed")
    assert commit() == git("rev-parse", "HEAD") + "+"
