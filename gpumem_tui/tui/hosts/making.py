"""Makes the screens of other machines, connected to or of a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumem_tui.monitor.history import History
from gpumem_tui.remote.connection import Connection
from gpumem_tui.remote.fleet import Fleet, WatchedHost
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.recording import HostsReplay, ReplayedHost
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.settings import Settings
from gpumem_tui.tui.hosts.one import HostAlerts, HostMonitor, HostSource
from gpumem_tui.tui.hosts.screen import HostsScreen
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.monitor.screen import MonitorScreen

if TYPE_CHECKING:
    from gpumem_tui.options.workload import WorkloadOptions
    from gpumem_tui.remote.searching import RemoteSearch
    from gpumem_tui.search.wire import Configured


def hosts_screen(fleet: Fleet | HostsReplay, settings: Settings, *, allow_signals: bool = False) -> MainScreen:
    """The Monitors of all hosts, to look only, unless processes there may be signalled."""
    replay = fleet if isinstance(fleet, HostsReplay) else None

    def monitor(connection: WatchedHost, history: History) -> HostMonitor:
        parts = {**host_parts(connection, settings), "history": history, "replay": replay}
        past = connection.past if isinstance(connection, ReplayedHost) else tuple
        signalled = connection if allow_signals and isinstance(connection, Connection) else None
        return HostMonitor(HostSource(connection), signalled, past=past, **parts)

    def history() -> History:
        return History(settings.interval_s, settings.history_hours)

    return HostsScreen(fleet, monitor, history, replay, allow_signals=allow_signals)


def host_parts(connection: WatchedHost, settings: Settings) -> dict[str, Any]:
    """What a Monitor of another machine is made of besides its source: to look only."""
    return {
        "history": History(settings.interval_s, settings.history_hours),
        "alerts": HostAlerts(connection),
        "chart_s": settings.chart_minutes * 60,
    }


def host_monitor(host: RemoteHost, ssh: SshOptions, settings: Settings) -> MainScreen:
    """The Monitor of one machine alone, to look only."""
    connection = Connection(host, ssh)
    connection.start()
    return MonitorScreen(connection, read_only=True, **host_parts(connection, settings))


def host_search(there: RemoteSearch, found: Configured, options: WorkloadOptions) -> MainScreen:
    """A search that runs on another machine, begun at once."""
    from gpumem_tui.search.report import device_line
    from gpumem_tui.tui.search.screen import SearchScreen

    notice = f"{device_line(found.config.device)}, in {found.directory}"
    return SearchScreen(found.config, options, notice, autostart=True, there=there)
