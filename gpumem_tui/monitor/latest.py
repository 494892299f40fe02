"""The newest of what one thread makes, for other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gpumem_tui.monitor.snapshot import Snapshot

T = TypeVar("T")


class LatestValue(Generic[T]):
    """Holds one value until the next one comes; a new one is another object.

    Attributes:
        value: the newest; None before the first.
    """

    def __init__(self) -> None:
        self.value: T | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._told: tuple[Callable[[], None], ...] = ()

    def put(self, value: T) -> None:
        """From now on this is the newest."""
        with self._changed:
            self.value = value
            self._changed.notify_all()
        for tell in self._told:
            tell()

    def end(self) -> None:
        """No value follows any more: threads that wait return."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for tell in self._told:
            tell()

    def wait(self, after: T | None, timeout_s: float) -> T | None:
        """The first value that is not `after`, or None if there is none in time, or none ever again."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.value is not after, timeout_s)
            return None if self.value is after else self.value

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called after each new value and at the end, by the thread that made it, which waits for it."""
        self._told = (*self._told, tell)

    def unsubscribe(self, tell: Callable[[], None]) -> None:
        """Have it called no more; a call that is under way goes on."""
        self._told = tuple(each for each in self._told if each is not tell)


class LatestSnapshot:
    """The part of `snapshot.Source` that hands the newest snapshot to other threads: a base class for sources."""

    def __init__(self) -> None:
        self._newest: LatestValue[Snapshot] = LatestValue()

    def latest(self) -> Snapshot | None:
        """The newest snapshot, None before the first."""
        return self._newest.value

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """The first snapshot that is not `after`, or None if there is none in time, or none ever again."""
        return self._newest.wait(after, timeout_s)

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called after each new snapshot and at the end, from another thread; it must not wait."""
        self._newest.subscribe(tell)
