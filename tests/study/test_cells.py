import dataclasses
from pathlib import Path

import pytest

from tests.study.small import GRID
from wtdp_jax.run_folder import write_json
from wtdp_jax.study import arms as a
from wtdp_jax.study import cells
from wtdp_jax.study.cells import Cell, Series
from wtdp_jax.study.folder import StudyFolder, choose, chosen_cell


def _series(arm: str, epsilon: float | None = 8.0) -> Series:
    return Series(model="small=some/folder", task="sst2", loss="label_words", arm=arm, epsilon=epsilon)


def _config(cell: Cell, **changes: object):
    given = {"num_examples": 1000, "noise_multiplier": 0.7, "data_dir": None, "root": Path("study")}
    return cells.train_config(GRID, cell, **{**given, **changes})


def test_series_have_an_epsilon_where_there_is_noise() -> None:
    series = cells.series_of(GRID)
    assert len(series) == 2 * (5 * 2 + 1)
    assert {s.epsilon for s in series if s.arm == a.TIED_NONPRIVATE} == {None}
    assert len({s.path for s in series}) == len(series)
    assert _series(a.TIED_EXACT).path == "small/sst2/label_words/tied-exact/epsilon-8"


def test_every_arm_chooses_from_the_same_grid() -> None:
    def chosen_from(arm: str) -> set:
        made = cells.selection_cells(GRID, _series(arm))
        return {(cell.learning_rate, cell.l2_clip_norm) for cell in made}

    whole = {(rate, norm) for rate in (1e-3, 1e-2) for norm in (0.1, 1.0, 10.0)}
    assert chosen_from(a.TIED_EXACT) == chosen_from(a.TIED_NAIVE) == chosen_from(a.UNTIED_EXACT) == whole
    # Without clipping there is no clip norm; a short run and a borrower take another's choice.
    assert chosen_from(a.TIED_NONPRIVATE) == {(1e-3, None), (1e-2, None)}
    assert not chosen_from(a.TIED_STANDARD) and not chosen_from(a.UNTIED_TIED_CHOICE)
    assert _series(a.UNTIED_TIED_CHOICE).chooser == _series(a.TIED_EXACT)


def test_the_only_settings_are_chosen_without_a_run(tmp_path: Path) -> None:
    grid = dataclasses.replace(GRID, learning_rates=(1e-3,), clip_norms=(1.0,))
    for arm, norm in ((a.TIED_EXACT, 1.0), (a.TIED_NONPRIVATE, None)):
        assert not cells.selection_cells(grid, _series(arm))
        choice = choose(StudyFolder(tmp_path), grid, _series(arm))
        assert choice is not None
        (cell, _) = cells.final_cells(grid, _series(arm))
        settled = chosen_cell(cell, choice)
        assert (settled.learning_rate, settled.l2_clip_norm) == (1e-3, norm)
    assert choose(StudyFolder(tmp_path), GRID, _series(a.TIED_EXACT)) is None


def test_the_highest_held_out_accuracy_is_chosen_of_equal_ones_the_lowest_loss(tmp_path: Path) -> None:
    series, folder = _series(a.TIED_EXACT), StudyFolder(tmp_path)
    possible = cells.selection_cells(GRID, series)
    figures = {1: (0.50, 0.6), 2: (0.61, 0.9), 3: (0.60, 0.9)}
    for index, cell in enumerate(possible):
        loss, accuracy = figures.get(index, (0.40, 0.5))
        folder.run(cell).path.mkdir(parents=True)
        write_json(folder.run(cell).results, {"loss": loss, "accuracy": accuracy})
    choice = choose(folder, GRID, series)
    assert choice is not None and choice["chosen"]["folder"] == possible[3].folder


def test_lengths_are_comparable() -> None:
    def steps(arm: str, purpose: str) -> int:
        return cells.cell_steps(GRID, Cell(series=_series(arm), purpose=purpose, seed=0), 1000)

    # 2 epochs of 1000 examples in batches of 100; a quarter of it to choose by; short runs of 3 steps.
    assert [steps(a.TIED_EXACT, purpose) for purpose in ("final", "selection")] == [20, 5]
    assert [steps(a.TIED_NONPRIVATE, purpose) for purpose in ("final", "selection")] == [100, 25]
    assert steps(a.TIED_STANDARD, "final") == 3
    assert len(cells.final_cells(GRID, _series(a.TIED_STANDARD))) == 1
    assert len(cells.final_cells(GRID, _series(a.TIED_EXACT))) == 2


def test_a_selection_run_never_sees_the_evaluation_rows() -> None:
    (cell, *_) = cells.selection_cells(GRID, _series(a.TIED_EXACT))
    config = _config(cell)
    assert config.held_out_fraction == 0.05 and config.seed == cells.SELECTION_SEED
    assert str(config.out) == "study/selection/small/sst2/label_words/tied-exact/epsilon-8/lr-0.001-clip-0.1"
    assert (config.learning_rate, config.l2_clip_norm) == (1e-3, 0.1)


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        (
            a.TIED_EXACT,
            {"tie_embeddings": True, "tied_norm": "cross_term", "engine": "ghost", "regime": "dp"},
        ),
        (a.TIED_NAIVE, {"tied_norm": "omit", "noise_multiplier": 0.7}),
        (a.TIED_MATERIALIZE, {"tied_norm": "materialize", "engine": "ghost"}),
        # 3 steps of 20, at the learning rates of the 20.
        (a.TIED_STANDARD, {"engine": "materialized", "steps": 3, "schedule_steps": 20}),
        (
            a.UNTIED_EXACT,
            {
                "tie_embeddings": False,
                "trainable": None,
                "held_out_fraction": 0.0,
                "resume": True,
                "schedule_steps": None,
            },
        ),
        (a.UNTIED_FROZEN_HEAD, {"trainable": "^(?!lm_head/)"}),
        (a.UNTIED_FROZEN_EMBEDDING, {"trainable": "^(?!wte/)"}),
        (a.TIED_DOUBLE_NOISE, {"double_noise": "^wte/"}),
        (a.TIED_CLIPPED, {"noise_multiplier": a.NEGLIGIBLE_NOISE}),
        (a.TIED_NONPRIVATE, {"regime": "nonprivate", "noise_multiplier": None, "batch_size": 20}),
    ],
)
def test_an_arm_is_what_it_says(arm: str, expected: dict[str, object]) -> None:
    cell = Cell(series=_series(arm), purpose="final", seed=1, learning_rate=1e-3, l2_clip_norm=1.0)
    config = _config(cell)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.model == "some/folder" and config.seed == 1 and config.learning_rate == 1e-3
