"""Charts as rows of text: stacked areas over time, lines of dots over x, and the axes of both."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, floor, log10
from typing import TypeVar

from msgspec import Struct

from gpumem_tui.memory import format_count
from gpumem_tui.tui.kit.figures import MUTED, Row, Span, joined, ruled, span_width
from gpumem_tui.tui.kit.glyphs import EIGHTHS

T = TypeVar("T")
Point = tuple[float, float]
Place = Callable[[float], float]
"""Where a value is on an axis, 0 to 1."""

LABEL_WIDTH = 8
"""Cells left of an area."""
SPANS_S = (120, 600, 3600, 6 * 3600, 24 * 3600)
_AXIS_STEP = 20
"""Columns from one time under a chart to the next."""
_DOTS_ACROSS, _DOTS_DOWN = 2, 4
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a braille character, by column and row."""


# Areas


class Band(Struct, frozen=True):
    """An area of a chart: its upper edge and its colour."""

    title: str
    colour: str


ALLOCATED = Band("allocated", "$gradients")
CACHED = Band("reserved", "$history-reserved")

Stack = tuple[tuple[int, Band], ...]
"""The upper edge of each area of a column in eighths of a row, from the bottom up."""


def stacked(edges: Iterable[tuple[float, Band]], top: float, rows: int) -> Stack:
    """Return the upper edges of a column, the lowest first; `top` is `rows` high, and what is there at all shows."""
    return tuple((_eighths(edge, top, rows), band) for edge, band in edges)


def area_rows(
    stacks: Iterable[Stack], rows: int, top: str, *, middle: str = "", bottom: str = "0", width: int = LABEL_WIDTH
) -> list[Row]:
    """Columns side by side, with the values of the highest, the middle and the lowest row in `width` cells."""
    labels = [""] * rows
    labels[0], labels[-1] = top, bottom
    if middle:
        labels[(rows - 1) // 2] = middle
    cells = zip(*(_area_column(stack, rows) for stack in stacks), strict=True)
    return [[label_span(label, width), *joined(row)] for label, row in zip(labels, cells, strict=True)]


def label_span(text: str, width: int = LABEL_WIDTH) -> Span:
    """Return a label left of an area."""
    return f"{text:>{width - 1}} ", MUTED


def chart_heading(title: str, values: Row, width: int, *, focused: bool) -> Row:
    """Return the line over a chart: its title, and as many of the values, pairs of spans, as there is room for."""
    left: Row = [(title, "bold $primary" if focused else f"bold {MUTED}")]
    while values and span_width(values) > width - span_width(left):
        values = values[:-2]
    return ruled(left, values, width)


def ends_row(columns: int, last: str) -> Row:
    """Return the line under a chart that begins at 0 and ends at `last`."""
    return [(" " * LABEL_WIDTH + "0" + " " * max(1, columns - 1 - len(last)) + last, MUTED)]


def by_column(items: Iterable[tuple[int, T]], columns: int, height: Callable[[T], int]) -> list[T | None]:
    """Return the highest item of each column; if missing, that of the column before."""
    shown: list[T | None] = [None] * columns
    for column, item in items:
        there = shown[column]
        shown[column] = item if there is None or height(item) >= height(there) else there
    for column in range(1, columns):
        shown[column] = shown[column - 1] if shown[column] is None else shown[column]
    return shown


def _eighths(size: float, total: float, rows: int) -> int:
    exact = min(1.0, size / total) * rows * 8 if total > 0 else 0.0
    return max(1, round(exact)) if size > 0 else 0


@lru_cache(4096)
def _area_column(stack: Stack, rows: int) -> tuple[Span, ...]:
    """Return the cells of a column from the top down. In a chart over time all but the newest were drawn before."""
    return tuple(_area_cell(stack, row) for row in range(rows - 1, -1, -1))


def _area_cell(stack: Stack, row: int) -> Span:
    """Return one cell of a column: its lowest area, and above the edge what is there."""
    bottom, top = row * 8, row * 8 + 8
    below = next(((edge, band) for edge, band in stack if edge > bottom), None)
    if below is None:
        return " ", ""
    edge, band = below
    if edge >= top:
        return "█", band.colour
    above = next((other for other_edge, other in stack if other_edge > edge), None)
    ground = "" if above is None else f" on {above.colour}"
    return EIGHTHS[edge - bottom], f"{band.colour}{ground}"


# Time


class TimeAxis(Struct, frozen=True):
    """The moments that the columns of a chart show.

    Attributes:
        start_s: where the first column begins, in seconds since the epoch; step_s: how long each is.
        labels: cells left of the first.
    """

    start_s: float
    step_s: float
    columns: int
    labels: int = LABEL_WIDTH

    @property
    def last_s(self) -> float:
        """The middle of the last column."""
        return self.start_s + (self.columns - 0.5) * self.step_s

    def time_at(self, x: int) -> float | None:
        """Return the middle of what is drawn at a column of the widget; None next to the chart."""
        column = x - self.labels
        return self.start_s + (column + 0.5) * self.step_s if 0 <= column < self.columns else None

    def column_at(self, time_s: float | None) -> int | None:
        """Return the inverse, without the labels; None beyond the chart."""
        if time_s is None:
            return None
        column = int((time_s - self.start_s) // self.step_s)
        return column if 0 <= column < self.columns else None

    def row(self, cursor: int | None, last: str = "now") -> Row:
        """Return the line that shows how long ago every so many columns are, and where the cursor is."""
        (lead, style), (text, _) = self.label_row(lambda ago: f"−{duration(ago * self.step_s)}" if ago else last)
        if cursor is None:
            return [(lead + text, style)]
        return [(lead + text[:cursor], style), ("▲", "bold $primary"), (text[cursor + 1 :], style)]

    def label_row(self, label: Callable[[int], str], title: str = "") -> Row:
        """Labels that end under their columns, by how many columns ago those are."""
        line = [" "] * self.columns
        for ago in range(0, self.columns, _AXIS_STEP):
            text, end = label(ago), self.columns - ago
            if len(text) <= end:
                line[end - len(text) : end] = text
        return [label_span(title, self.labels), ("".join(line), MUTED)]


def duration(seconds: float) -> str:
    """Return a length of time in its largest units: "90s" is "1m30s", two hours are "2h"."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else "", f"{rest}s" if rest else ""]
    return "".join(part for part in parts if part)[:8] or "0s"


# Lines of dots


class Plot:
    """`columns` × `rows` cells to draw points (x, y) into, each in eight dots or in a cell of its own.

    Args:
        x_of: where an x is; y reaches from 0 to `top`.
    """

    def __init__(self, columns: int, rows: int, x_of: Place, top: float) -> None:
        self.columns = columns
        self.rows = rows
        self._x_of = x_of
        self._top = top
        self._bits = [[0] * columns for _ in range(rows)]
        self._cells: list[Row] = [[(" ", "")] * columns for _ in range(rows)]

    def column_of(self, x: float) -> int:
        """Return the column in which an x is drawn."""
        return round(self._across(x)) // _DOTS_ACROSS

    def row_of(self, y: float) -> int:
        """Return the row in which a y is drawn, counted from the top."""
        return round(self._down(y)) // _DOTS_DOWN

    def line(self, points: Sequence[Point], style: str) -> None:
        """Join the points by dots; where lines meet, the later one's colour shows."""
        for (x0, y0), (x1, y1) in pairwise((self._across(x), self._down(y)) for x, y in points):
            steps = max(1, ceil(max(abs(x1 - x0), abs(y1 - y0))))
            for step in range(steps + 1):
                x, y = round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
                column, row = x // _DOTS_ACROSS, y // _DOTS_DOWN
                self._bits[row][column] |= _DOTS[x % _DOTS_ACROSS][y % _DOTS_DOWN]
                self._cells[row][column] = chr(_BRAILLE + self._bits[row][column]), style

    def mark(self, x: float, y: float, glyph: str, style: str) -> None:
        """Draw a point in a cell of its own, over what is there."""
        self._cells[self.row_of(y)][self.column_of(x)] = glyph, style

    def across(self, height: Callable[[float], float | None], x_max: float, glyph: str, style: str) -> None:
        """Draw a mark a column, at the height of the column's middle, up to `x_max`; none where that is None."""
        for column in range(self.columns):
            x = x_max * (column + 0.5) / self.columns
            if (y := height(x)) is not None:
                self._cells[self.row_of(y)][column] = glyph, style

    def upright(self, x: float, glyph: str, style: str) -> None:
        """Draw a mark a row at an x, behind what is there."""
        column = self.column_of(x)
        for row in self._cells:
            if row[column][0] == " ":
                row[column] = glyph, style

    def pile(self, column: int, sizes: Sequence[float], looks: Sequence[Span]) -> None:
        """Sizes above one another, the first at the bottom; a cell shows what fills its middle."""
        ends = list(accumulate(sizes))
        for level in range(self.rows):
            part = bisect_right(ends, (level + 0.5) * self._top / self.rows)
            if part < len(sizes):
                self._cells[self.rows - 1 - level][column] = looks[part]

    def framed(self, y_ticks: Iterable[float], width: int, x_labels: Iterable[tuple[float, str, int]]) -> list[Row]:
        """Return the whole chart with its axes.

        Args:
            width: cells for the numbers of the y axis.
            x_labels: x, its label, and how many of the label's cells stand left of x; of two that touch, the first is
                written.
        """
        numbers = {self.row_of(y): number(y) for y in y_ticks}
        rows: list[Row] = []
        for index, line in enumerate(self._cells):
            tick = numbers.get(index, "")
            rows.append([(f"{tick:>{width}} ", MUTED), ("┤" if tick else "│", MUTED), *joined(line)])
        rows.append([(" " * width + " └" + "─" * self.columns, MUTED)])
        under = [" "] * self.columns
        for x, label, left in x_labels:
            start = min(self.columns - len(label), max(0, self.column_of(x) - left))
            if start >= 0 and all(cell == " " for cell in under[max(0, start - 1) : start + len(label) + 1]):
                under[start : start + len(label)] = label
        rows.append([(" " * (width + 2) + "".join(under), MUTED)])
        return rows

    def _across(self, x: float) -> float:
        """Return where an x is, in dots from the left."""
        return min(1.0, max(0.0, self._x_of(x))) * (self.columns * _DOTS_ACROSS - 1)

    def _down(self, y: float) -> float:
        """Return where a y is, in dots from the top."""
        return (1 - min(1.0, y / self._top)) * (self.rows * _DOTS_DOWN - 1)


def number(value: float) -> str:
    """Return a number in at most seven characters; thousands with separators, millions by name.

    >>> number(8192.0), number(0.125), number(21.47), number(2_500_000.0)
    ('8,192', '0.125', '21.5', '2.5 M')
    """
    if abs(value) >= 1_000_000:
        return format_count(round(value))
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def nice_ceiling(value: float) -> float:
    """Return the next round number: where an axis may end.

    >>> nice_ceiling(23.0)
    25.0
    """
    if value <= 0:
        return 1.0
    return _round_up(value, (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8))


def ticks(top: float, most: int, least_step: float = 0.0) -> list[float]:
    """Return the numbers from 0 to at most `top` in steps of 1, 2 or 5 of a power of ten, no more than `most` of them.

    >>> ticks(95.0, 5)
    [0.0, 50.0]
    >>> ticks(95.0, 6)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    step = max(least_step, _round_up(top / max(1, most - 1), (1, 2, 5)))
    return [index * step for index in range(floor(top / step) + 1)]


def _round_up(value: float, steps: Sequence[float]) -> float:
    """Return the next of these steps of a power of ten."""
    power = 10.0 ** floor(log10(value))
    return next((step * power for step in steps if value <= step * power), 10 * power)
