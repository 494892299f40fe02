"""What libraries do that a simulated GPU cannot follow: compilation and kernels of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from gpumem_tui.command.checkpoints import write_no_checkpoint
from gpumem_tui.command.graphs import follow_graphs
from gpumem_tui.importing import after_import
from gpumem_tui.simulator.backend import Backend
from gpumem_tui.simulator.device import backend
from gpumem_tui.simulator.profile import WARP_SIZE
from gpumem_tui.simulator.torch_internals import original, replace
from gpumem_tui.simulator.uncompiled import stay_eager

if TYPE_CHECKING:
    from gpumem_tui.command.program import Program

_SHARED_BYTES = {(7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (12, 0): 101376}
_SHARED_BYTES_FROM_HOPPER = 232448
_REGISTERS = 65536
"""What a block of threads may have of shared memory, by compute capability, and a multiprocessor's 32-bit registers
(CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""


def follow_libraries(program: Program) -> None:
    """Replace compilation by eager execution, kernel launches by nothing, and writing checkpoints by a note."""
    stay_eager(program.note)
    write_no_checkpoint(program)
    follow_graphs(program.note)
    after_import("triton.runtime.driver", lambda module: module.driver.set_active(_TritonDriver(backend)))
    _compile_nothing(program)
    _iterate_in_full(program)
    after_import("triton.runtime.jit", lambda module: _launch_nothing(program, module.JITFunction))
    after_import(
        "triton.runtime.autotuner", lambda module: _launch_nothing(program, module.Autotuner, module.Heuristics)
    )


def _iterate_in_full(program: Program) -> None:
    """LBFGS iterates within a step until nothing changes, and losses without values never do."""
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
    """A kernel's results are allocated before it is launched: a launch that does nothing leaves memory right."""

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        program.note("Triton kernels are not run: what they allocate is, before they are launched")

    for kind in kinds:
        kind.run = run


class _KernelLeftOut:
    """A CUDA kernel that a program compiles while it runs: what it writes is allocated before, as with Triton's."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __call__(self, *_: Any, **__: Any) -> None:
        self._program.note("CUDA kernels that the program compiles are not run: what they write is allocated before")

    def set_shared_memory_config(self, size_bytes: int) -> None:
        """Memory of the multiprocessors, which is no part of the device's."""


def _compile_nothing(program: Program) -> None:
    if hasattr(torch.cuda, "_compile_kernel"):
        replace(torch.cuda, "_compile_kernel", lambda *_, **__: _KernelLeftOut(program))


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

    def get_current_stream(self, device: object = None) -> int:
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
        """There is nothing to measure."""
        return torch.empty(0)

    def _properties(self, device: object = None) -> dict[str, int]:
        properties = self._device.get_device_properties()
        capability = self._device.get_device_capability()
        shared = _SHARED_BYTES.get(capability) or _SHARED_BYTES_FROM_HOPPER
        return {
            "multiprocessor_count": properties.multi_processor_count,
            "max_shared_mem": shared,
            "max_num_regs": _REGISTERS,
            "warpSize": properties.warp_size,
        }
