"""What a run has spent cannot be spent again by editing what is around it."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import tiny
from tests.resume import small
from tests.resume.conftest import Finetune
from wtdp_jax import report, train
from wtdp_jax.checkpoint import CheckpointError
from wtdp_jax.config import TrainConfig
from wtdp_jax.inputs import Inputs, load
from wtdp_jax.models import from_pretrained, save_pretrained
from wtdp_jax.plan import make_plan
from wtdp_jax.run_folder import RunFolder, read_json, write_json


@dataclasses.dataclass
class Changed:
    """A run folder, and other settings or surroundings to continue it with."""

    out: Path
    place: Path
    settings: dict[str, Any]
    patch: pytest.MonkeyPatch

    @property
    def config(self) -> TrainConfig:
        """Its settings, to go on with."""
        return small.script_config(self.place, self.out, resume=True, **self.settings)


def _edit_rows(changed: Changed, edit: Callable[[list[str]], list[str]]) -> None:
    path = changed.place / "SST-2" / "train.tsv"
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *edit(rows)]) + "\n")


def _change_a_row(changed: Changed) -> None:
    _edit_rows(changed, lambda rows: [*rows[:-1], "terrible film\t0"])


def _change_the_order(changed: Changed) -> None:
    _edit_rows(changed, lambda rows: rows[::-1])


def _add_a_row(changed: Changed) -> None:
    _edit_rows(changed, lambda rows: [*rows, "great film\t1"])


def _change_a_weight(changed: Changed) -> None:
    model, params = from_pretrained(changed.place / "model")
    params["ln_f"]["bias"] = np.nextafter(params["ln_f"]["bias"], np.float32(1))
    save_pretrained(changed.place / "model", model, params, tiny.tokenizer())


def _change_jax(changed: Changed) -> None:
    changed.patch.setattr(jax, "__version__", "0.0.1")


def _change_the_device(changed: Changed) -> None:
    device = {"kind": "NVIDIA H100", "platform": "gpu", "count": 1}
    changed.patch.setattr(report, "device", lambda: device)


_CHANGES: list[tuple[Any, str]] = [
    ({"steps": 6}, "steps was 5, now 6"),
    ({"steps": None, "epochs": 2.0}, "epochs was None, now 2.0"),
    ({"noise_multiplier": 3.0}, "noise_multiplier was 4.0, now 3.0"),
    ({"noise_multiplier": None, "epsilon": 8.0}, "epsilon was None, now 8.0"),
    ({"delta": 1e-4}, "delta was None, now 0.0001"),
    ({"l2_clip_norm": 1.0}, "l2_clip_norm was 2.0, now 1.0"),
    ({"batch_size": 10}, "batch_size was 8, now 10"),
    ({"prompt": "{sentence} was"}, "prompt was '{sentence} it was', now '{sentence} was'"),
    ({"seed": 8}, "seed was 7, now 8"),
    ({"seed": None}, "seed was 7, now None"),
    (_change_a_row, "non_private_train_data was"),
    (_change_the_order, "non_private_train_data was"),
    (_add_a_row, "non_private_train_data was"),
    (_change_a_weight, "initial_model was"),
    (_change_jax, "jax was"),
    (_change_the_device, "device was"),
]


@pytest.fixture
def changed(
    request: pytest.FixtureRequest, whole: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Changed:
    """A copy of a whole run, and one change."""
    for name in ("SST-2", "model"):
        shutil.copytree(place / name, tmp_path / name)
    shutil.copytree(whole, tmp_path / "run")
    change = request.param
    settings = change if isinstance(change, dict) else {}
    changed = Changed(tmp_path / "run", tmp_path, settings, monkeypatch)
    if not settings:
        change(changed)
    return changed


_each_change = pytest.mark.parametrize(
    ("changed", "message"), _CHANGES, indirect=["changed"], ids=lambda value: getattr(value, "__name__", None)
)


@_each_change
def test_another_run_may_not_go_on(changed: Changed, message: str):
    before = small.contents(changed.out)
    with pytest.raises(ValueError, match="holds a run with another configuration: ") as raised:
        train.prepare(changed.config)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert small.contents(changed.out) == before


@pytest.fixture(scope="module")
def inputs(place: Path) -> Inputs:
    """What the whole run worked on."""
    return load(small.script_config(place, Path("unused")))


@_each_change
def test_not_even_with_a_record_made_to_fit(changed: Changed, inputs: Inputs, message: str):
    """config.json says what the new run is, to the last digit; the checkpoints say what they are of."""
    config = changed.config
    plan = make_plan(small.script_config(changed.place, changed.out), inputs)
    if not changed.settings:
        inputs = load(config)
    write_json(RunFolder(changed.out).config, train._record(config, inputs, plan))
    before = small.contents(changed.out)
    with pytest.raises(CheckpointError, match="no checkpoint to go on from: 5 is of a run with") as raised:
        train.run(config, inputs, plan)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert small.contents(changed.out) == before


def test_what_was_calibrated_may_not_change(whole: Path, place: Path, tmp_path: Path):
    """As another accountant would change it; the settings are the same."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    record = read_json(out / "config.json")
    record["plan"]["noise_multiplier"] = 5.0
    write_json(out / "config.json", record)
    with pytest.raises(ValueError, match=r"noise_multiplier was 5\.0, now 4\.0"):
        train.prepare(small.script_config(place, out, resume=True))


@pytest.fixture(scope="module")
def unseeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run whose keys no one can draw again."""
    return small.run(tmp_path_factory.mktemp("unseeded") / "run", seed=None).folder.path


_AFTER_STEPS = ("privacy.json", "results.json", "predictions.json", "curves.png", "model")


def _remove(out: Path, *names: str) -> None:
    for path in (out / name for name in names):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    "names",
    [("results.json",), ("privacy.json", "results.json"), _AFTER_STEPS, ("checkpoints/5", "results.json")],
)
def test_what_is_deleted_comes_back_the_same(unseeded: Path, tmp_path: Path, names: tuple[str, ...]):
    """With new keys it would be another model."""
    out = tmp_path / "run"
    shutil.copytree(unseeded, out)
    _remove(out, *names)
    with pytest.raises(ValueError, match="already holds this run: add --resume"):
        small.run(out, seed=None)
    small.run(out, seed=None, resume=True)
    assert small.ending(out) == small.ending(unseeded)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("names", [("config.json",), ("config.json", *_AFTER_STEPS, "metrics.jsonl")])
def test_checkpoints_of_no_known_run_are_left_alone(
    unseeded: Path, tmp_path: Path, names: tuple[str, ...], resume: bool
):
    out = tmp_path / "run"
    shutil.copytree(unseeded, out)
    _remove(out, *names)
    before = small.contents(out)
    with pytest.raises(ValueError, match="out must be empty or hold a run, got "):
        small.run(out, seed=None, resume=resume)
    assert small.contents(out) == before


@pytest.mark.parametrize("left", [*_AFTER_STEPS, "metrics.jsonl"])
def test_a_run_does_not_begin_again(unseeded: Path, tmp_path: Path, left: str):
    """Whatever is left of it besides its settings: without checkpoints there are no keys to go on with."""
    out = tmp_path / "run"
    shutil.copytree(unseeded, out)
    _remove(out, "checkpoints", *({*_AFTER_STEPS, "metrics.jsonl"} - {left}))
    before = small.contents(out)
    with pytest.raises(CheckpointError, match="tells of a run that has no checkpoint left: begun again"):
        small.run(out, seed=None, resume=True)
    assert small.contents(out) == before


def test_before_its_first_step_a_run_may_begin_again(tmp_path: Path):
    """Nothing was spent: as after a kill before the first checkpoint."""
    out = tmp_path / "run"
    with pytest.raises(small.Stopped):
        small.run(out, seed=None, stop_before=1)
    _remove(out, "checkpoints", "privacy.json")
    small.run(out, seed=None, resume=True)


@pytest.mark.slow
def test_the_script_refuses_in_one_line(finetune: Finetune, whole: Path, tmp_path: Path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    ended = finetune(out, steps=6, resume=True)
    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr == f"error: {out} holds a run with another configuration: steps was 5, now 6\n"
    record = read_json(out / "config.json")
    record["settings"]["steps"] = record["plan"]["num_steps"] = 6
    write_json(out / "config.json", record)
    ended = finetune(out, steps=6, resume=True)
    assert (ended.status, ended.stdout) == (2, "") and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error: ") and "5 is of a run withther configuration" in ended.stderr
