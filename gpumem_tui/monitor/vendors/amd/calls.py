"""Starting AMD SMI and calling it: every call passes here, is counted, and fails with a reason in a user's words.

The binding loads its library when it is imported, prints where it finds none, and does not count its starts: a second
`amdsmi_shut_down` ends it for every thread. So the library is loaded first, and starts are counted, here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, TypeVar

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Fault, Gone, StartFault
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.vendors.amd import NO_DRIVER, NO_LIBRARY
from gpumem_tui.monitor.vendors.calling import Calls, refused
from gpumem_tui.text import file_text

T = TypeVar("T")

SUCCESS, NO_PERMISSION, NOT_INITIALIZED, OUT_OF_RESOURCES = 0, 10, 32, 15
"""Codes of ``amdsmi_status_t`` in amdsmi.h, as are those below: equal in each version."""
_UNKNOWN_ERROR = 2**32 - 1
_REASONS = {
    2: "not supported",
    3: "not supported",
    6: "the kernel's graphics interface failed",
    8: "timed out",
    NO_PERMISSION: "no permission",
    12: "the GPU does not answer (I/O error)",
    14: "a file of the driver cannot be read",
    OUT_OF_RESOURCES: "more entries than the library lists",
    30: "busy",
    31: "not found",
    NOT_INITIALIZED: "driver was shut down",
    34: "driver is not loaded",
    40: "no data",
    42: "the GPU does not answer (I/O error)",
    43: "the GPU does not answer (no such device)",
    54: "the driver could not be started again",
    _UNKNOWN_ERROR: "unknown driver error",
}
_GONE = {NOT_INITIALIZED, 34, 54}
LOST = {6, 12, 14, 20, 31, 42, 43, 52, _UNKNOWN_ERROR}
"""The code that reading its memory returns where the GPU is lost: a file in sysfs that cannot be read
(`ErrnoToRsmiStatus`)."""

NOT_AVAILABLE = (2**64 - 1, 2**32 - 1, 2**16 - 1, "N/A")
"""Marks for "no figure": the largest number of the field's width, which the binding turns into text in places."""


class AmdFault(Fault):
    """A call failed. `code`: AMD SMI's, 0 where the binding itself failed."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class AmdGone(Gone, AmdFault):
    """The GPU, or the driver under it, does not answer at all."""


class _Library:
    """The binding, and how many have started it: there is one for the process."""

    def __init__(self) -> None:
        self.binding: ModuleType | None = None
        self.starts = 0
        self.lock = Lock()


_LIBRARY = _Library()


def binding() -> ModuleType:
    """Return the binding.

    Raises:
        AmdGone: nobody has started it.
    """
    if _LIBRARY.binding is None:
        raise AmdGone(NOT_INITIALIZED, _REASONS[NOT_INITIALIZED])
    return _LIBRARY.binding


class AmdCaller(Calls):
    """Calls AMD SMI for one thread: all calls pass here."""

    def __call__(self, function: str, *arguments: object) -> Any:
        """Return what the binding's function of this name returns.

        Raises:
            AmdGone: the driver is lost.
            AmdFault: any other error, also where the binding cannot make sense of an answer.
        """
        return self._make(function, lambda: getattr(binding(), function)(*arguments))

    def direct(self, function: str, *arguments: object) -> None:
        """Call the C function of this name.

        Raises:
            AmdGone, AmdFault: as above.
        """

        def call() -> None:
            code = getattr(binding().amdsmi_interface.amdsmi_wrapper, function)(*arguments)
            if code != SUCCESS:
                raise _fault(code)

        self._make(function, call)

    def _make(self, function: str, call: Callable[[], T]) -> T:
        try:
            with self.under_way(function):
                result = call()
        except AmdFault as fault:
            self.codes.add(fault.code)
            raise
        except AttributeError as error:
            self.missing.add(function)
            raise not_declared() from error
        except Exception as error:
            code = getattr(error, "err_code", None)
            if code is None:  # UnicodeDecodeError of a name, ValueError of a serial number: the library did answer
                self.codes.add(SUCCESS)
                raise AmdFault(0, f"amdsmi cannot read the answer: {type(error).__name__}") from error
            self.codes.add(code)
            raise _fault(code) from error
        self.codes.add(SUCCESS)
        return result


def _fault(code: int) -> AmdFault:
    return (AmdGone if code in _GONE else AmdFault)(code, _REASONS.get(code, f"AMD SMI error {code}"))


def not_declared() -> AmdFault:
    """Make the fault that the installed binding lacks a function, a struct or a field of one."""
    return AmdFault(0, "not in this amdsmi: upgrade it")


def reading(read: Callable[[], Reading[T]]) -> Reading[T]:
    """Return what `read` returns, or why the call in it failed. A lost GPU still raises `Gone`."""
    try:
        return read()
    except Fault as fault:
        return refused(fault)
    except (AttributeError, KeyError):  # a field that an older binding has not
        return refused(not_declared())


def figure(value: float | str) -> Reading[int]:
    """Return a number of an answer, unless it is a mark for no figure."""
    return Unknown("not available") if value in NOT_AVAILABLE else int(value)


# ---- starting and stopping


def start(call: AmdCaller, proc: Path) -> None:
    """Load the library and start it, unless somebody has. Each success needs a `stop`.

    A kernel that shows no driver counts only where the library finds no GPU either: a container may hide the one, not
    the other.

    Raises:
        StartFault: it does not start.
    """
    has_driver = _has_driver(proc)
    with _LIBRARY.lock:
        try:
            if _LIBRARY.binding is None:
                _load_library()
                _LIBRARY.binding = _load()
            if not _LIBRARY.starts:
                _initialize(call)
            if not has_driver and not call("amdsmi_get_processor_handles"):
                _shut_down(call)
                raise StartFault(NO_DRIVER)
        except StartFault as fault:
            if has_driver:
                raise
            raise StartFault(NO_DRIVER, _GET_DRIVER, no_driver=True) from fault
        _LIBRARY.starts += 1


_GET_DRIVER = "load it with `sudo modprobe amdgpu`, or give the container its GPUs (docker: --device=/dev/kfd)"


def _initialize(call: AmdCaller) -> None:
    try:
        call("amdsmi_init")
    except AmdFault as fault:
        raise _start_fault(fault) from fault


def stop(call: AmdCaller) -> None:
    """Let go of the library; who was the last ends it."""
    with _LIBRARY.lock:
        _LIBRARY.starts -= 1
        if not _LIBRARY.starts:
            _shut_down(call)


def _shut_down(call: AmdCaller) -> None:
    try:
        call("amdsmi_shut_down")
    except Fault:
        return  # a driver that is gone cannot be shut down, and need not be


def _has_driver(proc: Path) -> bool:
    """Return whether the kernel runs amdgpu: as a module, or built in with its device for computing (kfd)."""
    modules, devices = (file_text(proc / name).splitlines() for name in ("modules", "devices"))
    return any(line.startswith("amdgpu ") for line in modules) or any(line.split()[1:] == ["kfd"] for line in devices)


def _rocm() -> str:
    return os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH") or "/opt/rocm"


def _load() -> ModuleType:
    """Import the binding: ROCm's own, which fits its library for certain, or an installed one.

    Raises:
        StartFault: the library or the binding is not there, or they do not fit.
    """
    own = Path(_rocm(), "share/amd_smi")
    if (own / "amdsmi").is_dir() and str(own) not in sys.path:
        sys.path.insert(0, str(own))
        invalidate_caches()
    try:
        found = import_module("amdsmi")
    except ImportError as error:
        remedy = "`pip install 'gpumem-tui[amd]'`, amdsmi of the same version as ROCm"
        raise StartFault(f"the AMD driver runs, but its Python binding cannot be used ({error})", remedy) from error
    except (AttributeError, OSError, KeyError) as error:
        words = str(error).strip("'\"") or type(error).__name__
        remedy = "install the amdsmi of the same version as ROCm: `pip install amdsmi==VERSION`"
        raise StartFault(f"the AMD driver's library and its Python binding do not fit ({words})", remedy) from error
    wanted = file_text(Path(_rocm(), ".info/version")).partition("\n")[0].strip()  # such as 7.0.2-56
    version = str(getattr(found, "__version__", ""))
    if wanted and "site-packages" in str(found.__file__) and version.split(".")[:2] != wanted.split(".")[:2]:
        # The binding hands over memory of the size that it knows: a library with longer structs writes behind it.
        del sys.modules["amdsmi"]
        remedy = f"`pip install amdsmi=={'.'.join(wanted.split('.')[:2])}.*`"
        raise StartFault(f"amdsmi {version} is not made for ROCm {wanted}", remedy)
    return found


def _load_library() -> None:
    """Load the library as the binding looks for it, which prints where it finds none, and then cannot be imported.

    Raises:
        StartFault: it is nowhere, or cannot be loaded.
    """
    reasons = []
    for place in _places():
        try:
            ctypes.CDLL(place)
        except OSError as error:
            reasons.append(str(error))
        else:
            return
    worse = next((reason for reason in reasons if "No such file" not in reason or "libamd_smi" not in reason), "")
    if worse:
        raise StartFault(f"{NO_LIBRARY} cannot be loaded ({worse})", "reinstall ROCm's package amd-smi-lib")
    raise StartFault(f"{NO_LIBRARY} is not here", "install ROCm's package amd-smi-lib, or give the container ROCm")


def _places() -> Iterator[str]:
    if "ROCM_HOME" in os.environ or "ROCM_PATH" in os.environ:
        yield f"{_rocm()}/lib/libamd_smi.so"
    yield "libamd_smi.so"
    yield "/opt/rocm/lib/libamd_smi.so"


def _start_fault(fault: AmdFault) -> StartFault:
    if fault.code == NO_PERMISSION:
        return StartFault(
            "no permission to use the AMD driver", "join the groups that `ls -l /dev/kfd /dev/dri/render*` shows"
        )
    if fault.code == 34:
        return StartFault("the AMD driver is not loaded", "load it with `sudo modprobe amdgpu`, or reboot")
    return StartFault(f"AMD SMI does not start: {fault.reason}", "see `sudo dmesg | grep -i amdgpu`")
