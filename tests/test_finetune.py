"""The script as a user meets it: settings in, a run folder or one line of complaint out."""

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import tiny
from wtdp_jax.models import Llama, LlamaConfig, from_pretrained, save_pretrained
from wtdp_jax.run_folder import read_json

_SCRIPT = Path(__file__).parents[1] / "experiments" / "finetune.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data as GLUE's SST-2 has it, a small model, and room for runs."""
    place = tmp_path_factory.mktemp("finetune")
    for split, size in (("train", 24), ("dev", 5)):
        (place / "SST-2").mkdir(exist_ok=True)
        rows = ["sentence\tlabel"] + [f"{('bad', 'good')[i % 2]} film\t{i % 2}" for i in range(size)]
        (place / "SST-2" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    inputs = tiny.inputs()
    save_pretrained(place / "model", inputs.model, inputs.params, inputs.tokenizer)
    return place


def _arguments(place: Path, out: str = "run", **changes: object) -> list[str]:
    settings = {
        "task": "sst2",
        "data-dir": place,
        "model": place / "model",
        "prompt": "{sentence} it was",
        "engine": "materialized",
        "trainable": "wte|lm_head",
        "noise-multiplier": 1.0,
        "batch-size": 8,
        "physical-batch-size": 4,
        "steps": 2,
        "out": place / out,
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def _script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as a user does, wherever the package is."""
    environment = {**os.environ, "PYTHONPATH": str(_SCRIPT.parents[1])}
    return subprocess.run(
        [sys.executable, _SCRIPT, *arguments], capture_output=True, text=True, env=environment
    )


def _refusal(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Runs the script in this process, and returns the one line that it complains with."""
    monkeypatch.setattr(sys, "argv", [str(_SCRIPT), *arguments])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(_SCRIPT), run_name="__main__")
    assert leaving.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    return stderr.removeprefix("error: ").rstrip("\n")


@pytest.mark.slow
def test_a_llama_becomes_a_llama(place: Path):
    shape = {"vocab_size": len(tiny.WORDS), "n_positions": 8, "n_embd": 8, "n_layer": 1}
    model = Llama(LlamaConfig(**shape, n_head=2, n_kv_head=1, n_inner=12))
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    save_pretrained(place / "llama", model, params, tiny.tokenizer())
    changes = {"model": place / "llama", "engine": "bookkeeping", "loss": "lm", "uncovered": "error"}
    ended = _script(*_arguments(place, "of_llama", **changes, trainable=None), "--no-tie-embeddings")
    assert ended.returncode == 0, ended.stderr
    assert read_json(place / "of_llama" / "results.json")["num_eval_examples"] == 5
    trained, trained_params = from_pretrained(place / "of_llama" / "model")
    assert trained == Llama(dataclasses.replace(model.config, tie_embeddings=False))
    for name in ("q_proj", "down_proj"):
        assert np.any(trained_params["h"][name]["kernel"] != params["h"][name]["kernel"])


@pytest.mark.slow
def test_leaves_a_run_folder_and_says_what_it_promises(place: Path):
    ended = _script(*_arguments(place), "--no-tie-embeddings")
    assert ended.returncode == 0, ended.stderr
    assert "differentially private" in ended.stdout
    settings = read_json(place / "run" / "config.json")["settings"]
    assert settings["tie_embeddings"] is False and settings["engine"] == "materialized"
    assert read_json(place / "run" / "model" / "config.json")["tie_word_embeddings"] is False
    assert read_json(place / "run" / "results.json")["num_eval_examples"] == 5
    assert read_json(place / "run" / "privacy.json")["reproducible_randomness"] is False
    again = _script(*_arguments(place), "--no-tie-embeddings")
    assert again.returncode == 2 and again.stdout == ""
    assert (
        again.stderr
        == f"error: {place / 'run'} already holds this run: add --resume, or choose another out\n"
    )


def test_help_explains_every_setting():
    ended = _script("--help")
    for flag in ("--epsilon", "--no-tie-embeddings", "--physical-batch-size", "--resume"):
        assert flag in ended.stdout
    assert "Target epsilon" in ended.stdout and ended.returncode == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sst3"}, "task must be one of "),
        ({"engine": "magic"}, "invalid choice 'magic' for argument '--engine'"),
        ({"steps": "many"}, "Error parsing --steps: no type matching {None}|INT"),
        ({"stepz": 3}, "Unrecognized options: --stepz, 3"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be positive and finite, got -1.0"),
        ({"epsilon": 1.0}, "give epsilon or noise_multiplier, not both"),
        ({"data_dir": "nowhere"}, "nowhere/SST-2/train.tsv: "),
        ({"model": "./nowhere"}, "model must be a folder or a reachable hub name, got './nowhere'"),
        ({"max_length": 9}, "max_length must be at most the model's n_positions (8), got 9"),
        ({"max_length": 2}, "max_length must be"),
        ({"batch_size": 25}, "batch_size must be at most the 24 training examples, got 25"),
        ({"prompt": "{text} it was"}, "/"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    place: Path,
    changes: dict,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    assert _refusal(_arguments(place, out="refused", **changes), monkeypatch, capsys).startswith(message)
    assert not (place / "refused").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a film\t2", "SST-2/train.tsv:3: label must be one of '0', '1', got '2'"),
        ("a film", "SST-2/train.tsv:3: must have 2 columns, got 1"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(
    place: Path,
    tmp_path: Path,
    row: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2" / "train.tsv").write_text(f"sentence\tlabel\ngood film\t1\n{row}\n")
    arguments = _arguments(place, data_dir=tmp_path, out="refused")
    assert message in _refusal(arguments, monkeypatch, capsys)
    assert not (place / "refused").exists()


def test_an_unsupported_model_is_refused_by_the_options_name(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = read_json(place / "model" / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    refusal = _refusal(_arguments(place, model=tmp_path, out="refused"), monkeypatch, capsys)
    assert "activation_function" in refusal
    assert not (place / "refused").exists()


def test_a_folder_with_another_configuration_is_left_as_it_is(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    saved = {"settings": {"engine": "ghost"}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    arguments = _arguments(place, out=str(tmp_path))
    assert "holds a run with another configuration" in _refusal(arguments, monkeypatch, capsys)
    assert read_json(tmp_path / "config.json") == saved and len(list(tmp_path.iterdir())) == 1
