"""The live keys in one line. Textual's footer is a widget a key: it takes longer to make than the rest of a screen."""

from __future__ import annotations

from textual.binding import Binding
from textual.events import Click, Resize
from textual.screen import Screen

from gpumem_tui.tui.kit.figures import Row, span_width
from gpumem_tui.tui.kit.lines import Lines

_KEPT = 2
"""The last keys (help and quit) are shown however narrow the screen is."""
_PALETTE = "palette"
"""The command palette's key stands right where there is room for it."""
_ROOM_BEFORE_PALETTE = 3

_Shown = tuple[str, str, str]
"""A key, how it is written, and what it does."""


class KeyBar(Lines):
    """A key and what it does; a click presses it. Keys that there is no room for are in the help."""

    DEFAULT_CSS = """
    KeyBar { dock: bottom; height: 1; background: $footer-background; color: $footer-foreground; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: list[tuple[int, int, str]] = []

    def on_mount(self) -> None:
        """Follow the screen's keys."""
        self.screen.bindings_updated_signal.subscribe(self, self._show_keys)

    def on_resize(self, event: Resize) -> None:
        """As many keys as there is room for."""
        super().on_resize(event)
        self._show_keys(self.screen)

    def on_click(self, event: Click) -> None:
        """Press the key."""
        offset = event.get_content_offset(self)
        for first, last, key in self._places:
            if offset is not None and first <= offset.x < last:
                self.app.simulate_key(key)

    def _show_keys(self, screen: Screen[object]) -> None:
        shown = [
            (active.binding.key, self.app.get_key_display(active.binding), active.binding.description)
            for active in screen.active_bindings.values()
            if active.binding.show and active.enabled
        ]
        width = self.size.width
        while len(shown) > _KEPT and _length(shown) > width:
            del shown[-_KEPT - 1]
        row: Row = []
        self._places = []
        for number, key in enumerate(shown):
            self._add(row, key, "  " if number else "")
        palette = self.app.COMMAND_PALETTE_BINDING
        last = (palette, self.app.get_key_display(Binding(palette, "")), _PALETTE)
        room = width - span_width(row) - _length([last])
        if room >= _ROOM_BEFORE_PALETTE and palette in screen.active_bindings:
            self._add(row, last, " " * room)
        self.show_rows([row])

    def _add(self, row: Row, shown: _Shown, gap: str) -> None:
        key, display, description = shown
        start = span_width(row) + len(gap)
        row += [(gap, ""), (display, "bold $footer-key-foreground"), (f" {description}", "")]
        self._places.append((start, span_width(row), key))


def _length(shown: list[_Shown]) -> int:
    return sum(len(display) + len(description) + 3 for _, display, description in shown) - 2
