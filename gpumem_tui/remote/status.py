"""One host's state at one moment; the processes on the GPUs of hosts, and the ranks of a job among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.alerts import Alert, AlertMark, Severity
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, HostProcess, Memory
from gpumem_tui.remote.decode import HostReport
from gpumem_tui.remote.hosts import RemoteHost

_PEAK = "peak_allocated_bytes"
_LARGEST = 2**63
"""What a probe counts is less."""


@dataclass(frozen=True)
class RemoteProcess:
    """A process on a GPU of a host.

    Attributes:
        probe: what the probe inside it says, as JSON; empty without one.
    """

    host_name: str
    gpu: GpuReading
    process: GpuProcess
    probe: Mapping[str, Any]

    @property
    def known(self) -> HostProcess | None:
        """Return the process as its operating system knows it."""
        return None if isinstance(self.process.host, Unknown) else self.process.host

    @property
    def place(self) -> str:
        """Return the GPU's number, the MIG instance with it."""
        inside = next((each.index for each in self.gpu.instances if each.uuid == self.process.instance), None)
        return str(self.gpu.index) if inside is None else f"{self.gpu.index}:{inside}"

    @cached_property
    def key(self) -> str:
        """Return what names it among the processes of all hosts."""
        return "\t".join((self.host_name, self.gpu.uuid, self.process.instance, str(self.process.pid)))

    @cached_property
    def about(self) -> str:
        """Return the text that a filter looks through, in small letters."""
        about = f"{self.host_name} gpu{self.place} {self.process.pid}"
        known = self.known
        if known is not None:
            about += f" {known.user} {known.name} {known.command} {known.container}"
        return about.lower()

    def count(self, key: str) -> int | None:
        """Return a whole number of what its probe says, if it says so."""
        value = self.probe.get(key)
        return value if type(value) is int and abs(value) < _LARGEST else None


def job_of(each: RemoteProcess) -> tuple[str, str, int]:
    """Return what a job's ranks have in common on any host: user, the job's name or their command, how many.

    Where the launcher gives no name, two runs of one user with the same command and size at once count as one.
    """
    known, job = each.known, each.probe.get("job")
    user, command = ("", "") if known is None else (known.user, known.command)
    return user, job if isinstance(job, str) and job else command, each.count("world_size") or 0


@dataclass(frozen=True)
class JobRanks:
    """The ranks of one job, on whatever hosts, as their probes say.

    Attributes:
        ranks: a process each, by rank.
        world_size: how many there should be; 0 where no probe says so.
    """

    command: str
    world_size: int
    ranks: tuple[RemoteProcess, ...]

    @property
    def fullest(self) -> RemoteProcess | None:
        """Return the rank with the highest peak of allocated bytes."""
        known = [each for each in self.ranks if each.count(_PEAK) is not None]
        return max(known, key=lambda each: each.count(_PEAK) or 0, default=None)

    @property
    def spread_bytes(self) -> int:
        """Return the bytes between the highest and the lowest peak of the ranks."""
        peaks = [peak for each in self.ranks if (peak := each.count(_PEAK)) is not None]
        return max(peaks) - min(peaks) if peaks else 0

    @property
    def behind(self) -> tuple[RemoteProcess, int] | None:
        """Return the slowest rank and its lag in steps; None if no rank is more than one step behind."""
        steps = [(step, each) for each in self.ranks if (step := each.count("step")) is not None]
        if not steps:
            return None
        least, last = min(steps, key=lambda pair: pair[0])
        lag = max(step for step, _ in steps) - least
        return (last, lag) if lag > 1 else None


def jobs(listed: Sequence[RemoteProcess]) -> dict[tuple[str, str, int], JobRanks]:
    """Return the jobs of several ranks among the listed processes."""
    found: dict[tuple[str, str, int], list[RemoteProcess]] = {}
    for each in listed:
        if each.count("rank") is not None and (each.count("world_size") or 0) > 1:
            found.setdefault(job_of(each), []).append(each)
    return {
        key: JobRanks(_command(ranks[0]), key[2], tuple(sorted(ranks, key=lambda each: each.count("rank") or 0)))
        for key, ranks in found.items()
    }


def _command(each: RemoteProcess) -> str:
    return "" if each.known is None else each.known.command


# ---- a host

_WORST_FIRST = (Severity.CRITICAL, Severity.WARNING, Severity.NOTE)


class HostPhase(Enum):
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
        """Sum the memory of GPUs as far as it is known."""
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
    phase: HostPhase = HostPhase.CONNECTING
    report: HostReport | None = None
    received_s: float | None = None
    problem: str = ""
    note: str = ""
    retry_s: float | None = None

    @property
    def title(self) -> str:
        """Return the host's name, and why it is away if it is."""
        return f"{self.host.name} away: {self.problem}" if self.phase is HostPhase.AWAY else self.host.name

    def age_s(self, now_s: float) -> float | None:
        """Return seconds since its last reading; None before the first."""
        return None if self.received_s is None else max(0.0, now_s - self.received_s)

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """Return the GPUs of its last reading."""
        return () if self.report is None else self.report.snapshot.gpus

    @cached_property
    def memory(self) -> MemorySum:
        """Return the memory of all its GPUs."""
        return MemorySum.of(self.gpus)

    @cached_property
    def worst_alert(self) -> Alert | None:
        """Return the first of its worst alerts."""
        alerts = () if self.report is None else self.report.alerts
        return min(alerts, key=lambda alert: _WORST_FIRST.index(alert.severity), default=None)

    @cached_property
    def processes(self) -> tuple[RemoteProcess, ...]:
        """Return its processes by GPU and pid; of a host that is away as they were last seen."""
        if self.report is None:
            return ()
        found = [
            RemoteProcess(self.host.name, gpu, process, self.report.probes.get((gpu.uuid, process.pid), {}))
            for gpu in self.gpus
            for process in (() if isinstance(gpu.processes, Unknown) else gpu.processes)
        ]
        return tuple(sorted(found, key=lambda each: (each.gpu.index, each.process.pid)))


def mean_utilization(gpus: Iterable[GpuReading]) -> float | None:
    """Return how busy GPUs are on average, in percent; None where none says so."""
    busy = [gpu.utilization_percent for gpu in gpus if not isinstance(gpu.utilization_percent, Unknown)]
    return sum(busy) / len(busy) if busy else None


class AwayMarks:
    """Picks out of the hosts' states of each moment which host has just gone away, why, and which is back."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}

    def new(self, time_s: float, statuses: Iterable[HostStatus]) -> list[AlertMark]:
        """Return what is new at that moment, seconds since the epoch: away, away for another reason, or back."""
        found = []
        for status in statuses:
            name = status.host.name
            known = self._problems.get(name, "")
            if status.phase is HostPhase.AWAY and status.problem != known:
                self._problems[name] = status.problem
                found.append(AlertMark(time_s, Severity.WARNING, f"away: {status.problem}", name))
            elif status.phase is HostPhase.LIVE and known:
                del self._problems[name]
                found.append(AlertMark(time_s, Severity.NOTE, "answers again", name))
        return found
