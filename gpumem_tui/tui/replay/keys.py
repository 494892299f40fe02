"""The keys of a screen that plays a recording: a minute back or on, to a time, to an alert, hold.

A time is typed as ``03:12``, ``03:12:30`` or ``2026-11-22 03:12``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from textual.binding import Binding, BindingType

from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.main_screen import KeyBar, MainScreen

if TYPE_CHECKING:
    from textual.app import App
    from textual.widgets import Input

    from gpumem_tui.monitor.alerts import AlertMark
    from gpumem_tui.recording.player import Player

_ACTIONS = ("seek", "marks", "hold")
_LEADS = ("left_square_bracket", "right_square_bracket", "a", "slash", "space")
_TIME = "to a time of the recording: 03:12, 03:12:30, 2026-11-22 03:12; what is no time filters"
_MINUTES = "A minute of the recording back, a minute on; { } ten minutes"

REPLAY_BINDINGS: list[BindingType] = [
    Binding("left_square_bracket", "seek(-60)", "−1 min", key_display="[", tooltip=_MINUTES),
    Binding("right_square_bracket", "seek(60)", "+1 min", key_display="]", tooltip=_MINUTES),
    Binding("left_curly_bracket", "seek(-600)", show=False, tooltip=_MINUTES),
    Binding("right_curly_bracket", "seek(600)", show=False, tooltip=_MINUTES),
    Binding("a", "marks", "alerts", tooltip="The recording's alerts with their times; enter goes there"),
    Binding("space", "hold", "hold", tooltip="Hold the recording, or let it continue"),
]
"""After a screen's own: keys that both have do this where a recording is played."""


class ReplayKeys(MainScreen):
    """The part of a screen that steers what is played.

    Attributes:
        replay: what is played; None where the screen shows what is now.
    """

    replay: Player | None = None
    _jumps = 0

    def on_mount(self) -> None:
        """Show the keys of a recording first, as far as there is room."""
        if self.replay is not None:
            self.query_one(KeyBar).leads = _LEADS

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Offer to seek a moment only where a recording is played."""
        return self.replay is not None if action in _ACTIONS else True

    def has_key(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Return whether an action can be done here: only of what is played can a moment be sought."""
        return self.replay is not None if action in _ACTIONS else super().has_key(action, parameters)

    def help_first(self) -> Iterable[Row]:
        """Return how a time is typed, where a recording is played."""
        if self.replay is None:
            return ()
        from gpumem_tui.tui.kit.help import help_entries

        return [*help_entries([("/", _TIME)]), []]

    @property
    def replay_words(self) -> str:
        """Return what is played, from when to when, and its state."""
        replay = self.replay
        if replay is None or not replay.index.first_s:
            return ""
        held = " · held" if replay.is_held else ""
        stands = f" · {replay.notice}" if replay.notice else ""
        return f"recording {span(replay.index.first_s, replay.index.last_s)}{held}{stands}"

    def action_seek(self, step_s: float) -> None:
        """Go back or on by some seconds."""
        if self.replay is not None:
            self.replay.seek(self.replay.now_s + step_s)

    def action_hold(self) -> None:
        """Stand still, or continue."""
        if self.replay is not None:
            self.replay.hold(not self.replay.is_held)
            self._draw()

    def _draw(self) -> None:
        """Show what there is."""

    def has_jumped(self) -> bool:
        """Return whether a moment was sought since this was asked last."""
        before, self._jumps = self._jumps, 0 if self.replay is None else self.replay.jumps
        return self._jumps != before

    def is_time(self, typed: str) -> bool:
        """Return whether what is typed is no filter, but may become a moment of the recording."""
        return self.replay is not None and is_begun(typed)

    def go_to(self, typed: Input) -> None:
        """Go to the moment that was typed, which is no filter then."""
        if self.replay is None:
            return
        from gpumem_tui.recording.file import when

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
        """List the alerts that began, to go to one of them."""
        if self.replay is not None:
            _show_alerts(self.app, self.replay)


# ---- the list of alerts

_MOST_LISTED = 2000
_AT_ONCE_S = 0.01


def _show_alerts(app: App[int], replay: Player) -> None:
    """List the alerts that began, as far as the recording was read."""
    from gpumem_tui.plan.control import Option
    from gpumem_tui.tui.kit.dialogs import PickScreen

    marks = replay.marks[-_MOST_LISTED:]
    if not marks:
        none = "no alert in it" if replay.index.is_done else f"none so far, {replay.index.share:.0%} is read"
        app.notify(none, title="Alerts")
        return
    times = _by_title(marks)
    options = [Option(title, _note(mark)) for title, mark in times.items()]
    said = [] if replay.index.is_exact else ["An older recording: looked for once in each minute of it."]
    said += [] if replay.index.is_done else [f"{replay.index.share:.0%} of the recording is read so far."]
    before = [title for title, mark in times.items() if mark.time_s <= replay.now_s + _AT_ONCE_S]

    def picked(title: str | None) -> None:
        if title is not None:
            replay.seek(times[title].time_s)

    app.push_screen(PickScreen("Alerts", options, before[-1] if before else "", said), picked)


def _by_title(marks: Sequence[AlertMark]) -> dict[str, AlertMark]:
    """Return the marks by the time at which each began, made different where several began at once."""
    titled: dict[str, AlertMark] = {}
    from gpumem_tui.recording.file import when

    for mark in marks:
        title, number = when(mark.time_s), 1
        while title in titled:
            number += 1
            title = f"{when(mark.time_s)} #{number}"
        titled[title] = mark
    return titled


def _note(mark: AlertMark) -> str:
    return f"{mark.severity.value:<8} {f'{mark.who}: ' if mark.who else ''}{mark.message}"


# ---- a moment as it is typed

_MOMENT = r"(?:(\d{4})-(\d\d?)-(\d\d?)[ T])?(\d\d?):(\d\d)(?::(\d\d))?"
_BEGUN = r"\d{4}-[\d-]*[ T]?[\d:]*|\d{1,2}:[\d:]*"


def is_begun(text: str) -> bool:
    """Return whether what is typed may become a moment."""
    return bool(re.fullmatch(_BEGUN, text.strip()))


def moment_of(text: str, first_s: float, last_s: float) -> float | None:
    """Return seconds since the epoch, by the local clock; None if it is no time of day or no date.

    A time without a date is the first such moment of the recording; where it has none, the nearest before its end.

    Args:
        first_s: where the recording begins; `last_s`: where it ends.
    """
    found = re.fullmatch(_MOMENT, text.strip())
    if found is None:
        return None
    *date, hour, minute, second = (int(part) if part else 0 for part in found.groups())
    try:
        if found[1]:
            return datetime(date[0], date[1], date[2], hour, minute, second).astimezone().timestamp()
        day = datetime.fromtimestamp(first_s).replace(hour=hour, minute=minute, second=second, microsecond=0)
    except ValueError:
        return None
    moment_s = day.astimezone().timestamp()
    if moment_s < int(first_s):
        tomorrow_s = (day + timedelta(days=1)).astimezone().timestamp()
        return tomorrow_s if tomorrow_s <= last_s else moment_s
    return moment_s


def span(first_s: float, last_s: float) -> str:
    """Return from when to when, with the date once."""
    first, last = time.localtime(first_s), time.localtime(last_s)
    same_day = first[:3] == last[:3]
    return f"{time.strftime('%m-%d %H:%M', first)}–{time.strftime('%H:%M' if same_day else '%m-%d %H:%M', last)}"
