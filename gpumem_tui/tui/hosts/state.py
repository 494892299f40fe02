"""What the screen of hosts shows: one immutable state, and what is worked out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.alerts import Alert, Severity
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, HostProcess
from gpumem_tui.remote.connection import HostStatus

_PEAK = "peak_allocated_bytes"


class HostsSort(Enum):
    """What the processes are sorted by, in the order that the key goes through. The value is the column's heading."""

    MEMORY = "GPU MEM"
    HOST = "HOST"
    RANK = "RANK"
    SM = "SM%"
    USER = "USER"


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
        """The process as its operating system knows it."""
        return None if isinstance(self.process.host, Unknown) else self.process.host

    @property
    def place(self) -> str:
        """The GPU by its number, the MIG instance with it."""
        inside = next((each.index for each in self.gpu.instances if each.uuid == self.process.instance), None)
        return str(self.gpu.index) if inside is None else f"{self.gpu.index}:{inside}"

    def count(self, key: str) -> int | None:
        """A whole number of what its probe says, if it says so."""
        value = self.probe.get(key)
        return value if type(value) is int else None


@dataclass(frozen=True)
class HostsState:
    """Everything the screen shows.

    Attributes:
        now_s: `time.monotonic`, for ages.
        opened: the hosts whose GPUs are listed below them.
        only: list only this host's processes; empty for all.
    """

    statuses: tuple[HostStatus, ...] = ()
    now_s: float = 0.0
    opened: frozenset[str] = frozenset()
    sort: HostsSort = HostsSort.MEMORY
    reverse: bool = False
    filter: str = ""
    only: str = ""


def gpus_of(status: HostStatus) -> tuple[GpuReading, ...]:
    """The GPUs of a host's last reading."""
    return () if status.report is None else status.report.snapshot.gpus


def worst_alert(status: HostStatus) -> Alert | None:
    """The first of the worst."""
    alerts = () if status.report is None else status.report.alerts
    order = (Severity.CRITICAL, Severity.WARNING, Severity.NOTE)
    return min(alerts, key=lambda alert: order.index(alert.severity), default=None)


def all_processes(state: HostsState) -> Iterator[RemoteProcess]:
    """The processes on all GPUs of all hosts, also of those that are away as they were last seen."""
    for status in state.statuses:
        probes = {} if status.report is None else status.report.probes
        for gpu in gpus_of(status):
            for process in () if isinstance(gpu.processes, Unknown) else gpu.processes:
                yield RemoteProcess(status.host.name, gpu, process, probes.get((gpu.uuid, process.pid), {}))


def listed_processes(state: HostsState) -> list[RemoteProcess]:
    """Those that match, in their order; what is unknown comes after what is known."""
    words = state.filter.lower().split()
    listed = [each for each in all_processes(state) if not state.only or each.host_name == state.only]
    listed = [each for each in listed if all(word in _about(each) for word in words)] if words else listed
    names = {status.host.name: number for number, status in enumerate(state.statuses)}
    listed.sort(key=lambda each: (names[each.host_name], each.gpu.index, each.process.pid))
    pairs = [(_value(each, state.sort, names), each) for each in listed]
    known = [pair for pair in pairs if pair[0] is not None]
    descends = state.sort in (HostsSort.MEMORY, HostsSort.SM)
    known.sort(key=lambda pair: pair[0], reverse=descends != state.reverse)
    return [each for _, each in known] + [each for value, each in pairs if value is None]


def _about(each: RemoteProcess) -> str:
    about = f"{each.host_name} gpu{each.place} {each.process.pid}"
    known = each.known
    if known is not None:
        about += f" {known.user} {known.name} {known.command} {known.container}"
    return about.lower()


def _value(each: RemoteProcess, sort: HostsSort, names: Mapping[str, int]) -> Any:
    known = each.known
    match sort:
        case HostsSort.MEMORY:
            return None if isinstance(each.process.used_bytes, Unknown) else each.process.used_bytes
        case HostsSort.SM:
            return None if isinstance(each.process.sm_percent, Unknown) else each.process.sm_percent
        case HostsSort.HOST:
            return names[each.host_name]
        case HostsSort.USER:
            return None if known is None else known.user
        case HostsSort.RANK:
            rank = each.count("rank")
            return None if rank is None else (job_of(each), rank)


def job_of(each: RemoteProcess) -> tuple[str, str, int]:
    """What the ranks of a job have in common on whatever host: user, command, how many they are.

    Probes publish no job's number: two runs of one user with the same command and size at once count as one.
    """
    known = each.known
    about = ("", "") if known is None else (known.user, known.command)
    return (*about, each.count("world_size") or 0)


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
        """The one with the highest peak of allocated bytes."""
        known = [each for each in self.ranks if each.count(_PEAK) is not None]
        return max(known, key=lambda each: each.count(_PEAK) or 0, default=None)

    @property
    def spread_bytes(self) -> int:
        """Between the highest and the lowest of these peaks."""
        peaks = [peak for each in self.ranks if (peak := each.count(_PEAK)) is not None]
        return max(peaks) - min(peaks) if peaks else 0

    @property
    def behind(self) -> tuple[RemoteProcess, int] | None:
        """The one that lags most, and by how many steps; None if none does by more than the one that is under way."""
        steps = [(step, each) for each in self.ranks if (step := each.count("step")) is not None]
        if not steps:
            return None
        least, last = min(steps, key=lambda pair: pair[0])
        lag = max(step for step, _ in steps) - least
        return (last, lag) if lag > 1 else None


def jobs(listed: Sequence[RemoteProcess]) -> dict[tuple[str, str, int], JobRanks]:
    """The jobs of several ranks among the listed processes."""
    found: dict[tuple[str, str, int], list[RemoteProcess]] = {}
    for each in listed:
        if each.count("rank") is not None and (each.count("world_size") or 0) > 1:
            found.setdefault(job_of(each), []).append(each)
    return {
        key: JobRanks(key[1], key[2], tuple(sorted(ranks, key=lambda each: each.count("rank") or 0)))
        for key, ranks in found.items()
    }
