"""Makes a device type of Python's own known to a torch before 2.10, which knows those of C++ extensions only.

Torch asks two C++ objects about a device type: its device guard (c10/core/impl/DeviceGuardImplInterface.h) and its
hooks (aten/src/ATen/detail/AcceleratorHooksInterface.h). An object begins with the address of a table of functions, in
the order in which those headers declare them. Both tables are made here of functions that torch has compiled already:
there is one device, its only stream is always ready and no event is waited for, as torch itself documents for devices
of Python since 2.10 (torch/csrc/acc/Module.cpp). This holds for the headers of 2.6 to 2.9.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_tui.simulator.device.base import library
from gpumem_tui.simulator.torch_internals import MissingInTorch, original, replace
from gpumem_tui.text import minor_of

_PRIVATE, _META = 20, 14
"""Device types by number (c10/core/DeviceType.h): the one that is made known, and one whose guard does nothing."""

_GUARD = (
    "type", "exchangeDevice", "getDevice", "setDevice", "uncheckedSetDevice", "getStream", "getDefaultStream",
    "getStreamFromGlobalPool", "getNewStream", "exchangeStream", "destroyEvent", "record", "block", "queryEvent",
    "deviceCount", "queryStream", "synchronizeStream", "synchronizeEvent", "synchronizeDevice",
    "recordDataPtrOnStream", "elapsedTime", "its destructor", "delete",
)  # fmt: skip
"""A guard's functions."""
_SAY_WHICH = (
    "type", "exchangeDevice", "getDevice", "getStream", "getDefaultStream", "getStreamFromGlobalPool", "getNewStream",
    "exchangeStream",
)  # fmt: skip
"""Functions that return the device, or a stream of it. A stream is two words: its device, as a type and, in the byte
above, an index, and its number."""
_WAIT = ("record", "block", "synchronizeEvent", "synchronizeDevice")

_TWO_WORDS = "_ZNK3c109ClassType14constantValuesEv"
"""`c10::ClassType::constantValues`, which returns two words of an object: where an array of its begins, and how many
values lie up to where it ends. For an object whose words are all `_PRIVATE` that is device 0 of that type, stream 0."""

_ELSE, _ALL_HOOKS = "_ZTVN2at17XPUHooksInterfaceE", 20
"""The hooks of a device that is not there, which raise: in the place of those that nothing asks."""

_kept: list[Any] = []
"""Structures of which torch has the addresses."""


class _Stream(ctypes.Structure):
    _fields_ = (("device", ctypes.c_int64), ("number", ctypes.c_int64))


def set_up(name: str, backend_module: Any) -> None:
    """Make a device type known, as `_setup_privateuseone_for_python_backend` does since torch 2.10.

    Args:
        name: of the device type.
        backend_module: `torch.<name>`.

    Raises:
        MissingInTorch: what is taken of torch does not answer as in 2.6 to 2.9.
    """
    try:
        _register_objects()
    except (AttributeError, OSError, StopIteration, ValueError) as error:
        raise MissingInTorch(
            f"torch {torch.__version__} is built otherwise than 2.6 to 2.9 are: install 2.10 or newer"
        ) from error
    backend_registration.rename_privateuse1_backend(name)
    backend_registration.generate_methods_for_privateuse1_backend()
    torch._register_device_module(name, backend_module)
    library("_").fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse1")


def _register_objects() -> None:
    """Have torch ask a guard and hooks that are made here; what they are made of raises where it is missing."""
    core, rest = (ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob(f"{file}.*"))))
                  for file in ("libc10", "libtorch_cpu"))  # fmt: skip
    guards = (ctypes.c_void_p * (_PRIVATE + 1)).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
    table = ctypes.cast(guards[_META] or 0, ctypes.POINTER(ctypes.c_void_p))[0]
    idle = dict(zip(_GUARD, (ctypes.c_void_p * len(_GUARD)).from_address(table), strict=True))
    nothing, ready, count = idle["setDevice"], idle["queryStream"], idle["deviceCount"]
    two_words = ctypes.cast(rest[_TWO_WORDS], ctypes.c_void_p).value or 0
    others = {**dict.fromkeys(_SAY_WHICH, two_words), **dict.fromkeys(_WAIT, nothing), "queryEvent": ready}
    guard = _object((idle | others).values())
    stream = ctypes.CFUNCTYPE(_Stream, ctypes.c_void_p)(two_words)(guard)
    counted = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(count)(guard)
    if (stream.device, stream.number, counted) != (_PRIVATE, 0, 1):
        raise ValueError("these functions give something else")
    guards[_PRIVATE] = guard

    absent = (ctypes.c_void_p * (2 + _ALL_HOOKS)).in_dll(rest, _ELSE)[2:]
    is_there = [ready] * (3 if minor_of(torch.__version__) >= (2, 7) else 1)  # isBuilt, isAvailable, hasPrimaryContext
    first = [*absent[:2], *is_there, nothing, count]  # init, deviceCount
    hooks = ctypes.c_void_p(_object([*first, *absent[len(first) :]]))
    rest["_ZN2at33RegisterPrivateUse1HooksInterfaceEPNS_25PrivateUse1HooksInterfaceE"](hooks)


def pass_on_higher_order(mode: type[TorchDispatchMode]) -> None:
    """Have operators that call others come to a mode as all operators do: up to torch 2.8 each has a table of modes."""
    dispatch = original(HigherOrderOperator, "dispatch")

    def dispatched(operator: Any, *args: Any, **kwargs: Any) -> Any:
        def handed(active: TorchDispatchMode, *given: Any, **more: Any) -> Any:
            return active.__torch_dispatch__(operator, (), given, more)

        operator.python_key_table.setdefault(mode, handed)
        return dispatch(operator, *args, **kwargs)

    replace(HigherOrderOperator, "dispatch", dispatched)


def _object(functions: Iterable[int | None]) -> int:
    """Return the address of an object with these functions, whose other words are `_PRIVATE`."""
    table = (ctypes.c_void_p * len(_GUARD))(*functions)
    made = (ctypes.c_void_p * 256)(ctypes.addressof(table), *(255 * [_PRIVATE]))
    _kept.extend((table, made))
    return ctypes.addressof(made)
