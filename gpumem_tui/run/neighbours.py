"""The memory of a GPU that this process holds outside its allocator's segments, told apart from other processes'.

Standard library and torch only: it runs in the process that trains, which need not have a binding to NVML. Its C
library comes with the driver, and is asked directly (nvml.h; "Device Queries" of NVIDIA's NVML API reference).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import torch

from gpumem_tui.memory import format_bytes
from gpumem_tui.simulator.allocator.profile import Profile

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_NO_FIGURE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE: as on WSL, or where another user's process is not shown."""

_MOST_PROCESSES = 1024


class _ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`; the structs of the third version are longer under drivers 535.43 to 535.86."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def processes_on(uuid: str) -> dict[int, int] | None:
    """Return what each process that computes on a GPU holds there, in bytes by pid, as the driver counts both.

    None where the driver does not tell: it is another vendor's, or lists processes without their memory.
    """
    try:
        nvml: Any = ctypes.CDLL(_LIBRARY)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return None
    except (OSError, AttributeError):
        return None
    try:
        return _listed(nvml, uuid)
    finally:
        nvml.nvmlShutdown()


def _listed(nvml: Any, uuid: str) -> dict[int, int] | None:
    device, count = ctypes.c_void_p(), ctypes.c_uint(_MOST_PROCESSES)
    infos = (_ProcessInfo * _MOST_PROCESSES)()
    try:
        codes = (
            nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)),
            nvml.nvmlDeviceGetComputeRunningProcesses_v2(device, ctypes.byref(count), infos),
        )
    except AttributeError:
        return None
    listed = {infos[index].pid: infos[index].used_bytes for index in range(count.value)}
    if any(code != _SUCCESS for code in codes) or _NO_FIGURE in listed.values():
        return None
    return listed


def own_bytes(before: Mapping[int, int] | None, now: Mapping[int, int] | None, pid: int) -> int | None:
    """Return what this process holds of what the driver lists; None where that cannot be told.

    Within a container the driver may list the pids of its host: there it is the one that has come since.

    Args:
        before: as listed before this process used the GPU. now: as listed while it does.
        pid: this process, as it knows itself.
    """
    if before is None or now is None:
        return None
    come = [size_bytes for other, size_bytes in now.items() if other not in before]
    if pid in now and pid not in before:
        return now[pid]
    return come[0] if len(come) == 1 else None


class Neighbours:
    """Tells what this process holds outside its allocator on a GPU that others may use as well.

    Made before this process uses the GPU. The driver's figure of this process comes first. Where it gives none, the
    device's figure counts, less what others held, if that leaves what a context can be: neither more nor less.

    Args:
        uuid: the GPU's; empty where it is not known.
        others_bytes: what others held when the GPU was chosen.
        profile: what a process is expected to hold outside its allocator.
    """

    def __init__(self, uuid: str, others_bytes: int, profile: Profile) -> None:
        self._uuid, self._others_bytes, self._profile = uuid, others_bytes, profile
        self._before = processes_on(uuid) if uuid else None
        self.note = ""
        """A line where the figure is not measured, after `beside_allocator_bytes`."""

    def beside_allocator_bytes(self, device: torch.device) -> int:
        """Return what this process holds now next to its allocator's segments: context, kernels, libraries."""
        reserved_bytes = torch.cuda.memory_reserved(device)
        now = processes_on(self._uuid) if self._before is not None else None
        held_bytes = own_bytes(self._before, now, os.getpid())
        self.note = ""
        if held_bytes is not None and held_bytes > reserved_bytes:
            return held_bytes - reserved_bytes
        expected_bytes, possible = self._profile.context_bytes, self._profile.context_range
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        except RuntimeError:  # CUDA answers no more after a failed kernel
            reason = "the driver does not say what the process held"
        else:
            beside_bytes = total_bytes - free_bytes - reserved_bytes - self._others_bytes
            if beside_bytes > 0 and (beside_bytes in possible or not self._others_bytes):
                return beside_bytes
            reason = "other processes of the GPU may have taken or given back memory"
        self.note = f"{reason}: {format_bytes(expected_bytes)} outside the allocator are assumed"
        return expected_bytes
