"""CUDA as PyTorch's C++ answers it, if missing: put below `torch.cuda`, whose own Python runs unchanged.

It answers as torch/csrc/cuda/Module.cpp and c10/cuda/CUDACachingAllocator.cpp (2.6 to 2.11) do: nothing before it is
initialized, errors where CUDA raises, with the keys that they have, a history and counts for each device.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from gpumem_tui.memory import MIB
from gpumem_tui.simulator.allocator.blocks import Block, Pool
from gpumem_tui.simulator.allocator.caching import CachingAllocator, OutOfMemory
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario

ENVIRONMENT = "CUDA_STANDIN"
_BY_COUNT = ("allocation", "segment", "active", "inactive_split")
_BY_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
_POOLS = ("all", "small_pool", "large_pool")
_NEIGHBOUR = 999_999_999
"""Its pid, which no process here has."""

_NO_KERNEL = "CUDA error: an illegal memory access was encountered"


@dataclass(frozen=True)
class Card:
    """A GPU that is played.

    Attributes:
        context_bytes: what a process holds there outside its allocator.
        others_bytes: what a neighbour holds before this process uses the GPU, and `others_later_bytes` from then on.
    """

    uuid: str = "GPU-00000000-0000-0000-0000-0000000000a0"
    total_bytes: int = 8 << 30
    context_bytes: int = 700 * MIB
    others_bytes: int = 0
    others_later_bytes: int = 0


@dataclass
class Machine:
    """The GPUs that a process sees, and the allocator that it may choose.

    Attributes:
        backend: ``native``, or ``cudaMallocAsync``, which keeps no history and tells no observer.
        is_busy: another process has a GPU for itself, which shows as CUDA is first used.
    """

    cards: Sequence[Card] = (Card(),)
    backend: str = "native"
    is_busy: bool = False

    def text(self) -> str:
        """As the environment has it for a command."""
        return json.dumps(asdict(self))

    def visible(self, uuids: Sequence[str]) -> Machine:
        """The part that a process sees whose ``CUDA_VISIBLE_DEVICES`` has these, in their order."""
        by_uuid = {card.uuid: card for card in self.cards}
        return replace(self, cards=[by_uuid[uuid] for uuid in uuids])

    def driver(self, held: Sequence[int] = ()) -> Scenario:
        """NVML's answer: before this process uses any GPU, or while it holds so much of each."""
        gpus = []
        for card, own_bytes in zip(self.cards, held or [0] * len(self.cards), strict=True):
            others_bytes = card.others_later_bytes if own_bytes else card.others_bytes
            listed = ((_NEIGHBOUR, others_bytes), (os.getpid(), own_bytes))
            processes = [FakeProcess(pid, size_bytes) for pid, size_bytes in listed if size_bytes]
            used_bytes = others_bytes + own_bytes
            gpus.append(
                FakeGpu(uuid=card.uuid, total_bytes=card.total_bytes, used_bytes=used_bytes, processes=processes)
            )
        return Scenario(gpus=gpus)

    @classmethod
    def read(cls, text: str) -> Machine:
        """The inverse of `text`."""
        values = json.loads(text)
        return cls(**{**values, "cards": [Card(**card) for card in values["cards"]]})


class StandInAllocator(CachingAllocator):
    """One device's allocator, with its history and its counts."""

    def __init__(self, cuda: CudaStandIn, index: int, card: Card) -> None:
        capacity_bytes = card.total_bytes - card.context_bytes - card.others_later_bytes
        super().__init__(capacity_bytes, AllocatorSettings.from_environment())
        self.card, self._cuda, self._index = card, cuda, index
        self.made = self.freed = self.retired = 0
        self.trace: list[dict[str, Any]] = []
        self._live: dict[int, Block] = {}

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """As `malloc`; where there is no room, observers run before the error is raised."""
        try:
            block = super().malloc(size_bytes, stream)
        except OutOfMemory:
            free_bytes = self.capacity_bytes - self.stats.reserved_bytes
            self.write("oom", size_bytes, stream, device_free=free_bytes)
            for observer in self._cuda.observers:
                observer(self._index, size_bytes, self.allowed_bytes or self.card.total_bytes, free_bytes)
            raise
        self.made += 1
        self._live[block.address] = block
        self.write("alloc", size_bytes, stream, addr=block.address)
        return block

    def free(self, block: Block) -> None:
        """As `free`."""
        self.freed += 1
        del self._live[block.address]
        for action in ("free_requested", "free_completed"):
            self.write(action, block.requested_bytes, block.pool.stream, addr=block.address)
        super().free(block)

    def write(self, action: str, size_bytes: int, stream: int, **place: int) -> None:
        """Write down an event, while a history is kept; only allocations have frames (``context="alloc"``)."""
        if not self._cuda.most_entries:
            return
        entry: dict[str, Any] = {"action": action, **place, "size": size_bytes, "stream": stream}
        entry["time_us"] = time.time_ns() // 1000
        if action == "alloc":
            entry["frames"] = list(_frames())
        self.trace.append(entry)
        del self.trace[: -self._cuda.most_entries]

    def _take_from_driver(self, pool: Pool, size: int) -> Block | None:
        block = super()._take_from_driver(pool, size)
        if block is not None:
            self.write("segment_alloc", block.size_bytes, pool.stream, addr=block.address)
            self._cuda.tell_driver()
        return block

    def _release(self, block: Block) -> None:
        self.write("segment_free", block.size_bytes, block.pool.stream, addr=block.address)
        super()._release(block)
        self._cuda.tell_driver()

    def segments(self) -> Iterator[dict[str, Any]]:
        """As a snapshot has them."""
        blocks = [*self._live.values(), *self.cached_blocks()]
        for first in sorted((block for block in blocks if block.prev is None), key=lambda block: block.address):
            segment = [first]
            while (following := segment[-1].next) is not None:
                segment.append(following)
            yield {
                "device": self._index,
                "address": first.address,
                "total_size": sum(block.size_bytes for block in segment),
                "stream": first.pool.stream,
                "segment_type": "small" if first.pool.is_small else "large",
                "is_expandable": False,
                "frames": [],
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size_bytes,
                        "requested_size": block.requested_bytes if block.allocated else 0,
                        "state": "active_allocated" if block.allocated else "inactive",
                        "frames": [],
                    }
                    for block in segment
                ],
            }

    def statistics(self) -> dict[str, Any]:
        """As `_cuda_memoryStats` answers."""
        stats = self.stats
        by_pool = {name: {pool: _counted() for pool in _POOLS} for name in (*_BY_COUNT, *_BY_BYTES)}
        by_pool["allocation"]["all"] = _counted(self.made - self.freed, allocated=self.made, freed=self.freed)
        for name in _BY_BYTES:
            by_pool[name]["all"] = _counted(getattr(stats, name), getattr(stats, f"peak_{name}"))
        counts = {"num_alloc_retries": stats.num_alloc_retries, "num_ooms": stats.num_ooms, "max_split_size": -1}
        device = {"num_device_alloc": stats.num_device_alloc, "num_device_free": stats.num_device_free}
        oversize = {"oversize_allocations": _counted(), "oversize_segments": _counted()}
        return {**counts, "num_sync_all_streams": 0, **device, **by_pool, **oversize}


def _counted(current: int = 0, peak: int = 0, allocated: int = 0, freed: int = 0) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": allocated, "freed": freed}


SETTINGS: dict[str, Any] = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "graph_capture_record_stream_reuse": False,
    "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
}
"""``allocator_settings`` of a snapshot of torch 2.11 on an H200."""

_PLAYED = (
    "/gpumem_tui/simulator/",
    __file__,
    "/torch/_subclasses/",
    "/torch/utils/_python_dispatch.py",
)


def _frames() -> Iterator[dict[str, Any]]:
    """Yield the Python frames of an allocation, the innermost first, without those that play the GPU."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in _PLAYED):
            yield {"filename": path, "line": frame.f_lineno, "name": frame.f_code.co_name}
        frame = frame.f_back


@dataclass
class CudaStandIn:
    """The C++ below `torch.cuda` in this process.

    Attributes:
        observers: of an out-of-memory. `most_entries`: that the history keeps; 0 while none is kept.
        is_broken: a kernel has failed, so that CUDA answers nothing any more.
    """

    machine: Machine
    allocators: list[StandInAllocator] = field(default_factory=list)
    observers: list[Callable[..., object]] = field(default_factory=list)
    current: int = 0
    most_entries: int = 0
    is_broken: bool = False
    _initialized: bool = False
    _poisoned_in: int = 0

    def __post_init__(self) -> None:
        for index, card in enumerate(self.machine.cards):
            self.allocators.append(StandInAllocator(self, index, card))

    # Answers of `torch._C`

    def answers(self) -> dict[str, Callable[..., Any]]:
        """The functions of `torch._C`, by name."""
        return {
            "_cuda_getDeviceCount": self._count,
            "_cuda_isInBadFork": lambda: self._poisoned_in not in (0, os.getpid()),
            "_cuda_init": self._init,
            "_cuda_getDevice": lambda: self.current,
            "_cuda_setDevice": self._set_device,
            "_cuda_memoryStats": lambda device: self._of(device).statistics(),
            "_cuda_resetPeakMemoryStats": lambda device: self._of(device).stats.reset_peaks(),
            "_cuda_resetAccumulatedMemoryStats": self._reset_accumulated,
            "_cuda_setMemoryFraction": self._set_fraction,
            "_cuda_record_memory_history": self._record,
            "_cuda_memorySnapshot": self._snapshot,
            "_cuda_isHistoryEnabled": lambda: bool(self.most_entries),
            "_cuda_attach_out_of_memory_observer": self._observe,
            "_cuda_emptyCache": self._empty_cache,
            "_cuda_synchronize": self._check,
            "_cuda_getArchFlags": lambda: "sm_90",
            "_cuda_getAllocatorBackend": lambda: self.machine.backend,
        }

    def _count(self) -> int:
        self._poison()
        return len(self.allocators)

    def _poison(self) -> None:
        """Have forked children find that they cannot use CUDA (`register_fork_handler_for_device_init`)."""
        self._poisoned_in = self._poisoned_in or os.getpid()

    def _init(self) -> None:
        self._poison()
        if not self.allocators:
            raise RuntimeError("No CUDA GPUs are available")
        self._initialized = True
        cuda: Any = torch.cuda
        cuda._get_device_properties = self._properties
        cuda.default_generators = tuple(torch.Generator() for _ in self.allocators)

    def tell_driver(self) -> None:
        """Have NVML, where it is played, list what this process holds now."""
        path = os.environ.get("NVML_STUB_SCENARIO")
        held = [
            one.card.context_bytes + one.stats.reserved_bytes if one.stats.num_device_alloc else 0
            for one in self.allocators
        ]
        if path and any(held):
            self.machine.driver(held).write(Path(path))

    def _properties(self, device: int) -> SimpleNamespace:
        if self.machine.is_busy:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        card = self.allocators[device].card
        return SimpleNamespace(
            name="Stand-in", major=9, minor=0, total_memory=card.total_bytes, multi_processor_count=132,
            uuid=card.uuid.removeprefix("GPU-"),
        )  # fmt: skip

    def _of(self, device: int) -> StandInAllocator:
        """`assertValidDevice`."""
        if not (self._initialized and 0 <= device < len(self.allocators)):
            raise RuntimeError(f"Invalid device argument {device}: did you call init?")
        return self.allocators[device]

    def _set_device(self, device: int) -> None:
        _cuda()._lazy_init()
        if not 0 <= device < len(self.allocators):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.current = device

    def _set_fraction(self, fraction: float, device: int) -> None:
        allocator = self._of(device)
        allocator.allowed_bytes = int(fraction * allocator.card.total_bytes)

    def _reset_accumulated(self, device: int) -> None:
        allocator = self._of(device)
        allocator.made = allocator.freed = 0

    def _record(
        self, enabled: str | None, context: str | None, stacks: str, most: int, clear_history: bool, *_: Any
    ) -> None:
        assert context in (None, "state", "alloc", "all"), context
        assert stacks in ("python", "all"), stacks
        self._native("recordHistory")
        self.most_entries = most if enabled == "all" else 0
        for allocator in self.allocators:
            if enabled is None or clear_history:
                allocator.trace.clear()

    def _snapshot(self, _pool: object = None) -> dict[str, Any]:
        self._native("snapshot")
        return {
            "segments": [segment for allocator in self.allocators for segment in allocator.segments()],
            "device_traces": [list(map(dict, one.trace)) for one in self.allocators],
            "allocator_settings": dict(SETTINGS),
            "external_annotations": [],
        }

    def _observe(self, observer: Callable[..., object]) -> None:
        self._native("attachOutOfMemoryObserver")
        self.observers.append(observer)

    def _native(self, function: str) -> None:
        if self.machine.backend != "native":
            raise RuntimeError(f"{self.machine.backend} does not yet support {function}.")

    def _empty_cache(self) -> None:
        for allocator in self.allocators:
            allocator.empty_cache()

    def _check(self) -> None:
        if self.is_broken:
            raise RuntimeError(_NO_KERNEL)

    def memory_info(self, device: int) -> tuple[int, int]:
        """`cudaMemGetInfo`: (free, total) bytes."""
        self._check()
        allocator = self._of(device)
        return allocator.capacity_bytes - allocator.stats.reserved_bytes, allocator.card.total_bytes

    # Calls of a program

    def try_workspace(self, size_bytes: int) -> None:
        """Ask for what may be refused and is done without, as cuDNN's trials do: no error leaves the C++."""
        with suppress(OutOfMemory):
            self.allocators[self.current].free(self.allocators[self.current].malloc(size_bytes))

    def allocate(self, size_bytes: int, device: int | None = None) -> Block:
        """Allocate on a device as a tensor that is made there does: the first one initializes CUDA.

        Raises:
            torch.OutOfMemoryError: as PyTorch does once the error has left its C++.
        """
        _cuda()._lazy_init()
        self._check()
        try:
            return self.allocators[self.current if device is None else device].malloc(size_bytes)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {error.segment_bytes} bytes."
            ) from None


@contextmanager
def cuda_played(machine: Machine | None = None) -> Iterator[CudaStandIn]:
    """Have `torch.cuda` meet the stand-in, uninitialized as in a new process, within the context."""
    played = CudaStandIn(machine or Machine())
    with ExitStack() as stack:
        _put_below_torch(played, stack)
        yield played


def _cuda() -> Any:
    return torch.cuda


def _put_below_torch(played: CudaStandIn, stack: ExitStack) -> None:
    answers, cuda = played.answers(), _cuda()
    for name, answer in answers.items():
        stack.enter_context(patch.object(torch._C, name, answer, create=True))
    for name, value in (
        ("_initialized", False),
        ("_queued_calls", []),
        ("_cached_device_count", None),
        ("_cudart", SimpleNamespace(cudaMemGetInfo=played.memory_info)),
        ("_is_in_bad_fork", answers["_cuda_isInBadFork"]),
        ("_get_device_properties", None),
        ("default_generators", ()),
        ("_lazy_seed_tracker", type(cuda._lazy_seed_tracker)()),
    ):
        stack.enter_context(patch.object(cuda, name, value, create=True))
    kind: Any = torch.OutOfMemoryError
    stack.callback(setattr, kind, "__init__", kind.__init__)


# A command's whole process


_REAL_NAMES = (
    "is_initialized", "is_available", "init", "_lazy_init", "_lazy_call", "current_device", "set_device",
    "device_count", "get_device_properties", "synchronize", "cudart", "_is_in_bad_fork",
)  # fmt: skip
"""Functions of `torch.cuda`: they are torch's own above the stand-in, as all of `torch.cuda.memory` is."""


class _Current:
    """The allocator of whichever device is the current one, for tensors of the simulated GPU."""

    def __init__(self, played: CudaStandIn) -> None:
        vars(self)["_played"], vars(self)["_owners"] = played, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._played.allocators[self._played.current], name)

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        _cuda()._lazy_init()
        allocator: StandInAllocator = self._played.allocators[self._played.current]
        block = allocator.malloc(size_bytes, stream)
        self._owners[id(block)] = allocator
        return block

    def free(self, block: Block) -> None:
        self._owners.pop(id(block)).free(block)


def install_from_environment() -> None:
    """Play the machine that the environment describes, for good: tensors on ``cuda`` are the simulated GPU's."""
    from gpumem_tui.catalog.loader import find_gpu
    from gpumem_tui.simulator.allocator.profile import profile_for
    from gpumem_tui.simulator.cuda.presented import presented_as_cuda
    from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate

    machine = Machine.read(os.environ[ENVIRONMENT]).visible(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    gc.freeze()  # as where a GPU is simulated
    played, stack = CudaStandIn(machine), ExitStack()
    gpu = find_gpu("h200-141gb")
    allocator: Any = _Current(played)
    simulated = SimulatedGpu(gpu, profile_for(torch.__version__, gpu), allocator=allocator)
    _put_below_torch(played, stack)
    real = {(torch.cuda, name): getattr(torch.cuda, name) for name in _REAL_NAMES}
    for name, function in vars(torch.cuda.memory).items():
        if callable(function) and not name.startswith("__"):
            real[torch.cuda.memory, name] = function
            if getattr(torch.cuda, name, None) is function:
                real[torch.cuda, name] = function
    stack.enter_context(simulate(simulated))
    stack.enter_context(presented_as_cuda(simulated, len(machine.cards)))
    replaced: Iterable[tuple[tuple[Any, str], Any]] = real.items()
    for (owner, name), function in replaced:
        setattr(owner, name, function)
    for name, answer in played.answers().items():
        setattr(torch._C, name, answer)
    storages: Any = torch.UntypedStorage
    address = storages.data_ptr

    def address_of(storage: torch.UntypedStorage) -> int:
        known = simulated.memory.live.get(storage._cdata)
        return int(address(storage)) if known is None else known.block.address

    storages.data_ptr = address_of
    globals().update(installed=played, _kept=stack)
