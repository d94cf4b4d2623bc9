"""Tables of the figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .measure import Figures

Columns = Mapping[str, str]
"""Maps headings to figures; "ratio.name" is a nested figure."""


def table(title: str, figures: Figures, columns: Columns, width: int = 11) -> str:
    """One line per row, named `<row> <number of envs>` as in its key; a skipped row gives the reason."""
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
    """One column per reference: a row's microseconds divided by the reference's, median over the rounds."""
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
