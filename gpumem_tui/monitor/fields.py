"""What NVML tells, one function a field: a value, or `Unknown` with the reason. A GPU that is lost raises `nvml.Gone`.

Imports pynvml: import this module where it is needed, not at a program's start.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from gpumem_tui.memory import Unknown, Value
from gpumem_tui.monitor.nvml import NOT_AVAILABLE, Caller, Fault, declared, number, reading, refused, text
from gpumem_tui.monitor.snapshot import Memory, Reading


def _watts(milliwatts: Reading[int]) -> Reading[float]:
    return milliwatts if isinstance(milliwatts, Unknown) else milliwatts / 1000


def _bytes(kib: Reading[int]) -> Reading[int]:
    return kib if isinstance(kib, Unknown) else kib * 1024


# ---- the system


def driver_version(call: Caller) -> Reading[str]:
    """As nvidia-smi prints it."""
    return reading(lambda: text(call("nvmlSystemGetDriverVersion")))


def cuda_version(call: Caller) -> Reading[str]:
    """The newest CUDA version that the driver runs, "12.4"."""
    version = number(call, "nvmlSystemGetCudaDriverVersion")
    return version if isinstance(version, Unknown) else f"{version // 1000}.{version % 1000 // 10}"


# ---- one GPU: what does not change


@dataclass(frozen=True)
class Identity:
    """What names a GPU. `virtualization` is an nvmlGpuVirtualizationMode_t, 0 for a bare GPU."""

    uuid: str
    name: str
    bus_id: str
    compute_capability: Reading[tuple[int, int]]
    virtualization: int


def identity(call: Caller, handle: Any) -> Identity:
    """Read once for each handle.

    Raises:
        Fault: the UUID cannot be read.
    """
    name = reading(lambda: text(call("nvmlDeviceGetName", handle)))
    bus_id = reading(lambda: text(call("nvmlDeviceGetPciInfo", handle).busId))
    virtualization = number(call, "nvmlDeviceGetVirtualizationMode", handle)
    return Identity(
        uuid=text(call("nvmlDeviceGetUUID", handle)),
        name="unnamed GPU" if isinstance(name, Unknown) else name,
        bus_id="" if isinstance(bus_id, Unknown) else bus_id,
        compute_capability=compute_capability(call, handle),
        virtualization=virtualization if isinstance(virtualization, int) else 0,
    )


def compute_capability(call: Caller, handle: Any) -> Reading[tuple[int, int]]:
    """(8, 0) for sm_80."""

    def read() -> tuple[int, int]:
        major, minor = call("nvmlDeviceGetCudaComputeCapability", handle)
        return int(major), int(minor)

    return reading(read)


# ---- one GPU: memory and processes


_MEMORY_V2 = "nvmlDeviceGetMemoryInfo_v2"
_NO_SECOND_VERSION = (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)


def memory(call: Caller, handle: Any) -> Reading[Memory]:
    """By the second version of the call, which tells the driver's reserve apart, or the first on older drivers."""
    if _MEMORY_V2 not in call.missing:
        try:
            found = call("nvmlDeviceGetMemoryInfo", handle, version=declared("nvmlMemory_v2"))
            return _memory(found, _size(int(found.reserved)))
        except Fault as fault:
            if fault.code not in _NO_SECOND_VERSION:
                return refused(fault)
            call.missing.add(_MEMORY_V2)
    older = Unknown("drivers before 510 count it as used")
    return reading(lambda: _memory(call("nvmlDeviceGetMemoryInfo", handle), older))


def _memory(found: Any, reserved_bytes: Value) -> Reading[Memory]:
    if any(value in NOT_AVAILABLE for value in (found.total, found.used, found.free)):
        return Unknown("not available")
    return Memory(int(found.total), reserved_bytes, int(found.used), int(found.free))


def _size(size_bytes: int) -> Value:
    return Unknown("not available") if size_bytes in NOT_AVAILABLE else size_bytes


@dataclass(frozen=True)
class Running:
    """A process as a list of NVML has it."""

    pid: int
    used_bytes: Value


def compute_processes(call: Caller, handle: Any) -> Reading[tuple[Running, ...]]:
    """Processes with a CUDA context, clients of MPS included."""
    return reading(lambda: _processes(call, "nvmlDeviceGetComputeRunningProcesses", handle))


def graphics_processes(call: Caller, handle: Any) -> Reading[tuple[Running, ...]]:
    """Processes that draw."""
    return reading(lambda: _processes(call, "nvmlDeviceGetGraphicsRunningProcesses", handle))


def _processes(call: Caller, function: str, handle: Any) -> tuple[Running, ...]:
    kind = declared("c_nvmlProcessInfo_v2_t")
    for version in ("_v3", "_v2"):
        name = function + version
        if name in call.missing or (version == "_v3" and _longer_v3_structs()):
            continue
        try:
            found = _array(call, name, kind, lambda count, infos: (handle, count, infos))
        except Fault as fault:
            if fault.code != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
        else:
            return tuple(Running(int(p.pid), _size(int(p.usedGpuMemory))) for p in found)
    raise Fault(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "the driver is too old to list processes")


def _longer_v3_structs() -> bool:
    """Drivers 535.43 to 535.86 fill v3 with structs that nvidia-ml-py does not declare, so pids come out wrong.

    They are those that have the first of these symbols and not the second (found by nvitop's authors, issue 75).
    """
    library = pynvml.nvmlLib
    return hasattr(library, "nvmlDeviceGetConfComputeMemSizeInfo") and not hasattr(
        library, "nvmlDeviceGetRunningProcessDetailList"
    )


_MOST_ENTRIES = 2**20


def _array(call: Caller, function: str, kind: Any, arguments: Callable[[Any, Any], tuple[Any, ...]]) -> list[Any]:
    """What a function that fills an array has.

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
    raise Fault(pynvml.NVML_ERROR_INSUFFICIENT_SIZE, "the driver gives no end of entries")


def sm_percents(call: Caller, handle: Any, since_us: int) -> Reading[tuple[Mapping[int, int], int]]:
    """Share of the SMs by pid in the newest sample after `since_us` (NVML's clock), and that sample's time.

    NVML leaves out processes that did nothing.
    """

    def read() -> tuple[Mapping[int, int], int]:
        function, kind = "nvmlDeviceGetProcessUtilization", declared("c_nvmlProcessUtilizationSample_t")
        try:
            samples = _array(
                call, function, kind, lambda count, array: (handle, array, count, ctypes.c_ulonglong(since_us))
            )
        except Fault as fault:
            if fault.code != pynvml.NVML_ERROR_NOT_FOUND:
                raise
            return {}, since_us
        samples = [sample for sample in samples if sample.pid and sample.smUtil <= 100]
        samples.sort(key=lambda sample: sample.timeStamp)
        return {s.pid: s.smUtil for s in samples}, max((s.timeStamp for s in samples), default=since_us)

    return reading(read)


# ---- one GPU: what it does


_PERCENT = 100


def utilization(call: Caller, handle: Any) -> Reading[tuple[int, int]]:
    """Per cent of the last sample period in which a kernel ran, and in which memory was read or written."""

    def read() -> Reading[tuple[int, int]]:
        rates = call("nvmlDeviceGetUtilizationRates", handle)
        return (
            Unknown("not available") if max(rates.gpu, rates.memory) > _PERCENT else (int(rates.gpu), int(rates.memory))
        )

    return reading(read)


def power_w(call: Caller, handle: Any) -> Reading[float]:
    """Watts that the board draws."""
    return _watts(number(call, "nvmlDeviceGetPowerUsage", handle))


def power_limit_w(call: Caller, handle: Any) -> Reading[float]:
    """Watts that it may draw at most."""
    return _watts(number(call, "nvmlDeviceGetEnforcedPowerLimit", handle))


def temperature_c(call: Caller, handle: Any) -> Reading[int]:
    """Of the chip."""
    return number(call, "nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU)


def temperature_limit_c(call: Caller, handle: Any) -> Reading[int]:
    """Where the clocks are lowered."""
    return number(call, "nvmlDeviceGetTemperatureThreshold", handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)


def fan_percent(call: Caller, handle: Any) -> Reading[int]:
    """Of the fan's full speed."""
    return number(call, "nvmlDeviceGetFanSpeed", handle)


def sm_clock_mhz(call: Caller, handle: Any) -> Reading[int]:
    """Of the streaming multiprocessors, now."""
    return number(call, "nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM)


def memory_clock_mhz(call: Caller, handle: Any) -> Reading[int]:
    """Of the device's memory, now."""
    return number(call, "nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_MEM)


def pcie_generation(call: Caller, handle: Any) -> Reading[int]:
    """The link's, now: an idle GPU lowers it."""
    return number(call, "nvmlDeviceGetCurrPcieLinkGeneration", handle)


def pcie_width(call: Caller, handle: Any) -> Reading[int]:
    """The link's lanes, now."""
    return number(call, "nvmlDeviceGetCurrPcieLinkWidth", handle)


def pcie_rx_bytes_per_s(call: Caller, handle: Any) -> Reading[int]:
    """To the GPU, over the 20 ms that the call takes."""
    return _bytes(number(call, "nvmlDeviceGetPcieThroughput", handle, pynvml.NVML_PCIE_UTIL_RX_BYTES))


def pcie_tx_bytes_per_s(call: Caller, handle: Any) -> Reading[int]:
    """From the GPU, over the 20 ms that the call takes."""
    return _bytes(number(call, "nvmlDeviceGetPcieThroughput", handle, pynvml.NVML_PCIE_UTIL_TX_BYTES))


def ecc_corrected(call: Caller, handle: Any) -> Reading[int]:
    """Errors corrected since the driver was loaded."""
    return _ecc_errors(call, handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)


def ecc_uncorrected(call: Caller, handle: Any) -> Reading[int]:
    """Errors that could not be corrected since the driver was loaded."""
    return _ecc_errors(call, handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)


def _ecc_errors(call: Caller, handle: Any, kind: int) -> Reading[int]:
    return number(call, "nvmlDeviceGetTotalEccErrors", handle, kind, pynvml.NVML_VOLATILE_ECC)


def performance_state(call: Caller, handle: Any) -> Reading[int]:
    """0 (fastest) to 15."""
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


def throttle(call: Caller, handle: Any) -> Reading[tuple[str, ...]]:
    """Why the clocks are lowered now. Idleness and clocks that a user set are no reasons."""
    bits = number(call, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if isinstance(bits, Unknown):
        return bits
    return tuple(words for bit, words in _THROTTLES.items() if bits & bit)


def mig_mode(call: Caller, handle: Any) -> Reading[bool]:
    """Whether the GPU is divided into instances now."""
    return reading(lambda: bool(call("nvmlDeviceGetMigMode", handle)[0]))
