"""What the benchmark scripts share: interleaved timing, the largest size that fits, tables, figures."""

import datetime
import io
import math
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax

from wtdp_jax import report
from wtdp_jax.run_folder import write_bytes, write_json

GB = 1e9
"""Bytes in a GB, as in all figures here."""

NO_VALUE = "–"

CpuFusions = Literal["dots", "all"]

_YNN_FLAG = "xla_cpu_experimental_ynn_fusion_type"

Key = TypeVar("Key", bound=Hashable)

Row = dict[str, Any]
"""One line of a benchmark: what was measured, and the figures; None where there is none."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: with the unit.
        name: the value's name in a row.
        pattern: format of a number.
        unit: what a number is divided by.
    """

    heading: str
    name: str
    pattern: str = ""
    unit: float = 1


class Line(NamedTuple):
    """A line of a figure.

    Attributes:
        label: the same label, colour and style in all panels.
        points: pairs (x, y).
        color: a matplotlib colour.
        style: a matplotlib line style.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    style: str = "-"


class Panel(NamedTuple):
    """One of a figure's panels, both axes logarithmic."""

    title: str
    ylabel: str
    lines: Sequence[Line]


def interleaved_seconds(
    calls: Mapping[Key, Callable[[], Any]], *, repeats: int, seed: int = 0
) -> dict[Key, list[float]]:
    """Times calls in rounds: each once a round, in an order shuffled anew, after a round that is not timed.

    What slows the machine for a while then slows all alike, and ratios stand. The first round takes
    compilation and first allocations.

    Args:
        calls: functions without arguments; what they return is waited for, and dropped.
        repeats: rounds, at least 1.
        seed: of the orders.

    Returns:
        For each call the seconds of each round.

    Raises:
        ValueError: if `repeats` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    order, shuffler = list(calls), random.Random(seed)
    seconds: dict[Key, list[float]] = {name: [] for name in calls}
    for round_number in range(repeats + 1):
        shuffler.shuffle(order)
        for name in order:
            started = time.perf_counter()
            jax.block_until_ready(calls[name]())
            if round_number > 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The median time of each call."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def largest_fitting(total: Callable[[int], int], limit: float | int, *, first: int) -> int:
    """The n, at least 0, with total(n) <= limit < total(n + 1), both of them evaluated.

    Guesses by a straight line, which memory follows nearly, and by halves where that gains little.

    Args:
        total: a size, such as bytes, that grows with n without bound; evaluated as seldom as possible.
        limit: the largest size that fits.
        first: the first guess, at least 1.
    """
    sizes = {0: 0}
    low, high, guess = 0, math.inf, first
    while high - low > 1:
        before = low, high
        sizes[guess] = total(guess)
        if sizes[guess] <= limit:
            low = guess
        else:
            high = guess
        # A line through the two ends, or through the last two that fit.
        other = before[0] if math.isinf(high) else int(high)
        slope = (sizes[other] - sizes[low]) / (other - low)
        ahead = int((limit - sizes[low]) / slope) if slope > 0 else low
        if math.isinf(high):
            guess = low + max(ahead, 1)
        elif high - low > (before[1] - before[0]) / 2:
            guess = low + (int(high) - low) // 2
        else:
            guess = low + min(max(ahead, 1), int(high) - low - 1)
    return low


def ratios(row: Row, reference: Row | None, names: Sequence[str]) -> dict[str, float | None]:
    """Each named figure over the reference's, None where either is missing."""

    def ratio(name: str) -> float | None:
        value, base = row.get(name), (reference or {}).get(name)
        return value / base if value is not None and base else None

    return {name: ratio(name) for name in names}


def markdown_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The rows as a markdown table; a column in which no row has a value is left out."""
    shown = [column for column in columns if any(row.get(column.name) is not None for row in rows)]
    lines = [
        [column.heading for column in shown],
        ["---"] * len(shown),
        *([_cell(row.get(column.name), column) for column in shown] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value.replace("|", r"\|").replace("\n", " ")
    return format(value / column.unit if column.unit != 1 else value, column.pattern)


def draw(path: Path, panels: Sequence[Panel], *, xlabel: str, columns: int) -> None:
    """Draws panels in a grid, one legend for all; those without a point are left out.

    Args:
        path: the PNG file to write.
        panels: row by row.
        xlabel: what lies on every x axis.
        columns: panels in a row of the grid.
    """
    # Imported late and without pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    shown = [panel for panel in panels if any(line.points for line in panel.lines)]
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4.2 * columns + 2.4, 3.3 * max(rows, 1)), layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, Any] = {}
    first_of: dict[str, Any] = {}  # panels of one quantity share its axis
    for number, panel in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, number, sharey=first_of.get(panel.ylabel))
        first_of.setdefault(panel.ylabel, axes)
        axes.set(xlabel=xlabel, ylabel=panel.ylabel)
        axes.set(xscale="log", yscale="log", title=panel.title)
        for line in (line for line in panel.lines if line.points):
            x, y = zip(*line.points, strict=True)
            (handle,) = axes.plot(x, y, color=line.color, linestyle=line.style, marker=".", label=line.label)
            handles.setdefault(line.label, handle)
        ticks = sorted({x for line in panel.lines for x, _ in line.points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for side in (axes.xaxis, axes.yaxis):
            side.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_bytes(path, image.getvalue())


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
