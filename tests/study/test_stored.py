"""The studies that are stored: their reports say what their run folders do."""

import json
import re
import shutil
from pathlib import Path

import pytest

from experiments import norm_gap
from wtdp_jax.run_folder import read_json
from wtdp_jax.study.document import write_report
from wtdp_jax.study.folder import StudyFolder

_RESULTS = Path(__file__).parents[2] / "experiments" / "results"
STUDIES = sorted(path.parent.name for path in _RESULTS.glob("*/cells.json"))


@pytest.mark.parametrize("name", STUDIES)
def test_a_report_follows_from_its_runs(name: str, tmp_path: Path) -> None:
    stored, copy = _RESULTS / name, tmp_path / name
    shutil.copytree(stored, copy)
    for path in (copy / "report.md", *copy.glob("*.csv"), *copy.glob("*.png")):
        path.unlink()
    write_report(StudyFolder(copy))
    for path in (stored / "report.md", *stored.glob("*.csv")):
        assert (copy / path.name).read_text() == path.read_text(), path.name
    assert {path.name for path in stored.glob("*.png")} == {path.name for path in copy.glob("*.png")}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_how_it_was_made(name: str) -> None:
    study = read_json(_RESULTS / name / "study.json")
    assert study["begun"]
    for row in study["begun"]:
        assert row["command"].startswith("python experiments/study.py ")
        assert re.fullmatch(r"[0-9a-f]{40}", row["commit"]) and row["date"]
    for cell in read_json(_RESULTS / name / "cells.json"):
        run = _RESULTS / name / cell["folder"]
        if (run / "results.json").exists():
            results = read_json(run / "results.json")
            assert results["device"] and results["versions"]["jax"]
            assert read_json(run / "config.json")["settings"]["seed"] == cell["seed"]


def test_readme_shows_lines_of_the_stored_reports() -> None:
    readme = (_RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    section = readme.split("\n### SST-2 on a laptop\n")[1].split("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("|")]
    reports = (_RESULTS / name / "report.md" for name in STUDIES)
    sources = (*reports, *_RESULTS.glob("norm-gap-*/table.md"))
    stored = {line for path in sources for line in path.read_text(encoding="utf-8").splitlines()}
    assert len(shown) >= 6 and set(shown) <= stored
    for figure in re.findall(r"\(experiments/results/(\S+)\)", section):
        assert (_RESULTS / figure).exists()


@pytest.mark.parametrize("loss", ["label_words", "next_token", "lm"])
def test_what_the_naive_norm_does_is_stored(loss: str) -> None:
    folder = _RESULTS / f"norm-gap-{loss.replace('_', '-')}"
    record = read_json(folder / "results.json")
    assert record["settings"]["loss"] == loss and f"--loss {loss} " in record["command"]
    assert (folder / "table.md").read_text(encoding="utf-8") == (
        f"{norm_gap.table(record['rows'])}\n\n{norm_gap.caption(record)}\n"
    )
    assert (folder / "norm_gap.png").exists()


def test_stored_files_are_small() -> None:
    sizes = {path: path.stat().st_size for path in _RESULTS.rglob("*") if path.is_file()}
    large = {path for path, size in sizes.items() if size > 500_000}
    assert {path.parent.name for path in large} <= {"model"}
    assert not [path for path in sizes if "checkpoints" in path.parts]


def test_no_text_of_an_example_is_stored() -> None:
    names = {path.name for path in _RESULTS.rglob("*.json")}
    assert "predictions.json" not in names or all(
        json.loads(path.read_text()).keys() == {"labels", "right"}
        for path in _RESULTS.rglob("predictions.json")
    )
