"""The history of the GPU in focus: stacked areas over time, eight steps a cell; the values now or at the cursor."""

from __future__ import annotations

from collections.abc import Mapping

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.history import Column, Series
from gpumem_tui.monitor.snapshot import GpuReading
from gpumem_tui.tui.kit.chart import ALLOCATED, CACHED, Band, Stack, TimeAxis, area_rows, duration, stacked
from gpumem_tui.tui.kit.figures import MUTED, Row, clock, ruled, span_width

_LABEL_WIDTH = 6
_PERCENT = 100.0

USED = Band("used", "$history-used")
OTHERS = Band("used", "$history-others")
_UTILIZATION = Band("util", "$optimizer")
"""Solid, each darker than the one below it; the heading has the numbers."""


def axis_of(series: Series) -> TimeAxis:
    """The axis of a GPU's history."""
    return TimeAxis(series.start_s, series.step_s, len(series.peaks[Column.USED]), _LABEL_WIDTH)


def chart_columns(width: int) -> int:
    """Columns of buckets in a chart of this width."""
    return max(1, width - _LABEL_WIDTH)


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
    half = f"{total_bytes / GIB / 2:.0f}" if rows >= 5 else ""
    values = zip(*(series.peaks[each] for each in (Column.USED, Column.RESERVED, Column.ALLOCATED)), strict=True)
    stacks = (_stack(*each, total_bytes, rows) for each in values)
    loads = (stacked([(load or 0.0, _UTILIZATION)], _PERCENT, strip) for load in series.means[Column.UTILIZATION])
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
    row += [("▄", _UTILIZATION.colour), (f" {utilization} {'–' if load is None else f'{load:.0f}%':>4}", "")]
    return row


def _stack(used: float | None, reserved: float | None, allocated: float | None, total: float, rows: int) -> Stack:
    if used is None:
        return ()
    if reserved is None:
        return stacked([(used, USED)], total, rows)
    edges = ((min(allocated or 0.0, reserved), ALLOCATED), (min(reserved, used), CACHED), (used, OTHERS))
    return stacked(edges, total, rows)
