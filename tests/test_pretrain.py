"""Pretraining: a model that finetune.py takes, resumable to the same bits."""

import json
import math
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import pretrain
from experiments.pretrain import PretrainConfig
from wtdp_jax import cli
from wtdp_jax.config import TrainConfig
from wtdp_jax.inputs import load
from wtdp_jax.metrics import read_metrics
from wtdp_jax.models import from_pretrained

_SMALL = {
    "vocab_size": 320,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "steps": 6,
    "warmup_steps": 1,
    "batch_size": 4,
    "evaluate_every": 3,
    "checkpoint_every": 2,
    "held_out_fraction": 0.2,
    "dropout": 0.1,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("\n".join(f"page {n} : the film was good and the end was bad ." for n in range(600)))
    return path


def _config(text: Path, out: Path, **changes: object) -> PretrainConfig:
    return PretrainConfig(**{**_SMALL, "text": (str(text),), "out": out, **changes})


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    pretrain.main(_config(text, out))
    return out


def test_it_leaves_a_model_that_fine_tuning_takes(whole: Path, tmp_path: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"])) and results["parameters"] > 0
    (tmp_path / "SST-2").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "SST-2" / f"{split}.tsv").write_text("sentence\tlabel\nA Good film\t1\na bad one\t0\n")
    inputs = load(TrainConfig(task="sst2", data_dir=tmp_path, model=str(whole / "model")))
    assert inputs.model.config.tie_embeddings and inputs.model.config.dropout == 0
    assert len(inputs.tokenizer) == results["vocabulary"] == inputs.model.config.vocab_size


def test_it_learns_from_the_rows_held_in(whole: Path) -> None:
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 3, 6]
    assert rows[0]["eval_loss"] == pytest.approx(math.log(320), rel=0.05)
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"]


def test_a_resumed_run_ends_in_the_same_bits(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, take_step = tmp_path / "run", pretrain.Training._take_step

    def interrupted(training: pretrain.Training) -> dict[str, float]:
        if training.done == 5:
            raise KeyboardInterrupt
        return take_step(training)

    monkeypatch.setattr(pretrain.Training, "_take_step", interrupted)
    with pytest.raises(SystemExit):
        pretrain.main(_config(text, out))
    assert not (out / "results.json").exists()
    monkeypatch.undo()
    pretrain.main(_config(text, out, resume=True))
    for first, second in zip(
        *(jax.tree.leaves(from_pretrained(folder / "model")[1]) for folder in (whole, out)), strict=True
    ):
        np.testing.assert_array_equal(first, second)


def test_another_run_is_not_continued(text: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, message in (
        ({"resume": True, "learning_rate": 1e-4}, "learning_rate was 0.002, now 0.0001"),
        ({}, "already holds this run: add --resume"),
    ):
        with pytest.raises(SystemExit):
            pretrain.main(_config(text, whole, **changes))
        assert message in capsys.readouterr().err


def test_matrices_decay_and_vectors_do_not() -> None:
    config = PretrainConfig(**_SMALL, learning_rate=0.1, weight_decay=0.5)
    optimizer = pretrain.make_optimizer(config)
    params = {"h": {"c_fc": {"kernel": np.ones((2, 3, 3), np.float32), "bias": np.ones((2, 3), np.float32)}}}
    zero = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    assert np.all(updates["h"]["c_fc"]["kernel"] < 0) and np.all(updates["h"]["c_fc"]["bias"] == 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"vocab_size": 100}, "vocab_size must be at least 300"),
        ({"warmup_steps": 4000}, r"warmup_steps must be in \[0, steps\), got 4000"),
        ({"held_out_fraction": 0.0}, r"held_out_fraction must be in \(0, 0.5\], got 0.0"),
        ({"learning_rate": math.inf}, "learning_rate must be positive and finite, got inf"),
        ({"n_embd": 30, "n_head": 4}, "n_embd must be a multiple of n_head"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**changes)


def test_the_script_complains_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--text", "nowhere.txt", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(pretrain.__file__), run_name="__main__")
    assert leaving.value.code == 2
    assert capsys.readouterr().err == "error: text must name existing files, got 'nowhere.txt'\n"
    assert not (tmp_path / "run").exists()


def test_the_commands_in_the_docstring_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = str(pretrain.__doc__).splitlines()
    commands = [line.replace("'", "").split()[2:] for line in lines if line.startswith("    python ")]
    assert len(commands) == 2
    for arguments in commands:
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *arguments])
        assert cli.parse(PretrainConfig).effective().steps in (20, 4000)
