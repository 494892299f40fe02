"""NVML's C functions that the Monitor reads, by ctypes: names, numbers and structs are those of NVIDIA's nvml.h.

Its Python binding (nvidia-ml-py) declares all of NVML at each import, which takes as long as all of our own modules and
4 MiB. `tests/monitor/test_nvml.py` holds what is declared here to that binding.
"""

# ruff: noqa: D101, N801, N816  the names are NVML's

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int, c_int64, c_uint, c_uint32, c_ulonglong, c_void_p
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_INSUFFICIENT_SIZE = 7
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_ERROR_NO_DATA = 21
NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25
NVML_ERROR_UNKNOWN = 999

NVML_TEMPERATURE_GPU = 0
NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_PCIE_UTIL_TX_BYTES = 0
NVML_PCIE_UTIL_RX_BYTES = 1
NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_PSTATE_UNKNOWN = 32
NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU = 3
NVML_GPU_VIRTUALIZATION_MODE_HOST_VSGA = 4
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139

nvmlClocksThrottleReasonSwPowerCap = 0x4
nvmlClocksThrottleReasonHwSlowdown = 0x8
nvmlClocksThrottleReasonSyncBoost = 0x10
nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80


class nvmlPciInfo_t(ctypes.Structure):
    _fields_ = [
        ("busIdLegacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", c_char * 32),
    ]


class nvmlMemory_t(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class nvmlMemory_v2_t(ctypes.Structure):
    _fields_ = [
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


class nvmlProcessInfo_v2_t(ctypes.Structure):
    _fields_ = [
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    ]


class nvmlProcessUtilizationSample_t(ctypes.Structure):
    _fields_ = [
        ("pid", c_uint),
        ("timeStamp", c_ulonglong),
        ("smUtil", c_uint),
        ("memUtil", c_uint),
        ("encUtil", c_uint),
        ("decUtil", c_uint),
    ]


class nvmlUtilization_t(ctypes.Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class nvmlFieldValue_t(ctypes.Structure):
    _fields_ = [
        ("fieldId", c_uint32),
        ("scopeId", c_uint32),
        ("timestamp", c_int64),
        ("latencyUsec", c_int64),
        ("valueType", c_uint),
        ("nvmlReturn", c_uint),
        ("ullVal", c_ulonglong),  # of a union of eight bytes the member that is read
    ]


_WRITTEN: dict[str, tuple[type[Any], ...]] = {
    "nvmlSystemGetDriverVersion": (c_char * 80,),
    "nvmlSystemGetCudaDriverVersion": (c_int,),
    "nvmlDeviceGetCount": (c_uint,),
    "nvmlDeviceGetHandleByIndex": (c_void_p,),
    "nvmlDeviceGetName": (c_char * 96,),
    "nvmlDeviceGetUUID": (c_char * 96,),
    "nvmlDeviceGetPciInfo": (nvmlPciInfo_t,),
    "nvmlDeviceGetVirtualizationMode": (c_uint,),
    "nvmlDeviceGetCudaComputeCapability": (c_int, c_int),
    "nvmlDeviceGetMemoryInfo": (nvmlMemory_t,),
    "nvmlDeviceGetUtilizationRates": (nvmlUtilization_t,),
    "nvmlDeviceGetPowerUsage": (c_uint,),
    "nvmlDeviceGetEnforcedPowerLimit": (c_uint,),
    "nvmlDeviceGetTemperature": (c_uint,),
    "nvmlDeviceGetTemperatureThreshold": (c_uint,),
    "nvmlDeviceGetFanSpeed": (c_uint,),
    "nvmlDeviceGetClockInfo": (c_uint,),
    "nvmlDeviceGetCurrPcieLinkGeneration": (c_uint,),
    "nvmlDeviceGetCurrPcieLinkWidth": (c_uint,),
    "nvmlDeviceGetPcieThroughput": (c_uint,),
    "nvmlDeviceGetTotalEnergyConsumption": (c_ulonglong,),
    "nvmlDeviceGetTotalEccErrors": (c_ulonglong,),
    "nvmlDeviceGetPerformanceState": (c_uint,),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (c_ulonglong,),
    "nvmlDeviceGetMigMode": (c_uint, c_uint),
    "nvmlDeviceGetMaxMigDeviceCount": (c_uint,),
    "nvmlDeviceGetMigDeviceHandleByIndex": (c_void_p,),
}
"""By function what it writes through pointers that follow its other arguments; after a text's comes its length. A
function that is not here is given all of its arguments."""

_SYMBOLS = {
    "nvmlInit": "nvmlInit_v2",
    "nvmlDeviceGetCount": "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex": "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetPciInfo": "nvmlDeviceGetPciInfo_v3",
}
"""The symbols of those that nvml.h defines as their newest version."""

_loaded: list[ctypes.CDLL] = []


class NvmlError(Exception):
    """A function returned something else than NVML_SUCCESS. `code`: its nvmlReturn_t."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        """Return NVML's own words for it."""
        words = getattr(_loaded[0], "nvmlErrorString", None) if _loaded else None
        if words is None:
            return f"code {self.code}"
        words.restype = ctypes.c_char_p
        found: bytes = words(self.code)
        return found.decode(errors="replace")


def library() -> ctypes.CDLL:
    """Return NVML's library, loaded by the first call.

    Raises:
        NvmlError: NVML_ERROR_LIBRARY_NOT_FOUND.
    """
    if not _loaded:
        try:
            _loaded.append(ctypes.CDLL("libnvidia-ml.so.1"))
        except OSError as error:
            raise NvmlError(NVML_ERROR_LIBRARY_NOT_FOUND) from error
    return _loaded[0]


def code_of(function: str, *arguments: object) -> int:
    """Call a C function and return its code, also where this driver has no such function."""
    try:
        found = getattr(library(), _SYMBOLS.get(function, function))
    except AttributeError:
        return NVML_ERROR_FUNCTION_NOT_FOUND
    return int(found(*arguments))


def ask(function: str, *arguments: object) -> Any:
    """Call a C function and return what it writes: a number, text, a handle or a struct, or several of them.

    Raises:
        NvmlError: it returned another code than NVML_SUCCESS, or there is no such function.
    """
    written = [kind() for kind in _WRITTEN.get(function, ())]
    given = list(arguments)
    for each in written:
        given.append(ctypes.byref(each))
        if isinstance(each, ctypes.Array):
            given.append(len(each))
    code = code_of(function, *given)
    if code != NVML_SUCCESS:
        raise NvmlError(code)
    found = tuple(map(_plain, written))
    return found[0] if len(found) == 1 else found


def _plain(written: Any) -> Any:
    """Return Python's value; a struct and a handle are given to NVML again as they are."""
    if isinstance(written, ctypes.Structure | c_void_p):
        return written
    return written.value.decode(errors="replace") if isinstance(written, ctypes.Array) else written.value
