"""Presents the simulated GPU as CUDA: whatever a program asks of ``cuda`` gets the answer of that GPU.

Programs name their device ("cuda", `torch.cuda`, `tensor.is_cuda`), so the simulated one must bear CUDA's name for
them. For torch's C++ core it remains a device type of its own (see `device`); the two names are exchanged where Python
code passes devices in and reads them back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _device as default_devices
from torch.utils._python_dispatch import _push_mode

from gpumem_tui.simulator import hooks, host, recurrent, runtime, transfer
from gpumem_tui.simulator.backend import Backend
from gpumem_tui.simulator.device import DEVICE_TYPE, SimulatedGpu, backend, simulate
from gpumem_tui.simulator.loading import Loading
from gpumem_tui.simulator.names import (
    CUDA,
    SUFFIXED_TYPES,
    CudaGenerator,
    CudaNames,
    TensorType,
    by_number,
    is_here,
    presented,
    simulated,
    text_of,
)
from gpumem_tui.simulator.streams import SimulatedEvent, SimulatedStream, StreamContext
from gpumem_tui.simulator.subclasses import become, known_length, make_subclass
from gpumem_tui.simulator.torch_internals import Replacements

_CUDA_VERSION = "12.8"
_CUDNN_VERSION = 91002
"""What the CUDA wheels of torch 2.10 were built with; answered by a build without CUDA, whose own answer is none."""

_CUDNN_BENCHMARK_LIMIT = 10
"""torch's default (`benchmark_limit_cudnn` in aten/src/ATen/Context.h)."""


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
            yield CUDA


@contextmanager
def presented_as_cuda(gpu: SimulatedGpu, devices: int = 1) -> Iterator[None]:
    """Within the context, which lies within `simulate(gpu)`, the simulated device answers to CUDA's name.

    Args:
        devices: how many GPUs the program may count on its machine; it may only use the first.
    """
    before, backend.devices = backend.devices, devices
    try:
        with Replacements() as replacements, CudaNames() as names:
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


def _answer_for_cuda(replacements: Replacements, backend: Backend) -> None:
    cuda: Any = torch.cuda
    answers = {name: getattr(backend, name) for name in dir(backend) if not name.startswith("__")}
    for name in ("current", "devices", "_gpu"):
        answers.pop(name)
    answers.update(
        _lazy_init=lambda: None,
        _lazy_call=lambda call, **_: None,
        default_generators=tuple(CudaGenerator("cuda") for _ in range(backend.devices)),
        is_current_stream_capturing=lambda: False,
        device=_Guard,
        device_of=_Guard,
        StreamContext=StreamContext,
        current_blas_handle=lambda: 0,
        set_sync_debug_mode=lambda mode: None,
        get_sync_debug_mode=lambda: 0,
    )
    for module in (cuda, cuda.memory, cuda.random, cuda.streams):
        for name, answer in answers.items():
            if module is cuda or hasattr(module, name):
                replacements.set(module, name, answer)
    for suffix, dtype in SUFFIXED_TYPES.items():
        made = TensorType(f"torch.cuda.{suffix}", (), {"dtype": dtype})
        replacements.set(cuda, suffix, made)
    _do_nothing(replacements, cuda.nvtx, "range_push", "range_pop", "range_start", "range_end", "mark")
    _do_nothing(replacements, cuda.profiler, "start", "stop", "init")
    backends: Any = torch.backends
    replacements.set(backends.cuda, "is_built", lambda: True)
    for cudnn in (backends.cudnn, backends.cudnn.m):  # as others see it, and as its own functions do
        replacements.set(cudnn, "is_available", lambda: True)
        replacements.set(cudnn, "version", lambda: _CUDNN_VERSION)
        replacements.set(cudnn, "_init", lambda: True)
    internals: Any = torch._C
    replacements.set(internals, "_cuda_get_cudnn_benchmark_limit", lambda: _CUDNN_BENCHMARK_LIMIT)
    replacements.set(internals, "_cuda_set_cudnn_benchmark_limit", lambda limit: None)
    for (owner, name), answer in recurrent.answers().items():
        replacements.set(owner, name, answer)
    version: Any = torch.version
    if version.cuda is None:
        replacements.set(version, "cuda", _CUDA_VERSION)
    replacements.set(torch, "Generator", CudaGenerator)
    for (owner, name), answer in runtime.answers(backend).items():
        replacements.set(owner, name, answer)


class _Guard:
    """`torch.cuda.device` as a context: there is one device."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _answer_for_accelerator(replacements: Replacements, backend: Backend) -> None:
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


def _do_nothing(replacements: Replacements, owner: Any, *names: str) -> None:
    for name in names:
        if hasattr(owner, name):
            replacements.set(owner, name, lambda *_, **__: 0)


def _follow_devices_in_python(replacements: Replacements, gpu: SimulatedGpu) -> None:
    """Where Python or C++ reads a device before `CudaNames` sees it."""
    real: Any = vars(FakeTensor)["device"]
    read = real.fget

    def device(tensor: FakeTensor) -> torch.device:
        return read(tensor) if gpu.mode.is_dispatching else presented(tensor.fake_device)

    replacements.set(FakeTensor, "device", property(device, real.fset))
    replacements.set(FakeTensor, "is_cuda", property(is_here))
    plain_repr: Any = FakeTensor.__repr__

    def shown(tensor: FakeTensor, **_: Any) -> str:
        return plain_repr(tensor) if gpu.mode.is_dispatching else text_of(tensor)

    replacements.set(FakeTensor, "__repr__", shown)
    listed = FakeTensor.tolist
    replacements.set(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist() if is_here(tensor) else listed(tensor))

    def make_default(construct: Any, context: Any, device: Any) -> None:
        construct(context, by_number(device))

    construct = default_devices.DeviceContext.__init__
    replacements.set(default_devices.DeviceContext, "__init__", lambda c, device: make_default(construct, c, device))
    replacements.wrap(torch, "get_default_device", lambda read: presented(read()))
    replacements.set(torch.Tensor, "record_stream", lambda tensor, stream: gpu.mode.record_stream(tensor, stream))
    make: Any = torch.Tensor._make_subclass

    def subclass(*args: Any, **kwargs: Any) -> Any:
        return make_subclass(make, *args, **kwargs)

    replacements.set(torch.Tensor, "_make_subclass", staticmethod(subclass))
    wrap: Any = torch.Tensor._make_wrapper_subclass

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrap(*map(simulated, args), **{name: simulated(value) for name, value in kwargs.items()})

    replacements.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(wrapper))
    replacements.set(torch.Tensor, "nested_int_memo", property(known_length))
    replacements.set(nn.Module, "_apply", _apply_keeping_parameters)
    module_to = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if args:
            args = (by_number(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = by_number(kwargs["device"])
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


def _follow_loading(replacements: Replacements) -> None:
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


def _follow_threads(replacements: Replacements, gpu: SimulatedGpu, names: CudaNames) -> None:
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
            if any(isinstance(gradient, torch.Tensor) and is_here(gradient) for gradient in gradients):
                gpu.on_backward_error(error)
            raise

    replacements.set(function, "apply", apply)
    for (owner, name), answer in hooks.answers(gpu.on_backward_error).items():
        replacements.set(owner, name, answer)
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward

    def run_with_names(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return run_backward(*args, **kwargs)
        with names:  # off where `Tensor.backward` came by them; the engine's threads take over what is on
            return run_backward(*args, **kwargs)

    replacements.set(autograd, "_engine_run_backward", run_with_names)


def _follow_autocast(replacements: Replacements) -> None:
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
