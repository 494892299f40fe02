"""Tensors of the simulated GPU seen from beside: as storages, pinned, pickled, or as the default type."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_tui.simulator.device import DEVICE_TYPE, SimulatedGpu

_CUDA = torch.device("cuda", 0)
_pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def pin(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Pinning takes host memory only, and nothing is copied here that would be faster for it."""
    _pinned.add(tensor.untyped_storage())
    return tensor


def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    """Whether a tensor of the host was pinned."""
    return tensor.untyped_storage() in _pinned


def storage_device(gpu: SimulatedGpu) -> property:
    """`torch.UntypedStorage.device`, which of tensors without data is no device."""
    read: Any = torch._C.StorageBase.device  # type: ignore[attr-defined]

    def device(storage: torch.UntypedStorage) -> torch.device:
        found: torch.device = read.__get__(storage)
        return _CUDA if found.type == "meta" and not gpu.mode.is_dispatching and gpu.mode.holds(storage) else found

    return property(device)


def storage_address(gpu: SimulatedGpu) -> Callable[[torch.UntypedStorage], int]:
    """`torch.UntypedStorage.data_ptr`: an address of its own for each that holds memory, as programs compare them."""
    read: Any = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]

    def address(storage: torch.UntypedStorage) -> int:
        return storage._cdata if gpu.mode.holds(storage) else int(read(storage))

    return address


_thread = threading.local()


def deepcopied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """`torch.Tensor.__deepcopy__`, which clones a tensor of a class of its own only if that has no address."""
    _thread.is_copying = True
    try:
        return tensor.__deepcopy__(memo)  # type: ignore[no-any-return]
    finally:
        _thread.is_copying = False


def _tensor_address(tensor: FakeTensor) -> int:
    if getattr(_thread, "is_copying", False):
        return 0
    storage = tensor.untyped_storage()
    return storage.data_ptr() + int(tensor.storage_offset()) * tensor.element_size() if storage.nbytes() else 0


def reduce(reduced: Callable[..., Any], gpu: SimulatedGpu) -> Callable[..., Any]:
    """`FakeTensor.__reduce_ex__`: what is pickled of a tensor on the device is what it looks like."""

    def reduce_ex(tensor: FakeTensor, protocol: Any) -> Any:
        if tensor.fake_device.type != DEVICE_TYPE:
            return reduced(tensor, protocol)
        known = gpu.mode.values.of(tensor.detach())
        layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
        return _rebuilt, (known.clone() if known is not None else None, *layout)

    return reduce_ex


def _rebuilt(
    known: torch.Tensor | None, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> torch.Tensor:
    made = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
    if known is not None:
        made.copy_(known)
    return made.requires_grad_(requires_grad)


def _array(convert: Callable[..., Any], tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
    """`tensor.numpy()`, which CUDA's tensors refuse in these words."""
    if tensor.fake_device.type != DEVICE_TYPE:
        return convert(tensor, *args, **kwargs)
    raise TypeError(
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


def default_type(set_type: Callable[[Any], None], kind: Any) -> None:
    """`torch.set_default_tensor_type`, of a GPU's type too."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    if "cuda." not in name:
        torch.set_default_device(None)
        set_type(kind)
        return
    suffix = name.rpartition(".")[2]
    torch.set_default_dtype(_FLOATING[suffix])
    torch.set_default_device("cuda")


_FLOATING = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
}  # fmt: skip


def answers(gpu: SimulatedGpu) -> dict[tuple[Any, str], Any]:
    """The replaced attributes, by owner and name."""
    device, convert = storage_device(gpu), FakeTensor.numpy
    torch.serialization.add_safe_globals([_rebuilt])
    return {
        (FakeTensor, "numpy"): lambda tensor, *args, **kwargs: _array(convert, tensor, *args, **kwargs),
        (torch.Tensor, "pin_memory"): pin,
        (torch.Tensor, "is_pinned"): is_pinned,
        (torch.UntypedStorage, "device"): device,
        (torch.UntypedStorage, "data_ptr"): storage_address(gpu),
        (FakeTensor, "data_ptr"): _tensor_address,
        (torch.UntypedStorage, "is_cuda"): property(lambda storage: storage.device.type == "cuda"),
        (FakeTensor, "__reduce_ex__"): reduce(FakeTensor.__reduce_ex__, gpu),
        (torch, "set_default_tensor_type"): functools.partial(default_type, torch.set_default_tensor_type),
    }
