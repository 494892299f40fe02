"""When an alert began, and whom it concerned: what a recording is searched by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_tui.monitor.alerts import Alert, Key, Severity


@dataclass(frozen=True)
class Mark:
    """An alert that began.

    Attributes:
        host: by its name; empty in a recording of one machine.
        ranks: of the processes with a probe on the GPU that it concerns.
    """

    time_s: float
    severity: Severity
    message: str
    host: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def who(self) -> str:
        """The host and the ranks, as far as there are any."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return " ".join(part for part in (self.host, ranks) if part)


class NewAlerts:
    """Picks out of the alerts of each moment those that have just begun."""

    def __init__(self) -> None:
        self._known: dict[str, set[Key]] = {}

    def begun(
        self,
        time_s: float,
        alerts: Sequence[Alert],
        probes: Mapping[tuple[str, int], Mapping[str, Any]],
        host: str = "",
    ) -> list[Mark]:
        """Those of this moment that were not there in the one before.

        Args:
            probes: what probes say, by GPU or MIG instance and pid.
        """
        known = self._known.get(host, set())
        self._known[host] = {alert.key for alert in alerts}
        return [
            Mark(time_s, alert.severity, alert.message, host, ranks_on(alert.instance or alert.gpu_uuid, probes))
            for alert in alerts
            if alert.key not in known
        ]


def ranks_on(uuid: str, probes: Mapping[tuple[str, int], Mapping[str, Any]]) -> tuple[int, ...]:
    """The ranks of the processes on a GPU that are one of several."""
    found = {
        body.get("rank") for (place, _), body in probes.items() if place == uuid and (body.get("world_size") or 1) > 1
    }
    return tuple(sorted(rank for rank in found if type(rank) is int))
