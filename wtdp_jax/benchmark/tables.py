"""Rows of figures, and tables of them in markdown."""

from collections.abc import Sequence
from typing import Any, NamedTuple

GB = 1e9
"""Bytes in a GB, as in all figures here."""

NO_VALUE = "–"

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
