"""Makes the screens of other machines, connected to or of a recording."""

from __future__ import annotations

from typing import Any

from gpumem_tui.monitor.history import History
from gpumem_tui.remote.fleet import Fleet, WatchedHost
from gpumem_tui.remote.recording import HostsReplay, ReplayedHost
from gpumem_tui.settings import Settings
from gpumem_tui.tui.hosts.one import HostAlerts, HostMonitor, HostSource
from gpumem_tui.tui.hosts.screen import HostsScreen
from gpumem_tui.tui.kit.main_screen import MainScreen


def hosts_screen(fleet: Fleet | HostsReplay, settings: Settings) -> MainScreen:
    """The Monitors of all hosts, to look only."""

    replay = fleet if isinstance(fleet, HostsReplay) else None

    def monitor(connection: WatchedHost, history: History) -> HostMonitor:
        parts = {**host_parts(connection, settings), "history": history, "replay": replay}
        past = connection.past if isinstance(connection, ReplayedHost) else tuple
        return HostMonitor(HostSource(connection), past=past, **parts)

    return HostsScreen(fleet, monitor, lambda: History(settings.interval_s, settings.history_hours), replay)


def host_parts(connection: WatchedHost, settings: Settings) -> dict[str, Any]:
    """What a Monitor of another machine is made of besides its source: to look only."""

    return {
        "history": History(settings.interval_s, settings.history_hours),
        "alerts": HostAlerts(connection),
        "chart_s": settings.chart_minutes * 60,
        "read_only": True,
    }
