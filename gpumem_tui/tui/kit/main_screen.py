"""What the program's main screens have in common."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.events import Resize

from gpumem_tui.tui.kit.key_bar import KeyBar
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.textual_internals import SizedScreen

FRAME_CSS = """
MainScreen > #too-small { display: none; height: 1; color: $foreground; }
MainScreen.-tiny > * { display: none !important; }
MainScreen.-tiny > #too-small { display: block !important; }
"""
"""For the app's style sheet: a widget's own defaults would not hold against those of the screens."""


class MainScreen(SizedScreen):
    """Monitor, Search or Plan: a screen on keys 1, 2, 3, made when first shown and kept until the end.

    Attributes:
        SMALLEST: columns and rows below which the screen only says that it needs them.
        ending: the program is being left: nothing is begun any more.
    """

    SMALLEST: ClassVar[tuple[int, int]]

    ending = False

    def compose(self) -> ComposeResult:
        """The screen's own parts, and the frame around them."""
        yield from self.compose_parts()
        yield KeyBar()
        yield Lines(id="too-small")

    def compose_parts(self) -> ComposeResult:
        """What the screen shows, from top to bottom."""
        return ()

    def interrupt(self) -> bool:
        """Ctrl-C was pressed. Whether the screen has seen to it; else the program ends."""
        return False

    def cancel(self) -> None:
        """End whatever runs behind the screen; safe to call from any thread, returns at once."""

    async def end(self) -> int:
        """End whatever runs behind the screen, wait until it is gone, and return the exit code for leaving now."""
        self.ending = True
        self.cancel()
        return 0

    def fit_terminal(self, event: Resize) -> None:
        """A terminal that is too small gets one line that says what is needed."""
        (width, height), (columns, rows) = event.size, self.SMALLEST
        self.set_class(width < columns or height < rows, "-tiny")
        said = f"needs {columns}×{rows}, this is {width}×{height}"
        self.query_one("#too-small", Lines).show_rows([[(said, "")]])

    def on_unmount(self) -> None:
        """However the screen ends, what runs behind it does too."""
        self.cancel()
