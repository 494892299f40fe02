"""CUDA's name for the simulated device: exchanged in the arguments of torch's functions, and back in their answers.

Also what else of a tensor names its device: its storage, its text, and the default type.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpumem_tui.simulator.cuda.placing import placing
from gpumem_tui.simulator.device.base import DEVICE_TYPE
from gpumem_tui.simulator.device.gpu import SimulatedGpu, backend
from gpumem_tui.simulator.device.kinds import become, fake_device_of, is_dense
from gpumem_tui.simulator.device.shapes import Untraceable

CUDA = torch.device("cuda", 0)
_BASE: Any = torch._C.TensorBase
_STORAGE: Any = torch._C.StorageBase
SUFFIXED_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
    "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip
_pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
_thread = threading.local()


_ONE_GPU = (
    "several GPUs in one process are not simulated: write cuda:0 for each (transformers: device_map={'': 0}) for "
    "their sum, on a GPU that holds it (--gpu sim:NAME)"
)


def simulated(device: Any) -> Any:
    """Return the simulated device for one that names CUDA; anything else as it is.

    Raises:
        RuntimeError: this process has no such GPU, as CUDA states it, or it is another rank's.
    """
    kind = type(device)
    if kind is str:
        if not device.startswith("cuda") or (device != "cuda" and device[4] != ":"):
            return device
        device = torch.device(device)
    elif kind is not torch.device or device.type != "cuda":
        return device
    placing.meant(device.index)
    index = device.index or 0
    if index >= backend.devices:
        count = f"{backend.devices} GPU{'s' if backend.devices > 1 else ''}"
        raise torch.AcceleratorError(f"CUDA error: invalid device ordinal ({device} of {count}; {_ONE_GPU})")
    if index not in (0, backend.rank % backend.devices):
        raise RuntimeError(
            f"{device}: this process is rank {backend.rank}, whose GPU is cuda:0; {_ONE_GPU}, or start a process a GPU "
            "by torchrun"
        )
    return torch.device(DEVICE_TYPE, 0)


def by_number(device: Any) -> Any:
    """Return the device as `simulated` does, where a number names a GPU too."""
    return simulated(f"cuda:{device}" if type(device) is int else device)


def presented(device: torch.device) -> torch.device:
    """Return the device as the program sees it."""
    return CUDA if device.type == DEVICE_TYPE else device


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return a tensor's device, by what C++ knows of it."""
    found: torch.device = _BASE.device.__get__(tensor)
    return found


def is_here(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the simulated device, by what C++ knows of it."""
    device = fake_device_of(tensor) or device_of(tensor)
    return bool(device.type == DEVICE_TYPE)


# Tensors


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args:
        args = (by_number(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = by_number(kwargs["device"])
    return tensor.to(*args, **kwargs)


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return tensor.to(by_number("cuda" if device is None else device), non_blocking=non_blocking, **kwargs)


def _type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Answer ``tensor.type(torch.cuda.FloatTensor)``, and the name of a tensor's type."""
    name = getattr(dtype, "__name__", dtype) if not isinstance(dtype, torch.dtype) else None
    if isinstance(name, str) and name.startswith("torch.cuda."):
        return tensor.to(torch.device(DEVICE_TYPE, 0), SUFFIXED_TYPES[name.rpartition(".")[2]])
    if dtype is None and is_here(tensor):
        suffix = next((suffix for suffix, kind in SUFFIXED_TYPES.items() if kind is tensor.dtype), "Tensor")
        return f"torch.cuda.{suffix}"
    found: Any = tensor.type(dtype, *args, **kwargs) if dtype is not None else tensor.type()
    return found


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """Make a `torch.device`, for which a number alone is a GPU."""
    return torch.device("cuda", args[0]) if args and type(args[0]) is int else torch.device(*args, **kwargs)


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Do ``tensor.data = data``, also from the host to the device, or from inference mode, as CUDA's tensors can."""
    found = [(one, fake_device_of(one)) for one in (tensor, data)]
    if len({(fake is not None, fake or _BASE.device.__get__(one)) for one, fake in found}) > 1:
        become(tensor, data)
        return
    if found[0][1] is not None and tensor.is_inference() != data.is_inference():
        with torch.inference_mode(tensor.is_inference()):
            data = data.new_empty(0).set_(data.untyped_storage(), data.storage_offset(), data.size(), data.stride())
    tensor.data = data


def text_of(tensor: torch.Tensor) -> str:
    """Write a tensor as torch does; with the values if known, and none where there would be many."""
    with torch._C.DisableTorchFunction():
        if not is_here(tensor):
            return str(torch._tensor_str._str(tensor))
        values = backend._gpu.mode.values
        found = (
            values.of(tensor.detach())
            if tensor.dim()
            else torch.tensor(values.read(tensor), dtype=tensor.dtype, device="cpu")
        )
        text = f"tensor(..., size={tuple(tensor.shape)})" if found is None else torch._tensor_str._str(found)
        head, separator, tail = text[:-1].partition(", dtype=")
        grad = (
            f", grad_fn=<{tensor.grad_fn.name()}>" if tensor.grad_fn else ", requires_grad=True" * tensor.requires_grad
        )
        dtype = f", dtype={tensor.dtype}" if found is None and tensor.dtype != torch.float32 else separator + tail
        return f"{head}, device='cuda:0'{dtype}{grad})"


def _pin(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Note a tensor as pinned: that takes host memory only, and nothing is copied here that would be faster for it."""
    _pinned.add(tensor.untyped_storage())
    return tensor


def _is_pinned(tensor: torch.Tensor, *_: object, **__: object) -> bool:
    return tensor.untyped_storage() in _pinned


def _deepcopied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Do as `torch.Tensor.__deepcopy__`, which clones what is on the meta device, or of a class and without address."""
    _thread.is_copying = True
    try:
        return tensor.__deepcopy__(memo)  # type: ignore[no-any-return]
    finally:
        _thread.is_copying = False


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.type: _type,
    _BASE.is_cuda.__get__: is_here,
    torch.Tensor.device.__get__: lambda tensor: presented(fake_device_of(tensor) or _BASE.device.__get__(tensor)),
    _BASE.data.__set__: _set_data,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.__deepcopy__: _deepcopied,
    torch.Tensor.__repr__: lambda tensor, **_: text_of(tensor),
}
_READS = ("item", "__index__", "__int__", "__float__", "__bool__")
_STEPS_OF_LOADERS = ("add", "sub", "mul", "__add__", "__sub__", "__mul__", "__getitem__", "unbind")
_TENSORS_OF = {
    **{getattr(torch.Tensor, name): 1 for name in _READS},
    **{getattr(torch.Tensor, name): None for name in _STEPS_OF_LOADERS},
}
"""Functions that data loaders call on many small host tensors, and that make nothing on the device of them: by
function how many of its arguments are to be looked at, None for all."""

_OF_HOST = frozenset((torch.Tensor, int, float, bool))
_WithoutDispatch: Any = torch._C._DisableTorchDispatch
_from_numpy = torch.from_numpy
_is_transforming: Any = torch._C._are_functorch_transforms_active
"""Whether tensors are wrapped, perhaps one of the device among them."""


class CudaNames(TorchFunctionMode):
    """Exchanges CUDA's name for the simulated device's in the arguments of torch's functions, and back in answers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        if func is _from_numpy:  # a loader's, by the thousand: an array is on the host
            with _WithoutDispatch():
                return func(*args)
        if func in _TENSORS_OF and not kwargs:
            for value in args[: _TENSORS_OF[func]]:
                if type(value) not in _OF_HOST or is_dense(value):
                    break
            else:
                if not _is_transforming():
                    with _WithoutDispatch():
                        return func(*args)
        for argument in args:
            kind = type(argument)
            if kind is torch.device or kind is str:
                args = tuple(simulated(argument) for argument in args)
                break
        if kwargs:
            device = kwargs.get("device")
            if device is not None:
                kwargs = {**kwargs, "device": by_number(device)}
            if kwargs.get("pin_memory"):
                return _pin(func(*args, **{**kwargs, "pin_memory": False}))
            return func(*args, **kwargs)
        return func(*args)


class TensorType(type):
    """`torch.cuda.FloatTensor` and the like: make tensors on the GPU, and are the type of some."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **_: Any) -> torch.Tensor:
        """Make a tensor of a shape, or of data."""
        shape = _shape_in(args)
        if shape is not None:
            return torch.empty(shape, dtype=cls.dtype, device=torch.device(DEVICE_TYPE, 0))
        (data,) = args
        return torch.as_tensor(data).to(torch.device(DEVICE_TYPE, 0), cls.dtype)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and is_here(instance) and instance.dtype == cls.dtype


def _shape_in(args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the shape that a tensor's type is called with; None where it is called with data.

    A list or a tuple of numbers is data, `torch.Size` is a shape (`legacy_tensor_generic_ctor_new` in
    torch/csrc/utils/tensor_new.cpp).
    """
    if len(args) == 1 and isinstance(args[0], torch.Size):
        return args[0]
    return (args or (0,)) if all(type(argument) is int for argument in args) else None


class CudaGenerator(torch.Generator):
    """A generator that claims to be the GPU's; operators on the device draw nothing from it."""

    on_gpu: bool

    def __new__(cls, device: Any = "cpu") -> CudaGenerator:
        """Make one for the host, also if another device is asked for."""
        on_gpu = simulated(device) is not device
        made = super().__new__(cls, device="cpu" if on_gpu else device)  # type: ignore[call-arg]
        made.on_gpu = on_gpu
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU, or the host."""
        return CUDA if self.on_gpu else torch.device("cpu")


# Storages and the default type


def answers(gpu: SimulatedGpu) -> dict[tuple[Any, str], Any]:
    """Return the replaced attributes of tensors and storages, by owner and name."""
    default_type = _DefaultType()

    def device(storage: torch.UntypedStorage) -> torch.device:
        found: torch.device = _STORAGE.device.__get__(storage)  # which of tensors without data is no device
        return CUDA if found.type == "meta" and not gpu.mode.is_dispatching and gpu.memory.holds(storage) else found

    def address(storage: torch.UntypedStorage) -> int:
        """Return an address of its own for each storage that holds memory, as programs compare them."""
        if gpu.memory.holds(storage):
            return int(storage._cdata)
        try:
            return int(_STORAGE.data_ptr(storage))
        except RuntimeError:  # of the host, without data: machine code alone is refused its address
            return 0

    def array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_here(tensor):
            return _BASE.numpy(tensor, *args, **kwargs)
        raise TypeError(  # in CUDA's words
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
            "first."
        )

    def address_in(tensor: torch.Tensor) -> int:
        read: Any = _BASE.data_ptr
        return read(tensor) if fake_device_of(tensor) is None else _tensor_address(tensor)

    nested: Any = torch.nested.nested_tensor

    def make_nested(rows: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None:
            on_gpu = any(isinstance(row, torch.Tensor) and is_here(row) for row in rows)
        else:
            on_gpu = by_number(device) is not device
        if on_gpu and kwargs.get("layout") in (None, torch.strided):
            raise Untraceable(
                "torch.nested.nested_tensor: its strided layout has no shape without its values: write "
                f"layout=torch.jagged, as torch advises, or pad ({gpu.sites.calling_line()})"
            )
        return nested(rows, **kwargs)

    return {
        (torch.Tensor, "data_ptr"): address_in,
        (torch.Tensor, "numpy"): array,
        (torch.Tensor, "pin_memory"): _pin,
        (torch.Tensor, "is_pinned"): _is_pinned,
        (torch.UntypedStorage, "device"): property(device),
        (torch.UntypedStorage, "data_ptr"): address,
        (torch.UntypedStorage, "is_cuda"): property(lambda storage: storage.device.type == "cuda"),
        (torch.nested, "nested_tensor"): make_nested,
        (torch, "set_default_tensor_type"): default_type.set,
        (torch.Tensor, "__new__"): staticmethod(default_type.make),
    }


def is_copying() -> bool:
    """Return whether this thread makes a copy of a tensor by `_deepcopied`."""
    return getattr(_thread, "is_copying", False)


def _tensor_address(tensor: torch.Tensor) -> int:
    if is_copying():
        return 0
    storage = tensor.untyped_storage()
    start = storage.data_ptr() or storage._cdata  # on the host there is no other
    return start + int(tensor.storage_offset()) * tensor.element_size() if storage.nbytes() else 0


class _DefaultType:
    """The type of tensors without an explicit type, which may be one of the GPU's."""

    def __init__(self) -> None:
        self._set, self._make = torch.set_default_tensor_type, torch.Tensor.__new__
        self._is_on_gpu = False

    def set(self, kind: Any) -> None:
        """Do as `torch.set_default_tensor_type`, of a GPU's type too."""
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        self._is_on_gpu = "cuda." in name
        if not self._is_on_gpu:
            torch.set_default_device(None)
            self._set(kind)
            return
        torch.set_default_dtype(SUFFIXED_TYPES[name.rpartition(".")[2]])
        torch.set_default_device("cuda")

    def make(self, kind: type[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Do as ``torch.Tensor(…)``, which makes one of the default type, not on the default device."""
        if not self._is_on_gpu or kwargs:
            return self._make(kind, *args, **kwargs)
        shape, device = _shape_in(args), torch.device(DEVICE_TYPE, 0)
        made = self._make(torch.Tensor, *args) if shape is None else torch.empty(shape, device=device)
        made = made if is_here(made) else made.to(device)
        return made if kind is torch.Tensor else made.as_subclass(kind)
