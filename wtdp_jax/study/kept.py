"""A study's small files, for a repository: what its report is computed from, and a rerun skips by."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from wtdp_jax.run_folder import RunFolder, read_json, write_bytes
from wtdp_jax.study.folder import DIVERGED, StudyFolder

_REPORT = ("report.md", "*.csv", "*.png")


def keep(folder: StudyFolder, destination: Path) -> None:
    """Copies what is worth keeping of a study: no models, checkpoints, compiled programs or curves.

    `write_report` finds in the copy all that it needs, and `study.py` its finished runs. An older copy is
    removed when the new one is whole.

    Args:
      folder: the study's.
      destination: created if absent.

    Raises:
      ValueError: if the folder holds no study, or the destination anything but an older copy, or if one is
      inside of the other.
    """
    if not folder.cells.exists():
        raise ValueError(f"folder must hold a study (cells.json), got {folder.path}")
    _refuse_to_lose(folder, destination)
    place = destination.resolve()
    new, old = (place.with_name(f".{place.name}.{end}") for end in ("partial", "old"))
    shutil.rmtree(new, ignore_errors=True)
    for path in _worth_keeping(folder):
        copy = new / path.relative_to(folder.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(copy, path.read_bytes())
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _refuse_to_lose(folder: StudyFolder, destination: Path) -> None:
    """Refuses a destination that replacing would take more from than an older copy."""
    place, source = destination.resolve(), folder.path.resolve()
    if place == source or place in source.parents or source in place.parents:
        raise ValueError(
            "keep must be another folder than the study's, neither inside of it nor around it, "
            f"got {destination}"
        )
    if not place.exists() or not any(place.iterdir()):
        return
    copy = StudyFolder(place)
    if not copy.cells.exists():
        raise ValueError(f"keep must be empty or hold a study, got {destination}")
    # Of a copy all is worth keeping; a study that is still worked on has checkpoints, models, locks.
    others = {path for path in place.rglob("*") if not path.is_dir()} - {*_worth_keeping(copy)}
    if others:
        example = min(others).relative_to(place)
        raise ValueError(f"keep must hold nothing but an older copy, got {destination} with {example}")


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
