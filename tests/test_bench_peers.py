"""The benchmark beside other libraries, as far as it goes without them."""

import importlib
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from experiments import bench_peers
from experiments.bench_peers import PeersConfig
from wtdp_jax import cli


@pytest.fixture
def without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def importing(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", importing)


def test_a_missing_library_is_named_in_one_line(
    without_peers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_peers.installed(("jax-privacy", "opacus")) == {}
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "jax-privacy is left out: No module named 'jax_privacy'; pip install -e \".[bench]\" brings it"
    )
    assert second.startswith("opacus is left out: No module named 'opacus'")


@pytest.mark.slow
def test_what_is_there_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    bench_peers.main(PeersConfig(quick=True, peers=(), models=("tied",), repeats=2, out=out))
    record = json.loads((out / "results.json").read_text())
    plain, bookkeeping, ghost, naive = record["rows"]
    assert [row["variant"] for row in (plain, bookkeeping, ghost)] == ["non-private", "bookkeeping", "ghost"]
    assert plain["step_over"] == plain["gradient_over"] == 1
    for row in (bookkeeping, ghost):
        assert row["step_over"] == pytest.approx(row["step_seconds"] / plain["step_seconds"])
        assert 0.999 < row["clipped_norm_over_c"] <= 1
        assert len(row["all_seconds"]["step"]) == 2
    # The example is one on which a norm without the cross-term is seen to be wrong.
    assert abs(naive["clipped_norm_over_c"] - 1) > 1e-3 and "step_seconds" not in naive
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out


def test_what_a_library_raises_is_reported_in_its_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(task: bench_peers.Task, name: str) -> bench_peers.Contender:
        def backward() -> None:
            raise NotImplementedError("Parameter tying is not supported\nin detail")

        if name != "ghost":
            return bench_peers.Contender(lambda: 2.0, lambda: None, lambda: None, None)
        return bench_peers.Contender(lambda: 2.0, backward, backward, None)

    monkeypatch.setattr(bench_peers, "jax_contender", build)
    config = PeersConfig(quick=True, peers=(), models=("untied",), repeats=1).effective()
    plain, bookkeeping, ghost = bench_peers.measure(config, "untied", {})
    assert ghost["note"] == "refused: NotImplementedError: Parameter tying is not supported"
    assert ghost["step_over"] is None and bookkeeping["step_over"] > 0 and plain["note"] is None


def test_losses_that_differ_are_not_compared() -> None:
    bench_peers.check_losses([{"loss": 5.0}, {"loss": 5.001}, {"note": "refused"}])
    with pytest.raises(ValueError, match="losses must agree within 1e-3, got 5.0 to 5.1"):
        bench_peers.check_losses([{"loss": 5.0}, {"loss": 5.1}])


def test_the_one_example_is_all_its_target() -> None:
    task = bench_peers.Task("tied", preset="tiny", batch_size=4, length=16, l2_clip_norm=1.0, seed=0)
    assert task.one["ids"].shape == (1, 16) and np.all(task.one["ids"] == task.one["targets"])
    assert {name: leaf.shape[0] for name, leaf in task.batch.items()} == dict.fromkeys(task.batch, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 1025}, r"length must be in \[2, 1024\], got 1025"),
        ({"models": ()}, "models must name at least one, got none"),
        ({"variants": ("magic",)}, "variants must be among bookkeeping, ghost, .*, got magic"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"preset": "huge"}, "preset must be one of .*, got 'huge'"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm must be positive and finite, got 0.0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeersConfig(**settings)


def test_the_script_complains_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # which the script sets
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(bench_peers.__file__), run_name="__main__")
    assert leaving.value.code == 2
    assert capsys.readouterr().err == f"error: out must not exist, got {tmp_path}\n"


def test_the_commands_in_the_docstring_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = str(bench_peers.__doc__).splitlines()
    commands = [line.split()[2:] for line in lines if line.startswith("    python ")]
    assert len(commands) == 2
    for arguments in commands:
        monkeypatch.setattr(sys, "argv", ["bench_peers.py", *arguments])
        assert str(cli.parse(PeersConfig).out).startswith("runs/peers")
