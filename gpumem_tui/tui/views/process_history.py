"""The history of one process: what its allocator gave out, held, and reached, over time and over steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumem_tui.memory import Value
from gpumem_tui.tui.figures import MUTED, Span, compact_bytes, span_width
from gpumem_tui.tui.views.areas import Band, Stack, area_column, drawn, eighths
from gpumem_tui.tui.views.history import ALLOCATED, CACHED, SPANS_S, duration
from gpumem_tui.tui.views.readings import ruled
from gpumem_tui.watch.jobs import total_bytes
from gpumem_tui.watch.published import WatchedProcess

if TYPE_CHECKING:
    from gpumem_tui.watch.records import Sample

Row = list[Span]

_LABEL_WIDTH = 8
_AXIS_STEP = 20
_PEAK = Band("peak", "$history-used")
_FOUND = Band("tensors found", "$gradients")


def process_history_rows(watched: WatchedProcess, width: int, height: int, now_s: float) -> list[Row]:
    """Heading, areas, the time axis and the step axis in `height` rows.

    Of a process on several devices it is the first.
    """
    if height < 5:
        return []
    samples = _of_one_device(watched)
    title = f"{watched.process.title.partition(' (')[0]}"
    if not samples:
        return [ruled([(title, f"bold {MUTED}")], [], width), [("   no step has finished yet", MUTED)]]
    columns = max(1, width - _LABEL_WIDTH)
    span_s = _span_s(samples, now_s)
    shown = _by_column(samples, columns, span_s, now_s)
    rows = height - 3
    top = max((edge for sample in shown if sample is not None for edge, _ in _edges(sample)), default=0)
    areas = drawn([area_column(_stack(sample, top, rows), rows) for sample in shown])
    labels = [""] * rows
    labels[0], labels[-1] = compact_bytes(top), "0"
    return [
        _heading(title, samples[-1], span_s, width),
        *([(f"{label:>{_LABEL_WIDTH - 1}} ", MUTED), *area] for label, area in zip(labels, areas, strict=True)),
        _axis(["now" if not ago else f"−{duration(ago)}" for ago in _ticks(columns, span_s)], columns),
        _axis([_step_at(shown, index * _AXIS_STEP) for index in range(len(_ticks(columns, span_s)))], columns, "step"),
    ]


def _of_one_device(watched: WatchedProcess) -> list[Sample]:
    if not watched.own:
        return []
    device = watched.own[0].sample.record.device
    return [sample for sample in watched.history if sample.record.device == device] or [watched.own[0].sample]


def _span_s(samples: Sequence[Sample], now_s: float) -> float:
    """The shortest of the usual spans that holds all samples."""
    length_s = now_s - samples[0].record.wall_ns / 1e9
    return next((span_s for span_s in SPANS_S if span_s >= length_s), SPANS_S[-1])


def _by_column(samples: Sequence[Sample], columns: int, span_s: float, now_s: float) -> list[Sample | None]:
    """What each column shows: the highest of its samples, or the last one before, which still stands."""
    shown: list[Sample | None] = [None] * columns
    for sample in samples:
        index = columns - 1 - int((now_s - sample.record.wall_ns / 1e9) / span_s * columns)
        if 0 <= index < columns:
            there = shown[index]
            shown[index] = sample if there is None or _height(sample) >= _height(there) else there
    for index in range(1, columns):
        shown[index] = shown[index] or shown[index - 1]
    return shown


def _height(sample: Sample) -> int:
    return max((edge for edge, _ in _edges(sample)), default=0)


def _edges(sample: Sample) -> list[tuple[int, Band]]:
    """The upper edge of each area in bytes, the lowest first."""
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


def _stack(sample: Sample | None, top: int, rows: int) -> Stack:
    return () if sample is None else tuple((eighths(size, top, rows), band) for size, band in _edges(sample))


def _heading(title: str, newest: Sample, span_s: float, width: int) -> Row:
    left: Row = [(f"{title} · last {duration(span_s)} · step {newest.record.step:,}", f"bold {MUTED}")]
    right: Row = []
    for size_bytes, band in reversed(_edges(newest)):
        right += [("█", band.colour), (f" {band.title} {compact_bytes(size_bytes):>6}  ", "")]
    while right and span_width(right) > width - span_width(left):
        right = right[:-2]
    return ruled(left, right, width)


def _ticks(columns: int, span_s: float) -> list[float]:
    """Seconds ago under every so many columns, the newest first."""
    return [index * span_s / columns for index in range(0, columns, _AXIS_STEP)]


def _step_at(shown: Sequence[Sample | None], columns_ago: int) -> str:
    sample = shown[len(shown) - 1 - columns_ago]
    return "" if sample is None else f"{sample.record.step:,}"


def _axis(labels: Sequence[str], columns: int, title: str = "") -> Row:
    """Labels that end under their columns, counted from the right."""
    line = [" "] * columns
    for index, label in enumerate(labels):
        end = columns - index * _AXIS_STEP
        start = end - len(label)
        if start >= 0:
            line[start:end] = label
    return [(f"{title:>{_LABEL_WIDTH - 1}} " + "".join(line), MUTED)]
