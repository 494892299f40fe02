"""The alerts of a snapshot, since when each lasts, and which have just begun. Time is the snapshots' own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from msgspec import Struct, field

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.monitor.probes import NOTHING_SAID, Growing, ProbeReport, Probes, RanOutOfMemory, Said, Stopped
from gpumem_tui.monitor.ranks import other_ranks
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import STARTING, DeviceState, GpuProcess, GpuReading, Memory, Snapshot
from gpumem_tui.monitor.trend import Trend
from gpumem_tui.monitor.vendors import of_brand
from gpumem_tui.report.objects import picked
from gpumem_tui.settings import Settings

_NEAR_FULL_SLACK_PERCENT = 3.0
_EARLY_PERCENT = 20.0
"""Steady growth counts from this much below the near-full threshold ..."""
_EARLY_S = 300.0
"""... if it fills the GPU within this time."""
_HOT_SLACK_C = 3
_AT_LIMIT_PERCENT = 97.0
_AT_LIMIT_S = 10.0
"""A process that runs out of memory may free some before it ends: the limit may have been this long ago."""
_FILLING_S = 30.0
"""A process that runs out of memory mostly ends within this time of first reaching the limit. One that lived on there
had what it needed: its end is no news."""
_LATELY_S = 30.0
"""An end for want of memory is an alert if it was no longer ago than this when it was first seen."""
_NOTABLE_PERCENT = 5.0  # a process that held less of the device than this did not fill it

_STOPPED_S = 60.0
"""A rank that writes a checkpoint or evaluates while the others wait for it may take less."""


class Severity(Enum):
    """How urgent an alert is. The value is the key used in JSON."""

    NOTE = "note"
    """Worth knowing; nothing needs to be done."""
    WARNING = "warning"
    CRITICAL = "critical"


class AlertKind(Enum):
    """The condition that an alert is about. The value is the key used in JSON.

    Alerts of one severity come in this order: why GPUs are lost, what just happened, what lasts.
    """

    NO_DRIVER = "no_driver", "no GPU, or none of a vendor, can be watched: its driver does not start"
    OOM = "oom", "a process ran out of memory, or fits only by freeing its cache"
    LOST = "lost", "a GPU or a host does not answer any more"
    ECC = "ecc", "memory errors that could not be corrected"
    STALE = "stale", "a driver's call has not returned: the readings are old"
    NEAR_FULL = "near_full", "memory in use is near the device's, or soon will be"
    GROWTH = "growth", "a watched process's memory after each step rises steadily"
    STOPPED = "stopped", "ranks of a watched job wait in a collective for one that has stopped"
    SECOND_GPU = "second_gpu", "ranks of a job hold memory on a GPU that is another rank's"
    HOT = "hot", "a GPU is near the temperature at which its clocks are lowered"
    THROTTLED = "throttled", "a GPU's clocks are lowered"

    _value_: str
    meaning: str

    def __new__(cls, key: str, meaning: str = "") -> AlertKind:
        """Make a member of its key and what it means. The default is for mypy, which takes a look-up for a call."""
        self = object.__new__(cls)
        self._value_, self.meaning = key, meaning
        return self


_HOLD_S = {
    AlertKind.OOM: 60.0,
    AlertKind.THROTTLED: 10.0,
    AlertKind.HOT: 5.0,
    AlertKind.NEAR_FULL: 3.0,
    AlertKind.GROWTH: 30.0,
}
"""How long an alert outlives its cause, so that one that comes and goes does not flicker. Others end at once."""
_DELAY_S = {AlertKind.THROTTLED: 5.0}
"""How long a cause must last before it is an alert. Others begin at once."""
_PATIENCE_S = 30.0
"""How long an alert stays while its figure cannot be read."""
_HARMLESS_THROTTLING = frozenset({"power cap", "sync boost"})
"""Normal for a GPU under full load."""

Key = tuple[str, str, AlertKind]
"""GPU uuid, MIG instance uuid or empty, kind."""


class Alert(Struct, frozen=True):
    """A condition that somebody should know of.

    Attributes:
        gpu_uuid: empty if it concerns the whole machine.
        message: one line that names the GPU.
        since_s: when it began, seconds since the epoch.
        instance: the MIG instance it concerns, by its UUID; empty for the GPU.
    """

    severity: Severity
    gpu_uuid: str
    kind: AlertKind
    message: str
    since_s: float
    instance: str = ""

    @property
    def key(self) -> Key:
        """Return what makes it the same alert as before, though its message changes."""
        return self.gpu_uuid, self.instance, self.kind

    def as_json(self) -> dict[str, object]:
        """Return it as an object."""
        which = {"severity": self.severity.value, "kind": self.kind.value}
        return {**which, **picked(self, "gpu_uuid", "instance", "message", "since_s")}


class _Finding(Struct, frozen=True):
    """A condition that one rule found on a GPU, or on a MIG instance, now.

    Attributes:
        begins: cause enough to begin an alert; otherwise only enough to keep one.
    """

    kind: AlertKind
    severity: Severity
    message: str
    instance: str = ""
    begins: bool = True


class _Lasting(Struct):
    """A cause that was seen lately: an alert once it has lasted."""

    finding: _Finding
    since_s: float
    seen_s: float


class _Scope(Struct, frozen=True):
    """A device that has memory of its own: a GPU, or each of its MIG instances."""

    title: str
    instance: str
    memory: Reading[Memory]
    processes: Reading[tuple[GpuProcess, ...]]


class _Past(Struct):
    """The facts that earlier snapshots left about a scope.

    Attributes:
        full_s: when it was last at its limit.
        processes: the last list of them; None before the first.
        filled_s: by pid, when the limit was first reached in a process's life; long ago where nobody saw it.
    """

    trend: Trend = field(default_factory=Trend)
    time_s: float = 0.0
    full_s: float = -math.inf
    processes: tuple[GpuProcess, ...] | None = None
    filled_s: dict[int, float] = {}

    def has_ended(self, processes: tuple[GpuProcess, ...]) -> bool:
        """Return whether one of the last list is not in the next one."""
        return bool({p.pid for p in self.processes or ()} - {p.pid for p in processes})

    def take(self, processes: tuple[GpuProcess, ...], now_s: float, *, full: bool) -> None:
        """Remember the next list of processes, and whether memory is at its limit now."""
        since_s = -math.inf if self.processes is None else now_s
        known = {p.pid: self.filled_s.get(p.pid, since_s if full else None) for p in processes}
        self.filled_s = {pid: filled_s for pid, filled_s in known.items() if filled_s is not None}
        self.processes = processes


class Alerts:
    """Follows the snapshots and shows what is the matter now."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._lasting: dict[Key, _Lasting] = {}
        self._past: dict[tuple[str, str], _Past] = {}
        self._probes: Probes = {}
        self._watched: frozenset[int] = frozenset()
        self._time_s = 0.0

    def anew(self) -> Alerts:
        """Make new alerts with the same settings and no past."""
        return Alerts(self._settings)

    def update(self, snapshot: Snapshot, probes: ProbeReport = NOTHING_SAID) -> tuple[Alert, ...]:
        """Return the alerts after one more snapshot: the worst first, then by the order of kinds, then the oldest.

        Args:
            probes: what the probes of watched processes say; who ran out of memory, however long ago.
        """
        now_s = snapshot.time_s
        if now_s < self._time_s:
            for lasting in self._lasting.values():  # as the clock went back, nothing begins in the future
                lasting.since_s, lasting.seen_s = min(lasting.since_s, now_s), min(lasting.seen_s, now_s)
            self._past.clear()
        self._time_s = now_s
        publishing = {pid for _, pid in probes.figures}
        self._watched |= publishing
        found: dict[Key, _Finding] = {}
        unread: set[Key] = set()
        # a driver that lacks its library is nothing next to another's: many a machine has an integrated GPU
        beside = (
            each.problem for each in snapshot.drivers if not each.problem.startswith(of_brand(each.vendor).not_loaded)
        )
        problem = snapshot.problem or "; ".join(each for each in beside if each and STARTING not in each)
        if problem and STARTING not in problem:
            severity = Severity.CRITICAL if snapshot.problem else Severity.WARNING
            found["", "", AlertKind.NO_DRIVER] = _Finding(AlertKind.NO_DRIVER, severity, problem)
        for gpu in snapshot.gpus:
            for finding in self._findings(gpu, now_s, probes.figures):
                found[gpu.uuid, finding.instance, finding.kind] = finding
            unread |= set(_unread(gpu))
        if any(_hides_processes(gpu) for gpu in snapshot.gpus):  # a rank's main GPU may be among these
            unread |= {(gpu.uuid, "", AlertKind.SECOND_GPU) for gpu in snapshot.gpus}
        for uuid, finding in _of_probes(snapshot, probes):
            found[uuid, "", finding.kind] = finding
        found |= self._second_gpus(snapshot)
        scopes = {(gpu.uuid, scope.instance) for gpu in snapshot.gpus for scope in _scopes(gpu)}
        self._past = {key: past for key, past in self._past.items() if key in scopes}
        self._probes = dict(probes.figures) or self._probes
        self._watched &= publishing | {p.pid for past in self._past.values() for p in past.processes or ()}
        self._follow(found, unread, now_s)
        return self._alerts()

    def _second_gpus(self, snapshot: Snapshot) -> dict[Key, _Finding]:
        """Find ranks on GPUs of other ranks: of a job one alert, which stays on the GPU where it began.

        If two jobs share a GPU, the one with more such ranks counts.
        """
        found: dict[Key, _Finding] = {}
        for job in sorted(other_ranks(snapshot.gpus), key=lambda job: len(job[0].processes)):
            keys = [(each.gpu.uuid, "", AlertKind.SECOND_GPU) for each in job]
            place = next((number for number, key in enumerate(keys) if key in self._lasting), 0)
            more = f", as on {len(job) - 1} more" if len(job) > 1 else ""
            message = f"{job[place]}{more}: torch.cuda.set_device(local_rank) before the first CUDA call"
            found[keys[place]] = _Finding(AlertKind.SECOND_GPU, Severity.WARNING, message)
        return found

    def _follow(self, found: dict[Key, _Finding], unread: set[Key], now_s: float) -> None:
        for key, finding in found.items():
            if key in self._lasting:
                self._lasting[key].finding, self._lasting[key].seen_s = finding, now_s
            elif finding.begins:
                self._lasting[key] = _Lasting(finding, now_s, now_s)
        for key, lasting in list(self._lasting.items()):
            patience_s = _PATIENCE_S if key in unread else _HOLD_S.get(lasting.finding.kind, 0.0)
            if now_s - lasting.seen_s > patience_s:
                del self._lasting[key]

    def _alerts(self) -> tuple[Alert, ...]:
        alerts = [
            Alert(
                severity=lasting.finding.severity,
                gpu_uuid=uuid,
                kind=kind,
                message=lasting.finding.message,
                since_s=lasting.since_s,
                instance=instance,
            )
            for (uuid, instance, kind), lasting in self._lasting.items()
            if lasting.seen_s - lasting.since_s >= _DELAY_S.get(kind, 0.0)
        ]
        worst_first, kinds = list(reversed(Severity)), list(AlertKind)

        def rank(alert: Alert) -> tuple[int, int, float]:
            return worst_first.index(alert.severity), kinds.index(alert.kind), alert.since_s

        return tuple(sorted(alerts, key=rank))

    def _findings(self, gpu: GpuReading, now_s: float, probes: Probes) -> Iterator[_Finding]:
        title = f"GPU {gpu.index}"
        if gpu.state is DeviceState.LOST:
            yield _Finding(AlertKind.LOST, Severity.CRITICAL, f"{title}: lost: {gpu.state_reason}")
            return
        if gpu.state is DeviceState.STALE:
            age = f" {gpu.age_s:.0f} s" if gpu.age_s >= 1 else ""
            yield _Finding(AlertKind.STALE, Severity.WARNING, f"{title}: stale{age}: {gpu.state_reason}")
            return  # what it last said is not what is
        yield from self._hot(gpu, title)
        if not isinstance(gpu.telemetry.throttle, Unknown) and gpu.telemetry.throttle:
            harmless = set(gpu.telemetry.throttle) <= _HARMLESS_THROTTLING
            message = f"{title}: clocks lowered: {', '.join(gpu.telemetry.throttle)}"
            yield _Finding(AlertKind.THROTTLED, Severity.NOTE if harmless else Severity.WARNING, message)
        yield from _ecc(gpu, title)
        for scope in _scopes(gpu):
            past = self._past.setdefault((gpu.uuid, scope.instance), _Past())
            if past.time_s != now_s:  # not the same snapshot again
                yield from self._memory(scope, past, now_s)
        yield from self._retried(gpu, title, probes)

    def _memory(self, scope: _Scope, past: _Past, now_s: float) -> Iterator[_Finding]:
        """Find memory that is near its limit, and processes that ended at the limit."""
        if isinstance(scope.memory, Unknown):
            return
        size_bytes = scope.memory.used_bytes + scope.memory.free_bytes
        percent = scope.memory.used_percent
        if not isinstance(scope.processes, Unknown):
            yield from self._ended_while_filling(scope.processes, scope, past, size_bytes, now_s)
            if past.has_ended(scope.processes):
                past.trend.clear()
            past.take(scope.processes, now_s, full=percent >= _AT_LIMIT_PERCENT)
        past.trend.add(now_s, scope.memory.used_bytes)
        past.time_s = now_s
        past.full_s = now_s if percent >= _AT_LIMIT_PERCENT else past.full_s
        if percent >= self._settings.near_full_percent - _EARLY_PERCENT:
            yield from self._near_full(scope, scope.memory, percent, past.trend.seconds_to(size_bytes))

    def _ended_while_filling(
        self, processes: tuple[GpuProcess, ...], scope: _Scope, past: _Past, size_bytes: int, now_s: float
    ) -> Iterator[_Finding]:
        """Find processes that held a notable share and are gone right after they first met the limit.

        It is a guess, which is not needed where a probe shows how a process ended.
        """
        if past.time_s - past.full_s > _AT_LIMIT_S:
            return
        left = {process.pid for process in processes} | self._watched
        for process in past.processes or ():
            held, filled_s = process.used_bytes, past.filled_s.get(process.pid, -math.inf)
            if process.pid in left or isinstance(held, Unknown) or now_s - filled_s > _FILLING_S:
                continue
            if 100 * held >= _NOTABLE_PERCENT * size_bytes:
                who = "" if isinstance(process.host, Unknown) else f" ({process.host.name})"
                end = f"pid {process.pid}{who} ended as memory filled up, it held {format_bytes(held)}"
                message = f"{scope.title}: perhaps out of memory: {end}"
                yield _Finding(AlertKind.OOM, Severity.WARNING, message, scope.instance)

    def _near_full(self, scope: _Scope, memory: Memory, percent: float, full_in_s: float | None) -> Iterator[_Finding]:
        above = percent - self._settings.near_full_percent
        full_in = math.inf if full_in_s is None else full_in_s
        early = above >= -_EARLY_PERCENT and full_in <= _EARLY_S
        still = above >= -_NEAR_FULL_SLACK_PERCENT or (above >= -_EARLY_PERCENT and full_in <= 2 * _EARLY_S)
        if above < 0 and not early and not still:
            return
        outlook = f", full in about {_duration(full_in_s)}" if full_in_s is not None and memory.free_bytes else ""
        message = (
            f"{scope.title}: {memory.shown_percent} % of memory in use, {format_bytes(memory.free_bytes)} free{outlook}"
        )
        yield _Finding(AlertKind.NEAR_FULL, Severity.WARNING, message, scope.instance, begins=above >= 0 or early)

    def _hot(self, gpu: GpuReading, title: str) -> Iterator[_Finding]:
        celsius, limit_c = gpu.telemetry.temperature_c, gpu.telemetry.temperature_limit_c
        if isinstance(celsius, Unknown):
            return
        if isinstance(limit_c, Unknown):
            limit_c = self._settings.temperature_limit_c
        above_c = celsius - (limit_c - self._settings.temperature_margin_c)
        if above_c >= -_HOT_SLACK_C:
            message = f"{title}: {celsius} °C, limit {limit_c} °C"
            yield _Finding(AlertKind.HOT, Severity.WARNING, message, begins=above_c >= 0)

    def _retried(self, gpu: GpuReading, title: str, probes: Probes) -> Iterator[_Finding]:
        """Find watched processes whose allocator ran into the limit since the last snapshot."""
        for key, figures in probes.items():
            before = self._probes.get(key)
            if key[0] != gpu.uuid or before is None:
                continue
            ooms, retries = figures.ooms - before.ooms, figures.retries - before.retries
            if ooms > 0:
                message = f"{title}: out of memory in pid {key[1]} ({_times(figures.ooms)} so far)"
                yield _Finding(AlertKind.OOM, Severity.CRITICAL, message)
            elif retries > 0:
                message = f"{title}: pid {key[1]} fits only by freeing its cache ({_times(figures.retries)} so far)"
                yield _Finding(AlertKind.OOM, Severity.WARNING, message)


def _of_probes(snapshot: Snapshot, probes: ProbeReport) -> Iterator[tuple[str, _Finding]]:
    """Yield the processes that lately ran out of memory, those that grow and those that stopped, with their GPU's uuid.

    On one GPU the last process to run out comes last, and the one that fills it first.
    """
    indices = {gpu.uuid: gpu.index for gpu in snapshot.gpus}
    lately = [end for end in probes.ended if snapshot.time_s - end.time_s <= _LATELY_S]
    last_out = sorted(lately, key=lambda end: end.time_s)
    first_full = sorted(probes.growing, key=lambda one: one.left_s, reverse=True)
    long = [one for one in probes.stopped if one.since_s >= _STOPPED_S]
    kinds: list[tuple[AlertKind, Severity, Sequence[RanOutOfMemory | Growing | Stopped]]] = [
        (AlertKind.OOM, Severity.CRITICAL, last_out),
        (AlertKind.GROWTH, Severity.WARNING, first_full),
        (AlertKind.STOPPED, Severity.WARNING, long),
    ]
    for kind, severity, processes in kinds:
        for one in processes:
            uuid = one.gpu_uuid if one.gpu_uuid in indices else ""
            where = f"GPU {indices[uuid]}: " if uuid else ""
            yield uuid, _Finding(kind, severity, f"{where}{one.message}")


def _ecc(gpu: GpuReading, title: str) -> Iterator[_Finding]:
    if not isinstance(gpu.telemetry.ecc_uncorrected, Unknown) and gpu.telemetry.ecc_uncorrected > 0:
        errors = (
            "1 uncorrected ECC error"
            if gpu.telemetry.ecc_uncorrected == 1
            else f"{gpu.telemetry.ecc_uncorrected} uncorrected ECC errors"
        )
        yield _Finding(AlertKind.ECC, Severity.CRITICAL, f"{title}: {errors} since the driver was loaded")


def _scopes(gpu: GpuReading) -> list[_Scope]:
    title = f"GPU {gpu.index}"
    if gpu.instances:
        return [_Scope(f"{title} MIG {each.index}", each.uuid, each.memory, each.processes) for each in gpu.instances]
    return [_Scope(title, "", gpu.memory, gpu.processes)]


def _unread(gpu: GpuReading) -> Iterator[Key]:
    """Yield the alerts whose figure this snapshot lacks: they are neither on nor over."""
    if gpu.state is DeviceState.LOST:
        return
    stale = gpu.state is DeviceState.STALE
    for scope in _scopes(gpu):
        if stale or isinstance(scope.memory, Unknown):
            yield gpu.uuid, scope.instance, AlertKind.NEAR_FULL
    now = gpu.telemetry
    figures = {AlertKind.HOT: now.temperature_c, AlertKind.THROTTLED: now.throttle, AlertKind.ECC: now.ecc_uncorrected}
    for kind, figure in figures.items():
        if stale or isinstance(figure, Unknown):
            yield gpu.uuid, "", kind


def _hides_processes(gpu: GpuReading) -> bool:
    return gpu.state is not DeviceState.OK or isinstance(gpu.processes, Unknown)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


# ---- what a recording is searched by

_MOST_RANKS = 2**31
"""As `torch.distributed` counts them."""


class AlertMark(Struct, frozen=True):
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
        """Return the host and the ranks, as far as there are any."""
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
        said: Said,
        host: str = "",
    ) -> list[AlertMark]:
        """Return the alerts of this moment that were not there in the one before.

        Args:
            said: by the probes of the processes.
        """
        known = self._known.get(host, set())
        self._known[host] = {alert.key for alert in alerts}
        return [
            AlertMark(time_s, alert.severity, alert.message, host, ranks_on(alert.instance or alert.gpu_uuid, said))
            for alert in alerts
            if alert.key not in known
        ]


def ranks_on(uuid: str, said: Said) -> tuple[int, ...]:
    """Return the ranks of the processes on a GPU that are one of several; a host may say anything for one."""
    found = (body.get("rank") for (place, _), body in said.items() if place == uuid and _is_one_of_several(body))
    return tuple(sorted({rank for rank in found if type(rank) is int and 0 <= rank < _MOST_RANKS}))


def _is_one_of_several(body: Mapping[str, object]) -> bool:
    size = body.get("world_size")
    return isinstance(size, int) and size > 1
