"""A curve as lines of text: dots of a quarter of a cell, axes with numbers, and every line named where it ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import ceil, floor, log2, log10

from gpumem_tui.memory import Bucket, format_count
from gpumem_tui.plan.curves import Curve, CurveSeries
from gpumem_tui.tui.kit.figures import MUTED, Row, Span, fit, fit_right, joined, wrapped
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.kit.rows import ListRow, paragraph, row

SERIES_COLOURS = ("$activations", "$gradients", "$optimizer", "$temporary")
_TICK_WIDTH = 7
_DOTS_ACROSS, _DOTS_DOWN = 2, 4
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a braille character, by column and row."""
_HERE = "┊"
_MARK = " ← "
_X_WIDTH = 18
_LOOKS = {bucket.title: look for bucket, look in BUCKET_LOOKS.items()}

Place = Callable[[float], float]
"""Where a value lies on an axis, 0 to 1."""


def chart_rows(curve: Curve, width: int, height: int) -> list[ListRow]:
    """The chart, its axis and its note, in `width` cells; `height` lines of them for the plot itself."""
    xs = [x for series in curve.series for x, _ in series.points]
    if len(set(xs)) < 2:
        return paragraph("not enough points to draw", width)
    top = _axis_end(curve)
    x_of = _scale(min(xs), max(xs), logarithmic=curve.log_x)
    name_width = 0 if curve.stacked else max(len(series.name) for series in curve.series) + 1
    columns = max(8, width - _TICK_WIDTH - 2 - name_width)
    cells = _stacked(curve, columns, height, x_of, top) if curve.stacked else _lines(curve, columns, height, x_of, top)
    if curve.x_here is not None and min(xs) <= curve.x_here <= max(xs):
        _mark_here(cells, floor(x_of(curve.x_here) * (columns - 1)))
    names = {} if curve.stacked else _names(curve, height, top)
    ticks = {0: top, (height - 1) // 2: top * (1 - (height - 1) // 2 / (height - 1)), height - 1: 0.0}
    lines = [row((f"{curve.y_label}", MUTED))]
    for index, line in enumerate(cells):
        tick = number(ticks[index]) if index in ticks else ""
        spans: Row = [(f"{tick:>{_TICK_WIDTH}} ", MUTED), ("┤" if tick else "│", MUTED), *joined(line)]
        if index in names:
            spans.append((f" {names[index][0]}", f"bold {names[index][1]}"))
        lines.append(row(*spans))
    lines.append(row((" " * _TICK_WIDTH + " └" + "─" * columns, MUTED)))
    lines.append(row((" " * (_TICK_WIDTH + 2) + _x_labels(curve, columns, x_of), MUTED)))
    if curve.stacked:
        lines += _legend(curve, width)
    return lines


def value_rows(curve: Curve, width: int, most: int = 12) -> list[ListRow]:
    """The points in numbers, a line each: x, every series, and what the point is; `most` of them and the plan's own."""
    xs = sorted({x for series in curve.series for x, _ in series.points})
    chosen = _spread(xs, most, curve.x_here)
    by_series = [dict(series.points) for series in curve.series]
    names = _point_names(curve.series)
    column = max(9, *(len(series.name) + 1 for series in curve.series))
    first = min(_X_WIDTH, width - len(_MARK) - column * len(curve.series))
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


def number(value: float) -> str:
    """In at most seven characters; thousands with separators, millions by name.

    >>> number(8192.0), number(0.125), number(21.47), number(2_500_000.0)
    ('8,192', '0.125', '21.5', '2.5 M')
    """
    if abs(value) >= 1_000_000:
        return format_count(round(value))
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def nice_ceiling(value: float) -> float:
    """The next round number: where an axis may end.

    >>> nice_ceiling(23.0)
    25.0
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next((step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if value <= step * power), 10 * power)


def _axis_end(curve: Curve) -> float:
    """Above every value; of counts one whose half is whole too, since both are written on the axis."""
    highest = _highest(curve)
    if all(y == int(y) for series in curve.series for _, y in series.points):
        return 2.0 * ceil(nice_ceiling(highest / 2))
    return nice_ceiling(highest)


def _highest(curve: Curve) -> float:
    if not curve.stacked:
        return max(y for series in curve.series for _, y in series.points)
    sums: dict[float, float] = {}
    for series in curve.series:
        for x, y in series.points:
            sums[x] = sums.get(x, 0.0) + y
    return max(sums.values())


def _scale(first: float, last: float, *, logarithmic: bool) -> Place:
    if logarithmic and first > 0:
        return lambda x: (log2(x) - log2(first)) / (log2(last) - log2(first))
    return lambda x: (x - first) / (last - first)


def _lines(curve: Curve, columns: int, height: int, x_of: Place, top: float) -> list[Row]:
    """Each series as a line of dots; where two meet, the later one's colour shows."""
    bits = [[0] * columns for _ in range(height)]
    colours = [[""] * columns for _ in range(height)]
    across, down = columns * _DOTS_ACROSS - 1, height * _DOTS_DOWN - 1
    for index, series in enumerate(curve.series):
        dots = [(x_of(x) * across, (1 - min(1.0, y / top)) * down) for x, y in series.points]
        for (x0, y0), (x1, y1) in pairwise(dots):
            steps = max(1, ceil(max(abs(x1 - x0), abs(y1 - y0))))
            for step in range(steps + 1):
                x, y = round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
                bits[y // _DOTS_DOWN][x // _DOTS_ACROSS] |= _DOTS[x % _DOTS_ACROSS][y % _DOTS_DOWN]
                colours[y // _DOTS_DOWN][x // _DOTS_ACROSS] = SERIES_COLOURS[index % len(SERIES_COLOURS)]
    return [
        [(chr(_BRAILLE + bit) if bit else " ", colour) for bit, colour in zip(*pair, strict=True)]
        for pair in zip(bits, colours, strict=True)
    ]


def _stacked(curve: Curve, columns: int, height: int, x_of: Place, top: float) -> list[Row]:
    """Each column the parts of the sum at its place, the first at the bottom; a cell shows what fills its middle."""
    cells: list[Row] = [[(" ", "")] * columns for _ in range(height)]
    for column in range(columns):
        sizes = [_value_at(series, column / (columns - 1), x_of) for series in curve.series]
        ends = list(accumulate(sizes))
        for level in range(height):
            middle = (level + 0.5) * top / height
            part = bisect_right(ends, middle)
            if part < len(sizes):
                cells[height - 1 - level][column] = _look(curve.series[part].name)
    return cells


def _value_at(series: CurveSeries, place: float, x_of: Place) -> float:
    """The last point at or before a place: what is allocated stays until it changes."""
    found = series.points[0][1]
    for x, y in series.points:
        if x_of(x) > place:
            break
        found = y
    return found


def _mark_here(cells: list[Row], column: int) -> None:
    for line in cells:
        if line[column][0] == " ":
            line[column] = (_HERE, MUTED)


def _names(curve: Curve, height: int, top: float) -> dict[int, tuple[str, str]]:
    """The name of each series by the line in which it ends; where two would meet, the next free line."""
    found: dict[int, tuple[str, str]] = {}
    for index, series in enumerate(curve.series):
        wanted = floor((1 - min(1.0, series.points[-1][1] / top)) * (height - 1) + 0.5)
        free = sorted((line for line in range(height) if line not in found), key=lambda line: abs(line - wanted))
        if free:
            found[free[0]] = (series.name, SERIES_COLOURS[index % len(SERIES_COLOURS)])
    return found


def _x_labels(curve: Curve, columns: int, x_of: Place) -> str:
    """Numbers under their places, as many as do not touch; for marks their labels instead."""
    if curve.marks:
        places = [(mark.x, mark.label) for mark in curve.marks]
    else:
        xs = sorted({x for series in curve.series for x, _ in series.points})
        places = [(x, number(x)) for x in (xs[-1], *xs)]
    line = [" "] * columns
    for x, label in places:
        start = min(
            columns - len(label), max(0, floor(x_of(x) * (columns - 1)) - (0 if curve.marks else len(label) // 2))
        )
        around = line[max(0, start - 1) : start + len(label) + 1]
        if start >= 0 and all(cell == " " for cell in around):
            line[start : start + len(label)] = label
    return "".join(line)


def _legend(curve: Curve, width: int) -> list[ListRow]:
    items: list[Row] = []
    for series in curve.series:
        mark, colour = _look(series.name)
        items.append([(mark, colour), (f" {series.name}", "")])
    return [ListRow(tuple(spans)) for spans in wrapped(items, width, gap=2)]


def _look(name: str) -> Span:
    return _LOOKS.get(name, BUCKET_LOOKS[Bucket.OTHER])


def _spread(xs: Sequence[float], most: int, here: float | None) -> list[float]:
    """At most so many of the values, evenly from the first to the last, and the plan's own."""
    if len(xs) <= most:
        return list(xs)
    step = (len(xs) - 1) / (most - 1)
    chosen = {xs[round(index * step)] for index in range(most)}
    return sorted(chosen | {x for x in xs if x == here})


def _point_names(all_series: Sequence[CurveSeries]) -> dict[float, str]:
    return {
        x: name for series in all_series for (x, _), name in zip(series.points, series.names, strict=False)
    }  # fmt: skip
