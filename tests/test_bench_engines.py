"""The benchmark of the engines, end to end at the smallest sizes."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments import bench_engines
from experiments.bench_engines import BenchConfig, Case, Setting
from wtdp_jax import cli, compiled
from wtdp_jax.benchmark import compilations, engine_cases, step_cost

_SMALLEST: dict[str, Any] = {
    "presets": ("tiny",),
    "engines": ("bookkeeping",),
    "batch_sizes": (2,),
    "lengths": (4,),
    "remat": (False,),
}
_SETTING = Setting("tiny", "next_token", "float32", 2, 4)


@pytest.fixture
def no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a run the fifty steps whose compilations it counts."""
    counted = {"steps": 50, "accumulate": 1, "update": 1}
    monkeypatch.setattr(bench_engines, "compilations_in_a_run", lambda: counted)


def _run(out: Path, **changes: Any) -> list[dict[str, Any]]:
    """The rows that a run leaves."""
    bench_engines.main(BenchConfig(out=out, **{**_SMALLEST, **changes}))
    return json.loads((out / "results.json").read_text())["rows"]


@pytest.mark.slow
def test_a_run_that_only_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("nothing may be allocated")

    monkeypatch.setattr(step_cost.Arrays, "__init__", refuse)
    out = tmp_path / "run"
    rows = _run(out, compile_only=True, batch_sizes=(2, 4), models=("tied",))
    assert [(row["batch_size"], row["engine"], row["remat"]) for row in rows] == [
        (size, *variant)
        for size in (2, 4)
        for variant in (("non-private", False), ("non-private", True), ("bookkeeping", False))
    ]
    for row in rows:
        assert row["flops"] > 0 and row["temp_bytes"] > 0 and "step_seconds" not in row
        # float32 parameters and adam's two moments: the step holds at least three copies.
        assert row["step_bytes"] > 3 * 4 * 2 * 256 * 32
    assert rows[0]["over"]["plain"]["flops"] == 1 and rows[2]["over"]["plain"]["flops"] > 1
    assert rows[3]["step_bytes"] > rows[0]["step_bytes"]
    assert (out / "by_batch_size.png").exists() and not (out / "by_length.png").exists()
    printed = capsys.readouterr().out
    assert "50 Poisson steps: accumulate 1, update 1 (expected 1 each)" in printed
    assert (out / "table.md").read_text().strip() in printed


@pytest.mark.slow
def test_a_timed_run(tmp_path: Path, no_count: None) -> None:
    rows = _run(tmp_path / "run", models=("untied",), repeats=3)
    for row in rows:
        assert len(row["all_seconds"]["gradient"]) == len(row["all_seconds"]["step"]) == 3
        assert row["examples_per_second"] == pytest.approx(2 / row["step_seconds"])
        assert row["tokens_per_second"] == pytest.approx(8 / row["step_seconds"])
        assert (row["noise_seconds"] is None) == (row["engine"] == "non-private")
    private = rows[2]
    for name, base in (("plain", rows[0]), ("remat", rows[1])):
        ratio = private["gradient_seconds"] / base["gradient_seconds"]
        assert private["over"][name]["gradient_seconds"] == pytest.approx(ratio)


@pytest.mark.slow
def test_a_variant_that_needs_too_much_is_compiled_and_not_run(tmp_path: Path, no_count: None) -> None:
    rows = _run(tmp_path / "run", engines=(), models=("tied",), run_limit_gb=1e-6)
    for row in rows:
        assert row["note"].startswith("not run: needs 0.0 GB") and row["flops"] > 0
        assert "step_seconds" not in row


@pytest.mark.slow
def test_layers_in_bfloat16(tmp_path: Path, no_count: None) -> None:
    changes = {"engines": ("ghost",), "dtypes": ("bfloat16",), "models": ("tied",), "compile_only": True}
    rows = _run(tmp_path / "run", **changes)
    assert [row["engine"] for row in rows] == ["non-private", "non-private", "ghost"]
    assert all(row["note"] is None and row["temp_bytes"] > 0 for row in rows)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    case = Case(_SETTING, "tied", "non-private", None, False)

    def size(rows: int) -> int:
        at = case._replace(setting=_SETTING._replace(batch_size=rows))
        return compiled.memory(engine_cases.compile_case(at).step).total

    found = engine_cases.largest_batch(case, 2e6)
    assert found > 2 and size(found) <= 2e6 < size(found + 1)


def test_cases_are_told_apart_only_where_they_differ() -> None:
    config = BenchConfig(tied_norms=("cross_term", "materialize"), remat=(True,))
    found = bench_engines.cases(config, _SETTING)
    # Two baselines and four engines each, and two of these twice where the matrix is tied.
    assert [case.model for case in found] == ["tied"] * 8 + ["untied"] * 6
    assert len(set(found)) == 14


def test_quick_replaces_the_sizes_alone() -> None:
    config = BenchConfig(quick=True, losses=("lm",), repeats=3).effective()
    assert config.presets == ("tiny",) and config.losses == ("lm",) and config.repeats == 3


@pytest.mark.slow
def test_a_step_recompiled_for_each_shape_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ragged(compilations.PoissonSampler):
        """As a sampler without fixed physical batches would be."""

        def batches(self, step: int) -> Any:
            return [
                (rows[: 1 + step % 3], padding[: 1 + step % 3]) for rows, padding in super().batches(step)
            ]

    monkeypatch.setattr(compilations, "PoissonSampler", Ragged)
    assert compilations.compilations_in_a_run(steps=3) == {"steps": 3, "accumulate": 3, "update": 1}


def test_planned_operations_are_none_where_they_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Any) -> int:
        raise ValueError("cannot count the matrix product custom-call")

    monkeypatch.setattr(step_cost.compiled, "matmul_flops", refuse)
    program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert step_cost.planned(step_cost.Programs(program, program))["flops"] is None


def test_a_step_without_noise_has_the_same_state_and_no_noise() -> None:
    params, batch = {"w": jax.numpy.ones(3)}, {"x": jax.numpy.ones((2, 3))}
    key = jax.random.wrap_key_data(jax.numpy.zeros(2, jax.numpy.uint32))
    state = step_cost.initial_state(params, batch, key)
    sums = {"w": jax.numpy.zeros(3)}
    outcomes = [
        step_cost.optimizer(2, key, private=private).update(sums, state.opt_state, params)
        for private in (True, False)
    ]
    assert jax.tree.structure(outcomes[0][1]) == jax.tree.structure(outcomes[1][1])
    assert (outcomes[0][0]["w"] != 0).all() and (outcomes[1][0]["w"] == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": (64, 1025)}, r"lengths must be in \[2, 1024\], got 1025"),
        ({"lengths": ()}, "lengths must name at least one, got none"),
        ({"batch_sizes": (8, 0)}, "batch_sizes must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"presets": ("huge",)}, "preset must be one of .*, got 'huge'"),
        ({"memory_limit_gb": -1.0}, "memory_limit_gb must be positive and finite, got -1.0"),
        ({"run_limit_gb": float("nan")}, "run_limit_gb must be positive and finite, got nan"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**settings)


def test_a_folder_that_exists_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out must not exist"):
        bench_engines.main(BenchConfig(out=tmp_path))


def _script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # which the script sets
    monkeypatch.setattr(sys, "argv", ["bench_engines.py", *arguments])
    runpy.run_path(str(bench_engines.__file__), run_name="__main__")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "1"], "lengths must be in [2, 1024], got 1"),
        (["--engines", "magic"], "magic"),
        (["--out", "."], "out must not exist, got ."),
    ],
)
def test_the_script_complains_in_one_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as leaving:
        _script(monkeypatch, *arguments)
    stderr = capsys.readouterr().err
    assert leaving.value.code == 2
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and message in stderr


def test_the_commands_in_the_docstring_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = str(bench_engines.__doc__).splitlines()
    commands = [line.split()[2:] for line in lines if line.startswith("    python ")]
    assert len(commands) == 4
    for arguments in commands:
        monkeypatch.setattr(sys, "argv", ["bench_engines.py", *arguments])
        assert str(cli.parse(BenchConfig).out).startswith("runs/bench")
