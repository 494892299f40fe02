"""The manual on the screen: a topic's Markdown with its table of contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.filter import LineFilter
from textual.widgets import MarkdownViewer, OptionList
from textual.widgets.option_list import Option

from gpumem_tui.ascii import is_ascii_only
from gpumem_tui.manual import TOPICS, text, titles
from gpumem_tui.tui.kit.dialogs import Modal, TextScreen
from gpumem_tui.tui.kit.filters import AsciiFilter
from gpumem_tui.tui.kit.glyphs import THEME, THEMES
from gpumem_tui.tui.kit.help import help_entries
from gpumem_tui.tui.kit.main_screen import KeyBar, bindings_of

_CONTENTS_FROM = 100
"""Columns from which the table of contents is next to the text without being asked for."""


class ManualScreen(Modal[None]):
    """A topic of the manual, or the list of topics to pick from.

    Args:
        topic: one of `gpumem_tui.manual.TOPICS`; "" for the list of them.
        alone: nothing is below it: esc leads back to the list, and only `q` leaves.
    """

    CSS = """
    ManualScreen OptionList { height: 1fr; border: none; padding: 1 2; }
    ManualScreen MarkdownFence { overflow: hidden hidden; }
    ManualScreen MarkdownFence > Label { width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "turn(1)", "next topic", tooltip="The next topic"),
        Binding("p", "turn(-1)", "previous topic", tooltip="The topic before"),
        Binding("i", "index", "topics", tooltip="The list of topics; enter or a click opens one"),
        Binding("c", "contents", "contents", tooltip="The table of contents: show it, hide it"),
        Binding("escape", "back", "back", tooltip="Back: from a topic to the list it was picked from, else close"),
        Binding("question_mark", "keys", "keys", key_display="?", tooltip="These keys"),
        Binding("q", "dismiss", "close", tooltip="Close the manual"),
    ]

    def __init__(self, topic: str = "", *, alone: bool = False) -> None:
        super().__init__()
        self._topic = topic
        self._alone = alone
        self._was_listed = alone or not topic

    def compose(self) -> ComposeResult:
        """Yield the list of topics, the text with its table of contents, and the keys."""
        named = titles()
        width = max(map(len, named)) + 2
        options = (Option(f"{topic:<{width}}{title}", id=topic) for topic, title in named.items())
        yield OptionList(*options, markup=False)
        yield MarkdownViewer(self._markdown(), show_table_of_contents=False, open_links=False)
        yield KeyBar()

    def on_mount(self) -> None:
        """Let the arrow keys choose or scroll at once."""
        self._show_part()

    def on_resize(self, event: Resize) -> None:
        """Show the table of contents where there is room for it."""
        self.query_one(MarkdownViewer).show_table_of_contents = event.size.width >= _CONTENTS_FROM

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Offer only what does something."""
        match action:
            case "contents" | "index":
                return bool(self._topic)
            case "back":
                return bool(self._topic) or not self._alone
            case _:
                return True

    async def on_option_list_option_selected(self, message: OptionList.OptionSelected) -> None:
        """Open the topic that was picked."""
        self._was_listed = True
        await self._open(str(message.option.id))

    async def action_turn(self, by: int) -> None:
        """Open the topic that comes `by` places later in the manual; after the last the list of topics."""
        pages = ("", *TOPICS)
        await self._open(pages[(pages.index(self._topic) + by) % len(pages)])

    async def action_index(self) -> None:
        """Show the list of topics."""
        await self._open("")

    async def action_back(self) -> None:
        """Go back to the list that the topic was picked from, else close."""
        if self._topic and self._was_listed:
            await self._open("")
        else:
            self.dismiss(None)

    def action_contents(self) -> None:
        """Show the table of contents, or hide it."""
        viewer = self.query_one(MarkdownViewer)
        viewer.show_table_of_contents = not viewer.show_table_of_contents

    def action_keys(self) -> None:
        """Show the keys."""
        bindings = [one for one in bindings_of(type(self)) if one.tooltip]
        names = [(one.key_display or self.app.get_key_display(one), one.tooltip) for one in bindings]
        self.app.push_screen(TextScreen("Keys of the manual", list(help_entries(names))))

    async def _open(self, topic: str) -> None:
        self._topic = topic
        if topic:
            viewer = self.query_one(MarkdownViewer)
            await viewer.document.update(self._markdown())
            viewer.scroll_home(animate=False)
        self._show_part()

    def _show_part(self) -> None:
        """Show the list or the text, and give it the keys."""
        topics, viewer = self.query_one(OptionList), self.query_one(MarkdownViewer)
        topics.display, viewer.display = not self._topic, bool(self._topic)
        (viewer if self._topic else topics).focus()
        self.refresh_bindings()

    def _markdown(self) -> str:
        return text(self._topic) if self._topic else ""


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
        self._ascii = AsciiFilter(enabled=is_ascii_only())

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's filters, and ours after them."""
        return [*super().get_line_filters(), *([self._ascii] if self._ascii.enabled else [])]

    def on_mount(self) -> None:
        """Show the topic; the program ends when its screen is closed."""
        self.push_screen(ManualScreen(self._topic, alone=True), lambda _: self.exit())
