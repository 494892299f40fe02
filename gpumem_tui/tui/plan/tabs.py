"""The names of the panes, to click on."""

from __future__ import annotations

from textual.events import Click
from textual.message import Message

from gpumem_tui.tui.kit.row_list import CURSOR, FixedRows
from gpumem_tui.tui.plan.header import pane_places, pane_row


class PaneNames(FixedRows):
    """One line; says which pane is wanted."""

    class Wanted(Message):
        """A name was clicked."""

        def __init__(self, pane: str) -> None:
            super().__init__()
            self.pane = pane

    def __init__(self, *, classes: str) -> None:
        super().__init__()
        self.set_classes(classes)
        self._panes: list[str] = []

    def show_panes(self, panes: list[str], shown: str) -> None:
        """These panes, one of them shown."""
        self._panes = panes
        self.show(lambda width, selected: [pane_row(panes, shown, width)])

    def on_click(self, event: Click) -> None:
        """The pane under the pointer."""
        x = event.x - len(CURSOR)
        for pane, first, after in pane_places(self._panes, self.size.width - len(CURSOR)):
            if first <= x < after:
                self.post_message(self.Wanted(pane))
