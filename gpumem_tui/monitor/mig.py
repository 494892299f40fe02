"""The instances that MIG divides a GPU into, each read through a handle of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor import fields
from gpumem_tui.monitor.nvml import Caller, Fault, Gone, number, reading, text
from gpumem_tui.monitor.snapshot import Memory, Reading


@dataclass(frozen=True)
class Slice:
    """An instance's handle and names. `index`: its number under the GPU, as nvidia-smi prints it."""

    index: int
    uuid: str
    name: str
    handle: Any = field(compare=False)


@dataclass(frozen=True)
class SliceReading:
    """What one instance holds now."""

    slice: Slice
    memory: Reading[Memory]
    processes: Reading[tuple[fields.Running, ...]]


def layout(call: Caller, handle: Any) -> Reading[tuple[Slice, ...]]:
    """The instances of a GPU in MIG mode."""
    places = number(call, "nvmlDeviceGetMaxMigDeviceCount", handle)
    if isinstance(places, Unknown):
        return places
    found = (_slice(call, handle, index) for index in range(places))
    return tuple(instance for instance in found if instance is not None)


def _slice(call: Caller, gpu: Any, index: int) -> Slice | None:
    """None for a place where there is no instance; instances leave gaps when they are destroyed."""
    try:
        handle = call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index)
        name = reading(lambda: text(call("nvmlDeviceGetName", handle)))
        uuid = text(call("nvmlDeviceGetUUID", handle))
    except Gone:
        raise
    except Fault:
        return None
    return Slice(index, uuid, f"MIG instance {index}" if isinstance(name, Unknown) else name, handle)


def read(call: Caller, instance: Slice) -> SliceReading:
    """An instance's memory and processes. One that was destroyed meanwhile gives unknown values."""
    memory = fields.memory(call, instance.handle)
    return SliceReading(instance, memory, fields.compute_processes(call, instance.handle))
