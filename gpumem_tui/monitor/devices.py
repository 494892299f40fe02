"""The real GPUs of this machine, as their driver lists them, and which of them a process sees as cuda:0, cuda:1, ..."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from gpumem_tui.memory import MIB, Unknown, format_bytes
from gpumem_tui.monitor import vendors
from gpumem_tui.monitor.backend import Fault, GpuBackend, Identity, StartFault, Vendor
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import DeviceState, GpuProcess, GpuReading, Memory, ProcessKind, Snapshot

if TYPE_CHECKING:
    from gpumem_tui.catalog.shapes import Gpu

IDLE_BYTES = 512 * MIB
"""A GPU with less than this in use, and no compute process, is free: a display server may still draw on it."""

CONTEXT_BYTES = 128 * MIB
"""Less than a CUDA context takes on any GPU (`simulator/allocator/contexts.json`): a GPU that is busy with as much in
use by nobody whom the driver lists runs a program of another container."""


class RealGpu(Struct, frozen=True):
    """A GPU of this machine, as it stood at one moment.

    Attributes:
        used_bytes: held by processes; the driver's own reserve (`reserved_bytes`) is apart, except on drivers before
            510, which count it as used.
        pids: processes that compute on it, as far as the driver shows them.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    reserved_bytes: int
    used_bytes: int
    compute_capability: tuple[int, int]
    pids: tuple[int, ...]

    @classmethod
    def of(
        cls,
        index: int,
        named: Identity | GpuReading,
        memory: Memory,
        compute_capability: tuple[int, int],
        pids: tuple[int, ...] = (),
    ) -> RealGpu:
        """Make it of what was read; a reserve that the driver does not tell counts as none."""
        return cls(
            index=index,
            uuid=named.uuid,
            name=named.name,
            total_bytes=memory.total_bytes,
            reserved_bytes=memory.reserved_bytes if isinstance(memory.reserved_bytes, int) else 0,
            used_bytes=memory.used_bytes,
            compute_capability=compute_capability,
            pids=pids,
        )

    @property
    def is_free(self) -> bool:
        """Return whether nobody trains here."""
        return not self.pids and self.used_bytes < IDLE_BYTES

    def describe(self, *, shared: bool = False) -> Gpu:
        """Describe it for the simulator and the search. `shared`: only what others leave counts as the device's."""
        from gpumem_tui.catalog.loader import (
            multiprocessors_of,
            speed_of,
        )  # only here: a trial's process can do without
        from gpumem_tui.catalog.shapes import Gpu

        available = self.total_bytes - self.reserved_bytes - (self.used_bytes if shared else 0)
        return Gpu(
            name=str(self.index),
            title=self.name,
            kind=vendors.vendor().market(self.name),
            total_bytes=self.total_bytes,
            cuda_total_bytes=available,
            compute_capability=self.compute_capability,
            source=f"{vendors.vendor().library} on this machine",
            multiprocessors=multiprocessors_of(self.total_bytes, self.compute_capability),
            speed=speed_of(self.name, self.total_bytes),
        )


def list_gpus() -> tuple[RealGpu, ...] | Unknown:
    """Return every GPU of this machine that answers, or why none can be listed. A lost GPU hides no other."""
    reasons: list[str] = []
    for vendor in vendors.candidates(vendors.vendor()):
        backend = vendor.open(Path("/proc"))
        try:
            backend.start()
        except StartFault as fault:
            reasons.append(fault.reason)
            if not fault.no_driver:
                return Unknown(fault.reason)
        else:
            vendors.choose(vendor)
            return _list(vendor, backend)
    return Unknown(reasons[0])


def _list(vendor: Vendor, backend: GpuBackend) -> tuple[RealGpu, ...] | Unknown:
    try:
        found, faults = [], []
        for index in range(backend.count()):
            try:
                found.append(_read(backend, index))
            except (Fault, _Unreadable) as fault:
                faults.append(f"GPU {index}: {fault}")
    except Fault as fault:
        return Unknown(f"{vendor.library} cannot list the GPUs: {fault}")
    finally:
        backend.stop()
    if faults and not found:
        return Unknown(f"no GPU can be read: {'; '.join(faults)}")
    return tuple(found)


class _Unreadable(Exception):
    """A figure that a search needs of a GPU cannot be read."""


def _read(backend: GpuBackend, index: int) -> RealGpu:
    gpu = backend.gpu(index)
    identity, memory, processes = gpu.identity, gpu.memory(), gpu.compute_processes()
    if isinstance(memory, Unknown):
        raise _Unreadable(f"memory: {memory.reason}")
    if isinstance(identity.compute_capability, Unknown):
        raise _Unreadable(f"compute capability: {identity.compute_capability.reason}")
    pids = () if isinstance(processes, Unknown) else tuple(process.pid for process in processes)
    return RealGpu.of(index, identity, memory, identity.compute_capability, pids)


def free_gpus(snapshot: Snapshot, memory_bytes: int | None, environ: Mapping[str, str]) -> list[GpuReading]:
    """Return the GPUs that are free, by number; those that cannot be read, or are divided by MIG, are not.

    Args:
        memory_bytes: with so much memory free, whoever computes there; None for those on which nobody does.
        environ: whose ``CUDA_VISIBLE_DEVICES``, or its vendor's like, they are among, if it has any.
    """
    seen = visible_uuids(snapshot, environ)
    return [gpu for gpu in snapshot.gpus if not why_not_free(gpu, memory_bytes, seen)]


def visible_uuids(snapshot: Snapshot, environ: Mapping[str, str]) -> frozenset[str]:
    """Return the UUIDs of the GPUs that a program with this environment may see."""
    seen: set[str] = set()
    for brand in {gpu.vendor for gpu in snapshot.gpus}:
        whose = [Candidate(gpu.number, gpu.uuid, gpu.name) for gpu in snapshot.gpus if gpu.vendor == brand]
        visible = environ.get(vendors.of_brand(brand).visible)
        listed: Reading[tuple[str, ...]] = tuple(gpu.uuid for gpu in whose)
        if visible is not None:
            listed = visible_devices(whose, {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
        seen.update(() if isinstance(listed, Unknown) else listed)
    return frozenset(seen)


def is_free(gpu: GpuReading, memory_bytes: int | None = None) -> bool:
    """Return whether a GPU can be read as a whole and is free, as `free_gpus` has it."""
    return not why_not_free(gpu, memory_bytes)


def free_rule(memory_bytes: int | None = None) -> str:
    """Return by which rule a GPU is free, in one line for a person."""
    alive = "A GPU is free that answers, is not divided into MIG instances"
    if memory_bytes:
        return f"{alive} and has {format_bytes(memory_bytes)} free."
    most = f"less than {IDLE_BYTES // MIB} MiB in use ({CONTEXT_BYTES // MIB} MiB while it is busy)"
    return f"{alive}, has no process that computes, however little that holds, and {most}."


def why_not_free(gpu: GpuReading, memory_bytes: int | None = None, seen: Collection[str] | None = None) -> str:
    """Return why a GPU is not free, in a few words; empty if it is.

    Args:
        memory_bytes: as `free_gpus` has it.
        seen: the UUIDs of the GPUs that a program may see; None for all.
    """
    memory, processes = gpu.memory, gpu.processes
    if seen is not None and gpu.uuid not in seen:
        return f"not among those of {vendors.of_brand(gpu.vendor).visible}"
    if gpu.state is not DeviceState.OK:
        return f"{gpu.state.value}: {gpu.state_reason}"
    if gpu.mig:
        return "divided into MIG instances"
    if isinstance(memory, Unknown):
        return f"its memory is unknown: {memory.reason}"
    if isinstance(processes, Unknown):
        return f"its processes are unknown: {processes.reason}"
    if memory_bytes:
        return "" if memory.free_bytes >= memory_bytes else f"{format_bytes(memory.free_bytes)} free"
    computing = [process for process in processes if process.kind is not ProcessKind.GRAPHICS]
    if computing:
        more = f" and {len(computing) - 1} more" if len(computing) > 1 else ""
        return f"{_who(computing[0])}{more}"
    if memory.used_bytes >= IDLE_BYTES:
        return f"{format_bytes(memory.used_bytes)} in use by no listed process"
    busy = gpu.telemetry.utilization_percent
    if not processes and isinstance(busy, int) and busy > 0 and memory.used_bytes >= CONTEXT_BYTES:
        return f"busy for {busy} % with {format_bytes(memory.used_bytes)} in use by no listed process"
    return ""


def _who(process: GpuProcess) -> str:
    host = process.host
    who = f" ({host.name} of {host.user})" if not isinstance(host, Unknown) else ""
    size = "" if isinstance(process.used_bytes, Unknown) else f" with {format_bytes(process.used_bytes)}"
    return f"pid {process.pid}{who} computes{size}"


# ---- what a process sees


class Candidate(Struct, frozen=True):
    """A GPU as CUDA could list it.

    Attributes:
        index: the driver's under its vendor, which is the order on the PCI bus.
        instances: UUIDs of its MIG instances; with any, CUDA sees one of them and never the whole GPU.
    """

    index: int
    uuid: str
    name: str
    instances: tuple[str, ...] = ()
    vendor: str = ""


def visible_devices(gpus: Sequence[Candidate], environ: Mapping[str, str]) -> Reading[tuple[str, ...]]:
    """Return the UUIDs of cuda:0, cuda:1, ... for a process with this environment.

    ``CUDA_VISIBLE_DEVICES`` holds indices or UUIDs (or their beginnings). As CUDA does, the list ends at the first
    entry that names no GPU or more than one, and is empty if an entry repeats. Indices follow the PCI bus if
    ``CUDA_DEVICE_ORDER`` states PCI_BUS_ID; else the fastest GPU is first, which only tells the order where all GPUs
    are alike (CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA_VISIBLE_DEVICES").
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    entries = None if variable is None else [entry.strip() for entry in variable.split(",")]
    by_index = entries is None or any(entry.isdigit() for entry in entries)
    ordered = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) <= 1
    if by_index and not ordered:
        return Unknown(
            "CUDA puts the fastest of different GPUs first; CUDA_DEVICE_ORDER=PCI_BUS_ID would tell the order"
        )
    if entries is None:
        seen = [_whole(gpu) for gpu in gpus]
    else:
        seen = []
        for entry in entries:
            named = _named(entry, gpus)
            if len(named) != 1:
                break
            if named[0] in seen:
                return ()
            seen.append(named[0])
    instances = {uuid for gpu in gpus for uuid in gpu.instances}
    partial = [uuid for uuid in seen if uuid in instances]
    return (partial[0],) if partial else tuple(seen)  # CUDA lists a single MIG instance and nothing next to it


def _whole(gpu: Candidate) -> str:
    return gpu.instances[0] if gpu.instances else gpu.uuid


def _named(entry: str, gpus: Sequence[Candidate]) -> list[str]:
    """Return every device that an entry may mean."""
    if entry.isdigit():
        return [_whole(gpu) for gpu in gpus if gpu.index == int(entry)]
    if entry.startswith("GPU-"):
        return [_whole(gpu) for gpu in gpus if gpu.uuid.startswith(entry)]
    if entry.startswith("MIG-"):
        return [uuid for gpu in gpus for uuid in gpu.instances if uuid.startswith(entry)]
    return []
