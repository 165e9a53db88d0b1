"""Audits the guarantee: sound settings must stand, and every planted fault must be found out.

    python experiments/audit.py --quick --out runs/audit-quick
    python experiments/audit.py --out runs/audit

An adversary who knows all but the noise tests, from many draws of one full step, whether a canary took part;
the error rates bound epsilon from below. A sound setting's bound must not exceed its stated epsilon, and a
fault's must: the naive tied norm claimed to be exact, half the noise, and so on. Last, one whole training run
with many canaries, whose bound is weak. The exit status is 1 if any verdict is not as expected. An audit can
refute a stated epsilon, and never confirm it.
"""

import dataclasses
import sys
from pathlib import Path

from wtdp_jax import cli
from wtdp_jax.audit.one_run import RunConfig, audit_one_run
from wtdp_jax.audit.settings import DELTA, Finding, examine, faulty_settings, sound_settings
from wtdp_jax.benchmark import runs, tables
from wtdp_jax.benchmark.tables import Column, Row
from wtdp_jax.clipping import Engine

_COLUMNS = (
    Column("configuration", "name"),
    Column("stated epsilon", "stated_epsilon", ".3f"),
    Column("audited lower bound", "epsilon", ".3f"),
    Column("verdict", "verdict"),
    Column("as expected", "is_as_expected"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Audits the guarantee: sound settings must stand, and every planted fault must be found out."""

    out: Path = Path("runs/audit")
    """Folder for results.json and table.md; must not exist."""

    draws: int = 100_000
    """Draws of the noise, with the canary and as many without, for each setting."""

    ascent_steps: int = 3_000
    """Steps of gradient ascent towards parameters at which the naive tied norm is most wrong."""

    run_engines: tuple[Engine, ...] = ("ghost", "bookkeeping")
    """Engines whose whole training run is audited by many canaries."""

    seed: int = 0
    """Seed of parameters, data and noise."""

    quick: bool = False
    """Whether to take 20,000 draws, 1,000 steps of ascent and one training run."""

    def __post_init__(self) -> None:
        if self.draws < 20_000:
            raise ValueError(f"draws must be at least 20000, got {self.draws}")
        if self.ascent_steps < 0:
            raise ValueError(f"ascent_steps must be at least 0, got {self.ascent_steps}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def effective(self) -> "AuditConfig":
        """The settings with what `quick` replaces."""
        if not self.quick:
            return self
        return dataclasses.replace(self, draws=20_000, ascent_steps=1_000, run_engines=self.run_engines[:1])


def main(config: AuditConfig) -> bool:
    """Audits, writes results.json and table.md, and says whether all is as expected."""
    runs.new_folder(config.out)
    config = config.effective()
    rows: list[Row] = []
    for setting in (*sound_settings(), *faulty_settings()):
        found = examine(setting, seed=config.seed, draws=config.draws, ascent_steps=config.ascent_steps)
        rows.append(_row(found))
        print(tables.markdown_table(_COLUMNS, rows[-1:]).splitlines()[-1], flush=True)
    rows += [_run_row(engine, config.seed) for engine in config.run_engines]
    table = tables.markdown_table(_COLUMNS, rows)
    record = {
        **runs.environment(),
        "settings": dataclasses.asdict(config) | {"out": str(config.out)},
        "delta": DELTA,
        "rows": rows,
    }
    runs.write_results(config.out, record, table)
    wrong = [row["name"] for row in rows if not row["is_as_expected"]]
    print(f"\n{table}\n\neverything is in {config.out}")
    verdict = f"NOT as expected: {'; '.join(wrong)}" if wrong else "all as expected"
    print(f"{len(rows)} audits: {verdict}")
    return not wrong


def _row(found: Finding) -> Row:
    return {
        "name": found.setting.name,
        "stated_epsilon": found.stated_epsilon,
        **dataclasses.asdict(found.audit),
        "verdict": "refuted" if found.is_refuted else "stands",
        "is_as_expected": found.is_as_expected,
    }


def _run_row(engine: Engine, seed: int) -> Row:
    found = audit_one_run(RunConfig(engine=engine, seed=seed))
    is_refuted = found.epsilon > found.stated_epsilon
    return {
        "name": f"whole run, {engine}: {found.correct} of {found.guesses} guesses correct",
        **dataclasses.asdict(found),
        "verdict": "refuted" if is_refuted else "stands",
        "is_as_expected": not is_refuted,
    }


if __name__ == "__main__":
    given = cli.parse(AuditConfig)
    with cli.one_line_errors(ValueError, OSError):
        is_as_expected = main(given)
    sys.exit(0 if is_as_expected else 1)
