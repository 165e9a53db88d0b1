"""Timing, search, tables and files of the benchmark scripts."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from wtdp_jax.benchmark import figures, runs, tables, timing
from wtdp_jax.benchmark.figures import Line, Panel
from wtdp_jax.benchmark.tables import Column


def _recording(log: list[str], name: str) -> Callable[[], None]:
    return lambda: log.append(name)


def test_each_call_runs_once_a_round_in_changing_orders() -> None:
    log: list[str] = []
    seconds = timing.interleaved_seconds({name: _recording(log, name) for name in "abcd"}, repeats=20)
    rounds = ["".join(log[start : start + 4]) for start in range(0, len(log), 4)]
    assert len(rounds) == 21 and all(Counter(order) == Counter("abcd") for order in rounds)
    assert len(set(rounds)) > 5
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abcd", 20)


def test_the_first_round_is_not_timed() -> None:
    calls = iter([0.2, 0.0, 0.0])
    seconds = timing.interleaved_seconds({"a": lambda: time.sleep(next(calls))}, repeats=2)
    assert max(seconds["a"]) < 0.1


def test_a_call_is_timed_until_its_result_is_there() -> None:
    class Slow:
        def block_until_ready(self) -> None:
            time.sleep(0.05)

    seconds = timing.interleaved_seconds({"a": Slow, "b": lambda: jnp.ones(3)}, repeats=3)
    medians = timing.medians(seconds)
    assert medians["a"] >= 0.05 > medians["b"]


def test_medians() -> None:
    assert timing.medians({"a": [5.0, 1.0, 2.0]}) == {"a": 2.0}


def test_no_round_is_refused() -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        timing.interleaved_seconds({}, repeats=0)


_SIZES: dict[str, Callable[[int], int]] = {
    "line": lambda n: 1000 + 50 * n,
    "square": lambda n: n * n,
    "stairs": lambda n: 1000 + 50 * n + 37 * (n // 16),
    "cliff": lambda n: n if n < 70 else 10**6 + n,
}


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("limit", [0, 999, 1049, 1050, 16_000, 123_456])
@pytest.mark.parametrize("first", [1, 8, 64])
def test_the_largest_that_fits_is_found_with_its_successor(size: str, limit: int, first: int) -> None:
    tried: dict[int, int] = {}

    def total(n: int) -> int:
        assert n not in tried
        return tried.setdefault(n, _SIZES[size](n))

    found = timing.largest_fitting(total, limit, first=first)
    assert tried[found + 1] > limit and (found == 0 or tried[found] <= limit)
    if size == "line":
        assert len(tried) <= 7


def test_ratios_need_both_figures() -> None:
    row, base = {"a": 3.0, "b": None, "c": 1.0}, {"a": 2.0, "b": 1.0, "c": 0}
    assert tables.ratios(row, base, ["a", "b", "c", "d"]) == {"a": 1.5, "b": None, "c": None, "d": None}
    assert tables.ratios(row, None, ["a"]) == {"a": None}


def test_a_table_shows_units_gaps_and_no_empty_column() -> None:
    columns = [
        Column("name", "name"),
        Column("remat", "remat"),
        Column("memory (GB)", "bytes", ".2f", 1e9),
        Column("n", "n"),
        Column("never", "never"),
    ]
    rows = [
        {"name": "a|b", "remat": True, "bytes": 1_500_000_000, "n": 3},
        {"name": "c\nd", "remat": False, "bytes": None},
    ]
    assert tables.markdown_table(columns, rows).splitlines() == [
        "| name | remat | memory (GB) | n |",
        "| --- | --- | --- | --- |",
        r"| a\|b | yes | 1.50 | 3 |",
        "| c d | no | – | – |",
    ]


def test_files_and_the_folder_that_must_be_new(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    runs.new_folder(folder)
    record = {**runs.environment(peer="1.2"), "rows": [{"a": 1}]}
    runs.write_results(folder, record, "| a |")
    saved = json.loads((folder / "results.json").read_text())
    assert saved["rows"] == [{"a": 1}] and saved["versions"]["peer"] == "1.2"
    assert {"command", "date", "device"} <= saved.keys() and saved["device"]["cpu_cores"] >= 1
    assert (folder / "table.md").read_text() == "| a |\n"
    with pytest.raises(ValueError, match="out must not exist, got .*b$"):
        runs.new_folder(folder)


@pytest.mark.parametrize("points", [[(2, 1.0), (8, 3.0)], []])
def test_a_figure_is_drawn_from_whatever_there_is(tmp_path: Path, points: list[tuple[float, float]]) -> None:
    panels = [Panel("tied", "step (s)", [Line("ghost", points, "C0")]), Panel("untied", "step (s)", [])]
    figures.draw(tmp_path / "a.png", panels, xlabel="B", columns=2)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("dots", "", "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),
        ("dots", "--a=1", "--a=1 --xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),
        ("dots", "--xla_cpu_experimental_ynn_fusion_type=", "--xla_cpu_experimental_ynn_fusion_type="),
        ("all", "--a=1", "--a=1"),
    ],
)
def test_cpu_fusions_are_a_flag_unless_the_user_set_it(
    kind: runs.CpuFusions, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", before)
    runs.use_cpu_fusions(kind)
    assert os.environ["XLA_FLAGS"] == after == runs.environment()["xla_flags"]


@pytest.mark.slow
def test_the_flag_takes_effect() -> None:
    """In a process of its own, since XLA reads its flags once."""
    code = """
import jax, jax.numpy as jnp
from wtdp_jax.benchmark import runs
runs.use_cpu_fusions("{kind}")
program = jax.jit(lambda x, w: jnp.sum(x * w[:, None, None], 0)).lower(jnp.ones((2, 500, 700)), jnp.ones(2))
print("ynn" in program.compile().as_text())
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    printed = [
        subprocess.run(
            [sys.executable, "-c", code.format(kind=kind)],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        ).stdout.strip()
        for kind in ("all", "dots")
    ]
    assert printed == ["True", "False"]
