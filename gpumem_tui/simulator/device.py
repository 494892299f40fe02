"""The simulated GPU as PyTorch sees it: a device type of its own, with the functions that `torch.cuda` has.

Code that asks `torch.get_device_module(device)` for memory figures runs unchanged on this device and on a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import KIB, MIB, Bucket
from gpumem_tui.simulator import attention, autocast, kernels, recurrent
from gpumem_tui.simulator.allocator import CachingAllocator, OutOfMemory
from gpumem_tui.simulator.backend import Backend
from gpumem_tui.simulator.profile import Profile
from gpumem_tui.simulator.settings import AllocatorSettings
from gpumem_tui.simulator.shaped import AssumedRows
from gpumem_tui.simulator.streams import Streams
from gpumem_tui.simulator.timeline import Timeline, TimelineRecorder
from gpumem_tui.simulator.torch_internals import Replacements, extend
from gpumem_tui.simulator.trace import DeviceMode
from gpumem_tui.step import Phase
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.sites import SiteFinder
from gpumem_tui.step.walking import local

DEVICE_TYPE = "simgpu"


class SimulatedGpu:
    """One simulated GPU: its allocator and the record of what ran on it.

    Args:
        gpu: the GPU to be.
        profile: version- and architecture-dependent facts.
        limit_bytes: a cap on reserved bytes, as `set_per_process_memory_fraction` sets one; None for none.
        unlimited: never run out of memory, to trace what a step would need: at other batch sizes too, so buffers that
            kernels take only from some size on are recorded, empty, where they are not taken.
        on_backward_error: called with an error in backward other than out-of-memory, just before it ends the process
            (see `DeviceMode.raise_if_full`).
        on_out_of_memory: called with the message, just before it is raised.
        assumed_rows: how many rows operators give whose result's shape depends on what the GPU computes.
        notes: gets a line for what else is assumed, each as a key.
        allocator: in the place of one with this GPU's memory.

    Attributes:
        dropout_state: cuDNN's random states for dropout between recurrent layers, once they were asked for.
    """

    def __init__(
        self,
        gpu: Gpu,
        profile: Profile,
        limit_bytes: int | None = None,
        unlimited: bool = False,
        on_backward_error: Callable[[Exception], None] = lambda error: None,
        on_out_of_memory: Callable[[str], None] = lambda message: None,
        assumed_rows: AssumedRows | None = None,
        notes: dict[str, None] | None = None,
        allocator: CachingAllocator | None = None,
    ) -> None:
        self.gpu = gpu
        self.notes = {} if notes is None else notes
        self.dropout_state: torch.Tensor | None = None
        self.assumed_rows = assumed_rows or AssumedRows()
        self.on_backward_error = on_backward_error
        self.on_out_of_memory = on_out_of_memory
        self.profile = profile
        self.unlimited = unlimited
        capacity = 1 << 60 if unlimited else gpu.cuda_total_bytes - profile.context_bytes
        self.allocator = allocator or CachingAllocator(capacity, AllocatorSettings.from_environment(), limit_bytes)
        self.recorder = TimelineRecorder()
        self.streams = Streams(self.recorder, self.allocator)
        self.sites = SiteFinder()
        self.mode = DeviceMode(DEVICE_TYPE, self)

    def mark(self, step: int, phase: Phase) -> None:
        """From here on the run is in `phase` of `step`."""
        self.recorder.mark(step, phase)

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """State which bucket these tensors are; tensors elsewhere are ignored."""
        for tensor in tensors:
            number = self.mode.allocation_of(local(tensor))
            if number is not None:
                self.recorder.tag(number, bucket)

    def name_modules(self, model: torch.nn.Module) -> None:
        """Call the modules of `model` by their qualified names from now on."""
        self.sites.name_modules(model)

    def finish(self, failed: bool = False) -> Timeline:
        """The run so far; if it failed, up to where memory ran out."""
        return self.recorder.finish(failed)

    def out_of_memory(self, error: OutOfMemory) -> torch.OutOfMemoryError:
        """The exception PyTorch would raise, saying what its own message says."""
        free = max(0, error.capacity_bytes - error.reserved_bytes)
        message = (
            f"Simulated {self.gpu.title} out of memory. Tried to allocate {requested_text(error.requested_bytes)}; "
            f"the device has {requested_text(self.gpu.cuda_total_bytes)}, {requested_text(free)} of it free: "
            f"{requested_text(error.allocated_bytes)} allocated by PyTorch, "
            f"{requested_text(error.reserved_bytes - error.allocated_bytes)} reserved but unallocated, "
            f"{requested_text(self.profile.context_bytes)} CUDA context."
        )
        self.on_out_of_memory(message)
        return torch.OutOfMemoryError(message)


backend = Backend()
"""`torch.simgpu`."""
_registered = False


def register() -> None:
    """Make the device type known to torch; once per process, and before its first backward.

    Autograd counts the devices when it starts its threads, and never again.
    """
    global _registered
    if _registered:
        return
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=backend)
    autocast.register(DEVICE_TYPE)
    kernels.register()
    attention.register(lambda: backend._gpu.gpu.compute_capability)
    recurrent.register(lambda: backend._gpu)
    # CUDA's optimizers and gradient clipping take all tensors at once by default, which needs scratch for all of them;
    # torch's test for that goes by the exact type of a parameter.
    for owner in (optimizers, _foreach_utils):
        extend(owner, "_foreach_supported_types", FakeTensor)
    _registered = True


@contextmanager
def simulate(gpu: SimulatedGpu) -> Iterator[torch.device]:
    """Within the context, `gpu` is device ``simgpu:0``; tensors on it have shapes and storages but no values."""
    register()
    previous, backend.current = backend.current, gpu
    previous_streams, Streams.active = Streams.active, gpu.streams

    def backward(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = engine(*args, **kwargs)
        if not in_backward():
            gpu.mode.raise_if_full()
        return result

    def followed_resize(resize: Any, storage: torch.UntypedStorage, size_bytes: int) -> Any:
        result = resize(storage, size_bytes)
        gpu.mode.resized(storage)
        return result

    with Replacements() as replacements:
        replacements.wrap(torch.autograd, "_engine_run_backward", backward)
        replacements.wrap(torch.UntypedStorage, "resize_", followed_resize)
        replacements.set(FakeTensor, "__format__", _format_scalar)
        replacements.set(torch.Tensor, "pin_memory", _already_pinned)
        replacements.set(torch._C, "_conv_determine_backend_memory_format", kernels.convolution_layout)
        try:
            with gpu.sites.watching(), gpu.mode:
                yield torch.device(DEVICE_TYPE, 0)
        finally:
            backend.current = previous
            Streams.active = previous_streams


def _already_pinned(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Pinning takes host memory only, and nothing is copied here that would be faster for it."""
    return tensor


def _format_scalar(tensor: torch.Tensor, specification: str) -> str:
    """``f"{loss:.4f}"`` of a tensor of one element, which plain tensors format as its value."""
    return format(tensor.item() if tensor.dim() == 0 else object.__str__(tensor), specification)


def requested_text(size_bytes: int) -> str:
    """A size as PyTorch's out-of-memory message writes it (`format_size` in CUDACachingAllocator.cpp)."""
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    if size_bytes <= MIB:
        return f"{size_bytes / KIB:.2f} KiB"
    if size_bytes <= 1024 * MIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / (1024 * MIB):.2f} GiB"
