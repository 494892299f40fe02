"""The interface of a simulated GPU to its parts, so that none of them imports the file that puts it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.allocator.caching import CachingAllocator, OutOfMemory
from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.timeline import TimelineRecorder
from gpumem_tui.simulator.device.engine import Passes
from gpumem_tui.simulator.device.streams import Streams
from gpumem_tui.step.sites import SiteFinder

DEVICE_TYPE = "simgpu"
_libraries: list[torch.library.Library] = []


def library(namespace: str) -> torch.library.Library:
    """Return a library for kernels of a namespace's operators, kept, as it takes its kernels back when it goes."""
    _libraries.append(torch.library.Library(namespace, "IMPL"))
    return _libraries[-1]


@dataclass(frozen=True, slots=True)
class StorageView:
    """The way in which a tensor is in its storage; sizes are in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        """Return how a tensor is laid out in its storage."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(slots=True)
class Call:
    """An operator that is called on tensors without data.

    Attributes:
        func, types, args, kwargs: as `__torch_dispatch__` gets them.
        caller: the Python frame that called the operator; none or the engine's where C++ of backward did.
        shown: those of its tensors that are fake ones while it runs, and not to the program.
    """

    func: Any
    types: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    caller: FrameType | None = None
    shown: Sequence[torch.Tensor] = ()


Handler = Callable[[Call], Any]
"""Runs calls of one operator, and returns what they give."""


class DeviceParts(Protocol):
    """A simulated GPU as its parts use it: see `SimulatedGpu` for the attributes."""

    gpu: Gpu
    profile: Profile
    unlimited: bool
    allocator: CachingAllocator
    recorder: TimelineRecorder
    streams: Streams
    passes: Passes
    sites: SiteFinder
    notes: dict[str, None]
    dropout_state: torch.Tensor | None
    on_backward_error: Callable[[Exception], None]

    def communicate(self, args: Iterable[Any]) -> None:
        """Take NCCL's buffers for the group of ranks in a collective's arguments."""

    def load(self, library: str) -> None:
        """Take what a library of CUDA holds outside the allocator."""

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor], part: str = "") -> None:
        """State which bucket these tensors are, and which part of it."""

    def goes_beyond(self) -> bool:
        """Return whether memory has no end from now on, though it has just run out."""

    def out_of_memory(self, error: OutOfMemory) -> torch.OutOfMemoryError:
        """Make the exception that PyTorch would raise."""
