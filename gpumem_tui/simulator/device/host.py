"""Host tensors without data: models that are built on the host and end on the simulated device.

Tensors on the host keep their values, since data loading and metrics depend on them. But a large tensor that a module
makes for itself while it is constructed, or that a library converts as it reads a checkpoint, is a weight on its way to
the device: nobody reads it, and a model of 8 billion parameters would fill the host with it.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpumem_tui.simulator.device.kinds import fake_device_of, is_without_data
from gpumem_tui.step.sites import callers, is_own
from gpumem_tui.workload.errors import LIBRARIES

_LARGE_ELEMENTS = 1 << 18
"""From here on a tensor that a module makes has no data: smaller ones (position tables, running statistics) do."""

_aten: Any = torch.ops.aten
_FACTORIES = frozenset(
    {
        _aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default, _aten.ones.default,
        _aten.full.default, _aten.rand.default, _aten.randn.default,
    }
)  # fmt: skip
"""Functions that make a tensor of the size given by the first argument."""

_COPIES = frozenset({_aten._to_copy.default, _aten.clone.default, _aten.cat.default, _aten.stack.default})
_LIKES = frozenset(
    {_aten.empty_like.default, _aten.zeros_like.default, _aten.new_empty.default, _aten.new_zeros.default}
)
MAKERS = _FACTORIES | _COPIES
ALL_MAKERS = MAKERS | _LIKES
"""Operators whose results may be made without data."""

_OFFLOADING = tuple(
    os.path.join("", *path.split("/"), "") for path in ("deepspeed/runtime/zero", "deepspeed/ops", "torchao/optim")
)
_OFFLOADING_IN_TORCH = os.path.join("", "torch", "distributed", "fsdp", "")
"""Where engines keep weights, gradients and optimizer state on the host, which nobody else reads."""

_SAVED = torch.autograd.graph.save_on_cpu.__init__.__code__.co_filename, "pack_to_cpu"
"""Functions that copy activations to the host whole."""

_FILES_OF_DATA: set[str] = set()
_thread = threading.local()


def ends_on_device(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether one of `ALL_MAKERS`, on tensors of the host, makes a large weight of a model."""
    device = kwargs.get("device")
    if device is not None and device.type != "cpu":
        return False
    if func in _FACTORIES:
        return math.prod(args[0]) >= _LARGE_ELEMENTS and (
            any(
                frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module)
                for frame in callers(sys._getframe(1))
            )
            or is_offloaded(kwargs.get("dtype"))
        )
    source = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if not isinstance(source, torch.Tensor):  # a number, which `torch.vmap` copies so
        return False
    if source.numel() < _LARGE_ELEMENTS or not source.is_floating_point() or source.is_meta:
        return False
    if is_offloaded(source.dtype):
        return True
    if func in _LIKES:
        return False
    if is_moving_model():
        return True
    # Whether the code that calls torch is an installed library's, as loaders of checkpoints are.
    paths = (frame.f_code.co_filename for frame in callers(sys._getframe(1)))
    caller = next((path for path in paths if is_own(path)), "")
    return LIBRARIES.search(caller) is not None and _is_mapped(source.data_ptr())


def is_offloaded(dtype: torch.dtype | None) -> bool:
    """Return whether what makes a large tensor on the host offloads state, or activations, to it.

    Args:
        dtype: the tensor's, None for torch's default. Whole numbers among activations, such as indices, keep their
            values.
    """
    for frame in callers(sys._getframe(1)):
        path = frame.f_code.co_filename
        if (path, frame.f_code.co_name) == _SAVED:
            return dtype is None or dtype.is_floating_point
        if _OFFLOADING_IN_TORCH in path:
            return True
        if is_own(path):
            return any(folder in path for folder in _OFFLOADING)
    return False


@contextmanager
def moving_model() -> Iterator[None]:
    """Note that within the context this thread converts or moves the parameters of a module."""
    before = getattr(_thread, "is_moving_model", False)
    _thread.is_moving_model = True
    try:
        yield
    finally:
        _thread.is_moving_model = before


def is_moving_model() -> bool:
    """Return whether this thread converts or moves the parameters of a module."""
    return getattr(_thread, "is_moving_model", False)


def holds_data(path: str) -> None:
    """Note that tensors mapped from this file are the program's data, of which nothing is dropped."""
    _FILES_OF_DATA.add(os.path.realpath(path))


def _is_mapped(address: int) -> bool:
    """Return whether memory maps a file, as safetensors are loaded (proc_pid_maps(5)); False without /proc."""
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, *_ = words = line.split(maxsplit=5)
                first, behind = (int(number, 16) for number in span.split("-"))
                if first <= address < behind:
                    return len(words) == 6 and words[5].startswith("/") and words[5].rstrip("\n") not in _FILES_OF_DATA
    except OSError:
        return False
    return False


def is_copied_offloaded(tensor: torch.Tensor) -> bool:
    """Return whether a copy of a tensor on the device is offloaded to the host, and large enough to have no data."""
    is_large = tensor.numel() >= _LARGE_ELEMENTS and tensor.is_floating_point()
    return is_large and is_offloaded(tensor.dtype)


def is_to_host(tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy brings a tensor of the device to the host, where tensors have values."""
    device, place = kwargs.get("device"), fake_device_of(tensor)
    return device is not None and device.type == "cpu" and place is not None and place.type != "cpu"


def holds_values(args: tuple[Any, ...]) -> bool:
    """Return whether what is copied, the last of a copy's tensors, is on the host."""
    source = [argument for argument in args[:2] if isinstance(argument, torch.Tensor)][-1]
    return not is_without_data(source)
