"""NVML as the Monitor's backend.

Imports pynvml: import this module where it is needed, not at a program's start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Fault, Gone, Identity, ListedProcess, NoSuchGpu
from gpumem_tui.monitor.nvml import reads
from gpumem_tui.monitor.nvml.calls import Caller, NvmlFault, reading, start, stop, text
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import Memory

_UTILIZATION = ("utilization_percent", "memory_utilization_percent")


class Nvml:
    """The `GpuBackend` of NVIDIA.

    Args:
        proc: the folder of the kernel's own files, ``/proc``.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._call = Caller()
        self._proc = proc

    @property
    def calls(self) -> Mapping[str, int]:
        """By NVML's function."""
        return dict(self._call.counts)

    def in_progress(self) -> tuple[str, float] | None:
        """The function that has not returned, and for how many seconds."""
        return self._call.in_progress()

    def start(self) -> None:
        """As `GpuBackend.start`."""
        start(self._call, self._proc)

    def stop(self) -> None:
        """As `GpuBackend.stop`."""
        stop(self._call)

    def driver_version(self) -> Reading[str]:
        """As nvidia-smi prints it."""
        return reads.driver_version(self._call)

    def cuda_version(self) -> Reading[str]:
        """As nvidia-smi prints it."""
        return reads.cuda_version(self._call)

    def count(self) -> int:
        """As `GpuBackend.count`."""
        return int(self._call("nvmlDeviceGetCount"))

    def gpu(self, index: int) -> NvmlGpu:
        """As `GpuBackend.gpu`."""
        try:
            handle = self._call("nvmlDeviceGetHandleByIndex", index)
            identity = reads.identity(self._call, handle)
        except NvmlFault as fault:
            if fault.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                raise NoSuchGpu(fault.reason) from fault
            raise
        self._call.missing.clear()  # the driver may be another one since
        return NvmlGpu(self._call, handle, identity)

    def begin_pass(self) -> None:
        """As `GpuBackend.begin_pass`."""
        self._call.codes.clear()

    def check_answers(self) -> None:
        """As `GpuBackend.check_answers`."""
        if pynvml.NVML_SUCCESS not in self._call.codes and pynvml.NVML_ERROR_UNKNOWN in self._call.codes:
            raise Gone("the driver answers nothing but errors")

    def bus(self) -> frozenset[str]:
        """PCI addresses."""
        folder = self._proc / "driver" / "nvidia" / "gpus"
        return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()


class NvmlGpu:
    """The `GpuHandle` of NVIDIA."""

    def __init__(self, call: Caller, handle: Any, identity: Identity) -> None:
        self.identity = identity
        self._call = call
        self._handle = handle
        self._sampled_us = 0

    def memory(self) -> Reading[Memory]:
        """Of a divided GPU few users may read it."""
        return reads.memory(self._call, self._handle)

    def compute_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """Those with a CUDA context, clients of MPS included."""
        return reads.compute_processes(self._call, self._handle)

    def graphics_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """Those that draw."""
        return reads.graphics_processes(self._call, self._handle)

    def sm_percents(self) -> Reading[Mapping[int, int]]:
        """Of NVML's newest samples; it leaves out processes that did nothing."""
        found = reads.sm_percents(self._call, self._handle, self._sampled_us)
        self._sampled_us = 0 if isinstance(found, Unknown) else found[1]
        return found if isinstance(found, Unknown) else found[0]

    def read(self, names: Collection[str]) -> Mapping[str, Reading[Any]]:
        """As `GpuHandle.read`; both utilizations are one call."""
        call, handle = self._call, self._handle
        found: dict[str, Reading[Any]] = {}
        for name in names:
            if name in reads.READS:
                found[name] = reads.READS[name](call, handle)
            elif name in _UTILIZATION and name not in found:
                rates = reads.utilization(call, handle)
                found.update(zip(_UTILIZATION, (rates, rates) if isinstance(rates, Unknown) else rates, strict=True))
        return found

    def divided(self) -> Reading[bool]:
        """Whether MIG is on."""
        return reads.mig_mode(self._call, self._handle)

    def instances(self) -> tuple[NvmlInstance, ...]:
        """Instances leave gaps between their indices when they are destroyed."""
        places = reads.mig_places(self._call, self._handle)
        if isinstance(places, Unknown):
            return ()
        found = (self._instance(index) for index in range(places))
        return tuple(instance for instance in found if instance is not None)

    def _instance(self, index: int) -> NvmlInstance | None:
        """None for a place where there is no instance."""
        call = self._call
        try:
            handle = call("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, index)
            name = reading(lambda: text(call("nvmlDeviceGetName", handle)))
            uuid = text(call("nvmlDeviceGetUUID", handle))
        except Gone:
            raise
        except Fault:
            return None
        return NvmlInstance(index, uuid, f"MIG instance {index}" if isinstance(name, Unknown) else name, call, handle)


@dataclass(frozen=True)
class NvmlInstance:
    """The `InstanceHandle` of NVIDIA. One that was destroyed meanwhile gives unknown values."""

    index: int
    uuid: str
    name: str
    call: Caller = field(compare=False)
    handle: Any = field(compare=False)

    def memory(self) -> Reading[Memory]:
        """Its own."""
        return reads.memory(self.call, self.handle)

    def compute_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """Its own."""
        return reads.compute_processes(self.call, self.handle)
