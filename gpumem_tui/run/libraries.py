"""Answers libraries that ask a simulated GPU for compilation, kernels and graphs of their own, or NVML."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules._functions import SyncBatchNorm
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gpumem_tui.causes import Cause
from gpumem_tui.importing import after_import
from gpumem_tui.run.deepspeed import follow_deepspeed
from gpumem_tui.run.generating import generate_in_full
from gpumem_tui.run.out_of_memory import follow_finders
from gpumem_tui.run.resuming import resume_where_told
from gpumem_tui.run.saving import follow_saving, name_checkpoints
from gpumem_tui.run.stand_ins import CUDA, DRIVER
from gpumem_tui.run.trainers import follow_trainers
from gpumem_tui.simulator.allocator.caching import GRAPH_POOL
from gpumem_tui.simulator.allocator.contexts import CUDA_GRAPH
from gpumem_tui.simulator.allocator.profile import WARP_SIZE
from gpumem_tui.simulator.device.gpu import Backend, backend
from gpumem_tui.simulator.torch_internals import original, replace
from gpumem_tui.step import REDUCE_BUCKETS
from gpumem_tui.step.sites import own_line
from gpumem_tui.workload.extensions import CUDA_SOURCES, CompiledForCuda

if TYPE_CHECKING:
    from gpumem_tui.run.program import Program


_SHARED_BYTES = {(7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (12, 0): 101376}
_SHARED_BYTES_FROM_HOPPER = 232448
_REGISTERS = 65536
"""Shared memory of a block of threads by compute capability, and a multiprocessor's 32-bit registers
(CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""


def follow_libraries(program: Program) -> None:
    """Replace kernel launches by nothing, and writing checkpoints by a note; follow trainers."""
    follow_saving(program)
    name_checkpoints(backend._gpu)
    follow_trainers(program)
    resume_where_told(program, backend._gpu)
    follow_graphs(program.note)
    after_import("triton.runtime.driver", lambda module: module.driver.set_active(_TritonDriver(backend)))
    if hasattr(torch.cuda, "_compile_kernel"):
        replace(torch.cuda, "_compile_kernel", lambda *_, **__: _KernelLeftOut(program))
    _name_reduce_buckets(program)
    _iterate_in_full(program)
    generate_in_full(program)
    follow_finders(program.tries)
    follow_deepspeed(program.note, program.name)
    after_import("torch.utils.cpp_extension", lambda module: _refuse_cuda_sources(program, module))
    after_import("triton.runtime.jit", lambda module: _launch_nothing(program, module.JITFunction))
    after_import(
        "triton.runtime.autotuner", lambda module: _launch_nothing(program, module.Autotuner, module.Heuristics)
    )


def _name_reduce_buckets(program: Program) -> None:
    """Name what DistributedDataParallel's reducer keeps gradients in: it makes its buckets at once, and once anew."""
    if not torch.distributed.is_available():
        return
    reducer = getattr(torch.distributed, "Reducer")  # noqa: B009  which torch does not export by its types
    for name in ("__init__", "_rebuild_buckets"):
        replace(reducer, name, functools.partialmethod(_with_buckets, original(reducer, name), program))


_ONE_COPY = (
    "`DistributedDataParallel(…, gradient_as_bucket_view=True)` has one, but for gradients that accumulate under "
    "`no_sync()`"
)


def _with_buckets(reducer: Any, make: Callable[..., Any], program: Program, *args: Any, **kwargs: Any) -> Any:
    recorder = backend._gpu.recorder
    before = recorder.allocations
    made = make(reducer, *args, **kwargs)
    for number in range(before + 1, recorder.allocations + 1):
        recorder.name(number, REDUCE_BUCKETS)
    if make.__name__ == "__init__":
        program.note(Cause("reduce_buckets", _ONE_COPY, line=own_line()))
    return made


def _iterate_in_full(program: Program) -> None:
    """Let LBFGS make all of its iterations: it stops when nothing changes, and losses without values never do."""
    optimizer: Any = torch.optim.LBFGS
    step = original(optimizer, "step")

    @functools.wraps(step)
    def full_step(self: Any, closure: Any) -> Any:
        program.note("LBFGS: all iterations of a step are made; its history grows with steps, up to history_size pairs")
        for group in self.param_groups:
            group["tolerance_change"] = group["tolerance_grad"] = -1.0
        return step(self, closure)

    replace(optimizer, "step", full_step)


def _launch_nothing(program: Program, *kinds: Any) -> None:
    """Make launches do nothing: a kernel's results are allocated before it is launched."""

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        program.note("Triton kernels are not run: what they allocate is, before they are launched")
        if getattr(kernel, "configs", None):  # what a tuned kernel has found to be best is read to sum its parts
            kernel.best_config = kernel.configs[0]

    for kind in kinds:
        kind.run = run


def _refuse_cuda_sources(program: Program, module: Any) -> None:
    """Refuse at once to build extensions of CUDA sources, which a compiler would take minutes to fail at.

    Extensions in C++ alone are built as ever: the torch operators that they call can be followed.
    """
    for name in ("_jit_compile", "CUDAExtension"):
        replace(module, name, _building(program, original(module, name), is_for_cuda=name == "CUDAExtension"))


def _building(program: Program, build: Callable[..., Any], *, is_for_cuda: bool) -> Callable[..., Any]:
    @functools.wraps(build)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(build).bind(*args, **kwargs).arguments
        sources = [str(source) for source in given["sources"]]
        if is_for_cuda or given.get("with_cuda") or any(source.endswith(CUDA_SOURCES) for source in sources):
            name = given["name"]
            program.without.append(name)
            program.note(
                f"{own_line()}: the program went on without its extension {name}, which is compiled for CUDA: on a GPU "
                "that has it the memory may differ"
            )
            raise CompiledForCuda(f"the extension {name}", sources)
        return build(*args, **kwargs)

    return checked


class _KernelLeftOut:
    """A CUDA kernel that a program compiles while it runs: what it writes is allocated before, as with Triton's."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __call__(self, *_: Any, **__: Any) -> None:
        self._program.note("CUDA kernels that the program compiles are not run: what they write is allocated before")

    def set_shared_memory_config(self, size_bytes: int) -> None:
        """Ignore memory of the multiprocessors, which is no part of the device's."""


class _TritonDriver:
    """Triton's driver of the simulated GPU: what launchers ask it before they choose a kernel's shape.

    Args:
        device: answers as `torch.cuda` does.
    """

    def __init__(self, device: Backend) -> None:
        self._device = device
        self.utils = SimpleNamespace(get_device_properties=self._properties)
        self.get_current_device: Callable[[], int] = device.current_device
        self.get_device_capability = device.get_device_capability

    def get_current_stream(self, _device: object = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        compiler: Any = import_module("triton.backends.compiler")
        major, minor = self._device.get_device_capability()
        return compiler.GPUTarget("cuda", 10 * major + minor, WARP_SIZE)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return no cache: there is nothing to measure."""
        return torch.empty(0)

    def _properties(self, _device: object = None) -> dict[str, int]:
        properties = self._device.get_device_properties()
        capability = self._device.get_device_capability()
        shared = _SHARED_BYTES.get(capability) or _SHARED_BYTES_FROM_HOPPER
        return {
            "multiprocessor_count": properties.multi_processor_count,
            "max_shared_mem": shared,
            "max_num_regs": _REGISTERS,
            "warpSize": properties.warp_size,
        }


# CUDA graphs: what is captured runs once, then; a replay repeats the optimizer steps in it

_handles = count(1)
_SYNC_BATCH_NORM = SyncBatchNorm.forward.__code__


def _new_pool() -> tuple[int, int]:
    """Return the handle of a new pool, as `torch.cuda.graph_pool_handle` does."""
    return 0, next(_handles)


class CapturedGraph:
    """`torch.cuda.CUDAGraph`; what is allocated while it is captured comes from a pool of its own, or a shared one."""

    _capturing: CapturedGraph | None = None

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: ARG002 - as torch's is called
        self._stepped: list[Optimizer] = []
        self._watch: Any = None
        self._pool = _new_pool()
        self._stream: int | None = None

    @classmethod
    def is_capturing(cls) -> bool:
        """Return whether a graph is being captured.

        `SyncBatchNorm` needs to know: else it looks by values for ranks without samples, to leave these out.
        """
        return cls._capturing is not None or sys._getframe(1).f_code is _SYNC_BATCH_NORM

    def capture_begin(self, pool: tuple[int, int] | None = None, *_: object, **__: object) -> None:
        """Take memory from a pool, its own if none is given, and note which optimizers step."""
        self._pool = pool or self._pool
        self._stream = backend._gpu.streams.switch(GRAPH_POOL + self._pool[1])
        self._stepped.clear()
        CapturedGraph._capturing = self
        self._watch = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped.append(optimizer))

    def capture_end(self) -> None:
        """End the capture; the graph that it makes takes memory of the device outside the allocator."""
        CapturedGraph._capturing = None
        backend._gpu.streams.switch(self._stream)
        backend._gpu.load(CUDA_GRAPH)
        self._watch.remove()

    def replay(self) -> None:
        """Note that the captured optimizers have stepped once more."""
        for optimizer in self._stepped:
            for hook in list(optimizers._global_optimizer_post_hooks.values()):
                hook(optimizer, (), {})

    def pool(self) -> tuple[int, int]:
        """Return the id of the pool of memory."""
        return self._pool

    def _do_nothing(self, *_: object) -> None:
        """Answer what changes no memory."""

    instantiate = reset = enable_debug_mode = debug_dump = _do_nothing


def follow_graphs(note: Callable[[str], None]) -> None:
    """Give programs graphs that can be captured without CUDA, and `note` what that means."""

    class NotedGraph(CapturedGraph):
        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(keep_graph)
            note("CUDA graphs: traced once, as they are captured")

    cuda: Any = torch.cuda
    for module in (cuda, cuda.graphs):
        replace(module, "CUDAGraph", NotedGraph)
        replace(module, "graph_pool_handle", _new_pool)
        replace(module, "is_current_stream_capturing", CapturedGraph.is_capturing)


# Answers of NVML's Python binding (`pynvml`)


def answer_nvml(device: Backend, context_bytes: int) -> None:
    """Have NVML's binding answer for the simulated GPU, once the program has imported it.

    Args:
        device: answers as `torch.cuda`.
        context_bytes: what a process holds outside its allocator.
    """

    def memory(*_: object, **__: object) -> SimpleNamespace:
        total = device.get_device_properties().total_memory
        used = device.memory_reserved() + context_bytes
        return SimpleNamespace(total=total, used=used, free=total - used, reserved=0)

    def always(answer: object) -> Callable[..., object]:
        return lambda *_, **__: answer

    answers: dict[str, Callable[..., object]] = {
        "nvmlInit": always(None),
        "nvmlInitWithFlags": always(None),
        "nvmlShutdown": always(None),
        "nvmlSystemGetDriverVersion": always(DRIVER),
        "nvmlSystemGetCudaDriverVersion": always(1000 * CUDA[0] + 10 * CUDA[1]),
        "nvmlSystemGetCudaDriverVersion_v2": always(1000 * CUDA[0] + 10 * CUDA[1]),
        "nvmlDeviceGetCount": device.device_count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": always(0),
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetName": lambda _: device.get_device_name(),
        "nvmlDeviceGetUUID": lambda _: f"GPU-{device.get_device_properties().uuid}",
        "nvmlDeviceGetCudaComputeCapability": lambda _: device.get_device_capability(),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [],
        "nvmlDeviceGetTemperature": always(0),
        "nvmlDeviceGetPowerUsage": always(0),
    }

    def answer(module: Any) -> None:
        for name, function in answers.items():
            setattr(module, name, function)

    after_import("pynvml", answer)

    def number_as_nvml(module: Any) -> None:
        """Let DeepSpeed number GPUs as if all were visible: a simulated run hides the real ones."""
        module.CUDA_Accelerator._get_nvml_gpu_id = lambda _, index: index

    after_import("deepspeed.accelerator.cuda_accelerator", number_as_nvml)
