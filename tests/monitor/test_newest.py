"""What one thread makes and others take."""

from __future__ import annotations

import threading
from time import monotonic

from gpumem_tui.monitor.latest import LatestValue


def test_there_is_nothing_before_the_first() -> None:
    newest: LatestValue[str] = LatestValue()
    assert newest.value is None
    assert newest.wait(None, 0.01) is None


def test_the_newest_replaces_the_one_before() -> None:
    newest: LatestValue[str] = LatestValue()
    newest.put("first")
    newest.put("second")
    assert newest.value == "second"
    assert newest.wait(None, 0) == "second"
    assert newest.wait("second", 0.01) is None


def test_who_waits_gets_the_next_one() -> None:
    newest: LatestValue[str] = LatestValue()
    newest.put("first")
    threading.Timer(0.05, newest.put, ["second"]).start()
    assert newest.wait("first", 10) == "second"


def test_at_the_end_nobody_waits_on() -> None:
    newest: LatestValue[str] = LatestValue()
    newest.put("last")
    threading.Timer(0.05, newest.end).start()
    began_s = monotonic()
    assert newest.wait("last", 10) is None
    assert newest.wait(None, 10) == "last"
    assert newest.wait("last", 10) is None
    assert monotonic() - began_s < 5


def test_everyone_who_subscribed_is_told_once_the_value_is_there() -> None:
    newest: LatestValue[str] = LatestValue()
    seen: list[tuple[str, str | None]] = []
    newest.put("unheard")
    newest.subscribe(lambda: seen.append(("one", newest.value)))
    newest.subscribe(lambda: seen.append(("other", newest.value)))
    newest.put("first")
    newest.end()
    assert seen == [("one", "first"), ("other", "first")] * 2, "after the value, and at the end"


def test_who_is_told_no_more() -> None:
    newest: LatestValue[int] = LatestValue()
    one: list[int | None] = []
    other: list[int | None] = []

    def tell() -> None:
        one.append(newest.value)

    newest.subscribe(tell)
    newest.subscribe(lambda: other.append(newest.value))
    newest.put(1)
    newest.unsubscribe(tell)
    newest.put(2)
    assert (one, other) == ([1], [1, 2])
