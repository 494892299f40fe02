"""The history of one GPU or process, with a cursor for the mouse and the arrow keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Blur, Focus, Leave, MouseMove
from textual.message import Message

from gpumem_tui.monitor.history import Column, Series
from gpumem_tui.monitor.snapshot import GpuReading
from gpumem_tui.tui.kit.chart import TimeAxis
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.history import axis_of, history_view
from gpumem_tui.tui.process.history import ProcessChart, process_history_rows


class HistoryChart(Lines, can_focus=True):
    """Stacked areas. The cursor is a moment: it moves with the picture until that has left it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "look back", key_display="← →", tooltip="The values at an earlier moment"),
        Binding("right", "step(1)", show=False),
        Binding("shift+left", "step(-10)", show=False),
        Binding("shift+right", "step(10)", show=False),
        Binding("escape", "step(0)", show=False),
    ]

    class Changed(Message):
        """The cursor or the focus moved: the picture is another one."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002  as Textual names it
        super().__init__(id=id)
        self._cursor_s: float | None = None
        self._axis: TimeAxis | None = None

    def show(self, gpu: GpuReading, now: Mapping[Column, float], series: Series, width: int, height: int) -> None:
        """Render the buckets of a GPU, `now` its newest values."""
        self._axis = axis_of(series)
        cursor = self._axis.column_at(self._cursor_s)
        self.show_rows(history_view(gpu, now, series, width, height, cursor, focused=self.has_focus))

    def show_process(self, chart: ProcessChart, width: int, height: int) -> None:
        """Render what a process's probe has said."""
        self._axis = chart.axis(width)
        self.show_rows(process_history_rows(chart, width, height, self._cursor_s, focused=self.has_focus))

    def action_step(self, step: int) -> None:
        """The cursor goes to an earlier or a later bucket; 0 puts it away."""
        axis = self._axis
        if axis is None:
            return
        here_s = self._cursor_s
        if here_s is None or axis.column_at(here_s) is None:
            here_s = axis.last_s
        moved_s = here_s + step * axis.step_s
        self._point(None if not step or moved_s > axis.last_s else max(moved_s, axis.start_s))

    def on_mouse_move(self, event: MouseMove) -> None:
        """The cursor follows the mouse."""
        offset = event.get_content_offset(self)
        if self._axis is not None and offset is not None:
            self._point(self._axis.time_at(offset.x))

    def on_leave(self, event: Leave) -> None:
        """No mouse, no cursor."""
        self._point(None)

    def on_focus(self, event: Focus) -> None:
        """The heading shows who has the keys."""
        self.post_message(self.Changed())

    def on_blur(self, event: Blur) -> None:
        """The heading shows who has the keys."""
        self._point(None)
        self.post_message(self.Changed())

    def _point(self, time_s: float | None) -> None:
        if time_s != self._cursor_s:
            self._cursor_s = time_s
            self.post_message(self.Changed())
