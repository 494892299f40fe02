"""A source that stands still."""

from __future__ import annotations

from collections.abc import Callable

from gpumem_tui.monitor.snapshot import Snapshot


class Still:
    """Always the one snapshot that a test put in."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self.snapshot = snapshot

    def start(self) -> None:
        """Nothing begins."""

    def latest(self) -> Snapshot | None:
        """What the test put in."""
        return self.snapshot

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """What the test put in, once."""
        return None if self.snapshot is after else self.snapshot

    def subscribe(self, tell: Callable[[], None]) -> None:
        """There is nothing new, ever."""

    def stop(self) -> None:
        """Nothing ends."""
