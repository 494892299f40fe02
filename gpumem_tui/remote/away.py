"""Hosts that went away, and came back, as they are said and recorded: once each, not at every try to connect."""

from __future__ import annotations

from collections.abc import Iterable

from gpumem_tui.monitor.alerts import Severity
from gpumem_tui.monitor.marks import Mark
from gpumem_tui.remote.status import HostStatus, Phase


class AwayMarks:
    """Picks out of the hosts' states of each moment which host has just gone away, why, and which is back."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}

    def new(self, time_s: float, statuses: Iterable[HostStatus]) -> list[Mark]:
        """What is new at that moment, seconds since the epoch: away, away for another reason, or back."""
        found = []
        for status in statuses:
            name = status.host.name
            known = self._problems.get(name, "")
            if status.phase is Phase.AWAY and status.problem != known:
                self._problems[name] = status.problem
                found.append(Mark(time_s, Severity.WARNING, f"away: {status.problem}", name))
            elif status.phase is Phase.LIVE and known:
                del self._problems[name]
                found.append(Mark(time_s, Severity.NOTE, "answers again", name))
        return found
