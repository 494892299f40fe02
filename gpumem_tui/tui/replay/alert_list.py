"""The list of a recording's alerts, to go to the moment of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.app import App

from gpumem_tui.monitor.marks import Mark
from gpumem_tui.monitor.recording_file import when
from gpumem_tui.monitor.replay import Replay
from gpumem_tui.plan.control import Option
from gpumem_tui.tui.kit.dialogs import PickScreen

_MOST_LISTED = 2000
_AT_ONCE_S = 0.01


def show_alerts(app: App[Any], replay: Replay[Any]) -> None:
    """The alerts that began, as far as the recording was read."""
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


def _by_title(marks: Sequence[Mark]) -> dict[str, Mark]:
    """By the time at which each began, made different where several began at once."""
    titled: dict[str, Mark] = {}
    for mark in marks:
        title, number = when(mark.time_s), 1
        while title in titled:
            number += 1
            title = f"{when(mark.time_s)} #{number}"
        titled[title] = mark
    return titled


def _note(mark: Mark) -> str:
    return f"{mark.severity.value:<8} {f'{mark.who}: ' if mark.who else ''}{mark.message}"
