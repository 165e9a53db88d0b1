"""What README.md says to type, and what it names, works and exists."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest

from experiments.bench_engines import BenchConfig
from experiments.check_norms import CheckConfig
from experiments.norm_gap import NormGapConfig
from experiments.pretrain import PretrainConfig
from experiments.study import StudyConfig
from wtdp_jax.clipping import Engine
from wtdp_jax.clipping.factors import Clipping
from wtdp_jax.config import TrainConfig
from wtdp_jax.data import load_task
from wtdp_jax.rules import TiedNorm
from wtdp_jax.run_folder import RunFolder

_ROOT = Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", _README, re.MULTILINE | re.DOTALL)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = _blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme_example"})
    printed = capsys.readouterr().out
    assert re.search(r"^embed/embedding +tied +2 +0$", printed, re.MULTILINE)
    assert "differentially private for one training row" in printed and "for 5 steps" in printed


@pytest.mark.parametrize("end", [" && python experiments/quickstart.py", " && python -m pytest -n 2"])
def test_each_of_the_two_commands_stands_once_and_installs_first(end: str) -> None:
    commands = [line for block in _blocks("bash") for line in block.splitlines() if line.endswith(end)]
    assert len(commands) == 1 and _README.count(end) == 1
    assert commands[0].startswith("python3 -m venv .venv && . .venv/bin/activate && pip install ")


def test_flags_exist() -> None:
    fields = [
        field.name
        for config in (TrainConfig, CheckConfig, BenchConfig, StudyConfig, PretrainConfig, NormGapConfig)
        for field in dataclasses.fields(config)
    ]
    known = {name.replace("_", "-") for name in fields} | {"help", "check"}
    flags = set(re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z-]+)", _README))
    assert "tie-embeddings" in flags and flags <= known


def test_files_exist() -> None:
    named = set(re.findall(r"\b(?:wtdp_jax|experiments|tests)/[\w/.-]*\w", _README))
    assert "wtdp_jax/train.py" in named
    assert [path for path in named if not (_ROOT / path).exists()] == []


def test_the_run_folder_is_listed_whole() -> None:
    properties = [name for name, value in vars(RunFolder).items() if isinstance(value, property)]
    folder = RunFolder(Path("run"))
    table = re.findall(r"^\| `([\w.]+)/?` \|", _README, re.MULTILINE)
    assert {getattr(folder, name).name for name in properties} <= set(table)


@pytest.mark.parametrize("choice", [*get_args(Engine), *get_args(TiedNorm), *get_args(Clipping)])
def test_every_choice_is_explained(choice: str) -> None:
    assert f'"{choice}"`' in _README


def test_the_task_file_is_one(tmp_path: Path) -> None:
    (content,) = _blocks("json")
    path = tmp_path / "mine.json"
    path.write_text(content, encoding="utf-8")
    assert load_task(str(path)).label_words == {"neg": " bad", "pos": " good"}
