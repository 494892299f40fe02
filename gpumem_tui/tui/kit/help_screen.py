"""A screen's help, over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.text import assembled


class HelpScreen(ModalScreen[None]):
    """Closed by escape, q or ?.

    Args:
        lines: the text.
    """

    CSS_PATH = "help_screen.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "close"),
        Binding("up", "scroll('up')", show=False),
        Binding("down", "scroll('down')", show=False),
    ]

    def __init__(self, lines: Sequence[Row]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        """One scrollable text."""
        with VerticalScroll(id="help") as box:
            box.border_title = "Help"
            box.border_subtitle = "esc closes"
            yield Static(assembled(self._lines))

    def action_scroll(self, way: str) -> None:
        """A line up or down."""
        box = self.query_one("#help", VerticalScroll)
        box.scroll_relative(y=-1 if way == "up" else 1, animate=False)
