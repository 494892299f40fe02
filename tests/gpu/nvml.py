"""The driver's own figures for the first GPU, where nvidia-ml-py is installed."""

from __future__ import annotations

import os
from typing import Any


def device_memory() -> dict[str, int] | str:
    """Total, used and driver-reserved bytes of GPU 0 (the v2 call, which tells the reserve apart), or why not."""
    found = _ask(lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    if isinstance(found, str):
        return found
    return {"total_bytes": found.total, "used_bytes": found.used, "driver_reserved_bytes": found.reserved}


def own_bytes() -> int | str:
    """The driver's figure of this process on GPU 0, or why it is missing."""
    found = _ask(lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if isinstance(found, str):
        return found
    used = {process.pid: process.usedGpuMemory for process in found}.get(os.getpid())
    return used if used is not None else "unknown: the driver does not list this process"


def driver_version() -> str:
    """The driver's version, or ``unknown`` and why."""
    return str(_ask(lambda nvml, handle: nvml.nvmlSystemGetDriverVersion()))


def _ask(question: Any) -> Any:
    try:
        import pynvml
    except ImportError:
        return "unknown: nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, AttributeError) as error:  # an attribute is missing where the binding is an old one
        return f"unknown: {error}"
