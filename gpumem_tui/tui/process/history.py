"""The history of one process: what its allocator gave out, held, and reached, over time and over steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct

from gpumem_tui.memory import Value
from gpumem_tui.tui.kit.chart import (
    ALLOCATED,
    CACHED,
    LABEL_WIDTH,
    SPANS_S,
    Band,
    TimeAxis,
    area_rows,
    by_column,
    chart_heading,
    duration,
    stacked,
)
from gpumem_tui.tui.kit.figures import MUTED, Row, clock, compact_bytes, ruled
from gpumem_tui.watch.published import WatchedProcess, total_bytes

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample

_PEAK = Band("peak", "$history-used")
_HELD_S, _HELD_PERIODS = 15.0, 4
"""How long a sample holds if no other comes, and in times of what they are mostly apart: a step may take long."""
_FOUND = Band("tensors found", "$gradients")


class ProcessChart(Struct, frozen=True):
    """The past of a process: its samples of one device, the first of several, until `end_s`.

    Attributes:
        has_ended: `end_s` is its last sample's time; else it is now.
    """

    title: str
    samples: Sequence[ProbeSample]
    end_s: float
    has_ended: bool

    @classmethod
    def of(cls, watched: WatchedProcess, now_s: float) -> ProcessChart:
        """Return the chart of a process; of one that has ended it ends there."""
        samples = _of_one_device(watched)
        has_ended = not watched.is_running
        end_s = samples[-1].record.wall_ns / 1e9 if samples and has_ended else now_s
        return cls(watched.process.title.partition(" (")[0], samples, end_s, has_ended)

    def axis(self, width: int) -> TimeAxis | None:
        """Return the moments that its columns stand for; None without samples."""
        if not self.samples:
            return None
        columns = max(1, width - LABEL_WIDTH)
        return TimeAxis(self.end_s - self.span_s, self.span_s / columns, columns)

    @property
    def span_s(self) -> float:
        """The shortest of the usual spans that holds all samples."""
        length_s = self.end_s - self.samples[0].record.wall_ns / 1e9
        return next((span_s for span_s in SPANS_S if span_s >= length_s), SPANS_S[-1])


def process_history_rows(
    chart: ProcessChart, width: int, height: int, cursor_s: float | None = None, *, focused: bool = False
) -> list[Row]:
    """Heading, areas, the time axis and the step axis in `height` rows.

    Args:
        cursor_s: the moment whose values the heading shows; None for the newest.
        focused: the chart has the keys.
    """
    if height < 5:
        return []
    axis = chart.axis(width)
    if axis is None:
        heading = ruled([(chart.title, f"bold {MUTED}")], [], width)
        return [heading, [("   no step has finished yet", MUTED)]]
    shown = _by_column(chart.samples, axis)
    rows = height - 3
    top = max((_height(sample) for sample in shown if sample is not None), default=0)
    stacks = (stacked(() if sample is None else _edges(sample), top, rows) for sample in shown)
    cursor = axis.column_at(cursor_s)
    return [
        _heading(chart, width, None if cursor is None else (axis, shown[cursor], cursor), focused=focused),
        *area_rows(stacks, rows, compact_bytes(top)),
        axis.row(cursor, last="end" if chart.has_ended else "now"),
        axis.label_row(lambda ago: _step_at(shown, ago), "step"),
    ]


def _of_one_device(watched: WatchedProcess) -> list[ProbeSample]:
    if not watched.own:
        return []
    device = watched.own[0].sample.record.device
    return [sample for sample in watched.history if sample.record.device == device] or [watched.own[0].sample]


def _by_column(samples: Sequence[ProbeSample], axis: TimeAxis) -> list[ProbeSample | None]:
    """Return what each column shows: the highest of its samples, or the last one before as long as that holds.

    Samples that stay away, as of a process that was stopped, leave a gap: what was held then is not known.
    """
    columns = ((axis.column_at(min(sample.record.wall_ns / 1e9, axis.last_s)), sample) for sample in samples)
    shown = by_column(((column, sample) for column, sample in columns if column is not None), axis.columns, _height)
    holds = round(max(_HELD_S, _HELD_PERIODS * _period_s(samples)) / axis.step_s) + 1
    seen = {axis.column_at(min(sample.record.wall_ns / 1e9, axis.last_s)) for sample in samples}
    last = -holds
    for column in range(axis.columns):
        last = column if column in seen else last
        if column - last > holds:
            shown[column] = None
    return shown


def _period_s(samples: Sequence[ProbeSample]) -> float:
    """Return how far apart samples mostly are; 0 where one has no other."""
    times = [sample.record.wall_ns for sample in samples]
    gaps = sorted(after - before for before, after in pairwise(times))
    return gaps[len(gaps) // 2] / 1e9 if gaps else 0.0


def _height(sample: ProbeSample) -> int:
    return max((edge for edge, _ in _edges(sample)), default=0)


def _edges(sample: ProbeSample) -> list[tuple[int, Band]]:
    """Return the upper edge of each area in bytes, the lowest first."""
    if not sample.record.has_allocator:
        found = total_bytes(sample)
        return [(found, _FOUND)] if isinstance(found, int) else []
    figures: list[tuple[Value, Band]] = [
        (sample.allocated_bytes, ALLOCATED),
        (sample.peak_allocated_bytes, _PEAK),
        (sample.reserved_bytes, CACHED),
    ]
    known = [(value, band) for value, band in figures if isinstance(value, int)]
    return sorted(known, key=lambda pair: pair[0])


def _heading(
    chart: ProcessChart, width: int, at: tuple[TimeAxis, ProbeSample | None, int] | None, *, focused: bool
) -> Row:
    """Return which process and how long; the newest values, or those `at` the cursor with their time of day."""
    sample: ProbeSample | None = chart.samples[-1]
    when: Row = []
    if at is not None:
        axis, sample, column = at
        when = [(f"{clock(axis.start_s + column * axis.step_s)}  ", "bold")]
    step = "" if sample is None else f" · step {sample.record.step:,}"
    span = f"{'its last' if chart.has_ended else 'last'} {duration(chart.span_s)}"
    values = when
    for size_bytes, band in reversed([] if sample is None else _edges(sample)):
        values = [*values, ("█", band.colour), (f" {band.title} {compact_bytes(size_bytes):>6}  ", "")]
    return chart_heading(f"{chart.title} · {span}{step}", values, width, focused=focused)


def _step_at(shown: Sequence[ProbeSample | None], columns_ago: int) -> str:
    sample = shown[len(shown) - 1 - columns_ago]
    return "" if sample is None else f"{sample.record.step:,}"
