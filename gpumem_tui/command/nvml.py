"""What NVML's Python binding (`pynvml`) answers on a simulated GPU: programs log the device's memory by it."""

# ruff: noqa: N802  the names are the binding's

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpumem_tui.importing import after_import
from gpumem_tui.simulator.backend import Backend

_DRIVER, _CUDA_DRIVER = "570.86.10", 12080
"""The driver in the installer ``cuda_12.8.0_570.86.10_linux.run``, and CUDA's version as NVML writes it."""


class SimulatedNvml:
    """The binding's functions, by their names.

    Args:
        device: answers as `torch.cuda`.
        context_bytes: what a process holds beside its allocator.
    """

    def __init__(self, device: Backend, context_bytes: int) -> None:
        self._device = device
        self._context_bytes = context_bytes

    def follow(self) -> None:
        """Answer for the binding, once the program has imported it."""
        after_import("pynvml", self._answer)

    def _answer(self, module: Any) -> None:
        for name in dir(self):
            if name.startswith("nvml"):
                setattr(module, name, getattr(self, name))

    def nvmlInit(self) -> None: ...

    def nvmlInitWithFlags(self, flags: int) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return _DRIVER

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return _CUDA_DRIVER

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return _CUDA_DRIVER

    def nvmlDeviceGetCount(self) -> int:
        return self._device.device_count()

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: object) -> int:
        return 0

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._device.get_device_name()

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{self._device.get_device_properties().uuid}"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self._device.get_device_capability()

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: object = None) -> SimpleNamespace:
        total = self._device.get_device_properties().total_memory
        used = self._device.memory_reserved() + self._context_bytes
        return SimpleNamespace(total=total, used=used, free=total - used, reserved=0)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=0, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return []

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 0
