"""The processes; a click chooses one, a click on a heading sorts, the wheel moves the cursor."""

from __future__ import annotations

from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.message import Message

from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.processes import TableView, table_view
from gpumem_tui.tui.monitor.state import MonitorState, ProcessKey, SortBy

_WHEEL_STEP = 3


class ProcessTable(Lines, can_focus=True):
    """One line a process and device."""

    class Chosen(Message):
        """The user clicked on a process; `opened`: twice."""

        def __init__(self, key: ProcessKey, *, opened: bool) -> None:
            super().__init__()
            self.key = key
            self.opened = opened

    class SortWanted(Message):
        """The user clicked on a heading."""

        def __init__(self, order: SortBy) -> None:
            super().__init__()
            self.order = order

    class Moved(Message):
        """The wheel turned."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    view = TableView((), (), (), ())

    def show(self, state: MonitorState, width: int, height: int) -> None:
        """Render a state."""
        self.view = table_view(state, width, height)
        self.show_rows(self.view.rows)

    def on_click(self, event: Click) -> None:
        """Choose or sort."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y == 0:
            for first, last, order in self.view.headings:
                if first <= offset.x < last:
                    self.post_message(self.SortWanted(order))
        elif offset.y < len(self.view.keys):
            key = self.view.keys[offset.y]
            if key is not None:
                self.post_message(self.Chosen(key, opened=event.chain > 1))

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Down the list."""
        event.stop()
        self.post_message(self.Moved(_WHEEL_STEP))

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Up the list."""
        event.stop()
        self.post_message(self.Moved(-_WHEEL_STEP))
