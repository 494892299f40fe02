"""A memory snapshot's segments as a map, and the requests that found no room among them, as lines."""

from __future__ import annotations

from gpumem_tui.memory import format_bytes
from gpumem_tui.snapshots.analysis import Analysis
from gpumem_tui.snapshots.fragmentation import FailedRequest, Pin, SegmentRow
from gpumem_tui.snapshots.report import segment_cells
from gpumem_tui.tui.kit.figures import MUTED, Row, compact_bytes, fit
from gpumem_tui.tui.kit.rows import ListRow, heading, paragraph, row

_SIZE = 8
_MOST_ROWS = 500
_MOST_SHOWN = 5
_SIGNS = {"█": "$activations", "▒": "$temporary", "·": "$free"}


def segment_rows(analysis: Analysis, width: int) -> list[ListRow]:
    """Every segment, the largest first: its size, a map of it, and what is free."""
    found = analysis.segments
    lines = [
        row(("free between blocks  ", MUTED), (format_bytes(found.stranded_bytes), "bold")),
        row(("in free segments     ", MUTED), (format_bytes(found.returnable_bytes), "bold")),
        row(("largest free piece   ", MUTED), (format_bytes(found.largest_free_bytes), "bold")),
    ]
    cells = max(8, width - 3 * _SIZE - 3)
    lines.append(row((f"{'size':>{_SIZE}}  {fit('', cells)}{'free':>{_SIZE}}{'largest':>{_SIZE}}", f"bold {MUTED}")))
    lines += [_segment(one, number, cells) for number, one in enumerate(found.rows[:_MOST_ROWS])]
    if rest := found.rows[_MOST_ROWS:]:
        lines.append(row((f"{len(rest):,} smaller segments", MUTED)))
    return lines


def _segment(found: SegmentRow, number: int, cells: int) -> ListRow:
    signs = "".join(_SIGNS)
    spans: Row = [(f"{compact_bytes(found.segment.size_bytes):>{_SIZE}}", "bold"), ("  ", "")]
    spans += [(cell, _SIGNS[cell]) for cell in segment_cells(found, cells, signs)]
    style = "" if found.free_bytes else MUTED
    spans.append((f"{compact_bytes(found.free_bytes):>{_SIZE}}", style))
    spans.append((f"{compact_bytes(found.largest_free_bytes):>{_SIZE}}", style))
    return row(*spans, key=str(number))


def segment_details(found: SegmentRow) -> tuple[str, list[Row]]:
    """A segment in words."""
    segment = found.segment
    private = f", private pool {segment.pool}" if segment.pool != (0, 0) else ""
    kind = f"{'small' if segment.is_small else 'large'} requests, stream {segment.stream}{private}"
    used = segment.size_bytes - found.free_bytes
    lines: list[Row] = [
        [(f"{format_bytes(segment.size_bytes)} for {kind}{', expandable' if segment.is_expandable else ''}", "bold")],
        [(f"{format_bytes(used)} in use in {sum(not block.is_free for block in segment.blocks):,} blocks", "")],
        [(f"{format_bytes(found.free_bytes)} free in {found.free_pieces:,} pieces", "")],
        [],
    ]
    for block in segment.blocks[:_MOST_ROWS]:
        state = "free" if block.is_free else "in use" if block.is_allocated else "waits for another stream"
        lines.append([(f"{block.address - segment.address:>16,}  {format_bytes(block.size_bytes):>11}  {state}", "")])
    return f"segment at {segment.address:#x}", lines


def out_of_memory_rows(analysis: Analysis, width: int) -> list[ListRow]:
    """The requests that found no room, the last one first."""
    if not analysis.ooms:
        return paragraph("No request of this recording ran out of memory.", width)
    lines: list[ListRow] = []
    for oom in reversed(analysis.ooms[-_MOST_SHOWN:]):
        lines += _out_of_memory(oom, width)
    if more := len(analysis.ooms) - _MOST_SHOWN:
        lines += paragraph(f"{more} earlier ones", width) if more > 0 else []
    return lines


def _out_of_memory(oom: FailedRequest, width: int) -> list[ListRow]:
    lines = [heading(fit(f"event {oom.event:,}, {oom.line}", width))]
    for text in oom.explanation():
        lines += paragraph(text, width, "", indent=2)
    if oom.pins and oom.reason == "fragmented":
        lines += paragraph("what keeps the largest free pieces from being given back:", width)
        lines += [_pin(pin, width) for pin in oom.pins]
    return [*lines, row()]


def _pin(pin: Pin, width: int) -> ListRow:
    size = f"{compact_bytes(pin.free_bytes):>{_SIZE}} of {compact_bytes(pin.size_bytes)} free, {pin.blocks:,} blocks: "
    return row((size, "bold"), (fit(", ".join(pin.lines), max(4, width - len(size))), ""))
