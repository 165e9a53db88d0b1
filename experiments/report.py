"""Writes a study's report: report.md, a CSV file for each table, and figures, from study.py's run folders.

    python experiments/report.py runs/smoke

It may be called at any time; what is not finished yet is listed. Every row of a CSV names its run folders.
`--keep FOLDER` also copies the report, and the runs' small files that it is computed from, to where they
are to be stored. `study.py` continues such a copy too.
"""

import dataclasses
from pathlib import Path

import tyro

from wtdp_jax import cli
from wtdp_jax.study.document import write_report
from wtdp_jax.study.folder import StudyFolder
from wtdp_jax.study.kept import keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Writes a study's report into the study's folder."""

    folder: tyro.conf.Positional[Path]
    """The study's folder."""

    keep: Path | None = None
    """Where to copy report and small files, in place of an older copy; None: nowhere."""


def main(config: ReportConfig) -> None:
    """Writes the report, and says where it is."""
    with cli.one_line_errors(ValueError, OSError):
        folder = StudyFolder(config.folder)
        print(write_report(folder))
        if config.keep is not None:
            keep(folder, config.keep)
            print(config.keep)


if __name__ == "__main__":
    main(cli.parse(ReportConfig))
