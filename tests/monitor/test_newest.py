"""Values that one thread makes and others take."""

from __future__ import annotations

import threading
from time import monotonic

from gpumem_tui.monitor.threads import LatestValue
from tests.waiting import DEADLINE_S


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
    threading.Thread(target=newest.put, args=["second"]).start()
    assert newest.wait("first", DEADLINE_S) == "second"


def test_who_waits_is_woken_and_not_by_the_end_of_its_patience() -> None:
    """Two threads answer each other a thousand times: each waits for an hour if it is not woken."""
    asked: LatestValue[int] = LatestValue()
    answered: LatestValue[int] = LatestValue()

    def answer() -> None:
        last: int | None = None
        for _ in range(1000):
            last = asked.wait(last, 3600.0)
            answered.put(last or 0)

    def ask() -> None:
        for number in range(1, 1001):
            before = answered.value
            asked.put(number)
            assert answered.wait(before, 3600.0) == number

    threads = [threading.Thread(target=work, daemon=True) for work in (answer, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert answered.value == 1000, "one of them was not woken"


def test_at_the_end_nobody_waits_on() -> None:
    newest: LatestValue[str] = LatestValue()
    newest.put("last")
    threading.Thread(target=newest.end).start()
    began_s = monotonic()
    assert newest.wait("last", 3600.0) is None
    assert newest.wait(None, 3600.0) == "last"
    assert newest.wait("last", 3600.0) is None
    assert monotonic() - began_s < DEADLINE_S


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
