"""Figures as a table to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .measure import Figures

Columns = Mapping[str, str]
"""From a heading to the figure below it; "ratio.name" is a figure within a figure."""


def table(title: str, figures: Figures, columns: Columns, width: int = 11) -> str:
    """A line for each row, named `<row> <number of envs>` as in its key; a row that was skipped says why."""
    names = {key: key.split("/")[1:] for key in figures}
    room = max([len(row) for row, _ in names.values()], default=0)
    widths = [max(width, len(heading) + 2) for heading in columns]
    lines = [title, " " * (room + 10) + _line(columns, widths)]
    for key, row in figures.items():
        name, number = names[key]
        start = f"{name:<{room}}  {number:>8}"
        if "skipped" in row:
            lines.append(f"{start}  skipped: {row['skipped']:.100}")
            continue
        lines.append(start + _line([_number(_find(row, figure)) for figure in columns.values()], widths))
    return "\n".join(lines)


def ratios(references: Sequence[str]) -> dict[str, str]:
    """A column for how many times a reference's microseconds a row takes, in the median of the rounds."""
    return {f"x {reference}": f"ratio_median.{reference}" for reference in references}


def _line(cells: Iterable[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _find(row: Mapping[str, Any], figure: str) -> Any:
    value: Any = row
    for part in figure.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"
