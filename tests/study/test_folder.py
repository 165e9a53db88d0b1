from pathlib import Path

import pytest

from tests.study import fakes
from wtdp_jax.run_folder import read_json, write_json
from wtdp_jax.study import arms as a
from wtdp_jax.study.folder import StudyFolder, read_runs


def _begin_otherwise(run: Path, name: str) -> None:
    config = read_json(run / "config.json")
    write_json(run / "config.json", {**config, "identity": {**config["identity"], name: "something else"}})


@pytest.mark.parametrize(
    ("name", "arm", "other"),
    [
        ("initial_model", a.TIED_NAIVE, a.TIED_EXACT),
        ("eval_data", a.UNTIED_EXACT, a.TIED_EXACT),
        ("non_private_train_data", a.UNTIED_EXACT, a.TIED_EXACT),
    ],
)
def test_runs_that_began_with_something_else_are_not_compared(
    name: str, arm: str, other: str, tmp_path: Path
) -> None:
    made = [fakes.run(one, 150) for one in (a.TIED_EXACT, a.TIED_NAIVE, a.UNTIED_EXACT)]
    fakes.study(tmp_path, made, {})
    assert len(read_runs(StudyFolder(tmp_path))[0]) == 3
    folders = {run.cell["arm"]: run.folder for run in made}
    _begin_otherwise(tmp_path / folders[arm], name)
    with pytest.raises(ValueError, match=f"^{name} must be one for all runs of m, t, label_words") as refusal:
        read_runs(StudyFolder(tmp_path))
    said = str(refusal.value)
    assert folders[arm] in said and folders[other] in said and "\n" not in said


def test_what_has_diverged_has_ended(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    assert not folder.has_ended("cells/m") and not folder.has_diverged("cells/m")
    (tmp_path / "cells" / "m").mkdir(parents=True)
    (tmp_path / "cells" / "m" / "diverged.json").touch()
    assert folder.has_ended("cells/m") and folder.has_diverged("cells/m")
