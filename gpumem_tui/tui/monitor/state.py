"""The Monitor's contents: one immutable state with the steps that keys and snapshots take, and what feeds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpumem_tui.memory import Breakdown, Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind, Alerts
from gpumem_tui.monitor.history import History, Series
from gpumem_tui.monitor.probes import ProbeReport
from gpumem_tui.monitor.snapshot import GpuReading, Snapshot, Source
from gpumem_tui.tui.monitor.load import free_first
from gpumem_tui.watch.published import Key, ProbeSource, Published

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample


ProcessKey = tuple[str, int, str]
"""Device key, pid, MIG instance: one line of the process table."""


class SortBy(Enum):
    """The orders in which processes can be sorted, as the key goes through them. The value is the column's heading."""

    MEMORY = "GPU MEM"
    GPU = "GPU"
    SM = "SM%"
    CPU = "CPU%"
    HOST_MEMORY = "HOST MEM"
    AGE = "AGE"
    USER = "USER"
    PID = "PID"
    COMMAND = "COMMAND"

    @property
    def descends(self) -> bool:
        """The largest first, unless it is reversed."""
        return self in (SortBy.MEMORY, SortBy.SM, SortBy.CPU, SortBy.HOST_MEMORY, SortBy.AGE)


class ProcessParts(Struct, frozen=True):
    """The parts of what a process holds on one device, as a probe inside it states.

    Attributes:
        breakdown: the allocated bytes by bucket.
        cache_bytes: reserved by the allocator, not allocated.
    """

    breakdown: Breakdown
    cache_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """The bytes that PyTorch calls reserved; the rest of the process's share is its CUDA context."""
        return self.breakdown.total_bytes + self.cache_bytes


Parts = Mapping[tuple[str, int], ProcessParts]
"""By device key and pid; a process without a probe is absent."""


class TableState(Struct, frozen=True, kw_only=True, dict=True):
    """The sorting and the filter of a table of processes.

    Attributes:
        mine: list only the processes of the user who watches.
    """

    reverse: bool = False
    filter: str = ""
    mine: bool = False

    @property
    def sort(self) -> Enum:
        """The column that sorts: a field of each table's own, whose type lists its columns in the order of the key."""
        raise NotImplementedError


class MonitorState(TableState, frozen=True, dict=True):
    """Everything the Monitor shows.

    Attributes:
        snapshot: None until the first one.
        published: what probes say next to it.
        alerts: what is the matter.
        at_peak: processes with a probe are divided as at their peak, not as now.
        charts_process: the chart is of the chosen process, not of the device in focus.
        focus: the device whose ledger and history are shown in full, by its key; empty for the first.
        cursor: the chosen process.
        only_focus: list only the processes of the device in focus.
        free_first: devices that are free come before the others.
        user: what the user who watches is called on the machine that is watched.
        paused: new snapshots are kept from the screen.
    """

    snapshot: Snapshot | None = None
    published: Published = field(default_factory=Published)
    alerts: tuple[Alert, ...] = ()
    at_peak: bool = False
    charts_process: bool = False
    focus: str = ""
    cursor: ProcessKey | None = None
    sort: SortBy = SortBy.MEMORY
    tree: bool = False
    only_focus: bool = False
    free_first: bool = False
    user: str = ""
    paused: bool = False

    @property
    def now_s(self) -> float:
        """The snapshot's time, seconds since the epoch; 0 until the first one."""
        return self.snapshot.time_s if self.snapshot is not None else 0.0

    @cached_property
    def gpus(self) -> tuple[GpuReading, ...]:
        """The devices of the snapshot, in the order in which they are shown."""
        gpus = self.snapshot.gpus if self.snapshot is not None else ()
        return free_first(gpus) if self.free_first else gpus

    def warns(self, gpu: GpuReading, kind: AlertKind) -> bool:
        """Return whether there is an alert of this kind about a device or one of its MIG instances."""
        return any((alert.gpu_uuid, alert.kind) == (gpu.uuid, kind) for alert in self.alerts)

    @cached_property
    def parts(self) -> Parts:
        """The parts of what processes with a probe hold."""
        divided = {
            place: parts_of(sample, at_peak=self.at_peak) for place, (_, sample) in self.published.by_place.items()
        }
        return {place: parts for place, parts in divided.items() if parts is not None}

    @cached_property
    def focused(self) -> GpuReading | None:
        """The device in focus, the first if that one is gone, None without any."""
        gpus = self.gpus
        return next((gpu for gpu in gpus if device_key(gpu) == self.focus), gpus[0] if gpus else None)


def device_key(gpu: GpuReading) -> str:
    """Return what names a device from snapshot to snapshot; one that never answered has only its index."""
    return gpu.uuid or f"#{gpu.index}"


def parts_of(sample: ProbeSample, *, at_peak: bool) -> ProcessParts | None:
    """Return how a process divides what it has reserved of a GPU; None where its probe does not say enough.

    Args:
        at_peak: at the peak of its allocated bytes instead of now. Memory given back to the driver since then cannot
            be drawn into the present reserve: then the present value is shown.
    """
    reserved_bytes = sample.reserved_bytes
    if isinstance(reserved_bytes, Unknown):
        return None
    for buckets in (sample.peak_buckets, sample.buckets) if at_peak else (sample.buckets,):
        breakdown = Breakdown({bucket: size for bucket, size in buckets.items() if isinstance(size, int)})
        if breakdown.total_bytes <= reserved_bytes:
            return ProcessParts(breakdown, reserved_bytes - breakdown.total_bytes)
    return None


def seen(state: MonitorState, snapshot: Snapshot, published: Published, alerts: tuple[Alert, ...] = ()) -> MonitorState:
    """Take in a new snapshot and what probes say next to it."""
    return state if state.paused else replace(state, snapshot=snapshot, published=published, alerts=alerts)


def focused_on(state: MonitorState, step: int) -> MonitorState:
    """Move the focus to the next device, or back, round and round."""
    keys = [device_key(gpu) for gpu in state.gpus]
    if not keys:
        return state
    focused = state.focused
    here = keys.index(device_key(focused)) if focused is not None else 0
    return replace(state, focus=keys[(here + step) % len(keys)])


Sorted = TypeVar("Sorted", bound=TableState)


def sorted_by(state: Sorted, step: int) -> Sorted:
    """Sort by the next column, or by the one before."""
    orders = list(type(state.sort))
    return replace(state, sort=orders[(orders.index(state.sort) + step) % len(orders)], reverse=False)


def sorted_on(state: Sorted, order: Enum) -> Sorted:
    """Sort by a column; once more reverses the order."""
    return replace(state, sort=order, reverse=not state.reverse if order is state.sort else False)


HOLD_S = 0.2
"""How long a snapshot is held back for what probes say next to it, so that both are of one moment."""
_AT_ONCE_S = 0.5
"""The snapshots that follow the first one so soon complete it: they are drawn at once."""


class Feed:
    """Takes every snapshot in, whether the screen shows it or not.

    Attributes:
        published: what the probes said next to the newest one.
        alerts: what is the matter now; `rings`: one of them began with the newest snapshot.
        notice: what the source states of itself.
        asks: whether probes are asked: not before the first picture is drawn, as much is imported for that.
        first, latest: None before there is one.
    """

    def __init__(self, source: Source, history: History, alerts: Alerts, probes: ProbeSource | None) -> None:
        self.source = source
        self.published = Published()
        self.alerts: tuple[Alert, ...] = ()
        self.rings = False
        self.notice = ""
        self.asks = False
        self.first: Snapshot | None = None
        self.latest: Snapshot | None = None
        self._history = history
        self._judge = alerts
        self._probes = probes
        self._followed: Key | None = None
        self._asked: Snapshot | None = None
        self._held_since_s: float | None = None

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called whenever a look may find something new, from another thread; it must not wait."""
        self.source.subscribe(tell)
        if self._probes is not None:
            self._probes.subscribe(tell)

    @property
    def is_held(self) -> bool:
        """A snapshot waits for what probes say: look again after `HOLD_S` even if nobody told to."""
        return self._held_since_s is not None

    def look(self) -> bool:
        """Take in the newest snapshot and what probes say; False if nothing is new. Never waits."""
        notice, snapshot = self.source.notice, self.source.latest()
        if snapshot is None:
            return False
        if self._is_awaited(snapshot):
            return False
        published = self._probes.latest() if self._probes is not None else self.published
        notice = published.problem or notice
        if snapshot is self.latest and published is self.published and notice == self.notice:
            return False
        self.first = self.first or snapshot
        self.latest, self.published, self._held_since_s = snapshot, published, None
        self.notice = notice
        self._history.add(snapshot, published.figures)
        before = {alert.key for alert in self.alerts}
        told = ProbeReport(published.figures, published.out_of_memory, published.growing, published.stopped)
        self.alerts = self._judge.update(snapshot, told)
        self.rings = any(alert.key not in before for alert in self.alerts)
        return True

    def restart(self, past: Sequence[Snapshot], step_s: float) -> None:
        """Forget past snapshots: the source shows another moment now.

        Args:
            past: snapshots from before it, `step_s` apart.
        """
        self._history, self._judge = self._history.emptied(), self._judge.anew()
        interval_s, self._history.interval_s = self._history.interval_s, step_s
        for snapshot in past:
            self._history.add(snapshot)
            self._judge.update(snapshot)
        self._history.interval_s = interval_s
        self.first, self.latest, self.alerts = (past[0] if past else None), None, ()

    def follow(self, key: Key | None) -> None:
        """Have the history of this process read too."""
        if key != self._followed:
            self._followed = key
            if self._probes is not None and self._asked is not None:
                self._probes.ask(self._asked.gpus, key)

    def stop(self) -> None:
        """End what reads; returns at once, from any thread."""
        self.source.stop()
        if self._probes is not None:
            self._probes.stop()

    def _is_awaited(self, snapshot: Snapshot) -> bool:
        """Ask what probes say next to a new snapshot; whether it still waits for that."""
        if self._probes is None or not self.asks:
            return False
        if snapshot is not self._asked:
            self._asked = snapshot
            self._probes.ask(snapshot.gpus, self._followed)
        if snapshot is self.latest or self.seen_s(snapshot) < _AT_ONCE_S:
            return False
        if self._held_since_s is None:
            self._held_since_s = monotonic()
        return self._probes.is_reading and monotonic() - self._held_since_s < HOLD_S

    def seen_s(self, snapshot: Snapshot) -> float:
        """Return how long it had looked when a snapshot was made, in seconds."""
        return snapshot.time_s - self.first.time_s if self.first is not None else 0.0

    def series(self, gpu: GpuReading, columns: int, span_s: float, now_s: float) -> Series:
        """Return a device's last `span_s` seconds."""
        return self._history.series(device_key(gpu), columns, span_s, now_s)
