"""The real GPUs of this machine, as NVML lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pynvml

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import MIB, Unknown

IDLE_BYTES = 512 * MIB
"""A GPU with less than this in use, and no compute process, is free: a display server may still draw on it."""


@dataclass(frozen=True)
class RealGpu:
    """One GPU at one moment.

    Attributes:
        used_bytes: held by processes; the driver's own reserve (`reserved_bytes`) is apart.
        pids: processes that compute on it, as far as NVML shows them.
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
        available = self.total_bytes - self.reserved_bytes - (self.used_bytes if shared else 0)
        return Gpu(
            name=str(self.index),
            title=self.name,
            kind=_kind(self.name),
            total_bytes=self.total_bytes,
            cuda_total_bytes=available,
            compute_capability=self.compute_capability,
            source="NVML on this machine",
        )


def list_gpus() -> tuple[RealGpu, ...] | Unknown:
    """Every NVIDIA GPU of this machine that answers, or why there is none to list. A lost GPU hides no other."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Unknown(_init_reason(error))
    try:
        found, faults = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(_read(index))
            except pynvml.NVMLError as error:
                faults.append(f"GPU {index}: {error}")
    except pynvml.NVMLError as error:
        return Unknown(f"NVML cannot list the GPUs: {error}")
    finally:
        pynvml.nvmlShutdown()
    if faults and not found:
        return Unknown(f"no GPU can be read: {'; '.join(faults)}")
    return tuple(found)


def _read(index: int) -> RealGpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return RealGpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        reserved_bytes=int(memory.reserved),
        used_bytes=int(memory.used),
        compute_capability=(int(major), int(minor)),
        pids=tuple(int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    )


def _init_reason(error: pynvml.NVMLError) -> str:
    if isinstance(error, (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)):
        return "no NVIDIA driver on this machine"
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return "NVIDIA driver and library versions differ: reboot, or reload the driver"
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return "no permission to use the NVIDIA driver"
    return f"NVML does not start: {error}"


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _kind(name: str) -> Literal["consumer", "workstation", "datacenter"]:
    if "GeForce" in name or "TITAN" in name:
        return "consumer"
    return "workstation" if "RTX" in name or "Quadro" in name else "datacenter"
