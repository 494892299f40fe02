"""Jump labels: a letter on each pane of a screen; the letter gives that pane the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click, Key
from textual.widget import Widget
from textual.widgets import Static

from gpumem_tui.tui.kit.dialogs import Modal
from gpumem_tui.tui.kit.main_screen import MainScreen

LETTERS = "asdfghjklqwertyuiop"
"""The letters of panes, in reading order: those under the fingers first."""
_KEYS = " a letter goes to its pane · esc back "


def panes_of(screen: MainScreen) -> list[Widget]:
    """Return the widgets of a screen that can have the keys, in reading order."""
    seen = [widget for widget in screen.focus_chain if widget.region.area]
    return sorted(seen, key=lambda widget: (widget.region.y, widget.region.x))[: len(LETTERS)]


class JumpScreen(Modal[Widget | None]):
    """Letters over a screen's panes; the result is the pane whose letter was pressed, None for none.

    Args:
        panes: see `panes_of`.
    """

    DEFAULT_CSS = """
    JumpScreen { background: $background 40%; }
    JumpScreen Static { position: absolute; width: auto; height: 1; }
    JumpScreen .letter { background: $primary; color: $background; text-style: bold; }
    JumpScreen #jump-keys { dock: bottom; position: relative; background: $footer-background; width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+o", "dismiss(None)", "back")]

    def __init__(self, panes: Sequence[Widget]) -> None:
        super().__init__()
        self._panes = dict(zip(LETTERS, panes, strict=False))

    def compose(self) -> ComposeResult:
        """Yield a label at the first cell of each pane, with its title."""
        for letter, pane in self._panes.items():
            title = str(pane.border_title or "")
            label = Static(f" {letter} {title} " if title else f" {letter} ", classes="letter", markup=False)
            label.styles.offset = pane.region.offset
            yield label
        yield Static(_KEYS, id="jump-keys")

    def on_key(self, event: Key) -> None:
        """Go to the pane of a letter."""
        if event.key in self._panes:
            event.stop()
            self.dismiss(self._panes[event.key])

    def on_click(self, event: Click) -> None:
        """Go to the pane that was clicked."""
        at = event.screen_offset
        self.dismiss(next((pane for pane in self._panes.values() if pane.region.contains_point(at)), None))
