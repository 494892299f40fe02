"""The Monitor of one host among several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from gpumem_tui.monitor.alerts import Alert, Alerts
from gpumem_tui.monitor.probes import Growing, Probes, RanOutOfMemory
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.remote.connection import Connection
from gpumem_tui.tui.monitor.screen import MonitorScreen


class HostSource:
    """A connection as a source that outlives whoever looks at it: to stop it is for the owner of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._told: list[Callable[[], None]] = []

    @property
    def notice(self) -> str:
        """The host's name, and why it is away if it is."""
        return self._connection.notice

    def start(self) -> None:
        """It has begun."""

    def latest(self) -> Snapshot | None:
        """The newest snapshot, None before the first."""
        return self._connection.latest()

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """The first snapshot that is not `after`, or None if there is none in time."""
        return self._connection.wait(after, timeout_s)

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called whenever the host has news."""
        self._told.append(tell)
        self._connection.subscribe(tell)

    def stop(self) -> None:
        """The connection goes on; who looked at it is told no more."""
        for tell in self._told:
            self._connection.unsubscribe(tell)
        self._told.clear()


class HostAlerts(Alerts):
    """What the host itself judges: it knows what its probes say."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def update(
        self,
        snapshot: Snapshot,
        probes: Probes | None = None,
        ended: Sequence[RanOutOfMemory] = (),
        growing: Sequence[Growing] = (),
    ) -> tuple[Alert, ...]:
        """The alerts that came with its last reading."""
        report = self._connection.status.report
        return () if report is None else report.alerts


class HostMonitor(MonitorScreen):
    """The Monitor of a host, to look only; escape leads back to the hosts."""

    CSS_PATH = "../monitor/screen.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "unfilter", "no filter", tooltip="List all processes again"),
        Binding("escape", "back", "hosts", key_display="esc", tooltip="Back to all hosts"),
    ]

    def on_unmount(self) -> None:
        """Left: nobody looks any more."""
        self.feed.stop()

    def action_back(self) -> None:
        """Back to all hosts."""
        self.app.pop_screen()
