"""The GPUs that are there and those that were, each with its state at one moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic

from gpumem_tui.monitor.backend import Identity
from gpumem_tui.monitor.compose import Hosts, gpu_reading, lost_reading
from gpumem_tui.monitor.poller import GpuPoller, RawReadings
from gpumem_tui.monitor.readings import NOT_READ_YET
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading, HostReading
from gpumem_tui.monitor.worker import Worker

_STUCK_AFTER_S = 0.8
"""A GPU whose reading takes longer is stale."""


@dataclass(frozen=True)
class WatchedDevice:
    """A GPU's index, what reads it, and the thread in which that happens."""

    poller: GpuPoller
    worker: Worker

    @property
    def is_fresh(self) -> bool:
        """What is read each time has been read since it was last asked for."""
        asked_at, read_at = self.worker.asked_at, self.poller.raw.read_at
        return asked_at is None or (read_at is not None and read_at >= asked_at)

    @property
    def is_stuck(self) -> bool:
        """A call has not returned for long."""
        return self.worker.busy_s() >= _STUCK_AFTER_S

    def state_and_reason(self) -> tuple[DeviceState, str]:
        """Whether the GPU answers, is stale or lost, and why."""
        raw = self.poller.raw
        if raw.lost:
            return DeviceState.LOST, raw.lost
        if self.is_stuck:
            call = self.poller.backend.in_progress()
            return DeviceState.STALE, not_returned(*call) if call else f"reading it takes {self.worker.busy_s():.0f} s"
        return (DeviceState.OK, "") if raw.read_at is not None else (DeviceState.STALE, NOT_READ_YET.reason)


def not_returned(function: str, seconds: float) -> str:
    """The reason to show for a call that hangs."""
    return f"{function} has not returned for {seconds:.0f} s"


@dataclass(frozen=True)
class _Seen:
    index: int
    identity: Identity
    at: float


def have_moved(watched: Iterable[WatchedDevice]) -> bool:
    """One GPU answers at two indices: GPUs were renumbered, and some are still read by their old handles."""
    uuids = [each.poller.raw.identity.uuid for each in watched if each.poller.raw.identity and not each.poller.raw.lost]
    return len(set(uuids)) < len(uuids)


class Roster:
    """Remembers GPUs by UUID, so that one that vanishes stays listed as lost."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def readings(
        self, watched: Iterable[WatchedDevice], hosts: Hosts, host: HostReading, *, runs: bool
    ) -> tuple[GpuReading, ...]:
        """Every GPU, by index; one that the driver no longer lists keeps its index, and comes after who has it now.

        Args:
            runs: whether the driver does.
        """
        now = monotonic()
        by_uuid: dict[str, GpuReading] = {}
        for each in watched:
            reading = self._reading(each, hosts, host, now, runs=runs)
            by_uuid.setdefault(reading.uuid, reading)
        found = list(by_uuid.values())
        found += [
            lost_reading(seen.index, seen.identity, "the driver no longer lists it", now - seen.at)
            for uuid, seen in self._seen.items()
            if uuid not in by_uuid
        ]
        return tuple(sorted(found, key=lambda gpu: (gpu.index, gpu.state is DeviceState.LOST)))

    def _reading(
        self, watched: WatchedDevice, hosts: Hosts, host: HostReading, now: float, *, runs: bool
    ) -> GpuReading:
        index, raw = watched.poller.index, watched.poller.raw
        state, reason = watched.state_and_reason() if runs else (DeviceState.LOST, "the driver does not run")
        identity = self._identity(index, raw, state)
        age_s = 0.0 if raw.read_at is None else now - raw.read_at
        if state is DeviceState.LOST:
            return lost_reading(index, identity, reason, age_s)
        return gpu_reading(index, raw, state=state, reason=reason, age_s=age_s, hosts=hosts, host=host)

    def _identity(self, index: int, raw: RawReadings, state: DeviceState) -> Identity | None:
        """Whose readings these are. None: of a GPU that never answered, or that answers at another index by now."""
        identity = raw.identity
        if identity is None:
            return None
        seen = self._seen.get(identity.uuid)
        if state is DeviceState.LOST and seen is not None and seen.index != index:
            return None
        self._seen[identity.uuid] = _Seen(index, identity, monotonic() if raw.read_at is None else raw.read_at)
        return identity
