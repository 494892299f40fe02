"""What `torch.cuda` answers, for the GPU that is being simulated: the functions of a torch device module.

Code that asks `torch.get_device_module(device)` for memory figures runs unchanged on this device and on a real one.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import torch

from gpumem_tui.simulator.profile import THREADS_PER_BLOCK, WARP_SIZE
from gpumem_tui.simulator.runtime import per_multiprocessor
from gpumem_tui.simulator.streams import DEFAULT_STREAM, ExternalStream, SimulatedEvent, SimulatedStream, StreamContext

if TYPE_CHECKING:
    from gpumem_tui.simulator.device import SimulatedGpu


class Backend:
    """The device module of the simulated GPU; its functions have the names and parameters of `torch.cuda`'s.

    Attributes:
        current: the GPU that is being simulated.
        devices: how many GPUs of its kind this process may count on its machine; only the first one exists.
    """

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.current: SimulatedGpu | None = None
        self.devices = 1

    @property
    def _gpu(self) -> SimulatedGpu:
        if self.current is None:
            raise RuntimeError("no simulated GPU is active: wrap the step in simulator.device.simulate()")
        return self.current

    # What torch itself asks of a backend.

    def init(self) -> None:
        """Nothing to do: there is no driver to initialize."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Since Ampere (NVIDIA A100 white paper); before, PyTorch emulates it."""
        return including_emulation or self._gpu.gpu.compute_capability >= (8, 0)

    def is_tf32_supported(self) -> bool:
        return self._gpu.gpu.compute_capability >= (8, 0)

    # Random numbers: no value is ever computed.

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def seed(self) -> None: ...

    def seed_all(self) -> None: ...

    def initial_seed(self) -> int:
        return 0

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state() for _ in range(self.devices)]

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None: ...

    def set_rng_state_all(self, states: object) -> None: ...

    # The device and its memory.

    def synchronize(self, device: object = None) -> None:
        """Wait for what the GPU was given."""
        if self.current is not None:  # torch's profiler asks whatever device is registered
            self.current.streams.synchronize()

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        gpu, profile = self._gpu.gpu, self._gpu.profile
        major, minor = gpu.compute_capability
        return SimpleNamespace(
            name=gpu.title,
            total_memory=gpu.cuda_total_bytes,
            major=major,
            minor=minor,
            multi_processor_count=profile.multiprocessors,
            max_threads_per_multi_processor=profile.threads_per_multiprocessor,
            max_threads_per_block=THREADS_PER_BLOCK,
            warp_size=WARP_SIZE,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName="",
            pci_bus_id=0,
            pci_device_id=0,
            pci_domain_id=0,
            uuid=UUID(int=0),
            **per_multiprocessor(gpu.compute_capability),
        )

    def get_device_name(self, device: object = None) -> str:
        return self._gpu.gpu.title

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return self._gpu.gpu.compute_capability

    def get_arch_list(self) -> list[str]:
        major, minor = self._gpu.gpu.compute_capability
        return [f"sm_{major}{minor}"]

    def can_device_access_peer(self, device: object, peer_device: object) -> bool:
        return True

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """(free, total) bytes, as cudaMemGetInfo."""
        allocator = self._gpu.allocator
        return allocator.capacity_bytes - allocator.stats.reserved_bytes, self._gpu.gpu.cuda_total_bytes

    get_memory_info = mem_get_info

    def memory_allocated(self, device: object = None) -> int:
        return self._gpu.allocator.stats.allocated_bytes

    def max_memory_allocated(self, device: object = None) -> int:
        return self._gpu.allocator.stats.peak_allocated_bytes

    def memory_reserved(self, device: object = None) -> int:
        return self._gpu.allocator.stats.reserved_bytes

    def max_memory_reserved(self, device: object = None) -> int:
        return self._gpu.allocator.stats.peak_reserved_bytes

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._gpu.allocator.stats.reset_peaks()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def reset_accumulated_memory_stats(self, device: object = None) -> None: ...

    def empty_cache(self) -> None:
        self._gpu.allocator.empty_cache()
        self._gpu.recorder.empty_cache()

    def empty_host_cache(self) -> None: ...

    def memory_stats(self, device: object = None) -> OrderedDict[str, Any]:
        """The statistics this allocator keeps, under `torch.cuda.memory_stats`' keys."""
        stats = self._gpu.allocator.stats
        values: OrderedDict[str, Any] = OrderedDict(num_alloc_retries=stats.num_alloc_retries, num_ooms=stats.num_ooms)
        for name in ("requested", "allocated", "active", "reserved", "inactive_split"):
            values[f"{name}_bytes.all.current"] = getattr(stats, f"{name}_bytes")
            values[f"{name}_bytes.all.peak"] = getattr(stats, f"peak_{name}_bytes")
        return values

    def memory_summary(self, device: object = None, abbreviated: bool = False) -> str:
        return "\n".join(f"{name:<36}{value:>20}" for name, value in self.memory_stats().items())

    def memory_snapshot(self, *_: object, **__: object) -> list[dict[str, Any]]:
        return []

    def set_per_process_memory_fraction(self, fraction: float, device: object = None) -> None: ...

    def utilization(self, device: object = None) -> int:
        return 0

    memory_usage = temperature = power_draw = clock_rate = utilization

    def ipc_collect(self) -> None: ...

    # Streams.

    Stream = SimulatedStream
    ExternalStream = ExternalStream
    Event = SimulatedEvent
    stream = StreamContext

    def current_stream(self, device: object = None) -> SimulatedStream:
        return SimulatedStream(stream_id=self._gpu.streams.current)

    def default_stream(self, device: object = None) -> SimulatedStream:
        return SimulatedStream(stream_id=DEFAULT_STREAM)

    def get_stream_from_external(self, data_ptr: int, device: object = None) -> SimulatedStream:
        return ExternalStream(data_ptr)

    def set_stream(self, stream: SimulatedStream | None) -> None:
        if stream is not None:
            self._gpu.streams.switch(stream.stream_id)

    def set_device(self, device: object) -> None:
        """Check that it is the first device: there is one only."""

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    device_of = device
