"""What a study does with what is in its folder; the worker processes are played."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from wtdp_jax.run_folder import read_json, write_json
from wtdp_jax.study import arms as a
from wtdp_jax.study import conduct, origins, runs
from wtdp_jax.study.cells import Cell
from wtdp_jax.study.conduct import Study
from wtdp_jax.study.folder import DIVERGED, StudyFolder
from wtdp_jax.study.grid import Grid
from wtdp_jax.study.workers import Call, Failure

_GRID = Grid(
    models=("embedded",),
    tasks=("reviews",),
    arms=(a.TIED_EXACT, a.UNTIED_EXACT, a.TIED_STANDARD),
    seeds=1,
    learning_rates=(0.01, 0.02),
    clip_norms=(1.0,),
    steps=4,
    measured=("bookkeeping",),
)
_COSTS = "costs/embedded/reviews/label_words.json"


@dataclasses.dataclass
class _Workers:
    """Plays `run_all`: writes what a worker would, and remembers the calls.

    Attributes:
      model: stands for the model's values.
      data: stands for the rows.
      diverging: parts of the folders of runs that diverge.
    """

    model: str = "model A"
    data: str = "data A"
    diverging: tuple[str, ...] = ()
    measured: list[tuple[list[str], dict[str, Any]]] = dataclasses.field(default_factory=list)
    trained: list[str] = dataclasses.field(default_factory=list)

    def __call__(
        self, calls: Mapping[Any, Call], *, on_end: Any = lambda *ended: None, **how: Any
    ) -> dict[Any, Any]:
        found = {}
        for key, call in calls.items():
            found[key] = self._answer(call)
            on_end(key, found[key], 0.0)
        return found

    def _answer(self, call: Call) -> Any:
        if call.function is runs.train_cell:
            return self._train(call.arguments[0])
        if call.function is runs.fingerprints:
            settings = call.arguments[0]
            return self._fingerprints(settings["tie_embeddings"], settings["held_out_fraction"])
        if call.function is conduct.calibrate:
            return 0.5
        settings, variants = call.arguments
        assert isinstance(call.function, functools.partial)
        options = call.function.keywords
        self.measured.append(([variant.name for variant in variants], options))
        rows = [{**v._asdict(), "step_bytes": 1, "seconds": [1.0 * len(self.measured)]} for v in variants]
        written = {name: str(value) for name, value in settings.items()}
        return {
            "physical_batch_size": options["physical_batch_size"],
            "settings": written,
            "rows": rows,
        }

    def _train(self, config: Any) -> None:
        self.trained.append(str(config.out))
        config.out.mkdir(parents=True)
        identity = self._fingerprints(config.tie_embeddings, config.held_out_fraction)
        write_json(config.out / "config.json", {"settings": config.to_json(), "identity": identity})
        if any(part in str(config.out) for part in self.diverging):
            write_json(config.out / DIVERGED, {"reason": "loss is not finite"})
        else:
            write_json(config.out / "results.json", {"accuracy": 0.5, "loss": config.learning_rate})

    def _fingerprints(self, tie: bool, held_out: float) -> dict[str, str]:
        rows = f"{self.data}, {held_out} held out"
        return {
            "initial_model": f"{'tied' if tie else 'untied'} {self.model}",
            "non_private_train_data": f"train {rows}",
            "eval_data": f"dev {rows}",
        }


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> _Workers:
    played = _Workers()
    monkeypatch.setattr(conduct, "run_all", played)
    monkeypatch.setattr(origins, "run_all", played)
    monkeypatch.setattr(conduct, "load_split", lambda task, split, folder: range(1000))
    return played


def _study(
    path: Path, grid: Grid = _GRID, *, data_dir: Path | None = None, said: list | None = None
) -> Study:
    say = (said if said is not None else []).append
    return Study(grid=grid, folder=StudyFolder(path), data_dir=data_dir, jobs=1, say=say)


def _snapshot(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_standard_clipping_is_measured_in_one_way_whatever_its_arms_train_with(
    tmp_path: Path, workers: _Workers
) -> None:
    grid = dataclasses.replace(_GRID, standard_engine="microbatched", measured=("standard",))
    assert not _study(tmp_path, grid).conduct()
    ((names, options),) = workers.measured
    assert "tied standard" in names and "microbatched" not in str(options)
    engines = {
        read_json(tmp_path / cell["folder"] / "config.json")["settings"]["engine"]
        for cell in read_json(tmp_path / "cells.json")
        if cell["arm"] == a.TIED_STANDARD
    }
    assert engines == {"microbatched"}


def test_costs_are_measured_once(tmp_path: Path, workers: _Workers) -> None:
    for measured in (("bookkeeping",), ("bookkeeping",), ()):
        _study(tmp_path, dataclasses.replace(_GRID, measured=measured)).conduct()
    assert len(workers.measured) == 1


def test_an_engine_that_costs_lack_is_measured_together_with_the_others(
    tmp_path: Path, workers: _Workers
) -> None:
    _study(tmp_path).conduct()
    _study(tmp_path, dataclasses.replace(_GRID, measured=("ghost",))).conduct()
    expected = [variant.name for variant in runs.variants_of(("ghost", "bookkeeping"))]
    assert [names for names, _ in workers.measured][1:] == [expected]
    # No seconds of the first measurement are left beside those of the second.
    rows = read_json(tmp_path / _COSTS)["rows"]
    assert {row["name"] for row in rows} == {*expected} and {*rows[0]["seconds"]} == {2.0}
    assert all(row["seconds"] == [2.0] for row in rows)


@pytest.mark.parametrize("change", [{"physical_batch_size": 16}, {"max_length": 12}])
def test_costs_of_other_sizes_are_measured_again(
    change: dict[str, Any], tmp_path: Path, workers: _Workers
) -> None:
    study = _study(tmp_path)
    study._measure()
    dataclasses.replace(study, grid=dataclasses.replace(_GRID, **change))._measure()
    assert len(workers.measured) == 2


@pytest.mark.parametrize(
    ("arms", "changed", "message"),
    [
        (
            _GRID.arms,
            {"model": "model B"},
            r"model embedded must be that of .*, no folder \(fingerprint tied",
        ),
        # None of the runs that are in the folder belongs to the grid, but the report reads them all.
        (
            (a.TIED_NAIVE,),
            {"model": "model B"},
            r"model embedded must be that of .* got other \(fingerprint tied",
        ),
        (
            _GRID.arms,
            {"data": "data B"},
            "non_private_train_data of reviews, as encoded, must be that of .*, no folder ",
        ),
        (
            (a.TIED_NAIVE,),
            {"data": "data B"},
            r"of reviews, as encoded, must be .* got elsewhere \(fingerprint train data",
        ),
    ],
)
def test_other_models_and_data_of_one_name_are_refused_before_anything_is_run(
    arms: tuple[str, ...], changed: dict[str, str], message: str, tmp_path: Path, workers: _Workers
) -> None:
    _study(tmp_path).conduct()
    before, trained = _snapshot(tmp_path), len(workers.trained)
    for name, value in changed.items():
        setattr(workers, name, value)
    grid = dataclasses.replace(_GRID, models=("embedded=other",), arms=arms)
    with pytest.raises(ValueError, match=message) as refusal:
        _study(tmp_path, grid, data_dir=Path("elsewhere")).conduct()
    assert "\n" not in str(refusal.value)
    assert _snapshot(tmp_path) == before and len(workers.trained) == trained


def test_a_model_is_compared_across_tasks_and_data_are_not(tmp_path: Path, workers: _Workers) -> None:
    _study(tmp_path).conduct()
    grid = dataclasses.replace(_GRID, losses=("lm",), measured=())
    workers.data = "data of another loss"
    assert not _study(tmp_path, grid).conduct()
    workers.model = "model B"
    with pytest.raises(ValueError, match="model embedded must be that of"):
        _study(tmp_path, dataclasses.replace(grid, losses=("next_token",))).conduct()


def test_the_same_model_and_data_elsewhere_are_taken(tmp_path: Path, workers: _Workers) -> None:
    _study(tmp_path).conduct()
    trained = len(workers.trained)
    grid = dataclasses.replace(_GRID, models=("embedded=moved",))
    assert not _study(tmp_path, grid, data_dir=Path("elsewhere")).conduct()
    assert len(workers.trained) == trained and len(workers.measured) == 1


def test_another_models_runs_are_no_hindrance(tmp_path: Path, workers: _Workers) -> None:
    _study(tmp_path).conduct()
    workers.model = "model B"
    assert not _study(tmp_path, dataclasses.replace(_GRID, models=("b=other",))).conduct()


def test_what_is_given_must_load(tmp_path: Path, workers: _Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    _study(tmp_path).conduct()
    monkeypatch.setattr(workers, "_answer", lambda call: Failure("model must be a folder, got other"))
    with pytest.raises(ValueError, match="^model must be a folder, got other$"):
        _study(tmp_path, dataclasses.replace(_GRID, models=("embedded=other",))).conduct()


def _folders(cells: list[Cell]) -> list[str]:
    return [cell.folder for cell in cells]


def test_runs_that_diverge_are_said_to(tmp_path: Path, workers: _Workers) -> None:
    workers.diverging = ("tied-exact/epsilon-8/lr-0.02", "cells/embedded/reviews/label_words/untied-exact")
    said: list[str] = []
    study = _study(tmp_path, said=said)
    assert not study.conduct()
    gone = [
        "selection/embedded/reviews/label_words/tied-exact/epsilon-8/lr-0.02-clip-1",
        "selection/embedded/reviews/label_words/untied-exact/epsilon-8/lr-0.02-clip-1",
        "cells/embedded/reviews/label_words/untied-exact/epsilon-8/seed-0",
    ]
    assert _folders(study.diverged()) == gone
    assert [line for line in said if "diverged" in line] == [f"{folder} diverged (0 s)" for folder in gone]
    assert "cells/embedded/reviews/label_words/tied-exact/epsilon-8/seed-0 done (0 s)" in said
    trained = len(workers.trained)
    assert not study.conduct() and len(workers.trained) == trained


def test_a_series_whose_selection_runs_all_diverge_says_so(tmp_path: Path, workers: _Workers) -> None:
    workers.diverging = ("selection/embedded/reviews/label_words/untied-exact",)
    (failure,) = _study(tmp_path).conduct()
    assert failure == (
        "embedded/reviews/label_words/untied-exact/epsilon-8: nothing to choose from, as every selection run "
        "diverged: give lower learning rates"
    )
