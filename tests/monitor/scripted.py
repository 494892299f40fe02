"""A source of snapshots that gives what a test shows it."""

from __future__ import annotations

from collections.abc import Callable

from gpumem_tui.monitor.newest import Newest
from gpumem_tui.monitor.snapshot import Snapshot


class Scripted:
    """Stands still until another snapshot is shown."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._newest: Newest[Snapshot] = Newest()
        self._newest.value = snapshot
        self.notice = ""
        self.stopped = False

    def start(self) -> None:
        """Nothing to begin."""

    def show(self, snapshot: Snapshot) -> None:
        """This is the newest now."""
        self._newest.put(snapshot)

    def end(self, notice: str) -> None:
        """There is no other, and this is why."""
        self.notice = notice
        self._newest.end()

    def latest(self) -> Snapshot | None:
        """What was shown last."""
        return self._newest.value

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """What was shown last, once it is not `after`."""
        return self._newest.wait(after, timeout_s)

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called when another is shown."""
        self._newest.subscribe(tell)

    def stop(self) -> None:
        """Remember it."""
        self.stopped = True
