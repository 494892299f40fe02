"""What the Monitor shows: one immutable state, and the steps that keys and snapshots take from it to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from gpumem_tui.memory import Breakdown, Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind
from gpumem_tui.monitor.snapshot import GpuReading, Snapshot
from gpumem_tui.watch.published import Published

if TYPE_CHECKING:
    from gpumem_tui.watch.records import ProbeSample

ProcessKey = tuple[str, int, str]
"""Device key, pid, MIG instance: one line of the process table."""


class SortBy(Enum):
    """What the processes are sorted by, in the order that the key goes through. The value is the column's heading."""

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


@dataclass(frozen=True)
class ProcessParts:
    """How a probe inside a process divides what that process holds on one device.

    Attributes:
        breakdown: the allocated bytes by bucket.
        cache_bytes: reserved by the allocator, not allocated.
    """

    breakdown: Breakdown
    cache_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch calls reserved; the rest of the process's share is its CUDA context."""
        return self.breakdown.total_bytes + self.cache_bytes


Parts = Mapping[tuple[str, int], ProcessParts]
"""By device key and pid; a process without a probe is absent."""


@dataclass(frozen=True)
class MonitorState:
    """Everything the Monitor shows.

    Attributes:
        snapshot: None until the first one.
        published: what probes say beside it.
        alerts: what is the matter.
        at_peak: processes with a probe are divided as at their peak, not as now.
        charts_process: the chart is of the chosen process, not of the device in focus.
        focus: the device whose ledger and history are shown in full, by its key; empty for the first.
        cursor: the chosen process.
        only_focus: list only the processes of the device in focus.
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
    reverse: bool = False
    filter: str = ""
    tree: bool = False
    only_focus: bool = False
    paused: bool = False

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """The devices of the snapshot."""
        return self.snapshot.gpus if self.snapshot is not None else ()

    def warns(self, gpu: GpuReading, kind: AlertKind) -> bool:
        """Whether there is an alert of this kind about a device or one of its MIG instances."""
        return any((alert.gpu_uuid, alert.kind) == (gpu.uuid, kind) for alert in self.alerts)

    @cached_property
    def parts(self) -> Parts:
        """How the processes with a probe divide what they hold."""
        divided = {
            place: parts_of(sample, at_peak=self.at_peak) for place, (_, sample) in self.published.by_place.items()
        }
        return {place: parts for place, parts in divided.items() if parts is not None}

    @property
    def focused(self) -> GpuReading | None:
        """The device in focus, the first if that one is gone, None without any."""
        gpus = self.gpus
        return next((gpu for gpu in gpus if device_key(gpu) == self.focus), gpus[0] if gpus else None)


def device_key(gpu: GpuReading) -> str:
    """What names a device from snapshot to snapshot; one that never answered has only its index."""
    return gpu.uuid or f"#{gpu.index}"


def parts_of(sample: ProbeSample, *, at_peak: bool) -> ProcessParts | None:
    """How a process divides what it has reserved of a GPU; None where its probe does not say enough.

    Args:
        at_peak: at the peak of its allocated bytes instead of now. What it has given back to the driver since cannot
            be drawn into what is reserved now: then it is as now.
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
    """A new snapshot came, or probes said something new."""
    return state if state.paused else replace(state, snapshot=snapshot, published=published, alerts=alerts)


def focused_on(state: MonitorState, step: int) -> MonitorState:
    """The focus moves to the next device, or back, round and round."""
    keys = [device_key(gpu) for gpu in state.gpus]
    if not keys:
        return state
    focused = state.focused
    here = keys.index(device_key(focused)) if focused is not None else 0
    return replace(state, focus=keys[(here + step) % len(keys)])


def sorted_by(state: MonitorState, step: int) -> MonitorState:
    """The next column to sort by, or the one before."""
    orders = list(SortBy)
    return replace(state, sort=orders[(orders.index(state.sort) + step) % len(orders)], reverse=False)


def sorted_on(state: MonitorState, order: SortBy) -> MonitorState:
    """Sort by a column; by the same once more: the other way round."""
    return replace(state, sort=order, reverse=not state.reverse if order is state.sort else False)
