"""One host's state at one moment; the processes on the GPUs of hosts, and the ranks of a job among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind, AlertMark, Severity
from gpumem_tui.monitor.devices import is_free
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, HostProcess, Memory
from gpumem_tui.monitor.users import viewer
from gpumem_tui.monitor.vendors import vendor
from gpumem_tui.monitor.wire import HostReport
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.watch.ranks import RankState, StoppedAt, stop_of

_PEAK = "peak_allocated_bytes"
_LARGEST = 2**63
"""A probe counts less."""
_TELLABLE_S = 2.0
"""Ranks in lockstep write their steps down a second apart at most, and lines are under way for a while."""
_SILENT_S, _SILENT_STEPS = 15.0, 3
"""A rank is silent that has finished no step for so long, and for so many times as long as one took."""


_NO_PROBE: Mapping[str, object] = MappingProxyType({})


class RemoteProcess:
    """A process on a GPU of a host, or one that trains there on no GPU's list. Thousands are made each second.

    Args:
        gpu: where it is; None for host memory, or a GPU that cannot be told: `device` is its own name of it, "cpu".
        process: as one of a GPU's list.
        probe: what the probe inside it states, as JSON; empty without one.
        received_s: when that came, by the viewer's monotonic clock.

    Attributes:
        used_bytes: the memory that it holds; None where that is unknown.
    """

    __slots__ = ("__dict__", "device", "gpu", "host_name", "probe", "process", "received_s", "used_bytes")

    def __init__(
        self,
        host_name: str,
        gpu: GpuReading | None,
        process: GpuProcess,
        probe: Mapping[str, object] = _NO_PROBE,
        received_s: float = 0.0,
        device: str = "",
    ) -> None:
        self.host_name, self.gpu, self.process, self.device = host_name, gpu, process, device
        self.probe, self.received_s = probe, received_s
        used_bytes = process.used_bytes
        self.used_bytes = None if isinstance(used_bytes, Unknown) else used_bytes

    @property
    def known(self) -> HostProcess | None:
        """Return the process as its operating system knows it."""
        return None if isinstance(self.process.host, Unknown) else self.process.host

    @property
    def user(self) -> str | None:
        """Return whose it is; None where that is unknown."""
        known = self.known
        return None if known is None else known.user

    @property
    def sm_percent(self) -> int | None:
        """Return its share of the GPU's processors; None where that is unknown."""
        value = self.process.sm_percent
        return None if isinstance(value, Unknown) else value

    @property
    def place(self) -> str:
        """Return the GPU's number, the MIG instance with it; without a GPU what represents it."""
        if self.gpu is None:
            return self.device
        inside = next((each.index for each in self.gpu.instances if each.uuid == self.process.instance), None)
        return str(self.gpu.index) if inside is None else f"{self.gpu.index}:{inside}"

    @property
    def key(self) -> str:
        """Return what names it among the processes of all hosts."""
        where = self.device if self.gpu is None else self.gpu.uuid
        return f"{self.host_name}\t{where}\t{self.process.instance}\t{self.process.pid}"

    @cached_property
    def about(self) -> str:
        """Return the text that a filter looks through, in small letters."""
        about = f"{self.host_name} {'' if self.gpu is None else 'gpu'}{self.place} {self.process.pid}"
        known = self.known
        if known is not None:
            about += f" {known.user} {known.name} {known.command} {known.container}"
        return about.lower()

    def count(self, key: str) -> int | None:
        """Return a whole number of what its probe reports, if it has one."""
        value = self.probe.get(key)
        return value if type(value) is int and abs(value) < _LARGEST else None

    def seconds(self, key: str) -> float:
        """Return a duration of what its probe reports; 0 where it does not say."""
        value = self.probe.get(key)
        is_known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _LARGEST
        return float(value) if isinstance(value, (int, float)) and is_known else 0.0

    @property
    def step(self) -> int | None:
        """Return the last step that it finished, by its probe."""
        newest = self.count("newest_step")
        return self.count("step") if newest is None else newest

    @property
    def silent_s(self) -> float:
        """Return how long before its reading it had finished that step."""
        return self.seconds("age_s" if self.count("newest_step") is None else "newest_step_age_s")

    @property
    def is_silent(self) -> bool:
        """Return whether it has finished no step for longer than steps take."""
        return self.silent_s > max(_SILENT_S, _SILENT_STEPS * self.seconds("step_s"))

    @property
    def state(self) -> RankState:
        """Return what tells whether it has stopped, and where."""
        stopped = self.is_silent and self.step is not None
        at = StoppedAt.of(self.probe.get("stopped_at")) if stopped else None
        return RankState(self.count("rank"), self.step or 0, self.silent_s, stopped, at)

    def step_at(self, moment_s: float, step_s: float) -> float | None:
        """Return where it was at a moment no later than its reading, if a step takes so long."""
        step = self.step
        if step is None or not step_s:
            return step
        return step + min(moment_s - (self.received_s - self.silent_s), _TELLABLE_S / 2) / step_s


def job_of(each: RemoteProcess) -> tuple[str, str, int]:
    """Return what a job's ranks have in common on any host: user, the job's name or their command, how many.

    Where the launcher gives no name, two runs of one user with the same command and size at once count as one.
    """
    return each.user or "", _name(each) or _command(each), each.count("world_size") or 0


@dataclass(frozen=True)
class JobRanks:
    """The ranks of one job, on any hosts, as their probes say.

    Attributes:
        ranks: a process each, by rank.
        name: what its launcher calls it; empty where that gives nothing.
        world_size: how many there should be; 0 where no probe reports it.
    """

    command: str
    name: str
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
        """Return the slowest rank and its lag in steps; None if none is further behind than can be told.

        Ranks are compared at one moment, that of the earliest reading, as each counts by its own; and by the shortest
        mean of their steps, as after a halt one rank's mean has it in it and another's not yet.
        """
        times = [each.received_s for each in self.ranks]
        step_s = min(filter(None, (each.seconds("step_s") for each in self.ranks)), default=0.0)
        steps = [(step, each) for each in self.ranks if (step := each.step_at(min(times), step_s)) is not None]
        if not steps:
            return None
        least, last = min(steps, key=lambda pair: pair[0])
        lag = max(step for step, _ in steps) - least
        is_told = not step_s or lag * step_s > _TELLABLE_S + max(times) - min(times)
        return (last, round(lag)) if is_told and round(lag) > 1 else None

    @property
    def silence(self) -> str:
        """Return which rank has finished no step for long, or of all which stopped first, and where; else nothing."""
        stop = stop_of(each.state for each in self.ranks)
        return "" if stop is None else stop.words


def jobs(listed: Sequence[RemoteProcess]) -> dict[tuple[str, str, int], JobRanks]:
    """Return the jobs of several ranks among the listed processes."""
    found: dict[tuple[str, str, int], list[RemoteProcess]] = {}
    for each in listed:
        if each.count("rank") is not None and (each.count("world_size") or 0) > 1:
            found.setdefault(job_of(each), []).append(each)
    return {
        key: JobRanks(
            _command(ranks[0]), _name(ranks[0]), key[2], tuple(sorted(ranks, key=lambda each: each.count("rank") or 0))
        )
        for key, ranks in found.items()
    }


def _name(each: RemoteProcess) -> str:
    job = each.probe.get("job")
    return job if isinstance(job, str) else ""


def _command(each: RemoteProcess) -> str:
    known = each.known
    return "" if known is None else known.command


# ---- a host

_WORST_FIRST = (Severity.CRITICAL, Severity.WARNING, Severity.NOTE)


def user_on(host: RemoteHost) -> str:
    """Return the name of the user that the viewer is on a host: the login's, if it is named; else the name here."""
    login, at, _ = host.destination.rpartition("@")
    return login if at else viewer()


class HostPhase(Enum):
    """State of a connection."""

    CONNECTING = "connecting"
    LIVE = "live"
    AWAY = "away"


_LATE_S, _LATE_INTERVALS = 5.0, 3
"""A connected host whose last reading is older than so long, and than so many intervals, does not answer."""


@dataclass(frozen=True)
class MemorySum:
    """The memory of several GPUs, counted as that of one: `known` of those that report it; `is_whole`: all do."""

    known: Memory
    is_whole: bool

    @classmethod
    def together(cls, several: Iterable[MemorySum]) -> MemorySum:
        """Return the sum of several sums."""
        each = list(several)
        return cls(Memory.together([one.known for one in each]), all(one.is_whole for one in each))

    @classmethod
    def of(cls, gpus: Sequence[GpuReading]) -> MemorySum:
        """Sum the memory of GPUs as far as known."""
        known = _known_memory(gpus)
        return cls(Memory.together(known), len(known) == len(gpus))


def _known_memory(gpus: Iterable[GpuReading]) -> list[Memory]:
    """Return the memory of the GPUs that report it."""
    return [memory for memory in (gpu.visible_memory for gpu in gpus) if isinstance(memory, Memory)]


@dataclass(frozen=True)
class HostStatus:
    """The state of a host at one moment.

    Attributes:
        report: the last reading; None before the first.
        received_s: when it came (`time.monotonic`).
        problem: one line on why it is away; empty otherwise.
        note: one line on what is odd of a host that answers.
        retry_s: when it is tried again (`time.monotonic`); None while it is connected.
        began_s: when it began to be connected to (`time.monotonic`); None where that is unknown.
        interval_s: between two readings; 0 where that is unknown, as of what was recorded.
    """

    host: RemoteHost
    phase: HostPhase = HostPhase.CONNECTING
    report: HostReport | None = None
    received_s: float | None = None
    problem: str = ""
    note: str = ""
    retry_s: float | None = None
    interval_s: float = 0.0
    began_s: float | None = None

    @property
    def title(self) -> str:
        """Return the host's name, and why it is away if it is."""
        return f"{self.host.name} away: {self.problem}" if self.phase is HostPhase.AWAY else self.host.name

    def age_s(self, now_s: float) -> float | None:
        """Return seconds since its last reading; None before the first."""
        return None if self.received_s is None else max(0.0, now_s - self.received_s)

    def late(self, now_s: float) -> str:
        """Return for how long one that is connected has not answered, in words; empty where it answers in time."""
        age_s = self.age_s(now_s)
        if self.phase is not HostPhase.LIVE or not self.interval_s or age_s is None:
            return ""
        is_late = age_s >= max(_LATE_S, _LATE_INTERVALS * self.interval_s)
        return f"no answer for {age_s:.0f} s" if is_late else ""

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """Return the GPUs of its last reading, without their ledgers."""
        return () if self.report is None else self.report.snapshot.gpus

    @cached_property
    def memory(self) -> MemorySum:
        """Return the memory of all its GPUs."""
        return MemorySum.of(self.gpus)

    @cached_property
    def busy_percent(self) -> float | None:
        """Return how busy its GPUs are on average."""
        return mean_utilization(self.gpus)

    @cached_property
    def free_gpus(self) -> int:
        """Return on how many of its GPUs nobody computes."""
        return sum(map(is_free, self.gpus))

    @cached_property
    def most_free_bytes(self) -> int:
        """Return the free memory of the GPU that has most of it."""
        return max((memory.free_bytes for memory in _known_memory(self.gpus)), default=0)

    @cached_property
    def models(self) -> str:
        """Return what its GPUs are called, the vendor's name left out."""
        names = dict.fromkeys(gpu.name.removeprefix(f"{vendor().brand} ") for gpu in self.gpus)
        return ", ".join(names)

    @cached_property
    def users(self) -> tuple[str, ...]:
        """Return whose processes are on its GPUs, first who holds most memory there."""
        held: dict[str, int] = {}
        for each in self.processes:
            if (user := each.user) is not None:
                held[user] = held.get(user, 0) + (each.used_bytes or 0)
        return tuple(sorted(held, key=lambda user: (-held[user], user)))

    @cached_property
    def worst_alert(self) -> Alert | None:
        """Return the first of its worst alerts."""
        alerts = () if self.report is None else self.report.alerts
        return min(alerts, key=lambda alert: _WORST_FIRST.index(alert.severity), default=None)

    @cached_property
    def processes(self) -> tuple[RemoteProcess, ...]:
        """Return its processes by GPU and pid, on the CPU last; of a host that is away as they were last seen."""
        if self.report is None:
            return ()
        name, received_s, said = self.host.name, self.received_s or 0.0, self.report.said
        found = [
            RemoteProcess(name, gpu, each, said.get((each.instance or gpu.uuid, each.pid), _NO_PROBE), received_s)
            for gpu in self.gpus
            for each in gpu.all_processes
        ]
        if unlisted := self.report.snapshot.unlisted:
            by_uuid = {uuid: gpu for gpu in self.gpus for uuid in (gpu.uuid, *(part.uuid for part in gpu.instances))}
            found += [
                RemoteProcess(name, gpu, each.process, said.get(each.place, _NO_PROBE), received_s, each.device)
                for each in unlisted
                for gpu in (by_uuid.get(each.gpu_uuid),)
            ]
        return tuple(sorted(found, key=lambda each: (_index(each.gpu), each.process.pid)))


def _index(gpu: GpuReading | None) -> float:
    return math.inf if gpu is None else gpu.index


def mean_utilization(gpus: Iterable[GpuReading]) -> float | None:
    """Return how busy GPUs are on average, in percent; None where none reports it."""
    read = [gpu.telemetry.utilization_percent for gpu in gpus]
    busy = [percent for percent in read if not isinstance(percent, Unknown)]
    return sum(busy) / len(busy) if busy else None


def alerts_of(status: HostStatus, now_s: float) -> tuple[Alert, ...]:
    """Return a host's alerts, and that it is away if it had answered before.

    Args:
        now_s: seconds since the epoch.
    """
    if status.report is None:
        return ()
    if status.phase is not HostPhase.AWAY:
        return status.report.alerts
    away = Alert(Severity.WARNING, "", AlertKind.LOST, f"the host is away: {status.problem}", now_s)
    return (*status.report.alerts, away)


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
