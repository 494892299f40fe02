"""Presents the simulated GPU as CUDA: whatever a program asks of ``cuda`` gets the answer of that GPU.

Programs name their device ("cuda", `torch.cuda`, `tensor.is_cuda`), so the simulated one must bear CUDA's name for
them. For torch's C++ core it remains a device type of its own (see `device`); the two names are exchanged where Python
code passes devices in and reads them back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_devices
from torch.utils._python_dispatch import _push_mode

from gpumem_tui.simulator import host, runtime, transfer
from gpumem_tui.simulator.backend import Backend, SimulatedEvent, SimulatedStream
from gpumem_tui.simulator.device import DEVICE_TYPE, SimulatedGpu, backend, simulate
from gpumem_tui.simulator.loading import Loading
from gpumem_tui.simulator.subclasses import become, make_subclass

_CUDA_VERSION = "12.8"
_CUDNN_VERSION = 91002
"""What the CUDA wheels of torch 2.10 were built with; answered by a build without CUDA, whose own answer is none."""

_CUDA = torch.device("cuda", 0)
_BASE: Any = torch._C.TensorBase
_SUFFIXED_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
    "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip


def simulated(device: Any) -> Any:
    """The simulated device for one that names CUDA; anything else as it is.

    Raises:
        RuntimeError: this process has no such GPU, as CUDA says it, or it is another rank's.
    """
    kind = type(device)
    if kind is str:
        if not device.startswith("cuda") or (device != "cuda" and device[4] != ":"):
            return device
        device = torch.device(device)
    elif kind is not torch.device or device.type != "cuda":
        return device
    index = device.index or 0
    if index >= backend.devices:
        count = f"{backend.devices} GPU{'s' if backend.devices > 1 else ''}"
        raise torch.AcceleratorError(f"CUDA error: invalid device ordinal ({device} of {count}; --gpus N gives more)")
    if index:
        raise RuntimeError(
            f"{device}: this process is rank 0, whose GPU is cuda:0, and several GPUs in one process are not "
            "simulated; start a process a GPU, as torchrun does"
        )
    return torch.device(DEVICE_TYPE, 0)


def _by_number(device: Any) -> Any:
    """As `simulated`, where a number names a GPU too."""
    return simulated(f"cuda:{device}" if type(device) is int else device)


def presented(device: torch.device) -> torch.device:
    """The device as the program sees it."""
    return _CUDA if device.type == DEVICE_TYPE else device


def _is_here(tensor: torch.Tensor) -> bool:
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else _BASE.device.__get__(tensor)
    return bool(device.type == DEVICE_TYPE)


class _Replacements(ExitStack):
    """Attributes that are others within the context."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add one that is missing."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a function by one that gets it as its first argument."""
        before = getattr(owner, name)

        @functools.wraps(before)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(before, *args, **kwargs)

        self.set(owner, name, wrapped)


class _CudaNames(TorchFunctionMode):
    """Exchanges CUDA's name for the simulated device's in the arguments of torch's functions, and back in answers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        if func in _READS and type(args[0]) is torch.Tensor:  # one of the host: data loaders read many numbers
            with torch._C._DisableTorchDispatch():
                return func(*args)
        for argument in args:
            kind = type(argument)
            if kind is torch.device or kind is str:
                args = tuple(simulated(argument) for argument in args)
                break
        if kwargs:
            device = kwargs.get("device")
            if device is not None:
                kwargs = {**kwargs, "device": _by_number(device)}
            if kwargs.get("pin_memory"):
                return transfer.pin(func(*args, **{**kwargs, "pin_memory": False}))
            return func(*args, **kwargs)
        return func(*args)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args:
        args = (_by_number(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = _by_number(kwargs["device"])
    return tensor.to(*args, **kwargs)


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return tensor.to(_by_number("cuda" if device is None else device), non_blocking=non_blocking, **kwargs)


def _type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``tensor.type(torch.cuda.FloatTensor)``, and the name of a tensor's type."""
    name = getattr(dtype, "__name__", dtype) if not isinstance(dtype, torch.dtype) else None
    if isinstance(name, str) and name.startswith("torch.cuda."):
        return tensor.to(torch.device(DEVICE_TYPE, 0), _SUFFIXED_TYPES[name.rpartition(".")[2]])
    if dtype is None and _is_here(tensor):
        suffix = next((suffix for suffix, kind in _SUFFIXED_TYPES.items() if kind is tensor.dtype), "Tensor")
        return f"torch.cuda.{suffix}"
    found: Any = tensor.type(dtype, *args, **kwargs) if dtype is not None else tensor.type()
    return found


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.device: lambda *args, **kwargs: _device(*args, **kwargs),
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.type: _type,
    _BASE.is_cuda.__get__: _is_here,
    torch.Tensor.device.__get__: lambda tensor: presented(_BASE.device.__get__(tensor)),
    _BASE.data.__set__: lambda tensor, data: _set_data(tensor, data),
    torch.Tensor.is_pinned: transfer.is_pinned,
    torch.Tensor.__repr__: lambda tensor, **_: _repr(tensor),
}


_READS = {getattr(torch.Tensor, name) for name in ("item", "__index__", "__int__", "__float__", "__bool__")}


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """`torch.device`, for which a number alone is a GPU."""
    return torch.device("cuda", args[0]) if args and type(args[0]) is int else torch.device(*args, **kwargs)


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data``, also from the host to the device."""
    if _place(tensor) == _place(data):
        tensor.data = data
    else:
        become(tensor, data)


def _place(tensor: torch.Tensor) -> tuple[bool, torch.device]:
    """Whether a tensor is without data, and where it lies."""
    if isinstance(tensor, FakeTensor):
        return True, tensor.fake_device
    return False, _BASE.device.__get__(tensor)


def _repr(tensor: torch.Tensor) -> str:
    """As torch writes it; with the values where they are known, and none where there would be many."""
    with torch._C.DisableTorchFunction():
        if not _is_here(tensor):
            return str(torch._tensor_str._str(tensor))
        values = backend._gpu.mode.values
        shown = values.of(tensor.detach()) if tensor.dim() else values.copied_to_host(tensor)
        text = f"tensor(..., size={tuple(tensor.shape)})" if shown is None else torch._tensor_str._str(shown)
        head, separator, tail = text[:-1].partition(", dtype=")
        grad = (
            f", grad_fn=<{tensor.grad_fn.name()}>" if tensor.grad_fn else ", requires_grad=True" * tensor.requires_grad
        )
        dtype = f", dtype={tensor.dtype}" if shown is None and tensor.dtype != torch.float32 else separator + tail
        return f"{head}, device='cuda:0'{dtype}{grad})"


class _TensorType(type):
    """`torch.cuda.FloatTensor` and the like: make tensors on the GPU, and are the type of some."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **_: Any) -> torch.Tensor:
        device = torch.device(DEVICE_TYPE, 0)
        if all(type(argument) is int for argument in args):
            return torch.empty(args, dtype=cls.dtype, device=device)
        (data,) = args
        return torch.as_tensor(data).to(device, cls.dtype)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and _is_here(instance) and instance.dtype == cls.dtype


class _Generator(torch.Generator):
    """A generator that says to be the GPU's; operators on the device draw nothing from it."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        on_gpu = simulated(device) is not device
        made = super().__new__(cls, device="cpu" if on_gpu else device)  # type: ignore[call-arg]
        made.on_gpu = on_gpu
        return made

    on_gpu: bool

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _CUDA if self.on_gpu else torch.device("cpu")


@contextmanager
def device_for(gpu: SimulatedGpu, *, user_code: bool) -> Iterator[torch.device]:
    """`simulate(gpu)`, and the device as the code that trains on it is to name it.

    Args:
        user_code: it may name CUDA itself, as in ``torch.autocast("cuda")``; the catalog's models use the device that
            they are given, and need no such translation, which takes its time.
    """
    with simulate(gpu) as device:
        if not user_code:
            yield device
            return
        with presented_as_cuda(gpu):
            yield _CUDA


@contextmanager
def presented_as_cuda(gpu: SimulatedGpu, devices: int = 1) -> Iterator[None]:
    """Within the context, which lies within `simulate(gpu)`, the simulated device answers to CUDA's name.

    Args:
        devices: how many GPUs the program may count on its machine; it may only use the first.
    """
    before, backend.devices = backend.devices, devices
    try:
        with _Replacements() as replacements, _CudaNames() as names:
            _answer_for_cuda(replacements, backend)
            _answer_for_accelerator(replacements, backend)
            _follow_devices_in_python(replacements, gpu)
            for (owner, name), answer in transfer.answers(gpu).items():
                replacements.set(owner, name, answer)
            _follow_autocast(replacements)
            _follow_loading(replacements)
            _follow_threads(replacements, gpu, names)
            yield
    finally:
        backend.devices = before


def _answer_for_cuda(replacements: _Replacements, backend: Backend) -> None:
    cuda: Any = torch.cuda
    answers = {name: getattr(backend, name) for name in dir(backend) if not name.startswith("__")}
    for name in ("current", "devices", "_gpu"):
        answers.pop(name)
    answers.update(
        _lazy_init=lambda: None,
        _lazy_call=lambda call, **_: None,
        default_generators=tuple(_Generator("cuda") for _ in range(backend.devices)),
        is_current_stream_capturing=lambda: False,
        device=_Guard,
        StreamContext=_Guard,
        current_blas_handle=lambda: 0,
        set_sync_debug_mode=lambda mode: None,
        get_sync_debug_mode=lambda: 0,
    )
    for module in (cuda, cuda.memory, cuda.random, cuda.streams):
        for name, answer in answers.items():
            if module is cuda or hasattr(module, name):
                replacements.set(module, name, answer)
    for suffix, dtype in _SUFFIXED_TYPES.items():
        made = _TensorType(f"torch.cuda.{suffix}", (), {"dtype": dtype})
        replacements.set(cuda, suffix, made)
    _do_nothing(replacements, cuda.nvtx, "range_push", "range_pop", "range_start", "range_end", "mark")
    _do_nothing(replacements, cuda.profiler, "start", "stop", "init")
    backends: Any = torch.backends
    replacements.set(backends.cuda, "is_built", lambda: True)
    replacements.set(backends.cudnn, "is_available", lambda: True)
    replacements.set(backends.cudnn, "version", lambda: _CUDNN_VERSION)
    version: Any = torch.version
    if version.cuda is None:
        replacements.set(version, "cuda", _CUDA_VERSION)
    replacements.set(torch, "Generator", _Generator)
    for (owner, name), answer in runtime.answers(backend.device_count, backend.memory_stats).items():
        replacements.set(owner, name, answer)


class _Guard:
    """`torch.cuda.device` and `torch.cuda.stream` as contexts: there is one device, with one stream."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _answer_for_accelerator(replacements: _Replacements, backend: Backend) -> None:
    accelerator: Any = torch.accelerator
    replacements.set(torch._C, "_get_accelerator", lambda check=None: torch.device("cuda"))
    replacements.set(accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    renamed = {
        "current_device_index": backend.current_device,
        "current_device_idx": backend.current_device,
        "set_device_index": backend.set_device,
        "set_device_idx": backend.set_device,
        "device_index": _Guard,
    }
    for name in dir(accelerator):
        answer = renamed.get(name) or getattr(backend, name, None)
        if answer is not None and not name.startswith("_") and not isinstance(vars(accelerator).get(name), ModuleType):
            replacements.set(accelerator, name, answer)
    replacements.set(torch, "Stream", SimulatedStream)
    replacements.set(torch, "Event", SimulatedEvent)


def _do_nothing(replacements: _Replacements, owner: Any, *names: str) -> None:
    for name in names:
        if hasattr(owner, name):
            replacements.set(owner, name, lambda *_, **__: 0)


def _follow_devices_in_python(replacements: _Replacements, gpu: SimulatedGpu) -> None:
    """Where Python or C++ reads a device before `_CudaNames` sees it."""
    real: Any = vars(FakeTensor)["device"]
    read = real.fget

    def device(tensor: FakeTensor) -> torch.device:
        return read(tensor) if gpu.mode.is_dispatching else presented(tensor.fake_device)

    replacements.set(FakeTensor, "device", property(device, real.fset))
    replacements.set(FakeTensor, "is_cuda", property(_is_here))
    plain_repr: Any = FakeTensor.__repr__

    def shown(tensor: FakeTensor, **_: Any) -> str:
        return plain_repr(tensor) if gpu.mode.is_dispatching else _repr(tensor)

    replacements.set(FakeTensor, "__repr__", shown)
    listed = FakeTensor.tolist
    replacements.set(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist() if _is_here(tensor) else listed(tensor))

    def make_default(construct: Any, context: Any, device: Any) -> None:
        construct(context, _by_number(device))

    construct = default_devices.DeviceContext.__init__
    replacements.set(default_devices.DeviceContext, "__init__", lambda c, device: make_default(construct, c, device))
    replacements.wrap(torch, "get_default_device", lambda read: presented(read()))
    replacements.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
    make: Any = torch.Tensor._make_subclass

    def subclass(*args: Any, **kwargs: Any) -> Any:
        return make_subclass(make, *args, **kwargs)

    replacements.set(torch.Tensor, "_make_subclass", staticmethod(subclass))
    replacements.set(nn.Module, "_apply", _apply_keeping_parameters)
    module_to = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if args:
            args = (_by_number(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _by_number(kwargs["device"])
        return module_to(module, *args, **kwargs)

    replacements.set(nn.Module, "to", to)
    replacements.set(nn.Module, "cuda", lambda module, device=None: module.to("cuda" if device is None else device))


def _apply_keeping_parameters(
    module: nn.Module, move: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Any:
    """`Module._apply` whose parameters stay the same objects, as they do when they go from the CPU to CUDA.

    Torch would replace them, since a tensor without data cannot take the place of one with data.
    """
    if recurse:
        for child in module.children():
            child._apply(move)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad(), host.moving_model():
            moved = move(parameter)
            gradient = None if parameter.grad is None else move(parameter.grad)
        if moved is not parameter:
            become(parameter, moved)
        if gradient is not None:
            parameter.grad = gradient
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = move(buffer)
    return module


def _follow_loading(replacements: _Replacements) -> None:
    loading = Loading(torch.device(DEVICE_TYPE, 0))

    def save(save: Any, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        loading.make_room(f)
        save(obj, f, *args, **kwargs)

    replacements.wrap(torch, "load", loading.load)
    replacements.wrap(torch, "save", save)
    replacements.wrap(torch._guards, "detect_fake_mode", loading.fake_mode)
    replacements.wrap(torch._guards, "active_fake_mode", loading.fake_mode)
    replacements.wrap(torch._utils, "_rebuild_tensor", loading.rebuild)
    replacements.set(torch.serialization, "_package_registry", loading.registry(torch.serialization._package_registry))
    replacements.set(torch.UntypedStorage, "cuda", lambda storage, *_, **__: loading.to_device(storage))


def _follow_threads(replacements: _Replacements, gpu: SimulatedGpu, names: _CudaNames) -> None:
    """A program's threads, and its functions in autograd's, find the device too: modes are each thread's own."""

    kind: Any = threading.Thread
    bootstrap = kind._bootstrap_inner

    def run(thread: threading.Thread) -> None:
        _push_mode(gpu.mode)
        gpu.mode.prepare_thread()
        with names:
            bootstrap(thread)

    replacements.set(kind, "_bootstrap_inner", run)
    function: Any = torch.autograd.function.BackwardCFunction
    differentiate = function.apply

    def apply(node: Any, *gradients: Any) -> Any:
        try:
            return differentiate(node, *gradients)
        except Exception as error:
            if any(isinstance(gradient, torch.Tensor) and _is_here(gradient) for gradient in gradients):
                gpu.on_backward_error(error)
            raise

    replacements.set(function, "apply", apply)
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward

    def run_with_names(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return run_backward(*args, **kwargs)
        with names:  # off where `Tensor.backward` came by them; the engine's threads take over what is on
            return run_backward(*args, **kwargs)

    replacements.set(autograd, "_engine_run_backward", run_with_names)


def _follow_autocast(replacements: _Replacements) -> None:
    """`torch.autocast("cuda")` and the functions that ask for its state read the device type in C++."""

    def named(device_type: str) -> str:
        return DEVICE_TYPE if device_type == "cuda" else device_type

    construct = torch.autocast.__init__

    def init(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        construct(context, named(device_type), *args, **kwargs)

    replacements.set(torch.autocast, "__init__", init)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        read: Any = getattr(torch, name)

        def asked(*args: Any, _read: Any = read) -> Any:
            if not args or type(args[0]) is bool:  # as before torch 2.4, of CUDA
                args = ("cuda", *args)
            return _read(named(args[0]), *args[1:])

        replacements.set(torch, name, asked)
    replacements.set(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda"))
    replacements.set(torch, "set_autocast_gpu_dtype", lambda dtype: torch.set_autocast_dtype("cuda", dtype))
    replacements.wrap(
        torch.amp.autocast_mode, "is_autocast_available", lambda ask, device_type: ask(named(device_type))
    )
    replacements.set(torch.amp, "is_autocast_available", torch.amp.autocast_mode.is_autocast_available)
