"""Pausing, resuming and ending a search from another thread while its child comes and goes."""

from __future__ import annotations

import threading

import pytest

from gpumem_tui.run.control import Cancelled, Control

_AT_MOST_S = 20.0
_MEANWHILE_S = 0.3
"""How long a pause lets the other thread try to end the child under it; it must not get that far."""


class Child:
    """Writes down its requests. Its pause takes until its end has been asked for, if that can be meanwhile."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.is_pausing = threading.Event()
        self.has_ended = threading.Event()

    def pause(self) -> None:
        self.told.append("pause begins")
        self.is_pausing.set()
        self.has_ended.wait(_MEANWHILE_S)
        self.told.append("pause ends")

    def resume(self) -> None:
        self.told.append("resume")

    def end(self) -> None:
        self.told.append("end")
        self.has_ended.set()


def test_a_child_is_not_ended_while_it_is_told_to_pause() -> None:
    """Its pipe may be another file's by then."""
    control, child = Control(), Child()
    has_begun = threading.Event()

    def run() -> None:
        with control.running(child):
            has_begun.set()
            assert child.is_pausing.wait(_AT_MOST_S)

    search = threading.Thread(target=run)
    search.start()
    assert has_begun.wait(_AT_MOST_S)
    control.pause()
    search.join(_AT_MOST_S)
    assert child.told == ["pause begins", "pause ends", "end"]
    control.resume()
    assert child.told[-1] == "end", "a child that has ended gets no request"


def test_a_child_that_begins_during_a_pause_is_paused() -> None:
    control, child = Control(), Child()
    child.has_ended.set()
    control.pause()
    with control.running(child):
        assert child.told == ["pause begins", "pause ends"]
        control.resume()
    assert child.told[2:] == ["resume", "end"]


def test_a_child_is_ended_whatever_happens() -> None:
    control, child = Control(), Child()
    control.cancel()
    with pytest.raises(Cancelled), control.running(child):
        control.check()
    assert child.told == ["end"]
