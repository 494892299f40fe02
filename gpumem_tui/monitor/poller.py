"""Reading one GPU again and again: what is read at which pace, and what happens when it is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Fault, GpuBackend, GpuHandle, Identity, InstanceHandle, ListedProcess, NoSuchGpu
from gpumem_tui.monitor.readings import NOT_IN_MIG, NOT_READ_YET, READINGS, Pace, Reading
from gpumem_tui.monitor.snapshot import Memory

_NOT_SUPPORTED = Unknown("not supported")


@dataclass(frozen=True)
class InstanceRead:
    """What one MIG instance holds now."""

    instance: InstanceHandle
    memory: Reading[Memory]
    processes: Reading[tuple[ListedProcess, ...]]


@dataclass
class RawReadings:
    """What was read of one GPU, each value the newest there is. The poller's thread writes, others only read.

    Attributes:
        identity: None while the GPU never answered.
        lost: why nothing can be read; empty while it can.
        read_at: when memory and processes were last read (`time.monotonic`); None before.
        sm_percents: by pid; a process that is not in it did nothing.
        readings: every entry of the table, by name.
        mig: it is divided now.
        instances: its parts, empty without.
    """

    identity: Identity | None = None
    lost: str = ""
    read_at: float | None = None
    memory: Reading[Memory] = NOT_READ_YET
    compute_processes: Reading[tuple[ListedProcess, ...]] = NOT_READ_YET
    graphics_processes: Reading[tuple[ListedProcess, ...]] = NOT_READ_YET
    sm_percents: Reading[Mapping[int, int]] = NOT_READ_YET
    readings: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(READINGS, NOT_READ_YET))
    mig: bool = False
    instances: tuple[InstanceRead, ...] = ()


class GpuPoller:
    """Reads whichever GPU the driver has at one index, in a thread that its owner provides.

    Args:
        index: the driver's.
        backend: for that thread.
        slow_every: in how many passes the slow values are read once.
        tell: called when the values that are read each time are there.
    """

    def __init__(self, index: int, backend: GpuBackend, slow_every: int, tell: Callable[[], None]) -> None:
        self.index = index
        self.backend = backend
        self.raw = RawReadings()
        self.absent = False
        """The driver has no GPU at this index any more."""
        self._slow_every = slow_every
        self._tell = tell
        self._gpu: GpuHandle | None = None
        self._stale_handle = False
        self._pass = 0
        self._in_mig = False
        self._instances: tuple[InstanceHandle, ...] = ()

    def look_again(self) -> None:
        """Another GPU may have this index now: find out at the next pass. For other threads."""
        self._stale_handle = True

    def read(self) -> None:
        """One pass. Faults become unknown values, or a lost GPU."""
        self.backend.begin_pass()
        try:
            gpu = self._gpu
            if gpu is None or self._stale_handle:
                gpu = self._take_handle()
            self._read_fast(gpu)
            self._tell()
            self._read_slow(gpu)
            self._pass += 1
        except Fault as fault:
            self.absent = isinstance(fault, NoSuchGpu)
            self.raw.lost = fault.reason
            self._gpu = None

    def _take_handle(self) -> GpuHandle:
        self._stale_handle = False
        gpu = self.backend.gpu(self.index)
        if self.raw.identity is None or self.raw.identity.uuid != gpu.identity.uuid:
            self.raw = RawReadings(lost=self.raw.lost)
        self.raw.identity = gpu.identity
        self._gpu, self._pass = gpu, 0
        self._read_mig(gpu)
        return gpu

    def _read_fast(self, gpu: GpuHandle) -> None:
        self._read_each_time(gpu)
        self.raw.instances = tuple(map(_read_instance, self._instances))
        self.backend.check_answers()
        self.raw.lost = ""
        self.raw.read_at = monotonic()

    def _read_each_time(self, gpu: GpuHandle) -> None:
        self.raw.memory = gpu.memory()
        if not self._in_mig:
            self.raw.compute_processes = gpu.compute_processes()
        self._read_at(Pace.EACH_TIME, gpu)

    def _read_slow(self, gpu: GpuHandle) -> None:
        slow_pass, rest = divmod(self._pass, self._slow_every)
        if rest and not self._instances_vanished():
            return
        self._read_mig(gpu)
        if not self._in_mig:
            self.raw.graphics_processes = gpu.graphics_processes()
        for pace in (Pace.SLOW, Pace.RARE, Pace.SLOWER):
            if slow_pass % pace.value == 0:
                self._read_at(pace, gpu)
        if not self._in_mig:
            self.raw.sm_percents = gpu.sm_percents()

    def _read_at(self, pace: Pace, gpu: GpuHandle) -> None:
        names = _NAMES[pace, self._in_mig]
        found = gpu.read(names)
        self.raw.readings.update(found)
        if len(found) < len(names):
            self.raw.readings.update(dict.fromkeys(set(names) - found.keys(), _NOT_SUPPORTED))

    def _read_mig(self, gpu: GpuHandle) -> None:
        was_in_mig, self._in_mig = self._in_mig, gpu.divided() is True
        instances = gpu.instances() if self._in_mig else ()
        if instances != self._instances:
            self._instances = instances
            self.raw.instances = tuple(map(_read_instance, instances))
        if self._in_mig:
            self.raw.readings.update({name: NOT_IN_MIG for name, entry in READINGS.items() if not entry.in_mig})
        elif was_in_mig:
            self._read_each_time(gpu)  # what was not read meanwhile, before it is said to be of now
        self.raw.mig = self._in_mig

    def _instances_vanished(self) -> bool:
        """An instance that was there does not answer: MIG was switched off, or the GPU was divided again."""
        return any(isinstance(read.memory, Unknown) for read in self.raw.instances)


def _names(pace: Pace, *, in_mig: bool) -> tuple[str, ...]:
    due = ((name, entry) for name, entry in READINGS.items() if entry.pace is pace)
    return tuple(name for name, entry in due if entry.in_mig or not in_mig)


_NAMES = {(pace, in_mig): _names(pace, in_mig=in_mig) for pace in Pace for in_mig in (False, True)}
"""What is asked for at each pace, of a whole GPU and of one that MIG divides."""


def _read_instance(instance: InstanceHandle) -> InstanceRead:
    return InstanceRead(instance, instance.memory(), instance.compute_processes())
