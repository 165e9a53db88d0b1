"""What a benchmark's figures depend on, and the files that hold both."""

import datetime
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from wtdp_jax import report
from wtdp_jax.run_folder import write_bytes, write_json

CpuFusions = Literal["dots", "all"]

_YNN_FLAG = "xla_cpu_experimental_ynn_fusion_type"


def use_cpu_fusions(kind: CpuFusions) -> None:
    """Settles what XLA hands to its CPU library, YNN; to be called before jax computes anything.

    By default, in jax 0.10 to 0.12, that is reductions and chains of operations too. A weighted sum of
    per-example gradients then takes 15 to 50 times as long, so a comparison with whatever forms them would be
    one with YNN; and what a chain holds between its operations is in no memory plan. Devices other than CPUs
    are not concerned.

    Args:
        kind: "dots": matrix products, each by itself; a setting of the user's stays. "all" changes nothing.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if kind == "dots" and _YNN_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_YNN_FLAG}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT".strip()


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(**more_versions: str) -> dict[str, Any]:
    """Returns what a figure depends on besides the settings: command, date, versions, device, XLA's flags."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {**report.versions(), **more_versions},
        "device": {**report.device(), "cpu_cores": cores()},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def new_folder(path: Path) -> None:
    """Makes the folder of a benchmark's files.

    Raises:
        ValueError: if it exists.
    """
    if path.exists():
        raise ValueError(f"out must not exist, got {path}")
    path.mkdir(parents=True)


def write_results(folder: Path, record: Mapping[str, Any], table: str) -> None:
    """Writes results.json and table.md, whole or not at all; older ones are replaced."""
    write_json(folder / "results.json", record)
    write_bytes(folder / "table.md", f"{table}\n".encode())
