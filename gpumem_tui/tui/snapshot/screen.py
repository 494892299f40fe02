"""A PyTorch memory snapshot on the screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize

from gpumem_tui.snapshots.analysis import Analysis
from gpumem_tui.snapshots.model import MemorySnapshot
from gpumem_tui.tui.kit.dialogs import HelpScreen, TextScreen
from gpumem_tui.tui.kit.figures import Rows
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.row_list import FixedRows, RowList
from gpumem_tui.tui.snapshot import lines as views

_TALL = 32
_TICK_S = 20.0
_IDS = {pane: pane.replace(" ", "-") for pane in views.PANES}
_TITLES = {
    "lines": "Peak by source line",
    "stacks": "Peak by stack",
    "segments": "Segments when it was written",
    "out of memory": "Out of memory",
}


class SnapshotScreen(MainScreen):
    """One device of a file at a time.

    Args:
        analyses: its devices, taken apart; at least one.
        clock: the time of day.
    """

    CSS_PATH = "screen.tcss"
    SMALLEST = (60, 18)
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012  as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"pane('{pane}')", pane) for pane, key in views.PANES.items()),
        Binding("d", "device", "device", tooltip="The next device of the file"),
        Binding("right", "turn(1)", "next list", show=False),
        Binding("left", "turn(-1)", show=False),
        Binding("question_mark", "help", "help", key_display="?", tooltip="The keys and what the marks mean"),
        Binding("q", "app.quit", "quit", tooltip="Leave"),
    ]

    def __init__(
        self, snapshot: MemorySnapshot, analyses: Sequence[Analysis], *, clock: Callable[[], datetime] = datetime.now
    ) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._analyses = analyses
        self._clock = clock
        self._at = 0
        self._pane = "out of memory" if analyses[0].ooms else "lines"

    @property
    def analysis(self) -> Analysis:
        """The device that is shown."""
        return self._analyses[self._at]

    def compose_parts(self) -> ComposeResult:
        """Header, verdict, chart, the categories beside the lists."""
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

    def on_resize(self, event: Resize) -> None:
        """A tiny terminal gets one line that says what is needed."""
        self.fit_terminal(event)
        self.set_class(event.size.height >= _TALL, "-tall")
        self.call_after_refresh(self._draw)

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only what does something is offered."""
        return len(self._analyses) > 1 if action == "device" else True

    def action_pane(self, pane: str) -> None:
        """Show a list, and give it the keys."""
        self._pane = pane
        for other, name in _IDS.items():
            self.query_one(f"#{name}").set_class(other == pane, "-shown")
        self.query_one(f"#{_IDS[pane]}", RowList).focus()

    def action_turn(self, way: int) -> None:
        """The list before or after the one that is shown."""
        panes = list(views.PANES)
        self.action_pane(panes[(panes.index(self._pane) + way) % len(panes)])

    def action_device(self) -> None:
        """The next device."""
        self._at = (self._at + 1) % len(self._analyses)
        for name in _IDS.values():
            self.query_one(f"#{name}", RowList).begin()
        self._draw()

    def action_help(self) -> None:
        """The keys and the marks."""
        self.app.push_screen(HelpScreen(views.snapshot_help()))

    @on(RowList.Chosen, "#lines")
    def _open_line(self, message: RowList.Chosen) -> None:
        self.app.push_screen(TextScreen(*views.part_details(self.analysis.by_line[int(message.key)])))

    @on(RowList.Chosen, "#stacks")
    def _open_stack(self, message: RowList.Chosen) -> None:
        self.app.push_screen(TextScreen(*views.part_details(self.analysis.by_stack[int(message.key)])))

    @on(RowList.Chosen, "#segments")
    def _open_segment(self, message: RowList.Chosen) -> None:
        found = self.analysis.segments.rows[int(message.key)]
        self.app.push_screen(TextScreen(*views.segment_details(found)))

    # Drawing

    def _draw_header(self) -> None:
        analysis, now = self.analysis, f"{self._clock():%H:%M}"
        self._show("header", lambda width, _: [views.header_row(self._snapshot, analysis, now, width)])

    def _draw(self) -> None:
        self._draw_header()
        analysis, total = self.analysis, self.analysis.peak_allocated_bytes
        height = self.query_one("#course").size.height
        self._show("verdict", lambda width, _: [views.verdict_row(analysis, width)])
        self._show("course", lambda width, _: views.course_rows(analysis, width, height))
        self._show("categories", lambda width, _: views.category_rows(analysis, width))
        self._show("lines", lambda width, _: views.part_rows(analysis.by_line, total, width, "source line"))
        self._show("stacks", lambda width, _: views.part_rows(analysis.by_stack, total, width, "stack"))
        self._show("segments", lambda width, _: views.segment_rows(analysis, width))
        self._show("out-of-memory", lambda width, _: views.out_of_memory_rows(analysis, width))

    def _show(self, name: str, rows: Rows) -> None:
        self.query_one(f"#{name}", RowList).show(rows)
