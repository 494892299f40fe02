"""One host's state at one moment, and what follows from its last reading, computed once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.alerts import Alert, Severity
from gpumem_tui.monitor.snapshot import GpuReading, Memory
from gpumem_tui.remote.decode import HostReport
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.processes import RemoteProcess, processes_of

_WORST_FIRST = (Severity.CRITICAL, Severity.WARNING, Severity.NOTE)


class Phase(Enum):
    """State of a connection."""

    CONNECTING = "connecting"
    LIVE = "live"
    AWAY = "away"


@dataclass(frozen=True)
class MemorySum:
    """The memory of several GPUs; `is_whole`: of all of them."""

    used_bytes: int = 0
    total_bytes: int = 0
    is_whole: bool = True

    def __add__(self, other: MemorySum) -> MemorySum:
        return MemorySum(
            self.used_bytes + other.used_bytes, self.total_bytes + other.total_bytes, self.is_whole and other.is_whole
        )

    @classmethod
    def of(cls, gpus: Iterable[GpuReading]) -> MemorySum:
        """As far as it is known."""
        read = [gpu.visible_memory for gpu in gpus]
        known = [memory for memory in read if isinstance(memory, Memory)]
        used_bytes = sum(memory.total_bytes - memory.free_bytes for memory in known)
        return cls(used_bytes, sum(memory.total_bytes for memory in known), len(known) == len(read))


@dataclass(frozen=True)
class HostStatus:
    """One host at one moment.

    Attributes:
        report: the last reading; None before the first.
        received_s: when it came (`time.monotonic`).
        problem: one line on why it is away; empty otherwise.
        note: one line on what is odd of a host that answers.
        retry_s: when it is tried again (`time.monotonic`); None while it is connected.
    """

    host: RemoteHost
    phase: Phase = Phase.CONNECTING
    report: HostReport | None = None
    received_s: float | None = None
    problem: str = ""
    note: str = ""
    retry_s: float | None = None

    def age_s(self, now_s: float) -> float | None:
        """Seconds since its last reading; None before the first."""
        return None if self.received_s is None else max(0.0, now_s - self.received_s)

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """Of its last reading."""
        return () if self.report is None else self.report.snapshot.gpus

    @cached_property
    def memory(self) -> MemorySum:
        """Of all its GPUs."""
        return MemorySum.of(self.gpus)

    @cached_property
    def worst_alert(self) -> Alert | None:
        """The first of the worst."""
        alerts = () if self.report is None else self.report.alerts
        return min(alerts, key=lambda alert: _WORST_FIRST.index(alert.severity), default=None)

    @cached_property
    def processes(self) -> tuple[RemoteProcess, ...]:
        """By GPU and pid; of a host that is away as they were last seen."""
        return () if self.report is None else processes_of(self.host.name, self.report)


def mean_utilization(gpus: Iterable[GpuReading]) -> float | None:
    """How busy GPUs are on average, in percent; None where none says so."""
    busy = [gpu.utilization_percent for gpu in gpus if not isinstance(gpu.utilization_percent, Unknown)]
    return sum(busy) / len(busy) if busy else None
