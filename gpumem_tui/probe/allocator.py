"""What CUDA's caching allocator says about itself. Never initializes CUDA, never waits for a device, resets nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import torch


@dataclass(frozen=True)
class Figures:
    """The figures of one device's allocator at one moment; -1 where it does not say. See `wire.Record`."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    ooms: int
    inactive_split_bytes: int
    requested_bytes: int


UNKNOWN = Figures(-1, -1, -1, -1, -1, -1, -1, -1)


def is_running() -> bool:
    """Return whether this process uses CUDA."""
    return bool(torch.cuda.is_initialized())


def devices_in_use(holding: Collection[int]) -> list[int]:
    """List the CUDA devices to ask about: those that hold something known, and the current one."""
    if not is_running():
        return []
    return sorted({device for device in holding if device >= 0} | {torch.cuda.current_device()})


def figures(device: int) -> Figures:
    """Read the allocator's figures for a device of this process."""
    try:
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    except RuntimeError:  # an allocator of the program's own keeps none
        return UNKNOWN

    def of(name: str, value: str = "current") -> int:
        found = stats.get(name)
        if isinstance(found, dict):
            return int(found.get("all", {}).get(value, -1))
        return -1 if found is None else int(found)

    return Figures(
        of("allocated_bytes"),
        of("reserved_bytes"),
        of("allocated_bytes", "peak"),
        of("reserved_bytes", "peak"),
        of("num_alloc_retries"),
        of("num_ooms"),
        of("inactive_split_bytes"),
        of("requested_bytes"),
    )


@dataclass(frozen=True)
class AllocatorKind:
    """The kind of a device, as CUDA names it."""

    name: str
    compute_capability: tuple[int, int]
    total_bytes: int


def kind(device: int) -> AllocatorKind:
    """Read the kind of a device of this process."""
    found = torch.cuda.get_device_properties(device)
    return AllocatorKind(found.name, (found.major, found.minor), found.total_memory)


def device_uuid(device: int) -> str:
    """Return ``GPU-…`` as NVML writes it; empty where this torch (before 2.4) or this maker's device has none."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        return f"GPU-{UUID(str(found))}"
    except ValueError:
        return ""
