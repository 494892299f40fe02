"""The curves: a line each, the chosen one drawn, with its numbers; every line is named where it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil, log2

from gpumem_tui.memory import Bucket
from gpumem_tui.plan.curves import Curve, CurveSeries
from gpumem_tui.tui.kit.chart import Place, Plot, nice_ceiling, number
from gpumem_tui.tui.kit.figures import MUTED, ListRow, Row, Span, fit, fit_right, paragraph, row, wrapped
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS

SERIES_COLOURS = ("$activations", "$gradients", "$optimizer", "$temporary")
_LINES = ((90, 19), (60, 13), (0, 9))
"""Height of a plot from so many cells of width upward; odd, so that the middle of the axis is a line."""
_TICK_WIDTH = 7
_HERE = "┊"
_MARK = " ← "
_X_WIDTH = 18
_POINTS = 12
"""Points of a curve that are written out in numbers, but for the plan's own."""
_LOOKS = {bucket.title: look for bucket, look in BUCKET_LOOKS.items()}


def curve_rows(curves: Sequence[Curve], width: int, selected: str) -> list[ListRow]:
    """Return every curve's title, and the one under the cursor open."""
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
    """Return the chart, its note and its points; one line where every value is 0."""
    if curve.nothing and not any(y for series in curve.series for _, y in series.points):
        return [*paragraph(curve.nothing, width), row()]
    height = next((lines for needs, lines in _LINES if width >= needs), _LINES[-1][1])
    note = paragraph(curve.note, width) if curve.note else []
    values = [] if curve.stacked else value_rows(curve, width)
    return [*chart_rows(curve, width, height), *note, *values, row()]


def chart_rows(curve: Curve, width: int, height: int) -> list[ListRow]:
    """Return the chart and its axis, in `width` cells; `height` lines of them for the plot itself."""
    xs = sorted({x for series in curve.series for x, _ in series.points})
    if len(xs) < 2:
        return paragraph("not enough points to draw", width)
    top = _axis_end(curve)
    x_of = _scale(xs[0], xs[-1], logarithmic=curve.log_x)
    name_width = 0 if curve.stacked else max(len(series.name) for series in curve.series) + 1
    plot = Plot(max(8, width - _TICK_WIDTH - 2 - name_width), height, x_of, top)
    if curve.stacked:
        looks = [_look(series.name) for series in curve.series]
        for column in range(plot.columns):
            place = column / (plot.columns - 1)
            plot.pile(column, [_value_at(series, place, x_of) for series in curve.series], looks)
    for series, colour in () if curve.stacked else _coloured(curve):
        plot.line(series.points, colour)
    if curve.x_here is not None and xs[0] <= curve.x_here <= xs[-1]:
        plot.upright(curve.x_here, _HERE, MUTED)
    labels = [(x, text, len(text) // 2) for x, text in ((x, number(x)) for x in (xs[-1], *xs))]
    if curve.marks:
        labels = [(mark.x, mark.label, 0) for mark in curve.marks]
    lines = plot.framed((top, top / 2, 0.0), _TICK_WIDTH, labels)
    for index, (name, colour) in ({} if curve.stacked else _names(curve, plot)).items():
        lines[index].append((f" {name}", f"bold {colour}"))
    rows = [row((curve.y_label, MUTED)), *(row(*line) for line in lines)]
    return [*rows, *_legend(curve, width)] if curve.stacked else rows


def value_rows(curve: Curve, width: int) -> list[ListRow]:
    """Return `_POINTS` points and the plan's own in numbers, a line each: x, every series, and what the point is."""
    xs = sorted({x for series in curve.series for x, _ in series.points})
    chosen = _spread(xs, _POINTS, curve.x_here)
    by_series = [dict(series.points) for series in curve.series]
    names = {x: name for one in curve.series for (x, _), name in zip(one.points, one.names, strict=False)}
    column = max(9, *(len(series.name) + 1 for series in curve.series))
    first = max(1, min(_X_WIDTH, width - len(_MARK) - column * len(curve.series)))
    head = fit_right(curve.x_label, first) + "".join(f"{series.name:>{column}}" for series in curve.series)
    lines = [row((head, f"bold {MUTED}"))]
    for x in chosen:
        here = x == curve.x_here
        values = "".join(f"{number(points[x]) if x in points else '':>{column}}" for points in by_series)
        text = f"{number(x):>{first}}{values}"
        name = fit(names.get(x, "this plan" if here else ""), max(0, width - len(text) - len(_MARK))).rstrip()
        mark = (_MARK, "bold $primary") if here else (" " * len(_MARK), "")
        lines.append(row((text, "bold" if here else ""), mark, (name, MUTED)))
    return lines


def _axis_end(curve: Curve) -> float:
    """Return a value above all; of counts one whose half is whole too, since both are written on the axis."""
    sums: defaultdict[float, float] = defaultdict(float)
    for series in curve.series:
        for x, y in series.points:
            sums[x] = sums[x] + y if curve.stacked else max(sums[x], y)
    highest = max(sums.values())
    if all(y == int(y) for series in curve.series for _, y in series.points):
        return 2.0 * ceil(nice_ceiling(highest / 2))
    return nice_ceiling(highest)


def _scale(first: float, last: float, *, logarithmic: bool) -> Place:
    if logarithmic and first > 0:
        return lambda x: (log2(x) - log2(first)) / (log2(last) - log2(first))
    return lambda x: (x - first) / (last - first)


def _value_at(series: CurveSeries, place: float, x_of: Place) -> float:
    """Return the last point at or before a place: what is allocated stays until it changes."""
    found = series.points[0][1]
    for x, y in series.points:
        if x_of(x) > place:
            break
        found = y
    return found


def _coloured(curve: Curve) -> list[tuple[CurveSeries, str]]:
    return [(series, SERIES_COLOURS[index % len(SERIES_COLOURS)]) for index, series in enumerate(curve.series)]


def _names(curve: Curve, plot: Plot) -> dict[int, tuple[str, str]]:
    """Return the name of each series by the line in which it ends; where two would meet, the next free line."""
    found: dict[int, tuple[str, str]] = {}
    for series, colour in _coloured(curve):
        wanted = plot.row_of(series.points[-1][1])
        free = sorted((line for line in range(plot.rows) if line not in found), key=lambda line: abs(line - wanted))
        if free:
            found[free[0]] = (series.name, colour)
    return found


def _legend(curve: Curve, width: int) -> list[ListRow]:
    items: list[Row] = []
    for series in curve.series:
        mark, colour = _look(series.name)
        items.append([(mark, colour), (f" {series.name}", "")])
    return [ListRow(tuple(spans)) for spans in wrapped(items, width, gap=2)]


def _look(name: str) -> Span:
    return _LOOKS.get(name, BUCKET_LOOKS[Bucket.OTHER])


def _spread(xs: Sequence[float], most: int, here: float | None) -> list[float]:
    """Return at most so many of the values, evenly from the first to the last, and the plan's own."""
    if len(xs) <= most:
        return list(xs)
    step = (len(xs) - 1) / (most - 1)
    chosen = {xs[round(index * step)] for index in range(most)}
    return sorted(chosen | {x for x in xs if x == here})
