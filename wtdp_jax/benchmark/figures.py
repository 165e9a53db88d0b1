"""Line plots of several panels."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wtdp_jax.run_folder import write_bytes


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
