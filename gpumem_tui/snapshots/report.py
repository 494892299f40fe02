"""A snapshot's analysis as plain lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumem_tui.memory import format_bytes, format_count
from gpumem_tui.report.tables import largest_first
from gpumem_tui.snapshots.analysis import Analysis, Part
from gpumem_tui.snapshots.fragmentation import FailedRequest
from gpumem_tui.snapshots.model import MemorySnapshot, Segment

_MOST_PLACES = 20
_MOST_STACKS = 5
_MOST_SHOWN_FRAMES = 12
_MOST_SEGMENTS = 16
_MAP_CELLS = 40
_PLOT_WIDTH, _PLOT_HEIGHT = 72, 8
_SIZE_WIDTH = 11


def snapshot_lines(snapshot: MemorySnapshot, analyses: Sequence[Analysis]) -> Iterator[str]:
    """Yield everything about a file, as text: the answer first, a line a device."""
    several = len(analyses) > 1
    yield from (f"{f'cuda:{one.device}: ' if several else ''}{answer_words(one)}" for one in analyses)
    yield f"{snapshot.name} · {snapshot.kind} · {format_bytes(snapshot.size_bytes)}"
    for analysis in analyses:
        yield from _device_lines(analysis)


def answer_words(analysis: Analysis) -> str:
    """Return why the last request found no room; where all did, the peak and what holds most of it."""
    if analysis.ooms:
        return f"Out of memory: {analysis.ooms[-1].explanation[0]}"
    most = max(analysis.by_category, key=lambda part: part.size_bytes, default=None)
    held = "" if most is None else f", most of it {most.name} ({format_bytes(most.size_bytes)})"
    return (
        f"Peak {format_bytes(analysis.peak_allocated_bytes)} allocated{held}; "
        f"{format_bytes(analysis.peak_reserved_bytes)} reserved"
    )


def _device_lines(analysis: Analysis) -> Iterator[str]:
    lasted = "" if analysis.duration_s is None else f" in {analysis.duration_s:.3g} s"
    yield f"\ncuda:{analysis.device} · {format_count(analysis.events)} events{lasted}"
    yield (
        f"peak {format_bytes(analysis.peak_allocated_bytes)} allocated, at event {analysis.peak_event:,}; "
        f"{format_bytes(analysis.peak_reserved_bytes)} reserved at most"
    )
    yield (
        f"when written {format_bytes(analysis.end_allocated_bytes)} allocated, "
        f"{format_bytes(analysis.end_reserved_bytes)} reserved"
    )
    if analysis.difference_bytes:
        yield analysis.gap
    if analysis.events:
        yield "\nallocated over the events"
        yield from _plot(analysis)
    for oom in analysis.ooms[-1:]:
        yield f"\nout of memory at event {oom.event:,}, {oom.line}"
        yield from (f"  {line}" for line in oom.explanation)
        yield from _pin_lines(oom)
    yield from _part_lines(f"the peak by category (from {analysis.categories_from})", analysis.by_category)
    yield from _part_lines("the peak by source line", analysis.by_line)
    yield from _stack_lines(analysis)
    yield from _segment_lines(analysis)


def _plot(analysis: Analysis) -> Iterator[str]:
    """Yield a curve of the allocated bytes, in ASCII."""
    top = max((point.allocated_bytes for point in analysis.timeline), default=0) or 1
    heights = [0] * _PLOT_WIDTH
    for point in analysis.timeline:
        column = min(_PLOT_WIDTH - 1, (point.event + 1) * _PLOT_WIDTH // (analysis.events + 1))
        heights[column] = max(heights[column], -(-point.allocated_bytes * _PLOT_HEIGHT // top))
    for column in range(1, _PLOT_WIDTH):  # fewer events than columns: what was held is held
        heights[column] = heights[column] or heights[column - 1]
    for row in range(_PLOT_HEIGHT, 0, -1):
        label = format_bytes(top) if row == _PLOT_HEIGHT else ""
        yield f"{label:>{_SIZE_WIDTH}} |{''.join('#' if height >= row else ' ' for height in heights)}".rstrip()
    yield f"{'0 B':>{_SIZE_WIDTH}} +{'-' * _PLOT_WIDTH}"


def _part_lines(title: str, parts: Sequence[Part]) -> Iterator[str]:
    if parts:
        yield f"\n{title}"
    yield from largest_first(
        parts,
        _MOST_PLACES,
        lambda part: _sized(part.size_bytes, f"{part.name}{_blocks(part)}"),
        lambda rest: _sized(sum(part.size_bytes for part in rest), f"{len(rest):,} smaller ones"),
    )


def _sized(size_bytes: int, text: str) -> str:
    return f"{format_bytes(size_bytes):>{_SIZE_WIDTH}}  {text}"


def _blocks(part: Part) -> str:
    return f" ({part.blocks:,} blocks)" if part.blocks > 1 else ""


def _stack_lines(analysis: Analysis) -> Iterator[str]:
    stacks = [part for part in analysis.by_stack if part.frames]
    if not stacks:
        return
    yield "\nthe peak by stack, the innermost frame first"
    for part in stacks[:_MOST_STACKS]:
        yield _sized(part.size_bytes, f"{part.frames[0]}{_blocks(part)}")
        yield from (f"{'':>{_SIZE_WIDTH}}    {frame}" for frame in part.frames[1:_MOST_SHOWN_FRAMES])
        if (more := len(part.frames) - _MOST_SHOWN_FRAMES) > 0:
            yield f"{'':>{_SIZE_WIDTH}}    {more} more"


def _pin_lines(oom: FailedRequest) -> Iterator[str]:
    if not oom.pins or oom.reason != "fragmented":
        return
    yield "  what keeps the largest free pieces from being given back:"
    for pin in oom.pins:
        free, size = format_bytes(pin.free_bytes), format_bytes(pin.size_bytes)
        yield f"{free:>{_SIZE_WIDTH}}  of {size} free next to {pin.blocks:,} blocks: {', '.join(pin.lines)}"


def _segment_lines(analysis: Analysis) -> Iterator[str]:
    if not analysis.segments:
        return
    yield (
        f"\n{len(analysis.segments):,} segments when written: "
        f"{format_bytes(analysis.stranded_bytes)} free between blocks, "
        f"{format_bytes(analysis.returnable_bytes)} in wholly free segments, "
        f"the largest free piece {format_bytes(analysis.largest_free_bytes)}"
    )
    yield from largest_first(
        analysis.segments,
        _MOST_SEGMENTS,
        _segment_line,
        lambda rest: _sized(
            sum(segment.size_bytes for segment in rest),
            f"in {len(rest):,} smaller ones, {format_bytes(sum(segment.free_bytes for segment in rest))} of it free",
        ),
    )


def _segment_line(segment: Segment) -> str:
    size = format_bytes(segment.size_bytes)
    free = f"{format_bytes(segment.free_bytes)} free" if segment.free_bytes else "full"
    stream = f", stream {segment.stream}" if segment.stream else ""
    pieces = f" in {len(segment.free_sizes):,} pieces" if len(segment.free_sizes) > 1 else ""
    return f"{size:>{_SIZE_WIDTH}} [{segment_cells(segment, _MAP_CELLS, '#+.')}] {free}{pieces}{stream}"


def segment_cells(segment: Segment, cells: int, signs: str) -> str:
    """Return a segment as a row of `cells` characters.

    Args:
        signs: for a cell in use, one partly in use, one free.
    """
    size = segment.size_bytes
    used = [0.0] * cells
    for offset, length in segment.taken:
        first, last = offset * cells / size, (offset + length) * cells / size
        for cell in range(int(first), min(cells, int(last) + 1)):
            used[cell] += max(0.0, min(last, cell + 1) - max(first, cell))
    return "".join(signs[0] if share > 0.995 else signs[1] if share > 0.005 else signs[2] for share in used)
