"""The real GPUs of this machine, as their driver lists them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import MIB, Unknown
from gpumem_tui.monitor.backend import Fault, GpuBackend, StartFault
from gpumem_tui.monitor.vendors import VENDOR

IDLE_BYTES = 512 * MIB
"""A GPU with less than this in use, and no compute process, is free: a display server may still draw on it."""


@dataclass(frozen=True)
class RealGpu:
    """One GPU at one moment.

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

    @property
    def is_free(self) -> bool:
        """Nobody trains here."""
        return not self.pids and self.used_bytes < IDLE_BYTES

    def describe(self, *, shared: bool = False) -> Gpu:
        """As the simulator and the search know GPUs. `shared`: only what the others leave counts as the device's."""
        from gpumem_tui.catalog.loader import (
            multiprocessors_of,
            speed_of,
        )  # only here: a trial's process can do without

        available = self.total_bytes - self.reserved_bytes - (self.used_bytes if shared else 0)
        return Gpu(
            name=str(self.index),
            title=self.name,
            kind=_kind(self.name),
            total_bytes=self.total_bytes,
            cuda_total_bytes=available,
            compute_capability=self.compute_capability,
            source="NVML on this machine",
            multiprocessors=multiprocessors_of(self.total_bytes, self.compute_capability),
            speed=speed_of(self.name, self.total_bytes),
        )


def list_gpus() -> tuple[RealGpu, ...] | Unknown:
    """Every NVIDIA GPU of this machine that answers, or why there is none to list. A lost GPU hides no other."""
    backend = VENDOR.open(Path("/proc"))
    try:
        backend.start()
    except StartFault as fault:
        return Unknown(fault.reason)
    try:
        found, faults = [], []
        for index in range(backend.count()):
            try:
                found.append(_read(backend, index))
            except (Fault, _Unreadable) as fault:
                faults.append(f"GPU {index}: {fault}")
    except Fault as fault:
        return Unknown(f"{VENDOR.library} cannot list the GPUs: {fault}")
    finally:
        backend.stop()
    if faults and not found:
        return Unknown(f"no GPU can be read: {'; '.join(faults)}")
    return tuple(found)


class _Unreadable(Exception):
    """What a search needs to know of a GPU cannot be read."""


def _read(backend: GpuBackend, index: int) -> RealGpu:
    gpu = backend.gpu(index)
    identity, memory, processes = gpu.identity, gpu.memory(), gpu.compute_processes()
    if isinstance(memory, Unknown):
        raise _Unreadable(f"memory: {memory.reason}")
    if isinstance(identity.compute_capability, Unknown):
        raise _Unreadable(f"compute capability: {identity.compute_capability.reason}")
    return RealGpu(
        index=index,
        uuid=identity.uuid,
        name=identity.name,
        total_bytes=memory.total_bytes,
        reserved_bytes=memory.reserved_bytes if isinstance(memory.reserved_bytes, int) else 0,
        used_bytes=memory.used_bytes,
        compute_capability=identity.compute_capability,
        pids=() if isinstance(processes, Unknown) else tuple(process.pid for process in processes),
    )


def _kind(name: str) -> Literal["consumer", "workstation", "datacenter"]:
    if "GeForce" in name or "TITAN" in name:
        return "consumer"
    return "workstation" if "RTX" in name or "Quadro" in name else "datacenter"
