"""The simulated GPU as PyTorch sees it: a device type of its own, with the functions that `torch.cuda` has.

Code that asks `torch.get_device_module(device)` for memory figures runs unchanged on this device and on a real one.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.causes import Cause
from gpumem_tui.memory import KIB, MIB, Bucket
from gpumem_tui.simulator.allocator.caching import CachingAllocator, OutOfMemory
from gpumem_tui.simulator.allocator.contexts import CUDA_GRAPH
from gpumem_tui.simulator.allocator.folding import Round, folded
from gpumem_tui.simulator.allocator.profile import THREADS_PER_BLOCK, WARP_SIZE, Profile, per_multiprocessor
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.simulator.allocator.tries import settled
from gpumem_tui.simulator.device import attention, autocast, eight_bit, kernels, kinds, older, recurrent, unregistered
from gpumem_tui.simulator.device.base import DEVICE_TYPE
from gpumem_tui.simulator.device.engine import Passes
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.device.mode import DeviceMode
from gpumem_tui.simulator.device.shapes import AssumedRows
from gpumem_tui.simulator.device.streams import (
    DEFAULT_STREAM,
    ExternalStream,
    SimulatedEvent,
    SimulatedStream,
    StreamContext,
    Streams,
)
from gpumem_tui.simulator.torch_internals import Replacements
from gpumem_tui.step import Phase, RunStage
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.sites import SiteFinder
from gpumem_tui.step.walking import local
from gpumem_tui.text import minor_of

_ENDLESS, _REAL = 1 << 60, 1 << 50


class SimulatedGpu:
    """One simulated GPU: its allocator and the record of what ran on it.

    Args:
        gpu: the GPU to be.
        profile: version- and architecture-dependent facts.
        limit_bytes: a cap on reserved bytes, as `set_per_process_memory_fraction` sets one; None for none.
        unlimited: trace what a step would need: at other batch sizes too, so buffers that kernels take only from some
            size on are recorded, empty, where they are not taken; and never run out of memory, but for `ooms`.
        ooms: how often an unlimited one runs out of memory anyway, where the real one ends, before it has no end;
            None: each time.
        on_backward_error: called with an error in backward other than out-of-memory, just before it ends the process
            (see `DeviceMemory.raise_if_full`).
        on_out_of_memory: called with the message, just before it is raised; not called where memory has no end.
        assumed_rows: how many rows operators give whose result's shape depends on what the GPU computes.
        notes: gets a line for what else is assumed, each as a key.
        allocator: in the place of one with this GPU's memory.

    Attributes:
        dropout_state: cuDNN's random states for dropout between recurrent layers, once they were asked for.
        whole_tries: tells which times that memory ran out all steps since the last time were part of what was tried.
    """

    def __init__(  # noqa: PLR0913 - each is a keyword that one kind of run sets
        self,
        gpu: Gpu,
        profile: Profile,
        limit_bytes: int | None = None,
        unlimited: bool = False,
        ooms: int | None = 0,
        on_backward_error: Callable[[Exception], None] = lambda _: None,
        on_out_of_memory: Callable[[str], None] = lambda _: None,
        assumed_rows: AssumedRows | None = None,
        notes: dict[str, None] | None = None,
        allocator: CachingAllocator | None = None,
    ) -> None:
        self.gpu = gpu
        self.profile = profile
        self.unlimited = unlimited
        self.on_backward_error = on_backward_error
        self.on_out_of_memory = on_out_of_memory
        self.notes = {} if notes is None else notes
        self.dropout_state: torch.Tensor | None = None
        self.whole_tries: Callable[[], Container[int]] = tuple
        self._ooms_left = ooms if unlimited else None
        capacity = gpu.cuda_total_bytes - profile.context_bytes
        self.allocator = allocator or CachingAllocator(capacity, AllocatorSettings.from_environment, limit_bytes)
        if self._ooms_left == 0:
            self._remove_end()
        self.recorder = TimelineRecorder()
        self.phases_begun = 0
        self._rounds: list[Round] = []
        self._groups: dict[str, int] = {}
        self._libraries: list[str] = []
        self.streams = Streams(self.recorder, self.allocator)
        self.passes = Passes()
        self.sites = SiteFinder()
        self.memory = DeviceMemory(self)
        self.casts = autocast.Casts(self, self.memory)
        self.mode = DeviceMode(self, self.memory, assumed_rows or AssumedRows())

    def mark(self, step: int, phase: Phase, stage: RunStage | None = None) -> None:
        """State that the run is in `phase` of `step` from here on, and in that stage of the whole."""
        self.phases_begun += 1
        self.recorder.mark(step, phase, stage)

    def communicate(self, args: Iterable[Any]) -> None:
        """Take NCCL's buffers for the group of ranks that is among a collective's arguments, as NCCL does once."""
        c10d: Any = torch.distributed.distributed_c10d
        sizes = {name: group.size() for group, name in c10d._world.pg_names.items()}
        groups = (torch.distributed.ProcessGroup.unbox(one).group_name if isinstance(one, torch.ScriptObject) else one
                  for one in args if isinstance(one, (str, torch.ScriptObject)))  # fmt: skip
        name = next((one for one in groups if one in sizes), None)
        if name is not None and name not in self._groups:
            self._groups[name] = sizes[name]
            self._hold_context()

    def load(self, library: str) -> None:
        """Take what a library of CUDA holds outside the allocator, once; a CUDA graph each time."""
        if library == CUDA_GRAPH or library not in self._libraries:
            self._libraries.append(library)
            self._hold_context()

    def _hold_context(self) -> None:
        before_bytes = self.profile.context_bytes
        self.profile = self.profile.using(self.gpu, self._groups.values(), self._libraries)
        self.allocator.capacity_bytes -= self.profile.context_bytes - before_bytes

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor], part: str = "") -> None:
        """State which bucket these tensors are, and which part of it; tensors elsewhere are ignored."""
        for tensor in tensors:
            number = self.memory.allocation_of(local(tensor))
            if number is not None:
                self.recorder.tag(number, bucket, part)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's allocation, from 1 on; 0 of the program's data, None of one elsewhere."""
        number = self.memory.allocation_of(local(tensor))
        return 0 if number and self.recorder.is_data(number) else number

    def loaded(self, tensors: Iterable[torch.Tensor], source: str) -> None:
        """State that a line has loaded these tensors from a checkpoint, unless the program makes them its own."""
        for tensor in tensors:
            number = self.memory.allocation_of(local(tensor))
            if number is not None:
                self.recorder.came_from_file(number, source)

    def name_modules(self, model: torch.nn.Module) -> None:
        """Call the modules of `model` by their qualified names from now on."""
        self.sites.name_modules(model)
        self.mode.upcasts.look(model)

    def causes(self) -> Iterator[Cause]:
        """Yield what the program has asked of torch that takes memory by itself."""
        pools = [size_bytes for size_bytes in self.allocator.cached_in_graph_pools().values() if size_bytes]
        if len(pools) > 1:
            how = "capture them with one `pool=torch.cuda.graph_pool_handle()`, the largest first"
            yield Cause("graph_pools", f"{len(pools)} pools; {how}", sum(pools))
        yield from self.casts.causes()
        yield from self.mode.upcasts.causes()
        if self.memory.columns_bytes:
            how = "`torch.backends.cudnn.enabled` is False; leave it on"
            yield Cause("cudnn_off", how, self.memory.columns_bytes, self.memory.columns_line)

    def begin_round(self) -> int:
        """State that a call begins which is answered as others alike were; return the allocator's `state`."""
        state = self.allocator.state()
        self._rounds.append(Round(self.recorder.position, self.recorder.allocations, state))
        return state

    def finish(self, failed: bool = False) -> Timeline:
        """Return the run so far without what it tried and had no memory for; if it failed, up to where that ran out."""
        return settled(self.recorder.finish(failed), self.recorder.tries, self.whole_tries())

    def finish_folded(self, *, is_exact: bool) -> Timeline:
        """Return the run so far without what it did again and again alike (see `folded`), if memory never ran out."""
        if self.recorder.tries:
            return self.finish()
        return folded(self.finish(), self._rounds, is_exact=is_exact)

    def _remove_end(self) -> None:
        self.allocator.capacity_bytes, self.allocator.allowed_bytes = _ENDLESS, None

    @property
    def is_endless(self) -> bool:
        """Return whether memory has no end, now."""
        return self.allocator.capacity_bytes > _REAL

    def goes_beyond(self) -> bool:
        """Return whether memory has no end from now on, though it has just run out; else count that it has."""
        if self._ooms_left == 0:
            self._remove_end()
            return True
        if self._ooms_left is not None:
            self._ooms_left -= 1
        return False

    def out_of_memory(self, error: OutOfMemory) -> torch.OutOfMemoryError:
        """Make the exception that PyTorch raises, with its message (`malloc` in CUDACachingAllocator.cpp of 2.10)."""
        text, context_bytes, total_bytes = size_text, self.profile.context_bytes, self.gpu.whole.cuda_total_bytes
        free_bytes = max(0, error.capacity_bytes - error.reserved_bytes)
        used_bytes = error.reserved_bytes + context_bytes
        allowed = "" if error.allowed_bytes is None else f"{text(error.allowed_bytes)} allowed; "
        message = (
            f"{self.gpu.runtime} out of memory. Tried to allocate {text(error.segment_bytes)}. GPU 0 has a total "
            f"capacity of {text(total_bytes)} of which {text(free_bytes)} is free. Including non-PyTorch "
            f"memory, this process has {text(used_bytes)} memory in use. {allowed}Of the allocated memory "
            f"{text(error.allocated_bytes)} is allocated by PyTorch, and "
            f"{text(error.reserved_bytes - error.allocated_bytes)} is reserved by PyTorch but unallocated. If reserved "
            "but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
            "fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )
        self.on_out_of_memory(message)
        return torch.OutOfMemoryError(message)


# The functions of torch's device module

_ALWAYS: dict[str, Any] = {
    **dict.fromkeys(("is_initialized", "is_available", "can_device_access_peer"), True),
    "_is_in_bad_fork": False,
    **dict.fromkeys(("current_device", "initial_seed", "utilization"), 0),
    **dict.fromkeys(("memory_usage", "temperature", "power_draw", "clock_rate"), 0),
    **dict.fromkeys(("init", "manual_seed", "manual_seed_all", "seed", "seed_all"), None),
    **dict.fromkeys(("set_rng_state", "set_rng_state_all", "empty_host_cache", "ipc_collect"), None),
    **dict.fromkeys(("reset_accumulated_memory_stats", "set_per_process_memory_fraction", "set_device"), None),
}
"""Constant answers of these functions: there is one device, no driver, and no value is computed."""

_STATISTICS = {
    "memory_allocated": "allocated_bytes",
    "max_memory_allocated": "peak_allocated_bytes",
    **dict.fromkeys(("memory_reserved", "memory_cached"), "reserved_bytes"),
    **dict.fromkeys(("max_memory_reserved", "max_memory_cached"), "peak_reserved_bytes"),
}
"""By function, the allocator's figure that it answers."""


class Backend:
    """The device module of the simulated GPU; its functions have the names and parameters of `torch.cuda`'s.

    Attributes:
        current: the GPU that is being simulated.
        devices: how many GPUs of its kind this process may count on its machine; only the first one exists.
        rank: this process's number among those of the program. `ranks`: how many it made a process group of.
    """

    OutOfMemoryError = torch.OutOfMemoryError
    current_device: Callable[..., int]
    current_stream: Callable[..., SimulatedStream]
    get_device_capability: Callable[..., tuple[int, int]]
    get_device_name: Callable[..., str]
    memory_reserved: Callable[..., int]
    set_device: Callable[..., None]
    Stream = SimulatedStream
    ExternalStream = ExternalStream
    Event = SimulatedEvent
    stream = StreamContext

    def __init__(self) -> None:
        self.current: SimulatedGpu | None = None
        self.devices = 1
        self.rank, self.ranks = 0, 1
        functions: dict[str, Any] = vars(self)
        for name, answer in _ALWAYS.items():
            functions[name] = functools.partial(lambda answer, *_, **__: answer, answer)
        for name, figure in _STATISTICS.items():
            functions[name] = functools.partial(lambda figure, *_, **__: self._statistic(figure), figure)
        reset = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")
        functions.update(dict.fromkeys(reset, lambda *_, **__: self._gpu.allocator.stats.reset_peaks()))
        functions.update(dict.fromkeys(("device", "device_of"), lambda *_: nullcontext()))
        functions.update(
            get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
            get_rng_state=lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
            get_rng_state_all=lambda: [torch.zeros(16, dtype=torch.uint8) for _ in range(self.devices)],
            get_device_name=lambda *_, **__: self._gpu.gpu.whole.title,
            get_device_capability=lambda *_, **__: self._gpu.gpu.compute_capability,
            get_arch_list=lambda: [self._gpu.gpu.sm],
            memory_summary=lambda *_, **__: "\n".join(
                f"{name:<36}{value:>20}" for name, value in self.memory_stats().items()
            ),
            memory_snapshot=lambda *_, **__: [],
            current_stream=lambda *_, **__: SimulatedStream(stream_id=self._gpu.streams.current),
            default_stream=lambda *_, **__: SimulatedStream(stream_id=DEFAULT_STREAM),
            get_stream_from_external=lambda data_ptr, *_, **__: ExternalStream(data_ptr),
        )

    @property
    def _gpu(self) -> SimulatedGpu:
        if self.current is None:
            raise RuntimeError("no simulated GPU is active: wrap the step in simulator.device.gpu.simulate()")
        return self.current

    def _statistic(self, figure: str) -> int:
        return int(getattr(self._gpu.allocator.stats, figure))

    def device_count(self) -> int:
        """Return how many GPUs this process may count."""
        return self.devices

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Return whether bfloat16 works: since Ampere (NVIDIA A100 white paper); before, PyTorch emulates it."""
        return including_emulation or self._gpu.gpu.compute_capability >= (8, 0)

    def is_tf32_supported(self) -> bool:
        """Return whether TF32 works: since Ampere."""
        return self._gpu.gpu.compute_capability >= (8, 0)

    def synchronize(self, *_: object, **__: object) -> None:
        """Wait for what the GPU was given."""
        if self.current is not None:  # torch's profiler asks every registered device
            self.current.streams.synchronize()

    def get_device_properties(self, *_: object, **__: object) -> SimpleNamespace:
        """Return what CUDA tells of the GPU."""
        gpu, profile = self._gpu.gpu.whole, self._gpu.profile
        major, minor = gpu.compute_capability
        return SimpleNamespace(
            name=gpu.title,
            total_memory=gpu.cuda_total_bytes,
            major=major,
            minor=minor,
            multi_processor_count=profile.multiprocessors,
            max_threads_per_multi_processor=profile.threads_per_multiprocessor,
            max_threads_per_block=THREADS_PER_BLOCK,
            warp_size=2 * WARP_SIZE if gpu.arch else WARP_SIZE,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName=gpu.arch,
            pci_bus_id=0,
            pci_device_id=0,
            pci_domain_id=0,
            uuid=UUID(int=0),
            **per_multiprocessor(gpu.compute_capability),
        )

    def mem_get_info(self, *_: object, **__: object) -> tuple[int, int]:
        """Return (free, total) bytes, as cudaMemGetInfo does."""
        total_bytes = self._gpu.gpu.whole.cuda_total_bytes
        used_bytes = (
            self._gpu.gpu.engine_bytes + self._gpu.profile.context_bytes + self._gpu.allocator.stats.reserved_bytes
        )
        return max(0, total_bytes - used_bytes), total_bytes

    get_memory_info = mem_get_info

    def empty_cache(self) -> None:
        """Give the cached segments back."""
        self._gpu.allocator.empty_cache()
        self._gpu.recorder.empty_cache()

    def memory_stats(self, *_: object, **__: object) -> OrderedDict[str, Any]:
        """Return the statistics that this allocator keeps, under `torch.cuda.memory_stats`' keys."""
        stats = self._gpu.allocator.stats
        values: OrderedDict[str, Any] = OrderedDict(num_alloc_retries=stats.num_alloc_retries, num_ooms=stats.num_ooms)
        for name in ("requested", "allocated", "active", "reserved", "inactive_split"):
            values[f"{name}_bytes.all.current"] = getattr(stats, f"{name}_bytes")
            values[f"{name}_bytes.all.peak"] = getattr(stats, f"peak_{name}_bytes")
        return values

    def set_stream(self, stream: SimulatedStream | None) -> None:
        """Have this thread work on a stream."""
        if stream is not None:
            self._gpu.streams.switch(stream.stream_id)


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
    set_up = getattr(backend_registration, "_setup_privateuseone_for_python_backend", unregistered.set_up)
    set_up(DEVICE_TYPE, backend_module=backend)
    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):  # torch up to 2.8
        unregistered.pass_on_higher_order(DeviceMode)
    autocast.register(DEVICE_TYPE)
    autocast.copied.append(lambda source, copy: backend._gpu.casts.made(source, copy))
    kernels.register(lambda tensor: backend._gpu.mode.transfers.read(tensor))
    attention.register(lambda: backend._gpu.profile)
    recurrent.register(lambda: backend._gpu)
    eight_bit.follow_bitsandbytes(lambda: backend._gpu)
    _registered = True


@contextmanager
def simulate(gpu: SimulatedGpu) -> Iterator[torch.device]:
    """Have `gpu` be device ``simgpu:0`` within the context; tensors on it have shapes and storages but no values."""
    register()
    previous, backend.current = backend.current, gpu
    previous_streams, Streams.active = Streams.active, gpu.streams

    def backward(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            return engine(*args, **kwargs)
        result = gpu.passes.run(engine, *args, **kwargs)
        gpu.memory.raise_if_full()
        return result

    def followed_resize(resize: Any, storage: torch.UntypedStorage, size_bytes: int) -> Any:
        result = resize(storage, size_bytes)
        gpu.memory.resized(storage)
        return result

    with Replacements() as replacements:
        replacements.wrap(torch.autograd, "_engine_run_backward", backward)
        replacements.wrap(torch.UntypedStorage, "resize_", followed_resize)
        # Pinning takes host memory only, and nothing is copied here that would be faster for it.
        replacements.set(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor)
        kinds.follow_classes(replacements)
        replacements.set(torch._C, "_conv_determine_backend_memory_format", kernels.convolution_layout)
        for name, kernel in attention.ASKED_FOR.items():
            replacements.set(torch._C, name, attention.can_use(kernel, lambda: gpu.profile))
        if gpu.profile.version < minor_of(torch.__version__):
            older.follow(gpu.profile.version, replacements)
        try:
            with gpu.sites.watching(), gpu.mode:
                yield torch.device(DEVICE_TYPE, 0)
        finally:
            backend.current = previous
            Streams.active = previous_streams


def size_text(size_bytes: int) -> str:
    """Write a size as PyTorch's out-of-memory message does (`format_size` in CUDACachingAllocator.cpp)."""
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    if size_bytes <= MIB:
        return f"{size_bytes / KIB:.2f} KiB"
    if size_bytes <= 1024 * MIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / (1024 * MIB):.2f} GiB"
