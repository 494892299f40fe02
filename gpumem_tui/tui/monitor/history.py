"""The history of one GPU or process: stacked areas over time, and a cursor for the mouse and the arrow keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Blur, Focus, Leave, MouseMove
from textual.message import Message

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.history import Column, Series, values_of
from gpumem_tui.monitor.snapshot import GpuReading
from gpumem_tui.tui.kit.chart import (
    ALLOCATED,
    CACHED,
    SPANS_S,
    Band,
    Stack,
    TimeAxis,
    area_rows,
    chart_heading,
    duration,
    stacked,
)
from gpumem_tui.tui.kit.figures import MUTED, Row, clock
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.entries import charted
from gpumem_tui.tui.monitor.state import Feed, MonitorState

_LABEL_WIDTH = 6
_BACK = "In the history (tab): look back, with the values at the cursor"
_PERCENT = 100.0

USED = Band("used", "$history-used")
OTHERS = Band("used", "$history-others")
"""Solid, each darker than the one below it; the heading has the numbers."""
_UTILIZATION = Band("util", "$optimizer")


def axis_of(series: Series) -> TimeAxis:
    """Return the axis of a GPU's history."""
    return TimeAxis(series.start_s, series.step_s, len(series.peaks[Column.USED]), _LABEL_WIDTH)


def chart_columns(width: int) -> int:
    """Columns of a GPU's history of this width."""
    return max(1, width - _LABEL_WIDTH)


def history_view(  # noqa: PLR0913 - a pure view of all that the chart shows
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
    half = f"{total_bytes / GIB / 2:.0f}" if rows >= 5 else ""
    peaks = series.peaks
    values = zip(peaks[Column.USED], peaks[Column.RESERVED], peaks[Column.ALLOCATED], strict=True)
    stacks = (_stack(used, reserved, allocated, total_bytes, rows) for used, reserved, allocated in values)
    loads = (_load_stack(load or 0.0, strip) for load in series.means[Column.UTILIZATION])
    full = "100%" if strip > 1 else ""
    return [
        _heading(gpu, now, series, width, cursor, focused=focused),
        *area_rows(stacks, rows, f"{total_bytes / GIB:.0f}", middle=half, width=_LABEL_WIDTH),
        *area_rows(loads, strip, full, bottom="util", width=_LABEL_WIDTH),
        axis_of(series).row(cursor),
    ]


def _total_bytes(gpu: GpuReading, series: Series) -> float:
    memory = gpu.visible_memory
    if not isinstance(memory, Unknown):
        return memory.total_bytes
    return max((value for value in series.peaks[Column.USED] if value is not None), default=1.0)


def _heading(
    gpu: GpuReading, now: Mapping[Column, float], series: Series, width: int, cursor: int | None, *, focused: bool
) -> Row:
    span_s = series.step_s * len(series.peaks[Column.USED])
    probed = any(value is not None for value in series.peaks[Column.RESERVED])
    values = _values(now, probed=probed) if cursor is None else _values_at(series, cursor, probed=probed)
    return chart_heading(f"GPU {gpu.index} · last {duration(span_s)}", values, width, focused=focused)


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
    row += [("▄", _UTILIZATION.colour), (f" {utilization} {'–' if load is None else f'{load:.0f}%':>4}", "")]
    return row


@lru_cache(1024)
def _load_stack(load: float, rows: int) -> Stack:
    return stacked([(load, _UTILIZATION)], _PERCENT, rows)


@lru_cache(1024)
def _stack(used: float | None, reserved: float | None, allocated: float | None, total: float, rows: int) -> Stack:
    """Return a column of the chart: but for the newest, each is asked for again every second."""
    if used is None:
        return ()
    if reserved is None:
        return stacked([(used, USED)], total, rows)
    edges = ((min(allocated or 0.0, reserved), ALLOCATED), (min(reserved, used), CACHED), (used, OTHERS))
    return stacked(edges, total, rows)


class ChartSpan:
    """The time that the chart shows: as chosen, else the shortest of the usual spans that is not over yet.

    Args:
        most_s: the longest that is shown without being chosen. `past_s`: how far back the history reaches already.
    """

    def __init__(self, most_s: float, past_s: float) -> None:
        self._spans_s = sorted({*SPANS_S, most_s})
        self._most_s = most_s
        self._past_s = past_s
        self._chosen_s: float | None = None
        self._shown_s = most_s

    def now_s(self, seen_s: float) -> float:
        """Return the span, when the Monitor has looked for `seen_s`."""
        reaches_s = self._past_s + seen_s
        fitting_s = min(self._most_s, next((span_s for span_s in self._spans_s if span_s > reaches_s), self._most_s))
        self._shown_s = fitting_s if self._chosen_s is None else self._chosen_s
        return self._shown_s

    def step(self, step: int) -> None:
        """Choose a shorter or a longer span than is shown."""
        at = self._spans_s.index(self._shown_s) + step
        self._chosen_s = self._spans_s[max(0, min(at, len(self._spans_s) - 1))]


class HistoryChart(Lines, can_focus=True):
    """Stacked areas. The cursor is a moment: it moves with the picture until that has left it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "look back", key_display="← →", tooltip=_BACK),
        Binding("right", "step(1)", show=False, tooltip=_BACK),
        Binding("shift+left", "step(-10)", show=False, tooltip=_BACK),
        Binding("shift+right", "step(10)", show=False, tooltip=_BACK),
        Binding("escape", "step(0)", show=False, tooltip="In the history: no moment any more"),
    ]

    class Changed(Message):
        """The cursor or the focus moved: the picture is another one."""

    def __init__(self, span: ChartSpan) -> None:
        super().__init__()
        self._span = span
        self._cursor_s: float | None = None
        self._axis: TimeAxis | None = None

    def show(self, state: MonitorState, feed: Feed, width: int, height: int) -> None:
        """Render the history of the process that is charted, or of the GPU in focus."""
        gpu, snapshot, watched = state.focused, state.snapshot, charted(state)
        if snapshot is None:
            return
        if watched is not None:
            from gpumem_tui.tui.process.history import ProcessChart, process_history_rows  # after the first frame

            chart = ProcessChart.of(watched, snapshot.time_s)
            self._axis = chart.axis(width)
            self.show_rows(process_history_rows(chart, width, height, self._cursor_s, focused=self.has_focus))
        elif gpu is not None:
            span_s = self._span.now_s(feed.seen_s(snapshot))
            series = feed.series(gpu, chart_columns(width), span_s, snapshot.time_s)
            self._axis, now = axis_of(series), values_of(gpu, state.published.figures)
            cursor = self._axis.column_at(self._cursor_s)
            self.show_rows(history_view(gpu, now, series, width, height, cursor, focused=self.has_focus))

    def action_step(self, step: int) -> None:
        """Move the cursor to an earlier or a later bucket; 0 puts it away."""
        axis = self._axis
        if axis is None:
            return
        here_s = self._cursor_s
        if here_s is None or axis.column_at(here_s) is None:
            here_s = axis.last_s
        moved_s = here_s + step * axis.step_s
        self._point(None if not step or moved_s > axis.last_s else max(moved_s, axis.start_s))

    def on_mouse_move(self, event: MouseMove) -> None:
        """Have the cursor follow the mouse."""
        offset = event.get_content_offset(self)
        if self._axis is not None and offset is not None:
            self._point(self._axis.time_at(offset.x))

    def on_leave(self, _event: Leave) -> None:
        """Put the cursor away as the mouse leaves."""
        self._point(None)

    def on_focus(self, _event: Focus) -> None:
        """Show in the heading who has the keys."""
        self.post_message(self.Changed())

    def on_blur(self, _event: Blur) -> None:
        """Show in the heading who has the keys."""
        self._point(None)
        self.post_message(self.Changed())

    def _point(self, time_s: float | None) -> None:
        if time_s != self._cursor_s:
            self._cursor_s = time_s
            self.post_message(self.Changed())
