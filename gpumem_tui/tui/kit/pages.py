"""A report shown over the Monitor: one page or several, scrolled with the arrow keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Click, Resize
from textual.screen import ModalScreen

from gpumem_tui.tui.kit.figures import MUTED, Row, span_width
from gpumem_tui.tui.kit.lines import Lines

_GAP = "   "


@dataclass(frozen=True)
class Page:
    """One page. `rows`: what stands on it in so many cells of width."""

    name: str
    rows: Callable[[int], list[Row]]


@dataclass(frozen=True)
class Report:
    """What the screen shows. `note`: a line above the pages; empty for none."""

    title: str
    pages: tuple[Page, ...]
    note: str = ""


class PagesScreen(ModalScreen[None]):
    """Closed by escape, enter or q."""

    CSS_PATH = "pages.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss(None)", "close"),
        Binding("right,tab", "turn(1)", "next page"),
        Binding("left,shift+tab", "turn(-1)", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "leaf(-1)", show=False),
        Binding("pagedown", "leaf(1)", show=False),
        Binding("home", "jump(0)", show=False),
        Binding("end", "jump(1)", show=False),
    ]

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        self._at = 0

    def compose(self) -> ComposeResult:
        """Names of the pages over the one that is shown."""
        with Vertical(id="report"):
            yield Lines(id="names")
            with VerticalScroll(id="page", can_focus=False):
                yield Lines(id="rows")

    def on_resize(self, event: Resize) -> None:
        """The first page, or the same at another width."""
        self.call_after_refresh(self._draw)

    def on_click(self, event: Click) -> None:
        """A click on a name turns to it."""
        if event.widget is not None and event.widget.id == "names":
            offset = event.get_content_offset(event.widget)
            for index, (first, after) in enumerate(self._places()):
                if offset is not None and first <= offset.x < after:
                    self._turn_to(index)

    def show(self, report: Report) -> None:
        """Show newer figures."""
        self._report = report
        if self.is_mounted:
            self._draw()

    def action_turn(self, step: int) -> None:
        """The next page, or the one before."""
        self._turn_to((self._at + step) % len(self._report.pages))

    def action_scroll(self, step: int) -> None:
        """Lines up or down."""
        self._page.scroll_relative(y=step, animate=False)

    def action_leaf(self, step: int) -> None:
        """A screenful up or down."""
        self._page.scroll_relative(y=step * max(1, self._page.size.height - 1), animate=False)

    def action_jump(self, end: int) -> None:
        """To the first line or to the last."""
        self._page.scroll_to(y=self._page.max_scroll_y * end, animate=False)

    @property
    def _page(self) -> VerticalScroll:
        return self.query_one("#page", VerticalScroll)

    def _turn_to(self, index: int) -> None:
        self._at = index
        self._page.scroll_to(y=0, animate=False)
        self._draw()

    def _draw(self) -> None:
        box, names, lines = self.query_one("#report"), self.query_one("#names", Lines), self.query_one("#rows", Lines)
        if not lines.size.width:
            return  # before the first layout
        pages = self._report.pages
        several = len(pages) > 1
        box.border_title = Content(self._report.title)  # brackets in a command are no markup
        box.border_subtitle = f"{'← → pages · ' if several else ''}↑ ↓ scroll · esc closes"
        names.display = several or bool(self._report.note)
        names.show_rows([self._names()])
        drawn = [page.rows(lines.size.width) for page in pages]
        lines.styles.height = max(1, *map(len, drawn))  # of the longest, so that the frame stays as it is
        lines.show_rows(drawn[self._at])

    def _names(self) -> Row:
        row: Row = []
        pages = self._report.pages
        for index, page in enumerate(pages if len(pages) > 1 else ()):
            row += [(page.name, "bold reverse" if index == self._at else MUTED), (_GAP, "")]
        return [*row, (self._report.note, MUTED)]

    def _places(self) -> Sequence[tuple[int, int]]:
        """The columns of each name."""
        places, start = [], 0
        for page in self._report.pages:
            end = start + span_width([(page.name, "")])
            places.append((start, end))
            start = end + len(_GAP)
        return places
