"""A source of snapshots that gives what a test shows it."""

from __future__ import annotations

from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.monitor.threads import LatestSnapshot


class Scripted(LatestSnapshot):
    """A source that stops until another snapshot is shown."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        super().__init__()
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

    def stop(self) -> None:
        """Remember it."""
        self.stopped = True
