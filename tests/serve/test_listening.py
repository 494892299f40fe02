"""The web server's lines on errors of connections."""

from __future__ import annotations

import logging
import time

import pytest

from gpumem_tui.connections import Admission
from gpumem_tui.serve.listening import Seldom


def _logged(seldom: Seldom, message: str, error: Exception | None = None) -> None:
    exception = None if error is None else (type(error), error, None)
    seldom.handle(logging.LogRecord("asyncio", logging.ERROR, "", 1, message, (), exception))


def test_of_each_kind_of_error_a_line_is_said_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    said, now = list[str](), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seldom = Seldom(said.append)
    for _ in range(1000):
        _logged(seldom, "socket.accept() out of system resource", OSError(24, "Too many open files"))
        _logged(seldom, "something\nelse")
    assert said == [
        "socket.accept() out of system resource: OSError: [Errno 24] Too many open files",
        "something else",
    ]
    now[0] = 61.0
    _logged(seldom, "something\nelse")
    assert said[2:] == ["something else"]


def test_of_those_that_are_idle_the_oldest_goes_and_who_is_at_work_stays() -> None:
    gate, gone = Admission(4, 3), list[str]()
    at_work = gate.admit("a", lambda: gone.append("at work"))
    assert at_work is not None
    at_work.is_idle = False
    for name in ("1", "2", "3"):
        assert gate.admit("a", lambda name=name: gone.append(name)) is not None  # type: ignore[misc]
    assert gone == ["1"], "three of one address"
    assert gate.admit("b", lambda: gone.append("b")) is not None
    assert gate.admit("c", lambda: gone.append("c")) is not None
    assert gone == ["1", "2"], "four in all"
    gate.leave(at_work)
    assert gate.admit("d", lambda: gone.append("d")) is not None
    assert gone == ["1", "2"]


def test_where_all_are_at_work_nobody_is_let_in() -> None:
    gate = Admission(2, 2)
    for admitted in (gate.admit("a", lambda: None), gate.admit("b", lambda: None)):
        assert admitted is not None
        admitted.is_idle = False
    assert gate.admit("c", lambda: None) is None
