"""The log pane: the last lines that the user's command prints, wrapped to the pane's width."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from textual.events import Resize
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style

from gpumem_tui.run.children import side_effects
from gpumem_tui.run.events import Output
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import TraceProgress
from gpumem_tui.search.runner import SearchEvent, TrialProgress
from gpumem_tui.text import shortened
from gpumem_tui.tui.kit.figures import MUTED, Row

KEPT_LINES = 2000
_LONGEST_LINE = 2000


@dataclass(frozen=True)
class PrintedLine:
    """A line of the command (``output``), of ours over a run of it (``heading``), or said before the first one."""

    text: str
    kind: Literal["output", "heading", "notice"] = "output"


class Printed:
    """The last lines of one search or command; written by the thread that follows it and read by the screen's.

    Args:
        first: what is above the command's own lines.

    Attributes:
        unfinished: the command's line that has no end yet; empty for none.
    """

    def __init__(self, first: Iterable[PrintedLine] = ()) -> None:
        self._lock = threading.Lock()
        self._lines = deque(first, maxlen=KEPT_LINES)
        self._count = len(self._lines)
        self.unfinished = ""

    @classmethod
    def of(cls, config: SearchConfig) -> Printed:
        """Before a search: the command, and what it does to the user's machine; nothing for another workload."""
        command = config.workload.command
        if command is None:
            return cls()
        return cls((PrintedLine(f"$ {command.text}", "heading"), PrintedLine(side_effects(config.steps), "notice")))

    def take(self, event: SearchEvent) -> None:
        """Keep what an event adds to the lines."""
        if isinstance(event, Output):
            self.add(event.text)
        elif isinstance(event, TraceProgress) and event.sample is None:
            self._keep(PrintedLine(f"tracing batch size {event.batch_size:,}", "heading"))
        elif isinstance(event, TrialProgress) and event.sample is None:
            self._keep(PrintedLine(f"trial {event.number}: batch {event.batch_size:,}", "heading"))

    def since(self, seen: int) -> tuple[list[PrintedLine], int]:
        """Return the lines after the first `seen` ones, as far as they are kept, and how many there were by now."""
        with self._lock:
            new = min(self._count - seen, len(self._lines))
            return list(islice(self._lines, len(self._lines) - new, None)), self._count

    def add(self, text: str) -> None:
        """Keep a line of the command."""
        self._keep(PrintedLine(shortened(text, _LONGEST_LINE)))

    def show_unfinished(self, text: str) -> None:
        """Show the command's unfinished line; empty for none."""
        self.unfinished = shortened(text, _LONGEST_LINE)

    def _keep(self, line: PrintedLine) -> None:
        with self._lock:
            self._lines.append(line)
            self._count += 1


_STYLES = {"output": "", "heading": "bold $primary", "notice": MUTED}


class OutputPane(ScrollView, can_focus=True):
    """Follows the end of the output until the user scrolls up; at the end it follows again."""

    BORDER_TITLE = "Output of the command"

    def __init__(self) -> None:
        super().__init__()
        self._printed = Printed()
        self._seen = 0
        self._rows: Row = []
        self._unfinished = ""
        self._unfinished_rows = 0
        self._follows = True

    @property
    def text(self) -> str:
        """Return all rows as one text."""
        return "\n".join(text for text, _ in self._rows)

    def show(self, printed: Printed) -> None:
        """Add what has been printed since, or start over with the lines of another search."""
        if printed is not self._printed:
            self._printed = printed
            self._follows = True
            self._clear()
        if not self._width:
            return  # before the first layout, or hidden
        lines, self._seen = printed.since(self._seen)
        if lines or printed.unfinished != self._unfinished:
            self._unfinished = printed.unfinished
            self._add(lines)

    def on_resize(self, _event: Resize) -> None:
        """Wrap the lines to the new width."""
        follows = self._follows  # the clearing scrolls
        self._clear()
        self._follows = follows
        self.show(self._printed)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Stop following the output when the user scrolls up."""
        super().watch_scroll_y(old_value, new_value)
        self._follows = self.is_vertical_scroll_end

    def action_scroll_home(self) -> None:
        """Scroll to the first line without an animation, which the next line would stop."""
        self.scroll_home(animate=False, force=True, immediate=True, x_axis=False)

    def action_scroll_end(self) -> None:
        """Follow the end at once: a line that comes during an animation would stop it short of that."""
        self.scroll_end(animate=False, force=True, immediate=True, x_axis=False)

    def render_line(self, y: int) -> Strip:
        """Return a row of what is scrolled to."""
        row = self.scroll_offset.y + y
        base = self.visual_style
        if row >= len(self._rows):
            return Strip.blank(self.size.width, base.rich_style)
        text, style = self._rows[row]
        drawn = base + Style.parse(style) if style else base
        strip = Strip(self._segments(row, text, drawn)).adjust_cell_length(self.size.width, base.rich_style)
        return strip.apply_offsets(0, row)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """Return the text that the mouse has marked."""
        return selection.extract(self.text), "\n"

    def selection_updated(self, _selection: Selection | None) -> None:
        """Draw what is marked."""
        self.refresh()

    @property
    def _width(self) -> int:
        return self.scrollable_content_region.width

    def _segments(self, row: int, text: str, style: Style) -> Iterator[Segment]:
        selection = self.text_selection
        span = selection.get_span(row) if selection is not None else None
        if span is None:
            yield Segment(text, style.rich_style)
            return
        first, after = span[0], len(text) if span[1] == -1 else span[1]
        plain = style.rich_style
        marked = plain + self.screen.get_component_rich_style("screen--selection")
        yield from (Segment(text[:first], plain), Segment(text[first:after], marked), Segment(text[after:], plain))

    def _clear(self) -> None:
        self._seen = 0
        self._rows = []
        self._unfinished_rows = 0

    def _add(self, lines: Iterable[PrintedLine]) -> None:
        """Put lines below those that are there; the one that has not ended comes last."""
        del self._rows[len(self._rows) - self._unfinished_rows :]
        self._rows += [(text, _STYLES[line.kind]) for line in lines for text in _wrapped(line.text, self._width)]
        unfinished = list(_wrapped(self._unfinished, self._width)) if self._unfinished else []
        self._rows += [(text, "") for text in unfinished]
        self._unfinished_rows = len(unfinished)
        dropped = max(0, len(self._rows) - KEPT_LINES)
        del self._rows[:dropped]
        self.virtual_size = Size(self._width, len(self._rows))
        if self._follows:
            self.scroll_end(animate=False, force=True, immediate=True, x_axis=False)  # the bar is not there yet
        elif dropped:
            self.scroll_relative(y=-dropped, animate=False, force=True, immediate=True)
        self.refresh()


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the rows of a line, broken at a space where one is near the end of the row."""
    while cell_len(text) > width:
        row = chop_cells(text[:width], width)[0]
        space = row.rfind(" ") + 1
        if space > width // 2:
            row = row[:space]
        yield row
        text = text[len(row) :]
    yield text
