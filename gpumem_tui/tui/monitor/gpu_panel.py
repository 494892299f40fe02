"""The GPUs; a click puts one in focus."""

from __future__ import annotations

from textual.events import Click
from textual.message import Message

from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.entries import charted
from gpumem_tui.tui.monitor.gpus import GpusView, gpus_view
from gpumem_tui.tui.monitor.layout import Layout
from gpumem_tui.tui.monitor.probed_card import probed_card
from gpumem_tui.tui.monitor.state import MonitorState


class GpuPanel(Lines):
    """A line or a card each; without any, a card of a process that is watched in host memory."""

    class Chosen(Message):
        """The user clicked on the GPU of this key."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    _view = GpusView((), {})

    def show(self, state: MonitorState, plan: Layout, width: int) -> None:
        """Render a state."""
        self._view = gpus_view(state, plan, width)
        watched = charted(state) if not state.gpus else None
        self.show_rows(self._view.rows if watched is None else probed_card(watched, width, plan.gpus))

    def on_click(self, event: Click) -> None:
        """Put it in focus."""
        offset = event.get_content_offset(self)
        key = self._view.at(offset.x, offset.y) if offset is not None else None
        if key is not None:
            self.post_message(self.Chosen(key))
