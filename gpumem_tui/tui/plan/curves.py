"""The curves: a line each, the chosen one drawn with its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.plan.curves import Curve
from gpumem_tui.tui.kit.figures import MUTED
from gpumem_tui.tui.kit.rows import ListRow, paragraph, row
from gpumem_tui.tui.plan.chart import chart_rows, value_rows

_LINES = ((90, 19), (60, 13), (0, 9))
"""Height of a plot from so many cells of width upward; odd, so that the middle of the axis is a line."""


def curve_rows(curves: Sequence[Curve], width: int, selected: str) -> list[ListRow]:
    """Every curve's title, and the one under the cursor open."""
    lines: list[ListRow] = []
    for curve in curves:
        here = curve.key == selected
        lines.append(
            row(("▾ " if here else "▸ ", MUTED), (curve.title, "bold $primary" if here else ""), key=curve.key)
        )
        if here:
            lines += open_curve(curve, width)
    return lines


def open_curve(curve: Curve, width: int) -> list[ListRow]:
    """The chart, its note and its points; one line where every value is 0."""
    if curve.nothing and not any(y for series in curve.series for _, y in series.points):
        return [*paragraph(curve.nothing, width), row()]
    height = next(lines for needs, lines in _LINES if width >= needs)
    note = paragraph(curve.note, width) if curve.note else []
    values = [] if curve.stacked else value_rows(curve, width)
    return [*chart_rows(curve, width, height), *note, *values, row()]
