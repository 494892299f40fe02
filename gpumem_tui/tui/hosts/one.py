"""The Monitor of one host among several."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from msgspec import structs
from textual.binding import Binding, BindingType

from gpumem_tui.monitor.alerts import Alert, Alerts
from gpumem_tui.monitor.history import History
from gpumem_tui.monitor.probes import NOTHING_SAID, ProbeReport
from gpumem_tui.monitor.snapshot import HostProcess, Snapshot
from gpumem_tui.recording.player import PlayedHost, Player
from gpumem_tui.remote.connection import Connection, WatchedHost
from gpumem_tui.remote.ssh import NotSignalled
from gpumem_tui.remote.status import user_on
from gpumem_tui.settings import Settings
from gpumem_tui.tui.kit.main_screen import Act, permitted
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.tui.monitor.table_screen import UNFILTER, Ending


class HostSource:
    """A connection as a source of snapshots. It outlives the screens on it: its owner stops it."""

    def __init__(self, connection: WatchedHost) -> None:
        self._connection = connection
        self._told: list[Callable[[], None]] = []

    @property
    def notice(self) -> str:
        """The host's name, and why it is away if it is."""
        return self._connection.notice

    def start(self) -> None:
        """Do nothing: its owner has started it."""

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot, None before the first."""
        return self._connection.latest()

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """Return the first snapshot that is not `after`, or None if none comes in time."""
        return self._connection.wait(after, timeout_s)

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called whenever the host has news."""
        self._told.append(tell)
        self._connection.subscribe(tell)

    def stop(self) -> None:
        """Call the subscribers no more; the connection continues."""
        for tell in self._told:
            self._connection.unsubscribe(tell)
        self._told.clear()


class HostAlerts(Alerts):
    """The alerts of a host, which judges itself: it knows what its probes say."""

    def __init__(self, connection: WatchedHost) -> None:
        super().__init__()
        self._connection = connection

    def anew(self) -> HostAlerts:
        """Return itself, as it has no state."""
        return self

    def update(self, _snapshot: Snapshot, _probes: ProbeReport = NOTHING_SAID) -> tuple[Alert, ...]:
        """Return the alerts that came with its last reading."""
        report = self._connection.status.report
        return () if report is None else report.alerts


def end_there(connection: Connection, host: HostProcess, ending: Ending) -> tuple[str, bool]:
    """End a process on a host; what to say, and whether it failed. Takes as long as ssh does."""
    try:
        connection.signal(host, "TERM" if ending == "terminate" else "KILL")
    except NotSignalled as error:
        return str(error), True
    done = "asked to end" if ending == "terminate" else "killed"
    return f"pid {host.pid} ({host.name}) on {connection.host.name} {done}", False


class HostMonitor(MonitorScreen):
    """The Monitor of a host, to look only; escape leads back to the hosts.

    Args:
        history: what is remembered of the host.
        signals: processes there may be ended, where it is connected to.
        replay: what plays the recording that the host is of; None for what is now.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "unfilter", "no filter", tooltip=UNFILTER),
        Binding("escape", "back", "hosts", key_display="esc", tooltip="Back to all hosts"),
    ]

    def __init__(
        self, host: WatchedHost, settings: Settings, history: History, *, signals: bool, replay: Player | None
    ) -> None:
        super().__init__(
            HostSource(host),
            structs.replace(settings, bell=False),
            history=history,
            alerts=HostAlerts(host),
            read_only=True,
            user=user_on(host.status.host),
            replay=replay,
            past=host.past if isinstance(host, PlayedHost) else tuple,
        )
        self._signalled = host if signals and isinstance(host, Connection) else None

    @property
    def may_end(self) -> bool:
        """Return whether processes may be ended: only where the user has allowed it."""
        return self._signalled is not None and permitted(self, Act.END)

    def end_it(self, host: HostProcess, ending: Ending) -> tuple[str, bool]:
        """End a process over ssh; return what to say, and whether it failed."""
        assert self._signalled is not None
        return end_there(self._signalled, host, ending)

    def action_back(self) -> None:
        """Go back to all hosts."""
        self.app.pop_screen()
