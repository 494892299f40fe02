"""Starting NVML and calling it: every call passes here, is counted, and fails with a reason in a user's words.

Imports pynvml: import this module where it is needed, not at a program's start.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Fault, Gone, StartFault
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.vendors.calling import Calls, refused
from gpumem_tui.monitor.vendors.nvidia import NO_DRIVER, NO_DRIVER_LOADED

T = TypeVar("T")

NOT_AVAILABLE = (2**64 - 1, 2**32 - 1)
"""NVML's marks for "no figure", by the width of the field."""

_REASONS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission",
    pynvml.NVML_ERROR_NOT_FOUND: "not found",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not in this driver",
    pynvml.NVML_ERROR_TIMEOUT: "timed out",
    pynvml.NVML_ERROR_GPU_IS_LOST: "GPU is lost",
    pynvml.NVML_ERROR_RESET_REQUIRED: "GPU needs a reset",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver is not loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver and library versions differ",
    pynvml.NVML_ERROR_UNINITIALIZED: "driver was shut down",
    pynvml.NVML_ERROR_NO_DATA: "no data",
    pynvml.NVML_ERROR_UNKNOWN: "unknown driver error",
}
_GONE = {
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    pynvml.NVML_ERROR_UNINITIALIZED,
}


class NvmlFault(Fault):
    """A call failed. `code` is NVML's (nvmlReturn_t)."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class NvmlGone(Gone, NvmlFault):
    """The GPU, or the driver under it, does not answer at all."""


class Caller(Calls):
    """Calls NVML for one thread: all calls pass here."""

    def __call__(self, function: str, *arguments: object, **options: object) -> Any:
        """Return what pynvml's function of this name returns.

        Raises:
            NvmlGone: the GPU or the driver is lost.
            NvmlFault: any other error.
        """
        return self._make(function, lambda: getattr(pynvml, function)(*arguments, **options))

    def direct(self, function: str, *arguments: object) -> int:
        """Return the code of the C function of this name: NVML_SUCCESS or NVML_ERROR_INSUFFICIENT_SIZE.

        Raises:
            NvmlGone, NvmlFault: as above, for any other code.
        """

        def call() -> int:
            symbol = getattr(pynvml.nvmlLib, function, None)
            code = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND if symbol is None else int(symbol(*arguments))
            if code not in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_INSUFFICIENT_SIZE):
                raise pynvml.NVMLError(code)
            return code

        return self._make(function, call)

    def check(self, function: str, code: int) -> None:
        """Judge a code that a function wrote next to each of several values, as if it had returned it.

        Raises:
            NvmlGone, NvmlFault: as above.
        """
        if code != pynvml.NVML_SUCCESS:
            raise self._fault(function, pynvml.NVMLError(code))

    def _fault(self, function: str, error: pynvml.NVMLError) -> NvmlFault:
        self.codes.add(error.value)
        if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            self.missing.add(function)
        reason = _REASONS.get(error.value, f"NVML error: {error}")
        return (NvmlGone if error.value in _GONE else NvmlFault)(error.value, reason)

    def _make(self, function: str, call: Callable[[], T]) -> T:
        try:
            with self.under_way(function):
                result = call()
            self.codes.add(pynvml.NVML_SUCCESS)
            return result
        except pynvml.NVMLError as error:
            raise self._fault(function, error) from error
        except AttributeError as error:
            self.missing.add(function)
            raise not_declared() from error


def start(call: Caller, proc: Path) -> None:
    """Load the library and start it. Each success needs a `stop`.

    Raises:
        StartFault: it does not start.
    """
    try:
        call("nvmlInit")
    except NvmlFault as fault:
        raise _start_fault(fault, proc) from fault


def stop(call: Caller) -> None:
    """Let go of NVML; nothing happens if it was not started."""
    try:
        call("nvmlShutdown")
    except Fault:
        return  # a driver that is gone cannot be shut down, and need not be


def _start_fault(fault: NvmlFault, proc: Path) -> StartFault:
    if fault.code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and (proc / "driver/nvidia/version").exists():
        return StartFault(
            "the NVIDIA driver runs, but its library libnvidia-ml.so.1 is not here",
            "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    if fault.code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        remedy = "install it, or give the container its GPUs (docker: --gpus all)"
        return StartFault(NO_DRIVER, remedy, no_driver=True)
    if fault.code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return StartFault(NO_DRIVER_LOADED, "load it with `sudo modprobe nvidia`, or reboot")
    if fault.code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return StartFault("NVIDIA driver and library versions differ: reboot, or reload the driver")
    if fault.code == pynvml.NVML_ERROR_NO_PERMISSION:
        return StartFault(
            "no permission to use the NVIDIA driver", "see who may open /dev/nvidiactl with `ls -l /dev/nvidia*`"
        )
    return StartFault(f"NVML does not start: {fault.__cause__}", "see `sudo dmesg | grep -i nvrm`")


def text(value: str | bytes) -> str:
    """Return text, of bytes too, as older bindings return them."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def not_declared() -> NvmlFault:
    """Make the fault that the installed bindings lack a function, a struct or a field of one."""
    return NvmlFault(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "not in this nvidia-ml-py: upgrade it")


def declared(name: str) -> object:
    """Return what the bindings declare under a name.

    Raises:
        NvmlFault: they do not.
    """
    found: object = getattr(pynvml, name, None)
    if found is None:
        raise not_declared()
    return found


def structure(name: str) -> type[ctypes.Structure]:
    """Return the C struct that the bindings declare under a name; raises as `declared`."""
    found = declared(name)
    if not isinstance(found, type) or not issubclass(found, ctypes.Structure):
        raise not_declared()
    return found


def reading(read: Callable[[], Reading[T]]) -> Reading[T]:
    """Return what `read` returns, or why the call in it failed. A lost GPU still raises `Gone`."""
    try:
        return read()
    except Fault as fault:
        return refused(fault)
    except AttributeError:  # a field that an older struct has not
        return refused(not_declared())


def number(call: Caller, function: str, *arguments: object) -> Reading[int]:
    """Read a plain number in NVML's own unit."""

    def read() -> Reading[int]:
        value = int(call(function, *arguments))
        return Unknown("not available") if value in NOT_AVAILABLE else value

    return reading(read)
