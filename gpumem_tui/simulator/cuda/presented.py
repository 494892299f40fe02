"""Presents the simulated GPU as CUDA: everything that a program asks of ``cuda`` gets the answer of that GPU.

Programs name their device ("cuda", `torch.cuda`, `tensor.is_cuda`), so the simulated one must bear CUDA's name for
them. For torch's C++ core it remains a device type of its own (see `device`); the two names are exchanged where Python
code passes devices in and reads them back.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.nn.modules import module as modules
from torch.utils import _device as default_devices
from torch.utils import checkpoint
from torch.utils._python_dispatch import _push_mode

from gpumem_tui.simulator.cuda import names as cuda_names
from gpumem_tui.simulator.cuda import pickling
from gpumem_tui.simulator.cuda.loading import Loading, load_script
from gpumem_tui.simulator.cuda.names import CudaGenerator, CudaNames, by_number, presented, simulated
from gpumem_tui.simulator.cuda.placing import placing
from gpumem_tui.simulator.device import host, recurrent
from gpumem_tui.simulator.device.base import DEVICE_TYPE
from gpumem_tui.simulator.device.gpu import SimulatedGpu, backend
from gpumem_tui.simulator.device.kinds import become, fake_device_of, known_length
from gpumem_tui.simulator.device.mode import DeviceMode
from gpumem_tui.simulator.device.streams import SimulatedEvent, SimulatedStream, StreamContext
from gpumem_tui.simulator.torch_internals import Replacements, original
from gpumem_tui.step.phases import in_backward

_CUDA_VERSIONS = {11: "11.8", 12: "12.8", 13: "13.0"}
"""By CUDA's major version, that of the newest wheels which PyPI has of torch; answered by a build without CUDA."""

_NCCL_VERSION, _CUDNN_VERSION = (2, 27, 5), 91002
"""Those in the wheels of torch 2.9 and 2.10; cuDNN's is answered where the profile names none."""

_META = torch.device("meta")
_CUDNN_BENCHMARK_LIMIT = 10
"""torch's default (`benchmark_limit_cudnn` in aten/src/ATen/Context.h)."""


@contextmanager
def presented_as_cuda(gpu: SimulatedGpu, devices: int = 1, rank: int = 0) -> Iterator[None]:
    """Have the simulated device answer to CUDA's name within the context, which is within `simulate(gpu)`.

    Args:
        gpu: the simulated GPU.
        devices: how many GPUs the program may count on its machine; it may only use the first.
        rank: which of the ranks it is; it may use the GPU of that number as well, which is the first by another name.
    """
    before, backend.devices, backend.rank = backend.devices, devices, rank
    try:
        with Replacements() as replacements, CudaNames() as names:
            _answer_for_cuda(replacements, gpu)
            _answer_for_runtime(replacements)
            _answer_for_accelerator(replacements)
            _follow_devices_in_python(replacements, gpu)
            _hide_fake_tensors(replacements)
            for answers in (recurrent.answers(), cuda_names.answers(gpu), _hooks(gpu.on_backward_error)):
                for (owner, name), answer in answers.items():
                    replacements.set(owner, name, answer)
            _follow_modules(replacements)
            _follow_autocast(replacements)
            pickling.follow(replacements, gpu, _follow_loading(replacements))
            _follow_threads(replacements, gpu, names)
            gpu.mode._allow_unsafe_data_ptr_access = False  # machine code gets none, Python that of `cuda_names`
            recorder, sites = gpu.recorder, gpu.sites
            placing.begin(devices, lambda: recorder.allocations, sites.calling_line, recorder.place_of)
            yield
    finally:
        backend.devices, backend.rank = before, 0


# Answers of `torch.cuda` and the libraries around it


def _answer_for_cuda(replacements: Replacements, gpu: SimulatedGpu) -> None:
    cuda: Any = torch.cuda
    answers = {name: getattr(backend, name) for name in dir(backend) if not name.startswith("__")}
    for name in ("current", "devices", "rank", "_gpu", "_statistic"):
        del answers[name]
    answers.update(
        memory_stats=_statistics,
        set_device=lambda *_, **__: placing.choose(),
        _lazy_init=lambda: None,
        _lazy_call=lambda *_, **__: None,
        default_generators=tuple(CudaGenerator("cuda") for _ in range(backend.devices)),
        is_current_stream_capturing=lambda: False,
        device=_Guard,
        device_of=lambda obj: _Guard(obj.device),
        StreamContext=StreamContext,
        current_blas_handle=lambda: 0,
        set_sync_debug_mode=lambda *_, **__: None,
        get_sync_debug_mode=lambda: 0,
    )
    for module in (cuda, cuda.memory, cuda.random, cuda.streams):
        for name, answer in answers.items():
            if module is cuda or hasattr(module, name):
                replacements.set(module, name, answer)
    for suffix, dtype in cuda_names.SUFFIXED_TYPES.items():
        made = cuda_names.TensorType(f"torch.cuda.{suffix}", (), {"dtype": dtype})
        replacements.set(cuda, suffix, made)
    for module, functions in (
        (cuda.nvtx, ("range_push", "range_pop", "range_start", "range_end", "mark")),
        (cuda.profiler, ("start", "stop", "init")),
    ):
        for name in functions:
            if hasattr(module, name):
                replacements.set(module, name, lambda *_, **__: 0)
    backends: Any = torch.backends
    replacements.set(backends.cuda, "is_built", lambda: True)
    for cudnn in (backends.cudnn, backends.cudnn.m):  # as others see it, and as its own functions do
        replacements.set(cudnn, "is_available", lambda: True)
        replacements.set(cudnn, "version", lambda: gpu.profile.cudnn or _CUDNN_VERSION)
        replacements.set(cudnn, "_init", lambda: True)
    version: Any = torch.version
    if version.cuda is None:
        replacements.set(version, "cuda", _CUDA_VERSIONS.get(gpu.profile.cuda, f"{gpu.profile.cuda}.0"))
    replacements.set(torch, "Generator", CudaGenerator)


class _Guard(nullcontext[None]):
    """`torch.cuda.device` as a context: there is one device.

    Attributes:
        idx: its index, as it was asked for.
        prev_idx: of the device before, as torch has it until the context is entered.
    """

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        named = torch.device(device) if isinstance(device, str) else device
        self.idx = named if isinstance(named, int) else getattr(named, "index", None) or 0
        self.prev_idx = -1


def _answer_for_runtime(replacements: Replacements) -> None:
    """Answer the functions around `torch.cuda`'s memory figures; a CPU build lacks them, others initialize CUDA."""
    internals: Any = torch._C
    cuda: Any = torch.cuda
    below: dict[str, Any] = {
        "_cuda_getCurrentRawStream": lambda *_: backend.current_stream().cuda_stream,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda *_: placing.choose(),
        "_cuda_getDeviceCount": backend.device_count,
        "_cuda_sleep": lambda *_: None,
        "_scatter": _scatter,
        "_host_emptyCache": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_get_cudnn_benchmark_limit": lambda: _CUDNN_BENCHMARK_LIMIT,
        "_cuda_set_cudnn_benchmark_limit": lambda *_: None,
    }
    if not hasattr(internals, "_cuda_CUDAAllocator_AllocatorState"):  # only imported, by `torch._dynamo.reset`
        below["_cuda_CUDAAllocator_AllocatorState"] = object
    for name, answer in below.items():
        replacements.set(internals, name, answer)
    memory: dict[str, Any] = {
        "_record_memory_history": lambda *_, **__: None,
        "_snapshot": lambda *_, **__: {"segments": [], "device_traces": []},
        "_dump_snapshot": lambda *_, **__: None,
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda *_, **__: 1.0,
        "memory_stats_as_nested_dict": lambda *_, **__: _nested(_statistics()),
        "host_memory_stats": lambda: OrderedDict(),
        "host_memory_stats_as_nested_dict": lambda *_, **__: {},
        "device_memory_used": lambda *_, **__: _statistics()["reserved_bytes.all.current"],
        "list_gpu_processes": lambda *_, **__: "GPU:0\nno processes are running",
        "MemPool": _MemoryPool,
    }
    for module in (cuda, cuda.memory):
        for name, answer in memory.items():
            if hasattr(module, name):
                replacements.set(module, name, answer)
    replacements.set(cuda.nccl, "version", lambda: _NCCL_VERSION)


class _MemoryPool:
    """`torch.cuda.MemPool`: its allocations are taken from the pools of their streams."""

    id = (0, 0)

    def __init__(self, *_: object, **__: object) -> None:
        self.use_count = lambda: 1
        self.snapshot: Callable[[], list[dict[str, Any]]] = list


def _statistics(*_: object, **__: object) -> OrderedDict[str, Any]:
    """Answer `torch.cuda.memory_stats`: of all pools, as those of small and of large requests are not told apart."""
    stats, recorder = backend._gpu.allocator.stats, backend._gpu.recorder
    made, freed = recorder.allocations, recorder.position - recorder.allocations
    counts = {"current": made - freed, "allocated": made, "freed": freed}
    values: dict[str, Any] = {
        **backend.memory_stats(),
        **{f"allocation.all.{name}": count for name, count in counts.items()},
        **{name: getattr(stats, name) for name in ("num_device_alloc", "num_device_free")},
        "max_split_size": -1,
        "num_sync_all_streams": 0,
    }
    return OrderedDict(sorted(values.items()))


def _nested(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return `torch.cuda.memory_stats_as_nested_dict` of what `torch.cuda.memory_stats` gives."""
    found: dict[str, Any] = {}
    for name, value in statistics.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _scatter(tensor: torch.Tensor, devices: Sequence[int], *_: object) -> tuple[torch.Tensor]:
    """Hand out a batch to one GPU, as `nn.DataParallel` does."""
    if len(devices) > 1:
        raise RuntimeError(
            f"nn.DataParallel on {len(devices)} GPUs cannot be followed: run it on one (CUDA_VISIBLE_DEVICES=0), or "
            "use DistributedDataParallel with torchrun"
        )
    return (tensor.to("cuda"),)


def _answer_for_accelerator(replacements: Replacements) -> None:
    accelerator: Any = torch.accelerator
    replacements.set(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    replacements.set(accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    renamed = {
        "current_device_index": backend.current_device,
        "current_device_idx": backend.current_device,
        "set_device_index": lambda *_: placing.choose(),
        "set_device_idx": lambda *_: placing.choose(),
        "device_index": _Guard,
    }
    for name in dir(accelerator):
        answer = renamed.get(name) or getattr(backend, name, None)
        if answer is not None and not name.startswith("_") and not isinstance(vars(accelerator).get(name), ModuleType):
            replacements.set(accelerator, name, answer)
    replacements.set(torch, "Stream", SimulatedStream)
    replacements.set(torch, "Event", SimulatedEvent)


# Where Python or C++ reads a device before `CudaNames` sees it


def _follow_devices_in_python(replacements: Replacements, gpu: SimulatedGpu) -> None:
    is_here = cuda_names.is_here
    real: Any = vars(FakeTensor)["device"]
    read = real.fget

    def device_of_fake(tensor: FakeTensor) -> torch.device:
        return read(tensor) if gpu.mode.is_dispatching else presented(tensor.fake_device)

    def device(tensor: torch.Tensor) -> torch.device:
        found = fake_device_of(tensor)
        if found is None:
            return presented(cuda_names.device_of(tensor))
        if gpu.mode.is_dispatching:
            return found
        return _META if cuda_names.is_copying() else presented(found)

    replacements.set(FakeTensor, "device", property(device_of_fake, real.fset))
    replacements.set(torch.Tensor, "device", property(device))
    replacements.set(torch.Tensor, "is_cuda", property(is_here))
    checks = original(checkpoint, "_allowed_determinism_checks_to_fns")
    look = checks["default"]

    def look_at(tensor: torch.Tensor) -> dict[str, Any]:
        found = look(tensor)
        return {**found, "device": presented(found["device"])}

    replacements.set(checkpoint, "_allowed_determinism_checks_to_fns", {**checks, "default": look_at})
    plain_repr: Any = torch.Tensor.__repr__

    def shown(tensor: torch.Tensor, **named: Any) -> str:
        is_fake = fake_device_of(tensor) is not None and not gpu.mode.is_dispatching
        return cuda_names.text_of(tensor) if is_fake else plain_repr(tensor, **named)

    replacements.set(torch.Tensor, "__repr__", shown)
    construct: Any = default_devices.DeviceContext.__init__

    def make_default(context: Any, device: Any) -> None:
        construct(context, by_number(device))

    replacements.set(default_devices.DeviceContext, "__init__", make_default)
    replacements.wrap(torch, "get_default_device", lambda read: presented(read()))
    replacements.set(torch.Tensor, "record_stream", lambda tensor, stream: gpu.memory.record_stream(tensor, stream))
    wrap: Any = torch.Tensor._make_wrapper_subclass

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrap(*map(simulated, args), **{name: simulated(value) for name, value in kwargs.items()})

    replacements.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(wrapper))
    replacements.set(torch.Tensor, "nested_int_memo", property(known_length))


# Questions of programs about fake tensors. They find none on the simulated device, as none would be on a GPU.


class _OthersOnly(type):
    """Reports a tensor on the simulated device as no instance; else answers as `FakeTensor` does."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeTensor) and not isinstance(instance.fake_mode, DeviceMode)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, FakeTensor)


class _FakeTensor(metaclass=_OthersOnly):
    """`FakeTensor`, as programs see it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return FakeTensor(*args, **kwargs)


def _is_fake(value: object) -> bool:
    """Answer `torch._subclasses.fake_tensor.is_fake`."""
    return is_fake(value) and not (isinstance(value, FakeTensor) and isinstance(value.fake_mode, DeviceMode))


def _hide_fake_tensors(replacements: Replacements) -> None:
    """Give whoever asks torch's modules for `FakeTensor` a class of which the device's tensors are no instances.

    Torch's own modules get the class itself, as they work on fake tensors for the simulated GPU.
    """
    for module, names in (
        (torch._subclasses, {"FakeTensor": _FakeTensor}),
        (torch._subclasses.fake_tensor, {"FakeTensor": _FakeTensor, "is_fake": _is_fake}),
    ):
        shown = {name: _to_programs(original(module, name), other) for name, other in names.items()}
        replacements.callback(setattr, module, "__class__", type(module))
        module.__class__ = type("_Presented", (ModuleType,), shown)


_shown_to_all = False


@contextmanager
def fake_tensors_shown() -> Iterator[None]:
    """Have programs find fake tensors within the context.

    Dynamo guards compiled code by what torch's modules hold as Dynamo reads it, and the guard is checked from the
    program's frames.
    """
    global _shown_to_all
    before, _shown_to_all = _shown_to_all, True
    try:
        yield
    finally:
        _shown_to_all = before


def _to_programs(own: Any, other: Any) -> property:
    """Return a module attribute that reads as `own` inside torch and this package, and as `other` elsewhere."""

    def read(_module: ModuleType) -> Any:
        asking = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return own if _shown_to_all or asking in ("torch", "gpumem_tui") else other

    return property(read)


def _follow_modules(replacements: Replacements) -> None:
    module_to = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if args:
            args = (by_number(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = by_number(kwargs["device"])
        return module_to(module, *args, **kwargs)

    replacements.set(nn.Module, "_apply", _apply_keeping_parameters)
    replacements.set(nn.Module, "to", to)
    replacements.set(nn.Module, "cuda", lambda module, device=None: module.to("cuda" if device is None else device))


def _apply_keeping_parameters(
    module: nn.Module, move: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Any:
    """Do as `Module._apply`, but keep parameters the same objects, as they are when they go from the CPU to CUDA.

    Torch would replace them, since a tensor without data cannot take the place of one with data.
    """
    if recurse:
        for child in nn.Module.children(module):
            child._apply(move)
    lists = _lists_in_cpp(module)
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        with torch.no_grad(), host.moving_model():
            moved = move(parameter)
            gradient = None if parameter.grad is None else move(parameter.grad)
        if moved is not parameter:
            become(parameter, moved)
            module._parameters[name] = parameter  # a script module's C++ refers to what it was
        if gradient is not None:
            parameter.grad = gradient
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = move(buffer)
    for name, tensors in lists.items():
        script: Any = module
        script._c.setattr(name, tensors)
    return module


def _lists_in_cpp(module: Any) -> dict[str, list[torch.Tensor]]:
    """Return a script module's lists of tensors, by name, as a scripted LSTM keeps its weights."""
    kinds = module._concrete_type.get_attributes() if hasattr(module, "_concrete_type") else {}
    return {name: module._c.getattr(name) for name, (kind, _) in kinds.items() if kind.annotation_str == "List[Tensor]"}


def _follow_autocast(replacements: Replacements) -> None:
    """Translate the device type for `torch.autocast("cuda")` and what asks for its state, which read it in C++."""

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


def _follow_loading(replacements: Replacements) -> Loading:
    loading = Loading(torch.device(DEVICE_TYPE, 0))

    def save(save: Any, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        loading.make_room(f)
        save(obj, f, *args, **kwargs)

    replacements.wrap(torch, "load", loading.load)
    replacements.wrap(torch.jit, "load", load_script)
    # In a trace a value is called as the variable of whichever Python called its operator, the second time another's.
    replacements.set(torch.jit._trace, "_create_interpreter_name_lookup_fn", lambda _frames_up=1: lambda _value: "")
    replacements.wrap(torch, "save", save)
    replacements.wrap(torch._guards, "detect_fake_mode", loading.fake_mode)
    replacements.wrap(torch._guards, "active_fake_mode", loading.fake_mode)
    replacements.wrap(torch._utils, "_rebuild_tensor", loading.rebuild)
    replacements.set(torch.serialization, "_package_registry", loading.registry(torch.serialization._package_registry))
    replacements.set(torch.UntypedStorage, "cuda", lambda storage, *_, **__: loading.to_device(storage))
    return loading


# Other threads: a program's own, and the autograd engine's


def _follow_threads(replacements: Replacements, gpu: SimulatedGpu, names: CudaNames) -> None:
    """Have a program's threads, and its functions in autograd's, find the device too: modes are each thread's own."""
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
            if any(isinstance(gradient, torch.Tensor) and cuda_names.is_here(gradient) for gradient in gradients):
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


_REGISTERS: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (nn.Module, "register_backward_hook"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
    (modules, "register_module_backward_hook"),
    (modules, "register_module_full_backward_hook"),
    (modules, "register_module_full_backward_pre_hook"),
)
"""Functions that take a function of the program's which backward is to call."""


def _hooks(on_error: Callable[[Exception], None]) -> dict[tuple[Any, str], Any]:
    """Return what replaces these functions, by owner and name, so that errors in backward are reported.

    An exception that leaves one of the autograd engine's threads ends the process (see `DeviceMemory.raise_if_full`),
    so it never reaches the line that called ``backward()``.

    Args:
        on_error: called with what a program's function raises in a thread of the engine.
    """
    saved: Any = torch.autograd.graph.saved_tensors_hooks
    construct = saved.__init__

    def reported(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                # An engine's thread, which it has started for a device, is one that Python did not start.
                if in_backward() and isinstance(threading.current_thread(), threading._DummyThread):
                    on_error(error)
                raise

        return called

    def registering(register: Callable[..., Any], of_owner: bool) -> Callable[..., Any]:
        @functools.wraps(register)
        def registered(*args: Any, **kwargs: Any) -> Any:
            given = list(args)
            if len(given) > of_owner and callable(given[of_owner]):
                given[of_owner] = reported(given[of_owner])
            elif callable(kwargs.get("hook")):
                kwargs["hook"] = reported(kwargs["hook"])
            return register(*given, **kwargs)

        return registered

    def init(context: Any, pack_hook: Any, unpack_hook: Any) -> None:
        construct(context, pack_hook, reported(unpack_hook))

    replaced = {(owner, name): registering(getattr(owner, name), isinstance(owner, type)) for owner, name in _REGISTERS}
    return {**replaced, (saved, "__init__"): init}
