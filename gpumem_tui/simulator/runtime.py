"""What programs and libraries take from CUDA's runtime below and beside `torch.cuda`'s memory figures.

A build of torch without CUDA lacks these functions; the others would initialize CUDA.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gpumem_tui.simulator.backend import Backend

_NCCL_VERSION = (2, 27, 5)
"""What the CUDA wheels of torch 2.10 were built with."""

_REGISTERS_PER_MULTIPROCESSOR = 65536
_SHARED_BYTES_PER_BLOCK = 48 << 10
_SHARED_KIB_PER_MULTIPROCESSOR = {
    (7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100, (9, 0): 228, (10, 0): 228,
    (10, 3): 228, (12, 0): 100,
}  # fmt: skip
"""CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""


def per_multiprocessor(capability: tuple[int, int]) -> dict[str, int]:
    """Registers and shared memory (bytes) of an architecture, as `torch.cuda.get_device_properties` names them."""
    shared = _SHARED_KIB_PER_MULTIPROCESSOR.get(capability, 100) << 10
    kept = 1 << 10 if capability >= (8, 0) else 0
    return {
        "regs_per_multiprocessor": _REGISTERS_PER_MULTIPROCESSOR,
        "shared_memory_per_block": _SHARED_BYTES_PER_BLOCK,
        "shared_memory_per_block_optin": shared - kept,
        "shared_memory_per_multiprocessor": shared,
    }


def nested(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """`torch.cuda.memory_stats_as_nested_dict` of what `torch.cuda.memory_stats` gives."""
    found: dict[str, Any] = {}
    for name, value in statistics.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _scatter(tensor: torch.Tensor, devices: Sequence[int], *_: object) -> tuple[torch.Tensor]:
    """How `nn.DataParallel` hands out a batch, to one GPU."""
    if len(devices) > 1:
        raise RuntimeError(
            f"nn.DataParallel on {len(devices)} GPUs cannot be followed: run it on one (CUDA_VISIBLE_DEVICES=0), or "
            "use DistributedDataParallel with torchrun"
        )
    return (tensor.to("cuda"),)


_ALLOCATOR_STATE = "_cuda_CUDAAllocator_AllocatorState"


class MemoryPool:
    """`torch.cuda.MemPool`: its allocations are taken from the pools of their streams."""

    id = (0, 0)

    def __init__(self, *_: object, **__: object) -> None: ...

    def use_count(self) -> int:
        return 1

    def snapshot(self) -> list[dict[str, Any]]:
        return []


def answers(backend: Backend) -> dict[tuple[Any, str], Any]:
    """The replaced attributes, by owner and name."""
    statistics = backend.memory_stats
    cuda: Any = torch.cuda
    below = {
        "_cuda_getCurrentRawStream": lambda device=0: backend.current_stream().cuda_stream,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda device: None,
        "_cuda_getDeviceCount": backend.device_count,
        "_cuda_sleep": lambda cycles: None,
        "_scatter": _scatter,
        "_host_emptyCache": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }
    memory = {
        "_record_memory_history": lambda *_, **__: None,
        "_snapshot": lambda *_, **__: {"segments": [], "device_traces": []},
        "_dump_snapshot": lambda *_, **__: None,
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "memory_stats_as_nested_dict": lambda device=None: nested(statistics()),
        "host_memory_stats": lambda: OrderedDict(),
        "host_memory_stats_as_nested_dict": dict,
        "device_memory_used": lambda device=None: statistics()["reserved_bytes.all.current"],
        "list_gpu_processes": lambda device=None: "GPU:0\nno processes are running",
        "MemPool": MemoryPool,
    }
    found: dict[tuple[Any, str], Any] = {(torch._C, name): answer for name, answer in below.items()}
    if not hasattr(torch._C, _ALLOCATOR_STATE):  # only imported, by `torch._dynamo.reset` where there is CUDA
        found[torch._C, _ALLOCATOR_STATE] = object
    for module in (cuda, cuda.memory):
        found.update({(module, name): answer for name, answer in memory.items() if hasattr(module, name)})
    found[cuda.nccl, "version"] = lambda: _NCCL_VERSION
    return found
