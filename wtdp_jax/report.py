"""What a run says at its end: results.json, curves.png, and the same in words."""

import dataclasses
import functools
import importlib.metadata
import io
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from wtdp_jax.run_folder import write_bytes
from wtdp_jax.version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "dp-accounting", "numpy")

# Each can change a result's bits.
_SETTINGS_OF_JAX = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")

Row = dict[str, Any]
"""A line of metrics.jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The figures of a whole run, as in results.json.

    Attributes:
      accuracy: share of the evaluation set that is classified rightly, in [0, 1].
      loss: mean loss on the evaluation set, in nats.
      steps: optimizer steps.
      epsilon: of the effective noise multiplier, by PLD; None without a guarantee, "inf" if not finite.
      epsilon_claimed: of the plain noise multiplier; too small where the norm is naive.
      delta: of the guarantee.
      noise_multiplier: noise standard deviation over the clip norm.
      median_step_seconds: time of a step; None if no step was timed.
      steps_per_second: the inverse.
      examples_per_second: steps a second times the expected batch size.
      peak_memory_bytes: largest memory in use.
      peak_memory_of: "device" where the device reports it, else "process", the resident memory.
      num_trained_parameters: numbers that are trained, and noised in a private run.
      num_train_examples: training examples.
      num_eval_examples: evaluation examples.
      non_private_num_train_cut: training texts that were cut to the maximum length.
      num_eval_cut: evaluation texts that were.
      non_private_not_finite: gradients that were not finite and contributed zero, over all steps.
      versions: of the packages that compute.
      device: kind, platform and number of devices.
    """

    accuracy: float
    loss: float
    steps: int
    epsilon: float | str | None
    epsilon_claimed: float | str | None
    delta: float | None
    noise_multiplier: float | None
    median_step_seconds: float | None
    steps_per_second: float | None
    examples_per_second: float | None
    peak_memory_bytes: int
    peak_memory_of: Literal["device", "process"]
    num_trained_parameters: int
    num_train_examples: int
    num_eval_examples: int
    non_private_num_train_cut: int
    num_eval_cut: int
    non_private_not_finite: int
    versions: dict[str, str]
    device: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        return dataclasses.asdict(self)


def speed(rows: Sequence[Row], batch_size: int) -> dict[str, float | None]:
    """Returns the speed fields of `Results`, from the steps' times.

    The median leaves out what compilation adds to the first step of each process.

    Args:
      rows: lines of metrics.jsonl.
      batch_size: expected examples a step.
    """
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    median = statistics.median(seconds) if seconds else None
    steps_per_second = None if median is None else 1.0 / median
    return {
        "median_step_seconds": median,
        "steps_per_second": steps_per_second,
        "examples_per_second": None if steps_per_second is None else batch_size * steps_per_second,
    }


def peak_memory() -> tuple[int, Literal["device", "process"]]:
    """Returns the largest memory in use so far, in bytes, and whose memory it is."""
    device_statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device_statistics:
        return int(device_statistics["peak_bytes_in_use"]), "device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def versions() -> dict[str, str]:
    """Returns the versions of what computes; with a checkout of the project its commit too."""
    packages = {package: importlib.metadata.version(package) for package in _PACKAGES}
    of_source = {} if (found := commit()) is None else {"commit": found}
    return {"wtdp-jax": __version__, **of_source, "python": platform.python_version(), **packages}


@functools.cache
def commit() -> str | None:
    """The checkout's commit, with "+" where the package differs from it; None if this is no checkout."""
    package = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An environment inside somebody's repository is not this project's.
        if not git("ls-files", Path(__file__).name):
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def device() -> dict[str, Any]:
    """Returns the kind, platform and number of the devices."""
    devices = jax.devices()
    return {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)}


def computation() -> dict[str, Any]:
    """Returns what decides the bits of a computation besides its input: software, device, arithmetic."""
    return {
        "wtdp_jax": __version__,
        "jax": jax.__version__,
        "device": device(),
        **{name: getattr(jax.config, name) for name in _SETTINGS_OF_JAX},
    }


def describe(results: Results, guarantee: str, folder: Path) -> str:
    """Returns the outcome in words.

    Args:
      results: the figures.
      guarantee: the privacy statement in words.
      folder: the run folder.
    """
    lines = [
        f"accuracy {results.accuracy:.2%}, loss {results.loss:.4f} on {results.num_eval_examples} examples",
        f"peak {results.peak_memory_of} memory {results.peak_memory_bytes / 2**30:.2f} GiB",
    ]
    if results.median_step_seconds is not None:
        lines.append(
            f"{results.steps} steps, {results.median_step_seconds:.3g} s each (median), "
            f"{results.examples_per_second:.3g} examples/s"
        )
    if results.non_private_num_train_cut or results.num_eval_cut:
        lines.append(
            f"texts cut to the maximum length: {results.num_eval_cut} for evaluation, "
            f"{results.non_private_num_train_cut} (non-private) for training"
        )
    return "\n".join([*lines, guarantee, f"everything is in {folder}"])


def plot_curves(path: Path, rows: Sequence[Row]) -> None:
    """Draws loss, accuracy and the epsilon spent by step.

    Args:
      path: the image file to write.
      rows: lines of metrics.jsonl.
    """
    # Imported late and without pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[str, tuple[str, ...]] = {
        "loss (nats)": ("non_private_loss", "eval_loss"),
        "accuracy": ("eval_accuracy",),
        "epsilon spent (RDP)": ("epsilon_rdp",),
    }
    shown = {label: names for label, names in panels.items() if any(_points(rows, name) for name in names)}
    figure = Figure(figsize=(4 * max(len(shown), 1), 3), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (label, names) in enumerate(shown.items(), start=1):
        axes = figure.add_subplot(1, len(shown), index, xlabel="step", ylabel=label)
        for name in filter(lambda name: _points(rows, name), names):
            axes.plot(
                *zip(*_points(rows, name), strict=True),
                marker="." if name.startswith("eval") else "",
                label=name,
            )
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_bytes(path, image.getvalue())


def _points(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """The (step, value) pairs of one measurement."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]
