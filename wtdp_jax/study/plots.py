"""The study's figures: accuracies, signal to noise, memory."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wtdp_jax.run_folder import write_bytes
from wtdp_jax.study.arms import ARMS
from wtdp_jax.study.evidence import Row

_TIED, _UNTIED = "C0", "C1"


class Figure:
    """A matplotlib figure of panels side by side, without pyplot: no display, no global state."""

    def __init__(self, panels: int, *, height: float = 3.6, width: float = 5.2) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as MatplotlibFigure

        self._figure = MatplotlibFigure(figsize=(width * max(panels, 1), height), layout="constrained")
        FigureCanvasAgg(self._figure)
        self._panels = max(panels, 1)

    def panel(self, number: int, **settings: Any) -> Any:
        """The axes of one panel, counted from 0."""
        axes = self._figure.add_subplot(1, self._panels, number + 1)
        axes.set(**settings)
        axes.grid(alpha=0.3)
        return axes

    def write(self, path: Path) -> None:
        """Writes the image, whole or not at all."""
        image = io.BytesIO()
        self._figure.savefig(image, format="png", dpi=130)
        write_bytes(path, image.getvalue())


def plot_accuracies(path: Path, rows: Sequence[Row]) -> None:
    """Draws each series' accuracy and interval, one panel for each model, task and loss.

    Args:
      path: the image file.
      rows: of `evidence.accuracy_rows`.
    """
    places = sorted({_place(row) for row in rows})
    tallest = max((sum(_place(row) == place for row in rows) for place in places), default=1)
    figure = Figure(len(places), height=1.2 + 0.28 * tallest, width=6.5)
    for number, place in enumerate(places):
        shown = [row for row in rows if _place(row) == place]
        axes = figure.panel(number, title=place, xlabel="accuracy, % (dotted: the majority rate)")
        for height, row in enumerate(shown):
            color = _TIED if ARMS[row["arm"]].tie else _UNTIED
            axes.plot([row["low"], row["high"]], [height, height], color=color)
            axes.plot(row["accuracy"], height, marker="o", color=color)
        axes.set_yticks(range(len(shown)), [_series_label(row) for row in shown])
        axes.axvline(shown[0]["majority"], color="0.5", linestyle=":")
        axes.invert_yaxis()
    figure.write(path)


def plot_signal(path: Path, lines: Sequence[tuple[str, str, Sequence[tuple[int, float]]]]) -> None:
    """Draws signal to noise by step.

    Args:
      path: the image file.
      lines: (panel, arm, points (step, ratio)).
    """
    places = sorted({place for place, _, _ in lines})
    figure = Figure(len(places))
    for number, place in enumerate(places):
        axes = figure.panel(number, title=place, xlabel="step", ylabel="clipped sum / noise (non-private)")
        for _, arm, points in (line for line in lines if line[0] == place):
            style = "-" if ARMS[arm].tie else "--"
            axes.plot(*zip(*points, strict=True), style, label=arm)
        axes.legend(fontsize="small")
    figure.write(path)


def plot_memory(path: Path, rows: Sequence[Row]) -> None:
    """Draws the whole step's memory by variant, one panel for each measured model.

    Args:
      path: the image file.
      rows: with "place", "name", "tie" and "step_bytes".
    """
    places = sorted({row["place"] for row in rows})
    figure = Figure(len(places), width=6.5)
    for number, place in enumerate(places):
        shown = [row for row in rows if row["place"] == place]
        axes = figure.panel(number, title=place, xlabel="memory of a whole step, MB")
        colors = [_TIED if row["tie"] else _UNTIED for row in shown]
        axes.barh([row["name"] for row in shown], [row["step_bytes"] / 1e6 for row in shown], color=colors)
        axes.invert_yaxis()
    figure.write(path)


def _place(row: Row) -> str:
    return f"{row['model']}, {row['task']}, {row['loss']}"


def _series_label(row: Row) -> str:
    epsilon = row["target_epsilon"]
    return row["arm"] if epsilon is None else f"{row['arm']}, epsilon {epsilon:g}"
