"""The manual on the screen: a topic's Markdown with its table of contents."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import MarkdownViewer

from gpumem_tui.manual import TOPICS, index, text
from gpumem_tui.tui.kit.glyphs import THEME, THEMES
from gpumem_tui.tui.kit.main_screen import KeyBar

_CONTENTS_FROM = 100
"""Columns from which the table of contents is next to the text without being asked for."""


class ManualScreen(ModalScreen[None]):
    """A topic of the manual, or the list of topics.

    Args:
        topic: one of `gpumem_tui.manual.TOPICS`; "" for the list of them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "turn(1)", "next topic", tooltip="The next topic"),
        Binding("p", "turn(-1)", "previous topic", tooltip="The topic before"),
        Binding("c", "contents", "contents", tooltip="The table of contents: show it, hide it"),
        Binding("escape", "dismiss", "close", tooltip="Back"),
        Binding("q,question_mark", "dismiss", show=False),
    ]

    def __init__(self, topic: str = "") -> None:
        super().__init__()
        self._topic = topic

    def compose(self) -> ComposeResult:
        """Yield the text with its table of contents, and the keys."""
        yield MarkdownViewer(self._markdown(), show_table_of_contents=False, open_links=False)
        yield KeyBar()

    def on_mount(self) -> None:
        """Let the arrow keys scroll at once."""
        self.query_one(MarkdownViewer).focus()

    def on_resize(self, event: Resize) -> None:
        """Show the table of contents where there is room for it."""
        self.query_one(MarkdownViewer).show_table_of_contents = event.size.width >= _CONTENTS_FROM

    async def action_turn(self, by: int) -> None:
        """Open the topic that comes `by` places later in the manual; after the last the list of topics."""
        pages = ("", *TOPICS)
        self._topic = pages[(pages.index(self._topic) + by) % len(pages)]
        viewer = self.query_one(MarkdownViewer)
        await viewer.document.update(self._markdown())
        viewer.scroll_home(animate=False)

    def action_contents(self) -> None:
        """Show the table of contents, or hide it."""
        viewer = self.query_one(MarkdownViewer)
        viewer.show_table_of_contents = not viewer.show_table_of_contents

    def _markdown(self) -> str:
        return text(self._topic) if self._topic else index()


class ManualApp(App[None]):
    """The manual alone, as `gpumem-tui manual` opens it.

    Args:
        topic: as for `ManualScreen`.
    """

    def __init__(self, topic: str = "") -> None:
        super().__init__()
        self._topic = topic
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEME.name

    def on_mount(self) -> None:
        """Show the topic; the program ends when its screen is closed."""
        self.push_screen(ManualScreen(self._topic), lambda _: self.exit())
