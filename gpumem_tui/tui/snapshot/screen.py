"""A memory snapshot, as lines: memory over its events, what the peak consists of, segments, and what found no room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Size

from gpumem_tui.memory import Bucket, format_bytes
from gpumem_tui.snapshots.analysis import Analysis, Part, Point
from gpumem_tui.snapshots.fragmentation import FailedRequest, Pin
from gpumem_tui.snapshots.model import MemorySnapshot, Segment
from gpumem_tui.snapshots.report import answer_words, event_count, segment_cells
from gpumem_tui.snapshots.states import NOT_RECORDED
from gpumem_tui.tui.kit.chart import LABEL_WIDTH, Band, Stack, area_rows, by_column, ends_row, stacked
from gpumem_tui.tui.kit.dialogs import TextScreen
from gpumem_tui.tui.kit.figures import (
    MUTED,
    ListRow,
    Row,
    Rows,
    compact_bytes,
    fit,
    header_line,
    heading,
    paragraph,
    row,
)
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS, Look
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.row_list import FixedRows, RowList

PANES = {
    "lines": ("l", "Source lines: what the innermost line of the program holds at the peak"),
    "stacks": ("s", "Stacks at the peak; enter shows all frames of one"),
    "segments": ("m", "Segments when the snapshot was taken, and what is free in them"),
    "out of memory": ("o", "Requests that found no room, and why"),
}
"""The lists, with the key that shows each and its words."""

_SIZE = 8
_MOST_ROWS = 300
_CACHE = Band(Bucket.CACHE.title, "$history-reserved")
_LOOKS: dict[str, Look] = {
    **{bucket.title: look for bucket, look in BUCKET_LOOKS.items()},
    "model": BUCKET_LOOKS[Bucket.PARAMETERS],
    "forward": BUCKET_LOOKS[Bucket.ACTIVATIONS],
    "backward": BUCKET_LOOKS[Bucket.GRADIENTS],
    "optimizer": BUCKET_LOOKS[Bucket.OPTIMIZER],
    "elsewhere": BUCKET_LOOKS[Bucket.TEMPORARY],
    "before the recording": BUCKET_LOOKS[Bucket.CONTEXT],
}


def header_row(snapshot: MemorySnapshot, analysis: Analysis, time: str, width: int) -> ListRow:
    """Return the file, and which of its devices; what there is no room for is left out."""
    right: Row = [(time, MUTED), (" ", "")]
    devices = len(snapshot.devices)
    among = f" ({snapshot.devices.index(analysis.device) + 1} of {devices}, d)" if devices > 1 else ""
    facts = [f"cuda:{analysis.device}{among}", event_count(analysis.events)]
    if analysis.duration_s is not None:
        facts.append(f"{analysis.duration_s:.3g} s")
    facts.append(f"{snapshot.kind}, {format_bytes(snapshot.size_bytes)}")
    return row(*header_line((snapshot.name, "bold"), [(fact, "") for fact in facts], right, width))


def verdict_rows(analysis: Analysis, width: int) -> list[ListRow]:
    """Return the peak, or why a request failed, or what was not recorded, in as many lines as that takes."""
    mark, style = ("✗ ", "$text-error") if analysis.ooms else ("▲ ", "$warning")
    lines = paragraph(answer_words(analysis), width, "bold", indent=2)
    return [row((mark, style), (lines[0].text[2:], "bold")), *lines[1:]]


# Memory over the events


def course_rows(analysis: Analysis, width: int, height: int) -> list[ListRow]:
    """Return a chart of so many lines: allocated by category, above it the cache, below it where the peak is."""
    columns, rows = max(8, width - LABEL_WIDTH), max(3, height - 2)
    top = max(analysis.peak_reserved_bytes, analysis.peak_allocated_bytes, 1)
    bands = [Band(name, look_of(name)[1]) for name in analysis.categories]
    stacks = (_stack(point, bands, top, rows) for point in _by_column(analysis, columns))
    lines = [row(*line) for line in area_rows(stacks, rows, compact_bytes(top))]
    return [*lines, _mark_row(analysis, columns), row(*ends_row(columns, event_count(analysis.events)))]


def _by_column(analysis: Analysis, columns: int) -> list[Point]:
    """Return the highest point of each column; where nothing happened, what was held before."""
    points = ((_column(analysis, point.event, columns), point) for point in analysis.timeline)
    found = by_column(points, columns, lambda point: point.allocated_bytes)
    return [analysis.timeline[0] if point is None else point for point in found]


def _column(analysis: Analysis, event: int, columns: int) -> int:
    return min(columns - 1, (event + 1) * columns // (analysis.events + 1))


def _stack(point: Point, bands: Sequence[Band], top: int, rows: int) -> Stack:
    sums = zip(accumulate(point.by_category), point.by_category, bands, strict=True)
    edges = [(edge, band) for edge, size_bytes, band in sums if size_bytes]
    return stacked([*edges, (max(sum(point.by_category), point.reserved_bytes), _CACHE)], top, rows)


def _mark_row(analysis: Analysis, columns: int) -> ListRow:
    """Return the line that marks where the peak is, and where memory ran out."""
    line = [" "] * columns
    peak = _column(analysis, analysis.peak_event, columns)
    word = "▲ peak" if peak + 6 <= columns else "peak ▲"
    start = peak if peak + 6 <= columns else max(0, peak - 5)
    line[start : start + len(word)] = word
    spans: Row = [(" " * LABEL_WIDTH, "")]
    failed = {_column(analysis, oom.event, columns) for oom in analysis.ooms}
    for index, character in enumerate(line[:columns]):
        spans.append(("✗", "bold $text-error") if index in failed else (character, "$warning"))
    return row(*spans)


# Memory at the peak


def category_rows(analysis: Analysis, width: int) -> list[ListRow]:
    """Return the peak by category, which is the legend of the chart too."""
    title = "at the peak" if analysis.is_recorded else "when written"
    lines = [row((fit(title, width), f"bold {MUTED}"))]
    sizes = {part.name: part.size_bytes for part in analysis.by_category}
    lines += [_category(name, size_bytes, width) for name, size_bytes in sizes.items()]
    lines += [_category(name, 0, width) for name in analysis.categories if name not in sizes]
    lines.append(_sum("= allocated", analysis.peak_allocated_bytes, width))
    reserved = "reserved at most" if analysis.is_recorded else "reserved"
    lines.append(_sum(reserved, analysis.peak_reserved_bytes, width))
    lines.append(row())
    for text in analysis.notes:
        lines += paragraph(text, width)
    is_told = any(part.name != NOT_RECORDED for part in analysis.by_category)
    return [*lines, *(paragraph(f"categories from {analysis.categories_from}", width) if is_told else ())]


def _category(name: str, size_bytes: int, width: int) -> ListRow:
    pattern, colour = look_of(name)
    return row(
        (pattern, colour), (f" {fit(name, width - 2 - _SIZE)}", ""), (f"{compact_bytes(size_bytes):>{_SIZE}}", "")
    )


def _sum(title: str, size_bytes: int, width: int) -> ListRow:
    return row((fit(title, width - _SIZE), "bold"), (f"{compact_bytes(size_bytes):>{_SIZE}}", "bold"))


def look_of(name: str) -> Look:
    """Return the pattern and colour of a category."""
    return _LOOKS.get(name, BUCKET_LOOKS[Bucket.OTHER])


def part_rows(parts: Sequence[Part], total_bytes: int, width: int, what: str) -> list[ListRow]:
    """Return the largest parts of the peak: size, share, a bar in the pattern of the category, name."""
    bar = max(4, min(16, width // 8))
    lines = [row((fit(f"{'GiB':>{_SIZE}}  share  {what}", width), f"bold {MUTED}"))]
    for number, part in enumerate(parts[:_MOST_ROWS]):
        share = part.size_bytes / total_bytes if total_bytes else 0.0
        pattern, colour = look_of(part.categories[0][0]) if part.categories else BUCKET_LOOKS[Bucket.OTHER]
        cells = max(1, round(share * bar))
        blocks = f"  ×{part.blocks:,}" if part.blocks > 1 else ""
        room = max(4, width - _SIZE - 8 - bar - 1 - len(blocks))
        lines.append(
            row(
                (f"{compact_bytes(part.size_bytes):>{_SIZE}}", "bold"),
                (f"{share:>7.1%} ", MUTED),
                (pattern * cells, colour),
                (" " * (bar - cells + 1), ""),
                (fit(part.name, room), ""),
                (blocks, MUTED),
                key=str(number),
            )
        )
    if rest := parts[_MOST_ROWS:]:
        size = compact_bytes(sum(part.size_bytes for part in rest))
        lines.append(row((f"{size:>{_SIZE}}", "bold"), (f"  {len(rest):,} smaller ones", MUTED)))
    return lines


def part_details(part: Part) -> tuple[str, list[Row]]:
    """Return all facts about a part: its categories, and of a stack every frame."""
    lines: list[Row] = [[(f"{format_bytes(part.size_bytes)} in {part.blocks:,} blocks", "bold")], []]
    lines += [[(f"{format_bytes(size_bytes):>11}  {name}", "")] for name, size_bytes in part.categories]
    if part.frames:
        lines += [[], [("the innermost frame first", MUTED)], *([(frame, "")] for frame in part.frames)]
    return part.name, lines


_MOST_SEGMENTS = 500
_MOST_SHOWN = 5
_SIGNS = {"█": "$activations", "▒": "$temporary", "·": "$free"}


def segment_rows(analysis: Analysis, width: int) -> list[ListRow]:
    """Every segment, the largest first: its size, a map of it, and what is free."""
    lines = [
        row(("free between blocks  ", MUTED), (format_bytes(analysis.stranded_bytes), "bold")),
        row(("in free segments     ", MUTED), (format_bytes(analysis.returnable_bytes), "bold")),
        row(("largest free piece   ", MUTED), (format_bytes(analysis.largest_free_bytes), "bold")),
    ]
    cells = max(8, width - 3 * _SIZE - 3)
    lines.append(row((f"{'size':>{_SIZE}}  {fit('', cells)}{'free':>{_SIZE}}{'largest':>{_SIZE}}", f"bold {MUTED}")))
    lines += [_segment(one, number, cells) for number, one in enumerate(analysis.segments[:_MOST_SEGMENTS])]
    if rest := analysis.segments[_MOST_SEGMENTS:]:
        lines.append(row((f"{len(rest):,} smaller segments", MUTED)))
    return lines


def _segment(found: Segment, number: int, cells: int) -> ListRow:
    signs = "".join(_SIGNS)
    spans: Row = [(f"{compact_bytes(found.size_bytes):>{_SIZE}}", "bold"), ("  ", "")]
    spans += [(cell, _SIGNS[cell]) for cell in segment_cells(found, cells, signs)]
    style = "" if found.free_bytes else MUTED
    spans.append((f"{compact_bytes(found.free_bytes):>{_SIZE}}", style))
    spans.append((f"{compact_bytes(found.largest_free_bytes):>{_SIZE}}", style))
    return row(*spans, key=str(number))


def segment_details(segment: Segment) -> tuple[str, list[Row]]:
    """Return a segment in words."""
    private = f", private pool {segment.pool}" if segment.pool != (0, 0) else ""
    kind = f"{'small' if segment.is_small else 'large'} requests, stream {segment.stream}{private}"
    used = segment.size_bytes - segment.free_bytes
    lines: list[Row] = [
        [(f"{format_bytes(segment.size_bytes)} for {kind}{', expandable' if segment.is_expandable else ''}", "bold")],
        [(f"{format_bytes(used)} in use in {sum(not block.is_free for block in segment.blocks):,} blocks", "")],
        [(f"{format_bytes(segment.free_bytes)} free in {len(segment.free_sizes):,} pieces", "")],
        [],
    ]
    for block in segment.blocks[:_MOST_SEGMENTS]:
        state = "free" if block.is_free else "in use" if block.is_allocated else "waits for another stream"
        lines.append([(f"{block.address - segment.address:>16,}  {format_bytes(block.size_bytes):>11}  {state}", "")])
    return f"segment at {segment.address:#x}", lines


def out_of_memory_rows(analysis: Analysis, width: int) -> list[ListRow]:
    """Return the requests that found no room, the last one first."""
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
    for text in oom.explanation:
        lines += paragraph(text, width, "", indent=2)
    if oom.pins and oom.reason == "fragmented":
        lines += paragraph("what keeps the largest free pieces from being given back:", width)
        lines += [_pin(pin, width) for pin in oom.pins]
    return [*lines, row()]


def _pin(pin: Pin, width: int) -> ListRow:
    size = f"{compact_bytes(pin.free_bytes):>{_SIZE}} of {compact_bytes(pin.size_bytes)} free, {pin.blocks:,} blocks: "
    return row((size, "bold"), (fit(", ".join(pin.lines), max(4, width - len(size))), ""))


_TALL = 32
_TICK_S = 20.0
_IDS = {pane: pane.replace(" ", "-") for pane in PANES}
_TITLES = {
    "lines": "Peak by source line",
    "stacks": "Peak by stack",
    "segments": "Segments when it was written",
    "out of memory": "Out of memory",
}


def _interest(analysis: Analysis) -> tuple[bool, int]:
    return bool(analysis.ooms), analysis.peak_allocated_bytes


def _first_pane(analysis: Analysis) -> str:
    """Return the list that tells most: without any history it is the segments."""
    if analysis.ooms:
        return "out of memory"
    return "lines" if any(part.name != NOT_RECORDED for part in analysis.by_line) else "segments"


class SnapshotScreen(MainScreen):
    """The screen of a snapshot, one device at a time.

    Args:
        analyses: its devices, taken apart; at least one. It opens on one that ran out of memory, else on the largest.
        clock: the time of day.
    """

    CSS_PATH = "screen.tcss"
    SMALLEST = (60, 18)
    TOPIC = "snapshots"
    PANE_HELP: ClassVar[Mapping[str, str]] = {name.replace(" ", "-"): words for name, (_, words) in PANES.items()}
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012  as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"pane('{pane}')", pane, tooltip=words) for pane, (key, words) in PANES.items()),
        Binding("d", "device", "device", tooltip="The next device of the file"),
        Binding("question_mark", "app.help", "help", key_display="?", tooltip="The keys and what the marks mean"),
        Binding("q", "app.quit", "quit", tooltip="Leave"),
    ]

    def __init__(
        self, snapshot: MemorySnapshot, analyses: Sequence[Analysis], *, clock: Callable[[], datetime] = datetime.now
    ) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._analyses = analyses
        self._clock = clock
        self._at = max(range(len(analyses)), key=lambda at: _interest(analyses[at]))
        self._pane = _first_pane(self.analysis)

    @property
    def analysis(self) -> Analysis:
        """The device that is shown."""
        return self._analyses[self._at]

    def compose_parts(self) -> ComposeResult:
        """Yield header, verdict, chart, and the categories next to the lists."""
        yield FixedRows(id="header")
        yield FixedRows(id="verdict")
        yield FixedRows(id="course")
        with Horizontal(id="body"):
            yield FixedRows(id="categories", title="Categories")
            with Vertical(id="panes"):
                for pane, title in _TITLES.items():
                    yield RowList(id=_IDS[pane], title=title)

    def on_mount(self) -> None:
        """Everything is there already."""
        self.set_interval(_TICK_S, self._draw_header)
        self.action_pane(self._pane)

    def laid_out(self, size: Size) -> None:
        """Draw for another size of the terminal."""
        self.set_class(size.height >= _TALL, "-tall")
        self._draw_verdict()
        self.call_after_refresh(self._draw)

    def parting_lines(self) -> Iterable[str]:
        """Return the answer for the device that is shown."""
        return (f"{self._snapshot.name}: {answer_words(self.analysis)}",)

    # Keys

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Offer only what does something."""
        return len(self._analyses) > 1 if action == "device" else True

    def action_pane(self, pane: str) -> None:
        """Show a list, and give it the keys."""
        self._pane = pane
        for other, name in _IDS.items():
            self.query_one(f"#{name}").set_class(other == pane, "-shown")
        self.query_one(f"#{_IDS[pane]}", RowList).focus()

    def action_turn(self, way: int) -> None:
        """Show the list before or after the one that is shown."""
        panes = list(PANES)
        self.action_pane(panes[(panes.index(self._pane) + way) % len(panes)])

    def action_device(self) -> None:
        """Show the next device."""
        self._at = (self._at + 1) % len(self._analyses)
        for name in _IDS.values():
            self.query_one(f"#{name}", RowList).begin()
        self._draw_verdict()
        self.call_after_refresh(self._draw)

    @on(RowList.Chosen)
    def _open(self, message: RowList.Chosen) -> None:
        analysis, number = self.analysis, int(message.key)
        match message.rows.id:
            case "segments":
                shown = segment_details(analysis.segments[number])
            case "stacks":
                shown = part_details(analysis.by_stack[number])
            case _:
                shown = part_details(analysis.by_line[number])
        self.app.push_screen(TextScreen(*shown))

    # Drawing

    def _draw_header(self) -> None:
        analysis, now = self.analysis, f"{self._clock():%H:%M}"
        self._show("header", lambda width, _: [header_row(self._snapshot, analysis, now, width)])

    def _draw_verdict(self) -> None:
        """Give the verdict the lines that it takes."""
        panel = self.query_one("#verdict", RowList)
        rows = verdict_rows(self.analysis, self.size.width)
        panel.styles.height = len(rows)
        panel.show(lambda width, _: verdict_rows(self.analysis, width))

    def _draw(self) -> None:
        self._draw_header()
        analysis, total = self.analysis, self.analysis.peak_allocated_bytes
        course = self.query_one("#course")
        course.display = analysis.is_recorded
        for pane in ("lines", "stacks"):
            title = _TITLES[pane] if analysis.is_recorded else _TITLES[pane].replace("Peak", "Held when written,")
            self.query_one(f"#{pane}", RowList).border_title = title
        height = course.size.height
        self._show("course", lambda width, _: course_rows(analysis, width, height))
        self._show("categories", lambda width, _: category_rows(analysis, width))
        self._show("lines", lambda width, _: part_rows(analysis.by_line, total, width, "source line"))
        self._show("stacks", lambda width, _: part_rows(analysis.by_stack, total, width, "stack"))
        self._show("segments", lambda width, _: segment_rows(analysis, width))
        self._show("out-of-memory", lambda width, _: out_of_memory_rows(analysis, width))

    def _show(self, name: str, rows: Rows) -> None:
        self.query_one(f"#{name}", RowList).show(rows)
