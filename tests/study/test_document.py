"""The report from run folders that are made up, so that its numbers are known."""

import csv
from pathlib import Path

import pytest

from tests.study import fakes
from wtdp_jax.run_folder import read_json, write_json
from wtdp_jax.study import arms as a
from wtdp_jax.study.document import write_report
from wtdp_jax.study.folder import StudyFolder
from wtdp_jax.study.presets import PRESETS

_RIGHTS = {
    a.TIED_NONPRIVATE: 180,
    a.UNTIED_NONPRIVATE: 181,
    a.TIED_EXACT: 150,
    a.UNTIED_EXACT: 170,
    a.TIED_NAIVE: 148,
    a.TIED_DOUBLE_NOISE: 140,
    a.TIED_MATERIALIZE: 130,
    a.UNTIED_FROZEN_HEAD: 155,
}
_GRID = PRESETS["smoke"].to_json()
_VARIANTS = {"tied nonprivate": 10, "untied nonprivate": 12, "tied ghost": 11, "untied ghost": 13}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = [fakes.run(arm, rights + seed, seed=seed) for arm, rights in _RIGHTS.items() for seed in (0, 1)]
    fakes.study(tmp_path, runs, _GRID)
    cost = {
        "tied_parameters": 1_500_000,
        "untied_parameters": 2_500_000,
        "physical_batch_size": 8,
        "length": 16,
        "environment": {"device": {"kind": "cpu"}},
        "rows": [
            {"name": name, "tie": name[0] == "t", "step_bytes": 10**6 * size, "seconds": [0.001 * size] * 3}
            for name, size in _VARIANTS.items()
        ],
    }
    (tmp_path / "costs" / "m" / "t").mkdir(parents=True)
    write_json(tmp_path / "costs" / "m" / "t" / "label_words.json", cost)
    return tmp_path


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study_that_grew_names_every_command_and_every_arm(folder: Path) -> None:
    arms = [a.TIED_EXACT, a.UNTIED_TIED_CHOICE]
    write_json(folder / "study.json", read_json(folder / "study.json") | {"grid": {**_GRID, "arms": arms}})
    report = write_report(StudyFolder(folder)).read_text()
    for seeds in (1, 2):
        assert f"\n- `python experiments/study.py --seeds {seeds}`, last begun 2026-01-01 at " in report
    for arm in (*_RIGHTS, a.UNTIED_TIED_CHOICE):
        assert report.count(f"\n- `{arm}`: ") == 1


def test_the_report_has_every_part_and_the_known_numbers(folder: Path) -> None:
    report = write_report(StudyFolder(folder)).read_text()
    headings = [line[3:] for line in report.splitlines() if line.startswith("## ")]
    assert headings == [
        "Does untying still pay once the tied norm is exact and cheap?",
        "What was run",
        "Accuracy",
        "Untied minus tied",
        "How much of the gap each factor explains",
        "The paper's claims",
        "Memory and time of a step",
        "The same update by different ways",
        "Signal to noise",
        "How learning rates and clip norms were chosen",
    ]
    assert "- m, t, label_words, epsilon 8: yes; untied minus tied +10.00 points" in report
    assert "2 seeds." in report and "smaller than the 4 x 3 of a fair comparison" in report
    assert "| tied-naive | 8 | 2 | 74.25 | 0.35 |" in report and "| 11 | 8 |" in report
    assert "Nothing was chosen yet." in report
    for image in ("accuracy.png", "memory.png", "signal_to_noise.png"):
        assert f"({image})" in report and (folder / image).read_bytes().startswith(b"\x89PNG")


def test_a_choice_at_the_grids_edge_is_marked(folder: Path) -> None:
    candidates = [
        {"folder": f"selection/{rate}-{clip}", "learning_rate": rate, "l2_clip_norm": clip}
        | {"held_out_accuracy": 0.6, "held_out_loss": 0.5}
        for rate in (0.1, 0.2, 0.4)
        for clip in (1.0, 5.0)
    ]
    choices = {
        "inside": {"chosen": candidates[2], "candidates": candidates, "epsilon": 8.0},
        "corner": {"chosen": candidates[5], "candidates": candidates, "epsilon": 8.0},
        "given": {"chosen": candidates[0], "candidates": [], "epsilon": 8.0},
    }
    write_json(folder / "choices.json", choices)
    report = write_report(StudyFolder(folder)).read_text()
    edges = {row["series"]: row["edge"] for row in _rows(folder / "choices.csv")}
    assert edges == {
        "inside": "lowest clip norm",
        "corner": "highest learning rate, highest clip norm",
        "given": "–",
    }
    # The smoke preset holds out 5 % of the 1,000 rows: a standard error of at most 50 / sqrt(50) points.
    assert "t: 50 rows are held out, on which an accuracy has a standard error of up to 7.07 points" in report


def test_every_row_names_folders_that_exist(folder: Path) -> None:
    report = write_report(StudyFolder(folder)).read_text()
    tables = sorted(path.name for path in folder.glob("*.csv"))
    assert "accuracy.csv" in tables and "costs.csv" in tables and len(tables) == 8
    for name in tables:
        assert f"`{name}`" in report
        for row in _rows(folder / name):
            for source in row["folders"].split():
                assert (folder / source).exists()
            assert row["folders"] or row["verdict"].startswith("could not be tested")


def test_un_noised_figures_say_so(folder: Path) -> None:
    write_report(StudyFolder(folder))
    for name, column in (
        ("signal_to_noise", "non_private_signal_to_noise"),
        ("same_update", "non_private_largest_loss_difference"),
    ):
        (row, *_) = _rows(folder / f"{name}.csv")
        assert row[column]


def test_what_is_missing_is_listed(folder: Path) -> None:
    gone = folder / "cells/m/t/label_words/untied-exact/8.0/seed-1"
    (gone / "results.json").unlink()
    (gone / "diverged.json").touch()
    report = write_report(StudyFolder(folder)).read_text()
    assert "- cells/m/t/label_words/untied-exact/8.0/seed-1: diverged" in report
    assert "cannot tell (a single seed); untied minus tied +10.00 points" in report


def test_it_is_the_same_every_time(folder: Path) -> None:
    first = write_report(StudyFolder(folder)).read_bytes()
    assert write_report(StudyFolder(folder)).read_bytes() == first


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder must hold a study"):
        write_report(StudyFolder(tmp_path))
