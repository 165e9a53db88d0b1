"""Mutation testing of what privacy rests on: are small faults in rules, clipping, noise or sampling seen?

    pip install -e ".[test,mutation]"
    python experiments/mutation.py --out runs/mutation

Draws mutants (one operator, number or condition changed) from all that cosmic-ray can make of the modules
in `SUITES`, applies each to a copy of the repository, and runs that module's tests, which take 15 seconds or
less on unchanged code that is compiled. A mutant that no test notices has survived: it is a gap in the tests,
or changes nothing that matters. Why, is to be said in a JSON file given as --explained, {"the changed line":
"why it does not matter"}. The exit status is 1 while a survivor is unexplained. With 240 mutants it takes
about half an hour on two cores. When tests were added, only the survivors need be tried again:

    python experiments/mutation.py --again runs/mutation --explained explained.json --out runs/mutation-2
"""

import ast
import dataclasses
import multiprocessing
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wtdp_jax import cli
from wtdp_jax.benchmark import runs
from wtdp_jax.benchmark.tables import Column, markdown_table
from wtdp_jax.run_folder import read_json

_QUICK = "tests/clipping/test_quick.py"

SUITES = {
    "wtdp_jax/rules.py": "tests/test_rules.py",
    "wtdp_jax/head_rules.py": "tests/test_head_rules.py -k 'not 23'",
    "wtdp_jax/clipping/factors.py": (
        f"tests/clipping/test_factors.py {_QUICK} -k 'test_factors or edges or bookkeeping'"
    ),
    "wtdp_jax/clipping/ghost.py": (
        f"{_QUICK} tests/clipping/test_sensitivity.py -k 'by_the_margin or (test_quick and ghost)'"
    ),
    "wtdp_jax/clipping/bookkeeping.py": f"{_QUICK} -k bookkeeping",
    "wtdp_jax/clipping/materialized.py": f"{_QUICK} -k materialized",
    "wtdp_jax/clipping/layers.py": f"tests/clipping/test_layers.py {_QUICK} -k 'test_layers or ghost'",
    "wtdp_jax/clipping/tapped.py": (
        f"{_QUICK} tests/clipping/test_coverage.py"
        " -k 'programs_are_compared or refused_by_name or (test_quick and ghost)'"
    ),
    "wtdp_jax/clipping/rounds.py": f"{_QUICK} -k bookkeeping",
    "wtdp_jax/clipping/rows.py": f"tests/clipping/test_rows.py {_QUICK} -k 'test_rows or bookkeeping'",
    "wtdp_jax/noise.py": "tests/test_noise.py",
    "wtdp_jax/sampling.py": "tests/test_sampling.py",
    "wtdp_jax/privacy.py": "tests/test_privacy.py",
    "wtdp_jax/accounting.py": (
        "--noconftest tests/test_accounting.py -k 'not second and not many and not bounded'"
    ),
}
"""Each mutated module, and the tests that must notice."""

_COPIED = ("wtdp_jax", "tests", "experiments", "pyproject.toml", "README.md")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutationConfig:
    """Mutation testing of what privacy rests on."""

    out: Path = Path("runs/mutation")
    """Folder for results.json and table.md; must not exist."""

    mutants: int = 240
    """How many are drawn, of all modules together."""

    seed: int = 0
    """Seed of the draw."""

    jobs: int = 2
    """Mutants at once, each in a copy of the repository."""

    timeout_seconds: float = 120.0
    """Time after which a mutant's tests count as failed."""

    again: Path | None = None
    """Folder of an earlier draw, whose survivors are tried again; None: a new draw."""

    explained: Path | None = None
    """JSON file of survivors that do not matter, by their changed line; None: none is explained."""

    def __post_init__(self) -> None:
        for name in ("mutants", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {self.timeout_seconds}")


def main(config: MutationConfig) -> int:
    """Runs the tests on unchanged code, then on each mutant; returns the exit status."""
    root = Path(__file__).resolve().parents[1]
    with cli.one_line_errors(ValueError, OSError):
        explained = {} if config.explained is None else read_json(config.explained)
        # What may be refused comes first, so that it leaves no folder behind.
        draw = _new_draw(root, config) if config.again is None else _earlier_draw(config.again)
        runs.new_folder(config.out)
        with tempfile.TemporaryDirectory() as scratch:
            with multiprocessing.get_context("spawn").Pool(
                config.jobs, _settle, (root, Path(scratch))
            ) as pool:
                suites = sorted(set(SUITES.values()))
                baseline = dict(pool.apply(_unchanged, (suite,)) for suite in suites)  # one at a time: timed
                rows = list(draw.settled)
                for row in pool.imap_unordered(_try, [(m, config.timeout_seconds) for m in draw.untried]):
                    row["explanation"] = explained.get(row["after"].strip()) if row["survived"] else None
                    rows.append(row)
                    outcome = "SURVIVED" if row["survived"] else "killed"
                    total = len(draw.settled) + len(draw.untried)
                    print(f"{len(rows)}/{total} {outcome}: {row['module']}: {row['after']}", flush=True)
    rows.sort(key=lambda row: (row["module"], row["line"], row["operator"], row["after"]))
    record = {
        **runs.environment(),
        "settings": {name: str(value) for name, value in vars(config).items()},
        "draw": {"possible": draw.possible, "seed": draw.seed, "commands": draw.commands},
        "baseline_seconds": baseline,
        "rows": rows,
    }
    runs.write_results(config.out, record, table(rows))
    unexplained = [row for row in rows if row["survived"] and not row["explanation"]]
    survived = sum(row["survived"] for row in rows)
    print(
        f"{len(rows)} of {draw.possible} mutants: {len(rows) - survived} killed, {survived} survived, "
        f"{len(unexplained)} of them unexplained"
    )
    return 1 if unexplained else 0


class Draw(NamedTuple):
    """The mutants of a run.

    Attributes:
      possible: of how many they were drawn.
      seed: of the draw.
      commands: that led here, of earlier runs.
      settled: rows of those that an earlier run killed with the tests of today.
      untried: the others.
    """

    possible: int
    seed: int
    commands: list[str]
    settled: list[dict[str, Any]]
    untried: list[dict[str, Any]]


def _new_draw(root: Path, config: MutationConfig) -> Draw:
    possible = list(all_mutants(root))
    drawn = random.Random(config.seed).sample(possible, min(config.mutants, len(possible)))
    return Draw(len(possible), config.seed, [], [], drawn)


def _earlier_draw(folder: Path) -> Draw:
    """The mutants of an earlier run; untried are survivors, and those that tests now given up have killed."""
    record = read_json(folder / "results.json")
    draw = record["draw"]
    settled: list[dict[str, Any]] = []
    untried: list[dict[str, Any]] = []
    for row in record["rows"]:
        is_settled = not row["survived"] and SUITES[row["module"]] in record["baseline_seconds"]
        (settled if is_settled else untried).append(row)
    return Draw(draw["possible"], draw["seed"], [*draw["commands"], record["command"]], settled, untried)


def table(rows: list[dict[str, Any]]) -> str:
    """How many were killed, by module, and every survivor."""
    totals = Counter(row["module"] for row in rows)
    killed = Counter(row["module"] for row in rows if not row["survived"])
    counts = [{"module": m, "mutants": n, "killed": killed[m]} for m, n in sorted(totals.items())]
    heads = (Column("module", "module"), Column("mutants", "mutants"), Column("killed", "killed"))
    survivors = (
        Column("module", "module"),
        Column("line", "line"),
        Column("before", "before"),
        Column("survived as", "after"),
        Column("why it does not matter", "explanation"),
    )
    return "\n\n".join(
        (
            markdown_table(heads, counts),
            markdown_table(survivors, [row for row in rows if row["survived"]]),
        )
    )


def all_mutants(root: Path) -> Iterator[dict[str, Any]]:
    """Every change that cosmic-ray can make in the modules, save in annotations, in a fixed order."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    for module in SUITES:
        spared = list(_annotations((root / module).read_text(encoding="utf-8")))
        with tempfile.TemporaryDirectory() as folder:
            with use_db(Path(folder) / "mutants.sqlite", WorkDB.Mode.create) as found:
                init([root / module], found, {})
                specs = [item.mutations[0] for item in found.work_items]
        for spec in sorted(specs, key=lambda s: (s.operator_name, s.occurrence)):
            if not any(start <= spec.start_pos and spec.end_pos <= end for start, end in spared):
                yield {
                    "module": module,
                    "operator": spec.operator_name,
                    "occurrence": spec.occurrence,
                    "line": spec.start_pos[0],
                }


def _annotations(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types stand: what they say is checked by other means."""
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if isinstance(part, ast.expr):
                assert part.end_lineno is not None and part.end_col_offset is not None
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def _settle(root: Path, scratch: Path) -> None:
    """Gives a worker a copy of the repository and a core of its own, and goes there."""
    place = scratch / str(os.getpid())
    for name in _COPIED:
        source = root / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        place.mkdir(exist_ok=True)
        copy(source, place / name)
    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place)
    # Compiling takes half of a suite's time. A mutant changes few programs, and those are compiled anew.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(scratch / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # these tests need none, and loading takes seconds


def _test_command(suite: str) -> str:
    return shlex.join(
        [sys.executable, *shlex.split("-m pytest -q -x -p no:cacheprovider"), *shlex.split(suite)]
    )


def _unchanged(suite: str) -> tuple[str, float]:
    """Seconds of a suite on unchanged code, whose programs an earlier run has compiled.

    Raises:
      ValueError: if it fails there.
    """
    from cosmic_ray.testing import run_tests
    from cosmic_ray.work_item import TestOutcome

    run_tests(_test_command(suite), 600)
    started = time.perf_counter()
    outcome, output = run_tests(_test_command(suite), 600)
    if outcome != TestOutcome.SURVIVED:
        raise ValueError(f"{suite} must pass on unchanged code, got: {output.strip().splitlines()[-1]}")
    return suite, time.perf_counter() - started


def _try(job: tuple[Mapping[str, Any], float]) -> dict[str, Any]:
    """Applies one mutant, runs its module's tests, and takes it back."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import MutationSpec, WorkerOutcome

    mutant, timeout = job
    spec = MutationSpec(
        module_path=Path(mutant["module"]),
        operator_name=mutant["operator"],
        occurrence=mutant["occurrence"],
        start_pos=(0, 0),
        end_pos=(1, 0),
    )
    result = mutate_and_test([spec], _test_command(SUITES[mutant["module"]]), timeout)
    if result.worker_outcome != WorkerOutcome.NORMAL:
        raise RuntimeError(f"a mutant must be applied and tested, got: {result.output}")
    lines = (result.diff or "").splitlines()
    change = {
        when: " ".join(
            line[1:].strip() for line in lines if line.startswith(sign) and not line.startswith(3 * sign)
        )
        for when, sign in (("before", "-"), ("after", "+"))
    }
    if change != {when: mutant.get(when, change[when]) for when in change}:
        raise ValueError(f"{mutant['module']} must be as it was when its mutants were drawn, got {change}")
    return {**mutant, **change, "survived": not result.is_killed}


if __name__ == "__main__":
    sys.exit(main(cli.parse(MutationConfig)))
