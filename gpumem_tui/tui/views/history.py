"""The history of the GPU in focus: stacked areas over time, eight steps a cell; the values now or at the cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.history import Column, Series
from gpumem_tui.monitor.snapshot import GpuReading
from gpumem_tui.tui.figures import MUTED, Span, joined, span_width
from gpumem_tui.tui.glyphs import EIGHTHS, UTILIZATION_COLOUR
from gpumem_tui.tui.views.areas import Band, Stack, area_column, drawn, eighths
from gpumem_tui.tui.views.readings import clock, ruled

Row = list[Span]

SPANS_S = (120, 600, 3600, 6 * 3600, 24 * 3600)
LABEL_WIDTH = 6
_AXIS_STEP = 20
_PERCENT = 100.0


ALLOCATED = Band("allocated", "$gradients")
CACHED = Band("reserved", "$history-reserved")
USED = Band("used", "$history-used")
OTHERS = Band("used", "$history-others")
"""Solid, each darker than the one below it; the heading has the numbers."""


@dataclass(frozen=True)
class TimeAxis:
    """Which moment each column of a chart stands for.

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
        """The middle of what is drawn at a column of the widget; None beside the chart."""
        column = x - self.labels
        return self.start_s + (column + 0.5) * self.step_s if 0 <= column < self.columns else None

    def column_at(self, time_s: float | None) -> int | None:
        """The inverse, without the labels; None beyond the chart."""
        if time_s is None:
            return None
        column = int((time_s - self.start_s) // self.step_s)
        return column if 0 <= column < self.columns else None


def axis_of(series: Series) -> TimeAxis:
    """The axis of a GPU's history."""
    return TimeAxis(series.start_s, series.step_s, len(series.peaks[Column.USED]))


def chart_columns(width: int) -> int:
    """Columns of buckets in a chart of this width."""
    return max(1, width - LABEL_WIDTH)


def history_view(
    gpu: GpuReading,
    now: Mapping[Column, float],
    series: Series,
    width: int,
    height: int,
    cursor: int | None,
    *,
    focused: bool,
) -> list[Row]:
    """Heading, areas, utilization and time axis in `height` rows.

    Args:
        now: the newest values.
        cursor: the bucket whose values the heading shows; None for the newest values, which need not be the peaks of
            the last bucket.
        focused: the chart has the keys.
    """
    if height < 3:
        return []
    total_bytes = _total_bytes(gpu, series)
    strip = 2 if height >= 11 else 1
    rows = height - 2 - strip
    chart = _areas(series, total_bytes, rows)
    labels = _labels(total_bytes, rows)
    lines = [
        _heading(gpu, now, series, width, cursor, focused=focused),
        *([(fit_label(label), MUTED), *row] for label, row in zip(labels, chart, strict=True)),
    ]
    utilization = [None if value is None else value / _PERCENT for value in series.means[Column.UTILIZATION]]
    for number, row in enumerate(_area(utilization, strip, UTILIZATION_COLOUR)):
        label = "util" if number == strip - 1 else ("100%" if strip > 1 else "")
        lines.append([(fit_label(label), MUTED), *row])
    lines.append(_axis(series, cursor))
    return lines


def fit_label(text: str) -> str:
    """A label left of the chart."""
    return f"{text:>{LABEL_WIDTH - 1}} "


def _total_bytes(gpu: GpuReading, series: Series) -> float:
    memory = gpu.visible_memory
    if not isinstance(memory, Unknown):
        return memory.total_bytes
    return max((value for value in series.peaks[Column.USED] if value is not None), default=1.0)


def _heading(
    gpu: GpuReading, now: Mapping[Column, float], series: Series, width: int, cursor: int | None, *, focused: bool
) -> Row:
    span_s = series.step_s * len(series.peaks[Column.USED])
    name = f"GPU {gpu.index} · last {duration(span_s)}"
    left: Row = [(name, "bold $primary" if focused else f"bold {MUTED}")]
    probed = any(value is not None for value in series.peaks[Column.RESERVED])
    right = _values(now, probed=probed) if cursor is None else _values_at(series, cursor, probed=probed)
    while right and span_width(right) > width - span_width(left):
        right = right[:-2]
    return ruled(left, right, width)


def _values_at(series: Series, at: int, *, probed: bool) -> Row:
    """When a bucket began and how long it is; its peaks, and the mean of the utilization."""
    values = {column: values[at] for column, values in series.peaks.items()}
    values[Column.UTILIZATION] = series.means[Column.UTILIZATION][at]
    begun = clock(series.start_s + at * series.step_s)
    return [
        (begun, "bold"),
        (f" peak of {duration(series.step_s)}  ", MUTED),
        *_values(values, "mean utilization", probed=probed),
    ]


def _values(values: Mapping[Column, float | None], utilization: str = "utilization", *, probed: bool) -> Row:
    """Each value with the colour of its area: pairs of spans. `probed`: there are areas of a probe's figures."""
    row: Row = []
    shown = [(OTHERS if probed else USED, values.get(Column.USED))]
    if probed:
        shown += [(CACHED, values.get(Column.RESERVED)), (ALLOCATED, values.get(Column.ALLOCATED))]
    for band, value in shown:
        text = "–" if value is None else f"{value / GIB:.2f}"
        row += [("█", band.colour), (f" {band.title} {text:>6}  ", "")]
    load = values.get(Column.UTILIZATION)
    row += [("▄", UTILIZATION_COLOUR), (f" {utilization} {'–' if load is None else f'{load:.0f}%':>4}", "")]
    return row


def _labels(total_bytes: float, rows: int) -> list[str]:
    labels = [""] * rows
    labels[0] = f"{total_bytes / GIB:.0f}"
    labels[-1] = "0"
    if rows >= 5:
        labels[(rows - 1) // 2] = f"{total_bytes / GIB / 2:.0f}"
    return labels


def _areas(series: Series, total_bytes: float, rows: int) -> list[Row]:
    """The stacked areas from the top row down."""
    peaks = series.peaks
    columns = [
        _column(*values, total_bytes, rows)
        for values in zip(peaks[Column.USED], peaks[Column.RESERVED], peaks[Column.ALLOCATED], strict=True)
    ]
    return drawn(columns)


@lru_cache(4096)
def _column(
    used: float | None, reserved: float | None, allocated: float | None, total: float, rows: int
) -> tuple[Span, ...]:
    """A column of cells from the top down. All but the newest were drawn before."""
    return area_column(_stack(used, reserved, allocated, total, rows), rows)


def _stack(used: float | None, reserved: float | None, allocated: float | None, total: float, rows: int) -> Stack:
    if used is None:
        return ()
    if reserved is None:
        return ((eighths(used, total, rows), USED),)
    allocated = min(allocated or 0.0, reserved)
    edges = ((allocated, ALLOCATED), (min(reserved, used), CACHED), (used, OTHERS))
    return tuple((eighths(size, total, rows), band) for size, band in edges)


def _area(shares: Sequence[float | None], rows: int, colour: str) -> list[Row]:
    heights = [0 if share is None else max(0, round(min(1.0, share) * rows * 8)) for share in shares]
    cells = [[(EIGHTHS[max(0, min(8, height - row * 8))], colour) for height in heights] for row in range(rows)]
    return [joined(row) for row in reversed(cells)]


def _axis(series: Series, cursor: int | None) -> Row:
    """Times ago below the chart, and where the cursor is."""
    columns = len(series.peaks[Column.USED])
    line = [" "] * columns
    for column in range(columns - 1, -1, -_AXIS_STEP):
        ago_s = (columns - 1 - column) * series.step_s
        text = "now" if not ago_s else f"−{duration(ago_s)}"
        start = column - len(text) + 1
        if start >= 0:
            line[start : column + 1] = text
    if cursor is None:
        return [(" " * LABEL_WIDTH + "".join(line), MUTED)]
    before, after = "".join(line[:cursor]), "".join(line[cursor + 1 :])
    return [(" " * LABEL_WIDTH + before, MUTED), ("▲", "bold $primary"), (after, MUTED)]


def duration(seconds: float) -> str:
    """A length of time in its largest units: "90s" is "1m30s", two hours are "2h"."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else "", f"{rest}s" if rest else ""]
    return "".join(part for part in parts if part)[: LABEL_WIDTH + 2] or "0s"
