"""A study's small files, for a repository: what its report is computed from, and a rerun skips by."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from wtdp_jax.run_folder import RunFolder, read_json, write_bytes
from wtdp_jax.study.folder import DIVERGED, StudyFolder

_REPORT = ("report.md", "*.csv", "*.png")


def keep(folder: StudyFolder, destination: Path) -> None:
    """Copies what is worth keeping of a study: no models, checkpoints, compiled programs or curves.

    `write_report` finds in the copy all that it needs, and `study.py` its finished runs. What the destination
    held before is removed.

    Args:
      folder: the study's.
      destination: created if absent.

    Raises:
      ValueError: if the folder holds no study, or the destination is neither empty nor another study.
    """
    if not folder.cells.exists():
        raise ValueError(f"folder must hold a study (cells.json), got {folder.path}")
    if destination.exists() and any(destination.iterdir()) and not StudyFolder(destination).cells.exists():
        raise ValueError(f"keep must be empty or hold a study, got {destination}")
    if destination.resolve() == folder.path.resolve():
        raise ValueError(f"keep must be another folder than the study's, got {destination}")
    shutil.rmtree(destination, ignore_errors=True)
    for path in _worth_keeping(folder):
        copy = destination / path.relative_to(folder.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(copy, path.read_bytes())


def _worth_keeping(folder: StudyFolder) -> Iterator[Path]:
    """The files to copy."""
    for pattern in _REPORT:
        yield from sorted(folder.path.glob(pattern))
    top = (folder.study, folder.cells, folder.noise, folder.choices)
    yield from (path for path in top if path.exists())
    yield from sorted((folder.path / "costs").rglob("*.json"))
    for cell in read_json(folder.cells):
        if not folder.has_ended(cell["folder"]):
            continue
        run = RunFolder(folder.path / cell["folder"])
        files = [run.config, run.results, run.path / DIVERGED]
        if cell["purpose"] == "final":
            files += [run.privacy, run.predictions, run.metrics]
        yield from (path for path in files if path.exists())
