"""Reading one GPU again and again, and what travels of it: what is read at which pace, what happens when it is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic

from msgspec import Struct
from msgspec.structs import replace

from gpumem_tui.memory import Unknown, Value, format_bytes
from gpumem_tui.monitor.backend import Fault, GpuBackend, GpuHandle, Identity, InstanceHandle, ListedProcess, NoSuchGpu
from gpumem_tui.monitor.ledger import device_ledger, possible_memory
from gpumem_tui.monitor.readings import NOT_IN_MIG, NOT_READ_YET, READINGS, Pace, Reading, Telemetry
from gpumem_tui.monitor.snapshot import (
    HOLDERS,
    NOT_LOOKED_UP_YET,
    DeviceState,
    GpuProcess,
    GpuReading,
    HostProcess,
    HostReading,
    Instance,
    Memory,
    ProcessKind,
)
from gpumem_tui.monitor.threads import Crew, Job, Worker
from gpumem_tui.text import without_escapes

NOT_RETURNED = "has not returned for"
"""Marks the reason of a value that waits for a call."""
STUCK_AFTER_S = 0.8
"""A GPU whose reading takes longer is stale."""

_APART_SHARE = 0.1
"""Tolerance of two sizes of one process: a smaller difference may arise between two calls."""

Hosts = Mapping[int, Reading[HostProcess]]
"""The processes behind the pids, or why they are not known."""


class InstanceRead(Struct, frozen=True):
    """The memory and processes of one MIG instance, just read."""

    instance: InstanceHandle
    memory: Reading[Memory]
    processes: Reading[tuple[ListedProcess, ...]]


class RawReadings(Struct):
    """The newest value of each reading of one GPU. The reader's thread writes them, others only read.

    Attributes:
        identity: None while the GPU never answered.
        lost: why nothing can be read; empty while it can.
        read_at: when memory and processes were last read (`time.monotonic`); None before.
        disputed: why it is not known what a process holds, by pid, where both lists have it.
        process_percents: share of the compute units by pid; a process that is not in it did nothing.
        telemetry: every entry of the table.
        mig: whether it is divided now.
        instances: its parts, empty without.
    """

    identity: Identity | None = None
    lost: str = ""
    read_at: float | None = None
    memory: Reading[Memory] = NOT_READ_YET
    compute_processes: Reading[tuple[ListedProcess, ...]] = NOT_READ_YET
    graphics_processes: Reading[tuple[ListedProcess, ...]] = NOT_READ_YET
    disputed: Mapping[int, Unknown] = {}
    process_percents: Reading[Mapping[int, int]] = NOT_READ_YET
    telemetry: Telemetry = Telemetry()
    mig: bool = False
    instances: tuple[InstanceRead, ...] = ()

    @property
    def pids(self) -> frozenset[int]:
        """Return the pid of every process on it."""
        lists = [self.compute_processes, self.graphics_processes, *(each.processes for each in self.instances)]
        return frozenset(process.pid for listed in lists if not isinstance(listed, Unknown) for process in listed)


class GpuReader:
    """Reads whichever GPU the driver has at one index, one pass at a time, and shows how that GPU is.

    Args:
        index: the driver's.
        backend: for these passes alone.
        slow_every: in how many passes the slow values are read once.
        tell: called when the values that are read each time are there, and after each pass.
        crew: makes the passes, and those of other GPUs.

    Attributes:
        absent: the driver has no GPU at this index any more.
    """

    def __init__(self, index: int, backend: GpuBackend, slow_every: int, tell: Callable[[], None], crew: Crew) -> None:
        self.index = index
        self.backend = backend
        self.raw = RawReadings()
        self.absent = False
        self.worker = Worker(self._read, tell, crew)
        self._slow_every = slow_every
        self._tell = tell
        self._gpu: GpuHandle | None = None
        self._stale_handle = False
        self._pass = 0
        self._lacks_slow = False
        self._due_at = self._took_s = 0.0
        self._in_mig = False
        self._instances: tuple[InstanceHandle, ...] = ()

    # ---- for other threads

    @property
    def is_fresh(self) -> bool:
        """Return whether what is read each time has been read since it was last asked for."""
        asked_at, read_at = self.worker.asked_at, self.raw.read_at
        return asked_at is None or (read_at is not None and read_at >= asked_at)

    @property
    def is_stuck(self) -> bool:
        """Return whether a call has not returned for long."""
        return self.worker.busy_s() >= STUCK_AFTER_S

    def ask(self) -> None:
        """Begin a pass, unless the last one still runs; what is read each time is due from now on."""
        if self.raw.read_at is None or self.raw.read_at >= self._due_at:
            self._due_at = monotonic() - (STUCK_AFTER_S if self.is_stuck else 0.0)
        self.worker.ask()

    def state_and_reason(self) -> tuple[DeviceState, str]:
        """Return whether the GPU answers, is stale or lost, and why."""
        if self.raw.lost:
            return DeviceState.LOST, self.raw.lost
        if self.is_stuck:
            call = self.backend.in_progress()
            return DeviceState.STALE, not_returned(*call) if call else f"reading it takes {self.worker.busy_s():.0f} s"
        if self.worker.error:
            return DeviceState.STALE, self.worker.error
        if self.raw.read_at is None:
            return DeviceState.STALE, NOT_READ_YET.reason
        overdue_s = monotonic() - self._due_at if self.raw.read_at < self._due_at else self._took_s
        if overdue_s >= STUCK_AFTER_S:  # what was read first is old when all is there, or has not come for so long
            return DeviceState.STALE, f"reading it takes {overdue_s:.0f} s"
        return DeviceState.OK, ""

    def look_again(self) -> None:
        """Have the next pass find out which GPU has this index now."""
        self._stale_handle = True

    # ---- in a thread of the crew

    def _read(self) -> Job | None:
        """Read what is read each time; return what is left of the pass. Faults become unknown values, or a lost GPU."""
        self.backend.begin_pass()
        try:
            gpu = self._gpu
            if gpu is None or self._stale_handle:
                gpu = self._take_handle()
            slow_pass, rest = divmod(self._pass, self._slow_every)
            is_back = bool(self.raw.lost)
            if is_back:
                self._read_slow(gpu, slow_pass)  # this may be what it does not answer
            began_at = monotonic()
            self._read_each_time(gpu)
            self.raw.instances = tuple(map(_read_instance, self._instances))
            self.backend.check_answers()
        except Fault as fault:
            self._lose(fault)
            return None
        self.raw.lost = ""
        self.raw.read_at = began_at
        self._took_s = monotonic() - began_at
        self._pass += 1
        if is_back or (rest and not self._lacks_slow and not self._instances_vanished()):
            return None
        self._tell()
        return partial(self._read_rest, gpu, slow_pass)

    def _read_rest(self, gpu: GpuHandle, slow_pass: int) -> None:
        """Read what is slow, once all GPUs were read of which others wait for news."""
        try:
            self._read_slow(gpu, slow_pass)
        except Fault as fault:
            self._lose(fault)

    def _lose(self, fault: Fault) -> None:
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

    def _read_each_time(self, gpu: GpuHandle) -> None:
        self.raw.memory = gpu.memory()
        if not self._in_mig:
            self.raw.compute_processes = gpu.compute_processes()
        self._read_at(Pace.EACH_TIME, gpu)

    def _read_slow(self, gpu: GpuHandle, slow_pass: int) -> None:
        self._lacks_slow = True  # until all of it is read: an error of the program may end this before
        self._read_mig(gpu)
        if not self._in_mig:
            self.raw.graphics_processes = gpu.graphics_processes()
            self.raw.disputed = _disputed(self.raw.compute_processes, self.raw.graphics_processes)
        for pace in (Pace.SLOW, Pace.RARE, Pace.SLOWER):
            if slow_pass % pace.value == 0:
                self._read_at(pace, gpu)
        if not self._in_mig:
            self.raw.process_percents = gpu.process_percents()
        self._lacks_slow = False

    def _read_at(self, pace: Pace, gpu: GpuHandle) -> None:
        names = _NAMES[pace, self._in_mig]
        self.raw.telemetry = self.raw.telemetry.updated(gpu.read(names), names)

    def _read_mig(self, gpu: GpuHandle) -> None:
        was_in_mig, self._in_mig = self._in_mig, gpu.divided() is True
        instances = gpu.instances() if self._in_mig else ()
        if instances != self._instances:
            self._instances = instances
            self.raw.instances = tuple(map(_read_instance, instances))
        if self._in_mig:
            self.raw.telemetry = self.raw.telemetry.updated(_NONE_IN_MIG, _NOT_IN_MIG)
        elif was_in_mig:
            self._read_each_time(gpu)  # what was not read meanwhile, before it counts as of now
        self.raw.mig = self._in_mig

    def _instances_vanished(self) -> bool:
        """Return whether a known instance does not answer: MIG was switched off, or the GPU was divided again."""
        return any(isinstance(read.memory, Unknown) for read in self.raw.instances)


def _names(pace: Pace, *, in_mig: bool) -> tuple[str, ...]:
    due = ((name, entry) for name, entry in READINGS.items() if entry.pace is pace)
    return tuple(name for name, entry in due if entry.in_mig or not in_mig)


_NAMES = {(pace, in_mig): _names(pace, in_mig=in_mig) for pace in Pace for in_mig in (False, True)}
"""The readings of each pace, for a whole GPU and for one that MIG divides."""
_NOT_IN_MIG = tuple(name for name, entry in READINGS.items() if not entry.in_mig)
_NONE_IN_MIG = Telemetry.unknown(NOT_IN_MIG)


def _read_instance(instance: InstanceHandle) -> InstanceRead:
    return InstanceRead(instance, instance.memory(), instance.compute_processes())


def not_returned(function: str, seconds: float) -> str:
    """Return the reason to show for a call that hangs."""
    return f"{function} {NOT_RETURNED} {seconds:.0f} s"


def have_moved(readers: Iterable[GpuReader]) -> bool:
    """Return whether one GPU answers at two indices: some are still read by handles from before a renumbering."""
    uuids = [each.raw.identity.uuid for each in readers if each.raw.identity and not each.raw.lost]
    return len(set(uuids)) < len(uuids)


# ---- what travels: processes merged, ledgers made, losses spelled out


class _Seen(Struct, frozen=True):
    index: int
    identity: Identity
    at: float


class Roster:
    """Remembers a vendor's GPUs by UUID, so that one that vanishes stays listed as lost."""

    def __init__(self, brand: str) -> None:
        self._brand = brand
        self._base = 0
        self._seen: dict[str, _Seen] = {}

    def readings(
        self, readers: Iterable[GpuReader], hosts: Hosts, host: HostReading, *, base: int, runs: bool
    ) -> tuple[GpuReading, ...]:
        """Return every GPU, by index; one that the driver no longer lists keeps its index, after who has it now.

        Args:
            base: the index of the driver's first GPU.
            runs: whether the driver does.
        """
        self._base = base
        now = monotonic()
        by_uuid: dict[str, GpuReading] = {}
        for each in readers:
            reading = self._reading(each, hosts, host, now, runs=runs)
            by_uuid.setdefault(reading.uuid, reading)
        found = list(by_uuid.values())  # before those that are gone, and `sorted` keeps the order of equal indices
        found += [
            self._lost_reading(seen.index, seen.identity, "the driver no longer lists it", now - seen.at)
            for uuid, seen in self._seen.items()
            if uuid not in by_uuid
        ]
        return tuple(sorted(found, key=lambda gpu: gpu.index))

    def _reading(self, reader: GpuReader, hosts: Hosts, host: HostReading, now: float, *, runs: bool) -> GpuReading:
        raw = reader.raw
        state, reason = reader.state_and_reason() if runs else (DeviceState.LOST, "the driver does not run")
        identity = self._identity(reader.index, raw, state)
        age_s = 0.0 if raw.read_at is None else now - raw.read_at
        lost = self._lost_reading(reader.index, identity, reason, age_s)
        if state is DeviceState.LOST:
            return lost
        unified = identity is not None and identity.integrated and isinstance(raw.memory, Unknown)
        memory = _host_memory(host) if unified else possible_memory(raw.memory)
        holders = _holders(identity, unified=unified)
        instances = _fitting([_instance(read, hosts) for read in raw.instances], memory) if raw.mig else ()
        processes = _of_instances(instances) if raw.mig else _processes(raw, memory, hosts)
        return replace(
            lost,
            telemetry=raw.telemetry,
            state=state,
            memory=memory,
            ledger=device_ledger(memory, processes, holders=holders),
            holders=holders,
            processes=processes,
            unified=unified,
            mig=raw.mig,
            instances=instances,
        )

    def _identity(self, index: int, raw: RawReadings, state: DeviceState) -> Identity | None:
        """Return whose readings these are; None of a GPU that never answered, or that answers at another index now."""
        identity = raw.identity
        if identity is None:
            return None
        seen = self._seen.get(identity.uuid)
        if state is DeviceState.LOST and seen is not None and seen.index != index:
            return None
        self._seen[identity.uuid] = _Seen(index, identity, monotonic() if raw.read_at is None else raw.read_at)
        return identity

    def _lost_reading(self, index: int, identity: Identity | None, reason: str, age_s: float) -> GpuReading:
        """Make the reading of a GPU that does not answer: only its name is there."""
        known = identity or Identity(f"unknown-{self._base + index}", "unknown GPU", compute_capability=NOT_READ_YET)
        runtime, why = known.runtime_index, Unknown(reason)
        return GpuReading(
            index=self._base + index,
            vendor=self._brand,
            vendor_index=index if self._base else None,
            runtime_index=runtime if isinstance(runtime, int) and runtime != index else None,
            uuid=known.uuid,
            name=known.name,
            bus_id=known.bus_id,
            partition=known.partition,
            compute_capability=known.compute_capability,
            telemetry=Telemetry.unknown(why),
            state=DeviceState.LOST,
            state_reason=reason,
            age_s=age_s,
            memory=why,
            ledger=why,
            processes=why,
        )


def _host_memory(host: HostReading) -> Reading[Memory]:
    total, used = host.memory_total_bytes, host.memory_used_bytes
    if isinstance(total, Unknown):
        return total
    if isinstance(used, Unknown):
        return used
    return Memory(total, Unknown("part of the host's memory"), used, total - used)


def _holders(identity: Identity | None, *, unified: bool) -> str:
    if unified:
        return "what runs on the CPU, in the same memory"
    if identity is not None and identity.holds_virtual_machines:
        return "virtual machines on this host"
    return HOLDERS


def _fitting(instances: Sequence[Instance], memory: Reading[Memory]) -> tuple[Instance, ...]:
    """Return MIG instances; each of unknown memory where together they have more than their GPU.

    Compute instances of one GPU instance ("1c.3g.40gb") have one memory (NVIDIA's MIG User Guide, "Device Names").
    """
    sizes = [each.memory.total_bytes for each in instances if isinstance(each.memory, Memory)]
    share = any(re.search(r"\b\d+c\.\d+g\.", each.name) for each in instances)
    if isinstance(memory, Unknown) or share or sum(sizes) <= memory.total_bytes:
        return tuple(instances)
    whole, parts = format_bytes(memory.total_bytes), format_bytes(sum(sizes))
    why = Unknown(f"impossible: the driver gives the instances {parts} of the GPU's {whole}")
    return tuple(replace(each, memory=why, ledger=why) for each in instances)


def _possible_size(size_bytes: Value, memory: Reading[Memory]) -> Value:
    """Return what a process holds; unknown where that is more than the whole device."""
    if isinstance(size_bytes, Unknown) or isinstance(memory, Unknown) or size_bytes <= memory.total_bytes:
        return size_bytes
    said, whole = format_bytes(size_bytes), format_bytes(memory.total_bytes)
    return Unknown(f"impossible: the driver reports {said}, of a device of {whole}")


def _processes(raw: RawReadings, memory: Reading[Memory], hosts: Hosts) -> Reading[tuple[GpuProcess, ...]]:
    if isinstance(raw.compute_processes, Unknown):
        return raw.compute_processes
    drawing = () if isinstance(raw.graphics_processes, Unknown) else raw.graphics_processes
    compute = {process.pid: process for process in raw.compute_processes}
    graphics = {process.pid: process for process in drawing}
    percents = raw.process_percents
    return tuple(
        GpuProcess(
            pid=pid,
            kind=_kind(pid in compute, pid in graphics),
            used_bytes=raw.disputed.get(pid)
            or _possible_size(_newest_known([lists[pid] for lists in (compute, graphics) if pid in lists]), memory),
            sm_percent=percents if isinstance(percents, Unknown) else percents.get(pid, 0),
            host=hosts.get(pid, NOT_LOOKED_UP_YET),
        )
        for pid in compute | graphics
    )


def _disputed(
    computing: Reading[tuple[ListedProcess, ...]], drawing: Reading[tuple[ListedProcess, ...]]
) -> Mapping[int, Unknown]:
    """Return by pid why it is not known what a process holds that two lists, read together, have with two sizes."""
    if isinstance(computing, Unknown) or isinstance(drawing, Unknown):
        return {}
    sizes = {each.pid: each.used_bytes for each in computing}
    found = {}
    for each in drawing:
        one, other = sizes.get(each.pid), each.used_bytes
        if isinstance(one, int) and isinstance(other, int) and abs(one - other) > _APART_SHARE * max(one, other):
            said = f"{format_bytes(one)} where it computes and {format_bytes(other)} where it draws"
            found[each.pid] = Unknown(f"the driver lists {said}")
    return found


def _kind(computes: bool, draws: bool) -> ProcessKind:
    if computes and draws:
        return ProcessKind.BOTH
    return ProcessKind.COMPUTE if computes else ProcessKind.GRAPHICS


def _newest_known(entries: list[ListedProcess]) -> Value:
    """Return the first known size of one process's entries, the newest first: either list has its whole memory."""
    known = [entry.used_bytes for entry in entries if isinstance(entry.used_bytes, int)]
    return known[0] if known else entries[0].used_bytes


def _instance(read: InstanceRead, hosts: Hosts) -> Instance:
    instance, listed, memory = read.instance, read.processes, possible_memory(read.memory)
    processes: Reading[tuple[GpuProcess, ...]]
    if isinstance(listed, Unknown):
        processes = listed
    else:
        processes = tuple(
            GpuProcess(
                pid=each.pid,
                kind=ProcessKind.COMPUTE,
                used_bytes=_possible_size(each.used_bytes, memory),
                sm_percent=NOT_IN_MIG,
                host=hosts.get(each.pid, NOT_LOOKED_UP_YET),
                instance=instance.uuid,
            )
            for each in listed
        )
    return Instance(
        index=instance.index,
        uuid=instance.uuid,
        name=without_escapes(instance.name),
        memory=memory,
        processes=processes,
        ledger=device_ledger(memory, processes),
    )


def _of_instances(instances: Sequence[Instance]) -> Reading[tuple[GpuProcess, ...]]:
    found: list[GpuProcess] = []
    for instance in instances:
        if isinstance(instance.processes, Unknown):
            return instance.processes
        found += instance.processes
    return tuple(found)
