"""The keys of a screen that plays a recording: a minute back or on, to a time, to an alert, hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.binding import Binding, BindingType

from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.key_bar import KeyBar
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.replay.moment import is_begun, moment_of, span

if TYPE_CHECKING:
    from textual.widgets import Input

    from gpumem_tui.monitor.replay import Replay

_ACTIONS = ("seek", "marks", "hold")
_LEADS = ("left_square_bracket", "right_square_bracket", "a", "slash", "space")
_KEYS = (
    ("[  ]", "a minute back, a minute on; { } ten minutes"),
    ("/", "to a time: 03:12, 03:12:30, 2026-11-22 03:12; what is no time filters"),
    ("a", "the alerts with their times: type to filter, enter goes there"),
    ("space", "hold, or go on"),
)

REPLAY_BINDINGS: list[BindingType] = [
    Binding("left_square_bracket", "seek(-60)", "−1 min", key_display="[", tooltip="A minute back; { ten"),
    Binding("right_square_bracket", "seek(60)", "+1 min", key_display="]", tooltip="A minute on; } ten"),
    Binding("left_curly_bracket", "seek(-600)", show=False),
    Binding("right_curly_bracket", "seek(600)", show=False),
    Binding("a", "marks", "alerts", tooltip="The recording's alerts with their times; enter goes there"),
    Binding("space", "hold", "hold", tooltip="Hold the recording, or let it go on"),
]
"""After a screen's own: keys that both have do this where a recording is played."""


class ReplayKeys(MainScreen):
    """The part of a screen that steers what is played.

    Attributes:
        replay: what is played; None where the screen shows what is now.
    """

    replay: Replay[Any] | None = None
    _jumps = 0

    def on_mount(self) -> None:
        """The keys of a recording first, as far as there is room."""
        if self.replay is not None:
            self.query_one(KeyBar).leads = _LEADS

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only of what is played can a moment be sought."""
        return self.replay is not None if action in _ACTIONS else True

    @property
    def replay_words(self) -> str:
        """What is played, from when to when, and how it stands."""
        replay = self.replay
        if replay is None or not replay.index.first_s:
            return ""
        held = " · held" if replay.is_held else ""
        stands = f" · {replay.notice}" if replay.notice else ""
        return f"recording {span(replay.index.first_s, replay.index.last_s)}{held}{stands}"

    def replay_help(self) -> list[Row]:
        """The keys of a recording, for the help; nothing where none is played."""
        if self.replay is None:
            return []
        from gpumem_tui.tui.kit.dialogs import help_entry, help_heading

        return [help_heading("Recording"), *(help_entry(key, what) for key, what in _KEYS), []]

    def action_seek(self, step_s: float) -> None:
        """Back or on."""
        if self.replay is not None:
            self.replay.seek(self.replay.now_s + step_s)

    def action_hold(self) -> None:
        """Stand still, or go on."""
        if self.replay is not None:
            self.replay.hold(not self.replay.is_held)
            self._draw()

    def _draw(self) -> None:
        """Show what there is."""

    def has_jumped(self) -> bool:
        """Whether a moment was sought since this was asked last."""
        before, self._jumps = self._jumps, 0 if self.replay is None else self.replay.jumps
        return self._jumps != before

    def is_time(self, typed: str) -> bool:
        """Whether what is typed is no filter, but may become a moment of the recording."""
        return self.replay is not None and is_begun(typed)

    def go_to(self, typed: Input) -> None:
        """Go to the moment that was typed, which is no filter then."""
        if self.replay is None:
            return
        from gpumem_tui.monitor.recording_file import when

        index = self.replay.index
        moment_s = moment_of(typed.value, index.first_s, index.last_s)
        if moment_s is None:
            if self.is_time(typed.value):
                self.app.notify(f"{typed.value.strip()} is no time: 03:12, or 2026-11-22 03:12", severity="warning")
                typed.value = ""
            return
        typed.value = ""
        self.replay.seek(moment_s)
        if index.is_done and not index.first_s - 1 <= moment_s <= index.last_s + 1:
            self.app.notify(f"{when(moment_s)} is not in it: {span(index.first_s, index.last_s)}", severity="warning")

    def action_marks(self) -> None:
        """The alerts that began, to go to one of them."""
        from gpumem_tui.tui.replay.alert_list import show_alerts

        if self.replay is not None:
            show_alerts(self.app, self.replay)
