"""NVML as the Monitor's backend: one function for each thing that is read, and the handles that call them.

A function returns a value, or `Unknown` with the reason; a lost GPU raises `Gone`. Imports pynvml: import this module
where it is needed, not at a program's start.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pynvml
from msgspec import Struct

from gpumem_tui.memory import Unknown, Value
from gpumem_tui.monitor.backend import Fault, Gone, Identity, ListedProcess, NoSuchGpu
from gpumem_tui.monitor.readings import Reading, Telemetry
from gpumem_tui.monitor.snapshot import Memory
from gpumem_tui.monitor.vendors.calling import Called, refused
from gpumem_tui.monitor.vendors.nvidia.calls import (
    NOT_AVAILABLE,
    Caller,
    NvmlFault,
    declared,
    number,
    reading,
    start,
    stop,
    structure,
    text,
)

# ---- one GPU: what does not change


_INTEGRATED = {(3, 2), (5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0), (12, 1)}
"""Compute capabilities that only integrated GPUs have: Tegra K1 and X1, TX2, Xavier, Orin, Thor (before and since CUDA
13) and GB10, by the table at developer.nvidia.com/cuda-gpus. NVML itself does not say whether memory is unified."""

_VIRTUALIZATION_HOSTS = (
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VSGA,
)


def identity(call: Caller, handle: object) -> Identity:
    """Read once for each handle.

    Raises:
        NvmlFault: the UUID cannot be read.
    """
    name = reading(lambda: text(call("nvmlDeviceGetName", handle)))
    bus_id = reading(lambda: text(call("nvmlDeviceGetPciInfo", handle).busId))
    virtualization = number(call, "nvmlDeviceGetVirtualizationMode", handle)
    uuid, capability = text(call("nvmlDeviceGetUUID", handle)), compute_capability(call, handle)
    return Identity(
        uuid=uuid,
        name="unnamed GPU" if isinstance(name, Unknown) else name,
        bus_id="" if isinstance(bus_id, Unknown) else bus_id,
        compute_capability=capability,
        integrated=capability in _INTEGRATED,
        holds_virtual_machines=virtualization in _VIRTUALIZATION_HOSTS,
    )


def compute_capability(call: Caller, handle: object) -> Reading[tuple[int, int]]:
    """Read the compute capability, (8, 0) for sm_80."""

    def read() -> tuple[int, int]:
        major, minor = call("nvmlDeviceGetCudaComputeCapability", handle)
        return int(major), int(minor)

    return reading(read)


# ---- one GPU: memory and processes


_MEMORY_V2 = "nvmlDeviceGetMemoryInfo_v2"
_NO_SECOND_VERSION = (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)


def memory(call: Caller, handle: object) -> Reading[Memory]:
    """Read memory by the second version of the call, which tells the driver's reserve apart, or by the first."""
    if _MEMORY_V2 not in call.missing:
        try:
            found = call("nvmlDeviceGetMemoryInfo", handle, version=declared("nvmlMemory_v2"))
            return _memory(found, _size(int(found.reserved)))
        except NvmlFault as fault:
            if fault.code not in _NO_SECOND_VERSION:
                return refused(fault)
            call.missing.add(_MEMORY_V2)
    older = Unknown("drivers before 510 count it as used")
    return reading(lambda: _memory(call("nvmlDeviceGetMemoryInfo", handle), older))


class _MemoryInfo(Protocol):
    """NVML's ``nvmlMemory_t``, in bytes."""

    total: int
    used: int
    free: int


def _memory(found: _MemoryInfo, reserved_bytes: Value) -> Reading[Memory]:
    if any(value in NOT_AVAILABLE for value in (found.total, found.used, found.free)):
        return Unknown("not available")
    return Memory(int(found.total), reserved_bytes, int(found.used), int(found.free))


def _size(size_bytes: int) -> Value:
    return Unknown("not available") if size_bytes in NOT_AVAILABLE else size_bytes


def compute_processes(call: Caller, handle: object) -> Reading[tuple[ListedProcess, ...]]:
    """List the processes with a CUDA context, clients of MPS included."""
    return reading(lambda: _processes(call, "nvmlDeviceGetComputeRunningProcesses", handle))


def _processes(call: Caller, function: str, handle: object) -> tuple[ListedProcess, ...]:
    kind = structure("c_nvmlProcessInfo_v2_t")
    for version in ("_v3", "_v2"):
        name = function + version
        if name in call.missing or (version == "_v3" and _longer_v3_structs()):
            continue
        try:
            found = _array(call, name, kind, lambda count, infos: (handle, count, infos))
        except NvmlFault as fault:
            if fault.code != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
        else:
            return tuple(ListedProcess(int(p.pid), _size(int(p.usedGpuMemory))) for p in found)
    raise NvmlFault(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "the driver is too old to list processes")


def _longer_v3_structs() -> bool:
    """Return whether this is one of the drivers 535.43 to 535.86, whose v3 structs nvidia-ml-py does not declare.

    They are those that have the first of these symbols and not the second (found by nvitop's authors, issue 75).
    """
    library = pynvml.nvmlLib
    return hasattr(library, "nvmlDeviceGetConfComputeMemSizeInfo") and not hasattr(
        library, "nvmlDeviceGetRunningProcessDetailList"
    )


_MOST_ENTRIES = 2**20


def _array(
    call: Caller,
    function: str,
    kind: type[ctypes.Structure],
    arguments: Callable[[object, object], tuple[object, ...]],
) -> list[ctypes.Structure]:
    """Read the array that a function fills.

    Args:
        arguments: what the function is called with, of a pointer to the number of entries and of the array.

    One call where it fits, as the list is short; the binding's own functions always ask for the length first, and to
    list processes is one of the slowest NVML queries.
    """
    room = 32
    while room <= _MOST_ENTRIES:
        infos, count = (kind * room)(), ctypes.c_uint(room)
        code = call.direct(function, *arguments(ctypes.byref(count), infos))
        if code == pynvml.NVML_SUCCESS:
            return list(infos[: count.value])
        room = 2 * max(room, count.value)
    raise NvmlFault(pynvml.NVML_ERROR_INSUFFICIENT_SIZE, "the driver gives no end of entries")


def sm_percents(call: Caller, handle: object, since_us: int) -> Reading[tuple[Mapping[int, int], int]]:
    """Read shares of the SMs by pid in the newest sample after `since_us` (NVML's clock), and that sample's time.

    NVML leaves out processes that did nothing.
    """

    def read() -> tuple[Mapping[int, int], int]:
        function, kind = "nvmlDeviceGetProcessUtilization", structure("c_nvmlProcessUtilizationSample_t")
        try:
            samples = _array(
                call, function, kind, lambda count, array: (handle, array, count, ctypes.c_ulonglong(since_us))
            )
        except NvmlFault as fault:
            if fault.code != pynvml.NVML_ERROR_NOT_FOUND:
                raise
            return {}, since_us
        samples = [sample for sample in samples if sample.pid and sample.smUtil <= 100]
        samples.sort(key=lambda sample: sample.timeStamp)
        return {s.pid: s.smUtil for s in samples}, max((s.timeStamp for s in samples), default=since_us)

    return reading(read)


# ---- one GPU: what it does


_PERCENT = 100


def utilization(call: Caller, handle: object) -> Reading[tuple[int, int]]:
    """Read per cent of the last sample period in which a kernel ran, and in which memory was read or written."""

    def read() -> Reading[tuple[int, int]]:
        rates = call("nvmlDeviceGetUtilizationRates", handle)
        return (
            Unknown("not available") if max(rates.gpu, rates.memory) > _PERCENT else (int(rates.gpu), int(rates.memory))
        )

    return reading(read)


T = TypeVar("T")
Read = Callable[[Caller, object], Reading[T]]


def _number(function: str, *arguments: int) -> Read[int]:
    """Make a read of a plain number in NVML's own unit."""
    return lambda call, handle: number(call, function, handle, *arguments)


def _scaled(scale: Callable[[int], T], function: str, *arguments: int) -> Read[T]:
    """Make a read of a number in another unit than NVML's."""

    def read(call: Caller, handle: object) -> Reading[T]:
        found = number(call, function, handle, *arguments)
        return found if isinstance(found, Unknown) else scale(found)

    return read


def _watts(function: str) -> Read[float]:
    return _scaled(lambda milliwatts: milliwatts / 1000, function)


def _pcie_traffic(counter: int) -> Read[int]:
    """Make a read of traffic over the 20 ms that the call takes."""
    return _scaled(lambda kib: kib * 1024, "nvmlDeviceGetPcieThroughput", counter)


_joules = _scaled(lambda millijoules: millijoules / 1000, "nvmlDeviceGetTotalEnergyConsumption")
_SLOWDOWN_TEMPERATURE = _number("nvmlDeviceGetTemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)


def _ecc_errors(kind: int) -> Read[int]:
    return _number("nvmlDeviceGetTotalEccErrors", kind, pynvml.NVML_VOLATILE_ECC)


def _performance_state(call: Caller, handle: object) -> Reading[int]:
    state = number(call, "nvmlDeviceGetPerformanceState", handle)
    return Unknown("not available") if state == pynvml.NVML_PSTATE_UNKNOWN else state


_THROTTLES = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "hot",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSyncBoost: "sync boost",
}


def _throttle(call: Caller, handle: object) -> Reading[tuple[str, ...]]:
    bits = number(call, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if isinstance(bits, Unknown):
        return bits
    return tuple(words for bit, words in _THROTTLES.items() if bits & bit)


class _Traffic(Struct, frozen=True):
    """Bytes sent and received over all NVLinks of a GPU until a moment of NVML's clock, in microseconds."""

    rx_bytes: int
    tx_bytes: int
    time_us: int


_ALL_LINKS = 2**32 - 1
"""As the scope of a throughput counter: the sum over all links (NVML's nvml.h, "NVLink throughput counters")."""
_FIRST_TRAFFIC = Unknown("needs a second look")


def _rate(before: Reading[_Traffic], now: Reading[_Traffic], size: Callable[[_Traffic], int]) -> Reading[int]:
    """Return bytes a second from one reading to the next."""
    if isinstance(now, Unknown):
        return now
    if isinstance(before, Unknown):
        return _FIRST_TRAFFIC
    passed_us, moved = now.time_us - before.time_us, size(now) - size(before)
    if passed_us <= 0 or moved < 0:
        return Unknown("the counter began anew")
    return round(moved * 1e6 / passed_us)


def _traffic(call: Caller, handle: object) -> Reading[_Traffic]:
    """Read the counters of NVLink, which NVML has in KiB, without the protocol's overhead."""

    def read() -> _Traffic:
        ids = [declared(f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{way}") for way in ("RX", "TX")]
        values = call("nvmlDeviceGetFieldValues", handle, [(each, _ALL_LINKS) for each in ids])
        for value in values:
            call.check("nvmlDeviceGetFieldValues", value.nvmlReturn)
        received, sent = (int(value.value.ullVal) * 1024 for value in values)
        return _Traffic(received, sent, int(values[0].timestamp))

    return reading(read)


# ---- the handles


_READS: Mapping[str, Read[Any]] = {
    "power_w": _watts("nvmlDeviceGetPowerUsage"),
    "power_limit_w": _watts("nvmlDeviceGetEnforcedPowerLimit"),
    "temperature_c": _number("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
    "temperature_limit_c": _SLOWDOWN_TEMPERATURE,
    "fan_percent": _number("nvmlDeviceGetFanSpeed"),
    "sm_clock_mhz": _number("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
    "memory_clock_mhz": _number("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
    "pcie_generation": _number("nvmlDeviceGetCurrPcieLinkGeneration"),
    "pcie_width": _number("nvmlDeviceGetCurrPcieLinkWidth"),
    "pcie_rx_bytes_per_s": _pcie_traffic(pynvml.NVML_PCIE_UTIL_RX_BYTES),
    "pcie_tx_bytes_per_s": _pcie_traffic(pynvml.NVML_PCIE_UTIL_TX_BYTES),
    "energy_j": _joules,
    "ecc_corrected": _ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": _ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    "performance_state": _performance_state,
    "throttle": _throttle,
}
"""How each reading of a GPU is fetched that is one call of its own."""

_UTILIZATION = frozenset({"utilization_percent", "memory_utilization_percent"})
_NVLINK = frozenset({"nvlink_rx_bytes", "nvlink_tx_bytes", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s"})


class Nvml(Called[Caller]):
    """The `GpuBackend` of NVIDIA."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        super().__init__(Caller(), proc)

    def start(self) -> None:
        """Start NVML as `GpuBackend.start` has it."""
        start(self._call, self._proc)

    def stop(self) -> None:
        """Stop NVML as `GpuBackend.stop` has it."""
        stop(self._call)

    def driver_version(self) -> Reading[str]:
        """Read the driver's version as nvidia-smi prints it."""
        return reading(lambda: text(self._call("nvmlSystemGetDriverVersion")))

    def runtime_version(self) -> Reading[str]:
        """Read the newest CUDA version that the driver runs, "12.4", as nvidia-smi prints it."""
        version = number(self._call, "nvmlSystemGetCudaDriverVersion")
        return version if isinstance(version, Unknown) else f"{version // 1000}.{version % 1000 // 10}"

    def count(self) -> int:
        """Count the GPUs as `GpuBackend.count` has it."""
        return int(self._call("nvmlDeviceGetCount"))

    def gpu(self, index: int) -> NvmlGpu:
        """Return a GPU as `GpuBackend.gpu` has it."""
        try:
            handle = self._call("nvmlDeviceGetHandleByIndex", index)
            found = identity(self._call, handle)
        except NvmlFault as fault:
            if fault.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                raise NoSuchGpu(fault.reason) from fault
            raise
        self._call.missing.clear()  # the driver may be another one since
        return NvmlGpu(self._call, handle, found)

    def check_answers(self) -> None:
        """Judge as `GpuBackend.check_answers` has it."""
        if pynvml.NVML_SUCCESS not in self._call.codes and pynvml.NVML_ERROR_UNKNOWN in self._call.codes:
            raise Gone("the driver answers nothing but errors")

    def bus(self) -> frozenset[str]:
        """Return the PCI addresses at which the kernel's driver has a GPU."""
        folder = self._proc / "driver" / "nvidia" / "gpus"
        return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()


class NvmlGpu:
    """The `GpuHandle` of NVIDIA."""

    def __init__(self, call: Caller, handle: object, identity: Identity) -> None:
        self.identity = identity
        self._call = call
        self._handle = handle
        self._sampled_us = 0
        self._traffic: Reading[_Traffic] = _FIRST_TRAFFIC

    def memory(self) -> Reading[Memory]:
        """Read its memory; of a divided GPU few users may."""
        return memory(self._call, self._handle)

    def compute_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """List the processes with a CUDA context, clients of MPS included."""
        return compute_processes(self._call, self._handle)

    def graphics_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """List the processes that draw."""
        return reading(lambda: _processes(self._call, "nvmlDeviceGetGraphicsRunningProcesses", self._handle))

    def process_percents(self) -> Reading[Mapping[int, int]]:
        """Read shares of the SMs in NVML's newest samples, which leave out processes that did nothing."""
        found = sm_percents(self._call, self._handle, self._sampled_us)
        self._sampled_us = 0 if isinstance(found, Unknown) else found[1]
        return found if isinstance(found, Unknown) else found[0]

    def read(self, names: Collection[str]) -> Telemetry:
        """Read them as `GpuHandle.read`; both utilizations are one call, and so is NVLink."""
        call, handle = self._call, self._handle
        found = {name: _READS[name](call, handle) for name in names if name in _READS}
        if not _UTILIZATION.isdisjoint(names):
            rates = utilization(call, handle)
            kernels, accesses = (rates, rates) if isinstance(rates, Unknown) else rates
            found |= {"utilization_percent": kernels, "memory_utilization_percent": accesses}
        if not _NVLINK.isdisjoint(names):
            found |= self._links()
        return Telemetry(**found)

    def _links(self) -> dict[str, Reading[int]]:
        """Read NVLink's counters, and their rates since the last time."""
        before, links = self._traffic, _traffic(self._call, self._handle)
        self._traffic = links
        return {
            "nvlink_rx_bytes": links if isinstance(links, Unknown) else links.rx_bytes,
            "nvlink_tx_bytes": links if isinstance(links, Unknown) else links.tx_bytes,
            "nvlink_rx_bytes_per_s": _rate(before, links, lambda traffic: traffic.rx_bytes),
            "nvlink_tx_bytes_per_s": _rate(before, links, lambda traffic: traffic.tx_bytes),
        }

    def divided(self) -> Reading[bool]:
        """Read whether MIG is on."""
        return reading(lambda: bool(self._call("nvmlDeviceGetMigMode", self._handle)[0]))

    def instances(self) -> tuple[NvmlInstance, ...]:
        """List its instances, which leave gaps between their indices when they are destroyed."""
        places = number(self._call, "nvmlDeviceGetMaxMigDeviceCount", self._handle)
        if isinstance(places, Unknown):
            return ()
        found = (self._instance(index) for index in range(places))
        return tuple(instance for instance in found if instance is not None)

    def _instance(self, index: int) -> NvmlInstance | None:
        """Return the instance at a place; None if missing."""
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
    handle: object = field(compare=False)

    def memory(self) -> Reading[Memory]:
        """Read its own memory."""
        return memory(self.call, self.handle)

    def compute_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """List its own processes."""
        return compute_processes(self.call, self.handle)
