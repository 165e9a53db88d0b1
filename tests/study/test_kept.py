"""The small files of a study, which tell the same as the study."""

from pathlib import Path

import pytest

from experiments import report
from tests.study import fakes
from wtdp_jax.run_folder import read_json
from wtdp_jax.study import arms as a
from wtdp_jax.study import kept as kept_module
from wtdp_jax.study.document import write_report
from wtdp_jax.study.folder import StudyFolder
from wtdp_jax.study.kept import keep
from wtdp_jax.study.presets import PRESETS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = [fakes.run(arm, rights) for arm, rights in ((a.TIED_EXACT, 150), (a.UNTIED_EXACT, 170))]
    path = tmp_path / "study"
    path.mkdir()
    fakes.study(path, runs, PRESETS["smoke"].to_json())
    for run in runs:
        for name in ("checkpoints/3/state", "model/model.safetensors", "curves.png", ".lock"):
            (path / run.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (path / run.folder / name).write_text("large")
    return path


def test_a_copy_gives_the_same_report_without_what_is_large(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    report.main(report.ReportConfig(folder=folder, keep=kept))
    large = [p for p in kept.rglob("*") if p.is_file() and p.read_bytes() == b"large"]
    assert not large and (kept / "accuracy.png").exists()
    said = (kept / "report.md").read_text()
    assert said == (folder / "report.md").read_text()
    (kept / "report.md").unlink()
    assert write_report(StudyFolder(kept)).read_text() == said


def test_a_run_that_has_not_ended_is_passed_over(folder: Path, tmp_path: Path) -> None:
    ended, begun = (StudyFolder(folder).path / cell["folder"] for cell in read_json(folder / "cells.json"))
    (begun / "results.json").unlink()
    assert (ended / "config.json").exists() and (begun / "config.json").exists()
    keep(StudyFolder(folder), tmp_path / "kept")
    copies = {tmp_path / "kept" / path.relative_to(folder) for path in (ended, begun)}
    assert {path for path in copies if path.exists()} == {tmp_path / "kept" / ended.relative_to(folder)}


def test_an_older_copy_is_replaced(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    keep(StudyFolder(folder), kept)
    (kept / "stale.csv").touch()
    keep(StudyFolder(folder), kept)
    assert not (kept / "stale.csv").exists() and (kept / "cells.json").exists()


def test_other_files_are_not_removed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").touch()
    with pytest.raises(SystemExit):
        report.main(report.ReportConfig(folder=folder, keep=other))
    assert (other / "mine.txt").exists()
    assert capsys.readouterr().err == f"error: keep must be empty or hold a study, got {other}\n"
    with pytest.raises(ValueError, match="another folder than the study's"):
        keep(StudyFolder(folder), folder / ".." / folder.name)
    assert (folder / "cells.json").exists()
    with pytest.raises(ValueError, match="must hold a study"):
        keep(StudyFolder(other), tmp_path / "new")


@pytest.mark.parametrize("place", [".", "..", "kept", "cells/m"])
def test_neither_is_inside_of_the_other(place: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    (folder.parent / "cells.json").write_text("[]")  # passes for a study
    with pytest.raises(ValueError, match="neither inside of it nor around it, got"):
        keep(StudyFolder(folder), folder / place)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "made",
    [
        "compiled/program",
        "cells/m/t/label_words/tied-exact/8.0/seed-0/checkpoints/3/state",
        "cells/m/t/label_words/tied-exact/8.0/seed-0/model/model.safetensors",
        "selection/m/t/label_words/tied-exact/8.0/lr-0.1/.lock",
        "README.md",
    ],
)
def test_a_study_that_is_worked_on_is_not_removed(made: str, folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    keep(StudyFolder(folder), kept)
    (kept / made).parent.mkdir(parents=True, exist_ok=True)
    (kept / made).touch()
    with pytest.raises(ValueError, match="keep must hold nothing but an older copy") as refusal:
        keep(StudyFolder(folder), kept)
    assert str(refusal.value).endswith(f"got {kept} with {made}") and (kept / made).exists()


def test_a_copy_that_fails_midway_leaves_the_older_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    keep(StudyFolder(folder), kept)
    before = {path: path.read_bytes() for path in kept.rglob("*.json")}
    written = []

    def write_three(path: Path, content: bytes) -> None:
        if len(written) == 3:
            raise OSError("no space left")
        written.append(path)
        path.write_bytes(content)

    monkeypatch.setattr(kept_module, "write_bytes", write_three)
    with pytest.raises(OSError, match="no space left"):
        keep(StudyFolder(folder), kept)
    assert before == {path: path.read_bytes() for path in kept.rglob("*.json")}
    monkeypatch.undo()
    keep(StudyFolder(folder), kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "study"]


def test_a_copy_may_be_reached_by_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "stored").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "stored")
    for _ in range(2):
        keep(StudyFolder(folder), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "stored" / "cells.json").exists()
