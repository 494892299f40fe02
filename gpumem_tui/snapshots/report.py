"""A snapshot's analysis as plain lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumem_tui.memory import format_bytes, format_count
from gpumem_tui.report.tables import counted, largest_first
from gpumem_tui.snapshots.analysis import Analysis, Part
from gpumem_tui.snapshots.comparison import Comparison, MemoryChange, signed
from gpumem_tui.snapshots.comparison import answer_words as change_words
from gpumem_tui.snapshots.fragmentation import FailedRequest
from gpumem_tui.snapshots.model import MemorySnapshot, Segment
from gpumem_tui.snapshots.states import NOT_RECORDED

_MOST_PLACES = 20
_MOST_STACKS = 5
_MOST_SHOWN_FRAMES = 12
_MOST_SEGMENTS = 16
_MAP_CELLS = 40
_PLOT_WIDTH, _PLOT_HEIGHT = 72, 8
_SIZE_WIDTH, _BAR = 11, 24


def snapshot_lines(snapshot: MemorySnapshot, analyses: Sequence[Analysis]) -> Iterator[str]:
    """Yield everything about a file, as text: the answer first, a line a device."""
    several = len(analyses) > 1
    yield from (f"{f'cuda:{one.device}: ' if several else ''}{answer_words(one)}" for one in analyses)
    yield f"{snapshot.name} · {snapshot.kind} · {format_bytes(snapshot.size_bytes)}"
    for analysis in analyses:
        yield from _device_lines(analysis)


def comparison_lines(before: MemorySnapshot, after: MemorySnapshot, found: Sequence[Comparison]) -> Iterator[str]:
    """Yield how two files differ: the answer first, a line a device."""
    several = len(found) > 1
    yield from (f"{f'cuda:{one.after.device}: ' if several else ''}{change_words(one)}" for one in found)
    yield (
        f"{before.name} ({before.kind}, {format_bytes(before.size_bytes)}) → {after.name} ({after.kind}, "
        f"{format_bytes(after.size_bytes)})"
    )
    for one in found:
        yield from _change_lines(one)


def _change_lines(found: Comparison) -> Iterator[str]:
    yield f"\ncuda:{found.after.device} · compared {found.moment}"
    yield from found.notes
    yield f"\n{'before':>{_SIZE_WIDTH}}  {'after':>{_SIZE_WIDTH}}  {'change':>{_SIZE_WIDTH}}"
    for title, one, other in found.figures:
        yield _changed(one, other, title)
    one, other = found.segments
    yield f"{one:>{_SIZE_WIDTH},}  {other:>{_SIZE_WIDTH},}  {other - one:>+{_SIZE_WIDTH},}  segments"
    for title, rows in (
        ("by category", found.by_category),
        ("more, by source line", [row for row in found.by_line if row.bytes_more > 0]),
        ("freed, by source line", [row for row in found.by_line if row.bytes_more < 0]),
    ):
        if rows:
            yield f"\n{title}"
        yield from largest_first(
            rows,
            _MOST_PLACES,
            lambda row: _changed(row.before_bytes, row.after_bytes, line_words(row)),
            lambda rest: _changed(
                sum(row.before_bytes for row in rest),
                sum(row.after_bytes for row in rest),
                f"{len(rest):,} smaller ones",
            ),
        )


def line_words(row: MemoryChange) -> str:
    """Return a category, or a line with its category and its number of blocks."""
    if not row.category:
        return row.name
    blocks = f", {row.before_blocks:,} → {row.after_blocks:,} blocks" if row.before_blocks != row.after_blocks else ""
    return f"{row.name} ({row.category}{blocks})"


def _changed(before_bytes: int, after_bytes: int, text: str) -> str:
    sizes = (format_bytes(before_bytes), format_bytes(after_bytes), signed(after_bytes - before_bytes))
    return f"{'  '.join(f'{size:>{_SIZE_WIDTH}}' for size in sizes)}  {text}"


def answer_words(analysis: Analysis) -> str:
    """Return why the last request found no room; where all did, the peak and what holds most of it.

    Without events it is what was held as the file was written, and how to record more.
    """
    if analysis.ooms:
        return f"Out of memory: {analysis.ooms[-1].explanation[0]}"
    most = max(analysis.by_category, key=lambda part: part.size_bytes, default=None)
    held = "" if most is None else f", most of it {most.name} ({format_bytes(most.size_bytes)})"
    if not analysis.is_recorded:
        lacking = analysis.missing[0]
        if not analysis.end_reserved_bytes:
            return f"{lacking[0].upper()}{lacking[1:]}"
        return (
            f"{format_bytes(analysis.end_allocated_bytes)} allocated when the file was written"
            f"{'' if most is None or most.name == NOT_RECORDED else held}; "
            f"{format_bytes(analysis.end_reserved_bytes)} reserved; {lacking}"
        )
    return (
        f"Peak {format_bytes(analysis.peak_allocated_bytes)} allocated{held}; "
        f"{format_bytes(analysis.peak_reserved_bytes)} reserved"
    )


def _device_lines(analysis: Analysis) -> Iterator[str]:
    lasted = "" if analysis.duration_s is None else f" in {analysis.duration_s:.3g} s"
    yield f"\ncuda:{analysis.device} · {event_count(analysis.events)}{lasted}"
    if analysis.is_recorded:
        yield (
            f"peak {format_bytes(analysis.peak_allocated_bytes)} allocated, {when(analysis.peak_event)}; "
            f"{format_bytes(analysis.peak_reserved_bytes)} reserved at most"
        )
    yield (
        f"when written {format_bytes(analysis.end_allocated_bytes)} allocated, "
        f"{format_bytes(analysis.end_reserved_bytes)} reserved"
    )
    yield from analysis.notes
    if analysis.is_recorded:
        yield "\nallocated over the events"
        yield from _plot(analysis)
    yield from _stage_lines(analysis)
    for oom in analysis.ooms[-1:]:
        yield f"\nout of memory at event {oom.event:,}, {oom.line}"
        yield from (f"  {line}" for line in oom.explanation)
        yield from _pin_lines(oom)
    what = "the peak" if analysis.is_recorded else "held when written"
    yield from _part_lines(f"{what} by category (from {analysis.categories_from})", analysis.by_category)
    yield from _part_lines(f"{what} by source line", analysis.by_line)
    yield from _stack_lines(analysis, what)
    yield from _segment_lines(analysis)


def event_count(events: int) -> str:
    """Return a number of events in words."""
    return f"{format_count(events)} {'event' if events == 1 else 'events'}"


def when(event: int) -> str:
    """Return the moment after an event in words; -1 is before the first."""
    return "before the first event" if event < 0 else f"at event {event:,}"


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


def _stage_lines(analysis: Analysis) -> Iterator[str]:
    """Yield a bar for the peak of each stage of the run, where stacks show several."""
    if not analysis.stages:
        return
    top = max(size for _, size, _ in analysis.stages) or 1
    yield "\nthe peak of each stage of the run (by functions on the stacks)"
    for name, size, event in analysis.stages:
        highest = ", the highest" if size == top else ""
        yield _sized(size, f"{name:<11} {'#' * max(1, size * _BAR // top):<{_BAR}} at event {event:,}{highest}")


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


def _stack_lines(analysis: Analysis, what: str) -> Iterator[str]:
    stacks = [part for part in analysis.by_stack if part.frames]
    if not stacks:
        return
    yield f"\n{what} by stack, the innermost frame first"
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
        f"\n{counted(len(analysis.segments), 'segment')} when written: "
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
