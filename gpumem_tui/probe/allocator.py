"""Reads the CUDA caching allocator's statistics. Never initializes CUDA, waits for a device or resets anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

import torch

_FIGURES = {
    "allocated_bytes": ("allocated_bytes", "current"),
    "reserved_bytes": ("reserved_bytes", "current"),
    "peak_allocated_bytes": ("allocated_bytes", "peak"),
    "peak_reserved_bytes": ("reserved_bytes", "peak"),
    "retries": ("num_alloc_retries", ""),
    "ooms": ("num_ooms", ""),
    "inactive_split_bytes": ("inactive_split_bytes", "current"),
    "requested_bytes": ("requested_bytes", "current"),
}
"""By their names in `wire.Record`, what `torch.cuda.memory_stats_as_nested_dict` calls them, and which value of it."""

UNKNOWN = dict.fromkeys(_FIGURES, -1)


def is_running() -> bool:
    """Return whether this process uses CUDA."""
    return bool(torch.cuda.is_initialized())


def devices_in_use(holding: Collection[int]) -> list[int]:
    """List the CUDA devices to ask about: those that hold something known, and the current one."""
    if not is_running():
        return []
    return sorted({device for device in holding if device >= 0} | {torch.cuda.current_device()})


def figures(device: int) -> dict[str, int]:
    """Read the allocator's figures for a device of this process, by name; -1 where it does not say."""
    try:
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    except RuntimeError:  # an allocator of the program's own keeps none
        return UNKNOWN

    def of(name: str, value: str) -> int:
        found = stats.get(name)
        if isinstance(found, dict):
            return int(found.get("all", {}).get(value, -1))
        return -1 if found is None else int(found)

    return {name: of(*where) for name, where in _FIGURES.items()}


def limit_bytes(device: int) -> int | None:
    """Return the most that the allocator may reserve of a device, by `torch.cuda.set_per_process_memory_fraction`.

    None without such a limit, or where this torch does not tell (before 2.8), or its allocator.
    """
    ask: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    try:
        fraction = 1.0 if ask is None else ask(device)
    except (AttributeError, RuntimeError):  # a build without it, an allocator of the program's own
        return None
    return round(fraction * torch.cuda.get_device_properties(device).total_memory) if fraction < 1 else None


def capacity_bytes(device: int) -> int:
    """Return the most that the allocator can reserve of a device."""
    limit = limit_bytes(device)
    return int(torch.cuda.get_device_properties(device).total_memory) if limit is None else limit


def device_uuid(device: int) -> str:
    """Return ``GPU-…`` as NVML writes it; empty where this torch (before 2.4) or this maker's device has none."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        return f"GPU-{UUID(str(found))}"
    except ValueError:
        return ""
