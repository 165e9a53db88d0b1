"""What README.md says was measured is what `experiments/results/` holds."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")

Row = dict[str, Any]

_NONE = "–"

# Labels in README: engine, remat.
_VARIANTS = {
    "non-private, `remat=True`": ("non-private", True),
    "ghost, `remat=True`": ("ghost", True),
    'ghost, `remat="full"`': ("ghost", "full"),
    "bookkeeping, `remat=True`": ("bookkeeping", True),
    'bookkeeping, `remat="full"`': ("bookkeeping", "full"),
}
_PEERS = {
    "bookkeeping": ("wtdp-jax", "bookkeeping"),
    "ghost": ("wtdp-jax", "ghost"),
    "jax-privacy 2.0.0, `microbatch_size=1`": ("jax-privacy", "microbatch_size=1"),
    "Opacus 1.6.0, ghost": ("opacus", "ghost"),
}


def _results(name: str) -> dict[str, Any]:
    return json.loads((_ROOT / "experiments" / "results" / name / "results.json").read_text(encoding="utf-8"))


def _over(folder: str, wanted: Row, names: tuple[str, ...]) -> str:
    """Figures of a row over the non-private gradient without remat, as README writes them."""
    found = [row for row in _results(folder)["rows"] if wanted.items() <= row.items()]
    if not found:
        return _NONE
    (row,) = found
    over = row["over"]["plain"]
    return " / ".join(
        format(over[n], ".2f" if n.endswith("seconds") else ".3f") for n in names if over.get(n)
    )


def _gradient(variant: str, column: int) -> str:
    engine, remat = _VARIANTS[variant]
    wanted: Row = {"engine": engine, "remat": remat, "model": "tied"}
    names = ("flops", "temp_bytes", "gradient_seconds")
    if column == 2:
        return _over("distilgpt2-lm", wanted | {"batch_size": 4, "length": 1024}, names)
    return _over("distilgpt2-batch", wanted | {"batch_size": (8, 16)[column], "length": 64}, names)


def _step(variant: str, column: int) -> str:
    engine, remat = _VARIANTS[variant]
    model, size = (("tied", 8), ("tied", 16), ("untied", 8), ("untied", 16))[column]
    wanted = {"engine": engine, "remat": remat, "model": model, "batch_size": size, "length": 64}
    return _over("distilgpt2-batch", wanted, ("step_bytes", "step_seconds"))


def _peer(label: str, column: int) -> str:
    library, variant = _PEERS[label]
    wanted = {"library": library, "variant": variant, "model": ("tied", "untied")[column]}
    (row,) = [row for row in _results("peers-b16")["rows"] if wanted.items() <= row.items()]
    return "refuses" if row["step_over"] is None else format(row["step_over"], ".2f")


def lines(labels: Any, columns: int, figure: Callable[[str, int], str]) -> list[str]:
    """Lines of a table in README."""
    cells = {label: [figure(label, column) for column in range(columns)] for label in labels}
    return [f"| {label} | {' | '.join(row)} |" for label, row in cells.items() if {*row} != {_NONE}]


@pytest.mark.parametrize(
    ("labels", "columns", "figure"), [(_VARIANTS, 3, _gradient), (_VARIANTS, 4, _step), (_PEERS, 2, _peer)]
)
def test_tables(labels: Any, columns: int, figure: Callable[[str, int], str]) -> None:
    for line in lines(labels, columns, figure):
        assert line in _README.splitlines()


def noise_figures() -> dict[str, str]:
    """What README says of noise."""
    ours, _, theirs, _ = _results("noise")["rows"]
    return {
        "NOISE": f"{ours['seconds']:.2f}",
        "NOISE_MEMORY": f"{ours['temp_over_sum']:.3f}",
        "REACH": f"{theirs['reach']:.2f}",
        "JAX_NOISE": f"{theirs['seconds']:.2f}",
        "JAX_MEMORY": f"{theirs['temp_over_sum']:.2f}",
    }


def test_noise() -> None:
    found = noise_figures()
    said = re.search(
        r"takes ([\d.]+) s of a step at 163 million parameters, and ([\d.]+) of the sum's own\s+memory; "
        r"`jax.random.normal`, whose tails end at ([\d.]+) standard deviations, ([\d.]+) s and ([\d.]+) ",
        _README,
    )
    assert said is not None and said.groups() == tuple(found.values())


def test_standard_clippings_memory() -> None:
    wanted = {"engine": "ghost", "batch_size": 16, "length": 64}
    (row,) = [row for row in _results("distilgpt2-plan")["rows"] if wanted.items() <= row.items()]
    times = re.search(r"takes (\d+) times the temporary memory of ghost at B 16, T 64", _README)
    assert times is not None and int(times[1]) == round(1 / row["over"]["materialized"]["temp_bytes"])


def test_the_stored_audit_found_every_fault_and_no_other() -> None:
    rows = _results("audit-quick")["rows"]
    assert all(row["is_as_expected"] for row in rows)
    faults = [row for row in rows if row["name"].startswith("fault: ")]
    assert len(faults) == 5 and all(row["verdict"] == "refuted" for row in faults)
    assert len(rows) - len(faults) >= 14


def test_of_the_stored_mutants_every_survivor_is_explained() -> None:
    record = _results("mutation")
    assert len(record["rows"]) >= 200
    assert all(row["explanation"] for row in record["rows"] if row["survived"])
    assert max(record["baseline_seconds"].values()) <= 15


def test_the_privacy_page_says_the_measured_coverage() -> None:
    table = (_ROOT / "experiments" / "results" / "coverage.md").read_text(encoding="utf-8")
    share = table.strip().splitlines()[-1].split("|")[4].strip()
    assert f"of all lines, {share} %" in (_ROOT / "wtdp_jax" / "PRIVACY.md").read_text(encoding="utf-8")
    assert float(share) >= 95


def test_each_result_says_how_it_was_made() -> None:
    tables = sorted((_ROOT / "experiments" / "results").glob("*/table.md"))
    assert len(tables) >= 7
    for path in (table.parent for table in tables):
        record = _results(path.name)
        assert record["command"].startswith("python experiments/")
        assert {"date", "versions", "device", "settings", "rows"} <= record.keys()
