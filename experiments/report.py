"""Writes a study's report: report.md, a CSV file for each table, and figures, from study.py's run folders.

    python experiments/report.py runs/smoke

It may be called at any time; what is not finished yet is listed. Every row of a CSV names its run folders.
"""

import dataclasses
from pathlib import Path

import tyro

from wtdp_jax import cli
from wtdp_jax.study.document import write_report
from wtdp_jax.study.folder import StudyFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Writes a study's report into the study's folder."""

    folder: tyro.conf.Positional[Path]
    """The study's folder."""


def main(config: ReportConfig) -> None:
    """Writes the report, and says where it is."""
    with cli.one_line_errors(ValueError, OSError):
        print(write_report(StudyFolder(config.folder)))


if __name__ == "__main__":
    main(cli.parse(ReportConfig))
