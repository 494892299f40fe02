"""Which GPUs a process sees as cuda:0, cuda:1, ... by its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import Reading


@dataclass(frozen=True)
class Candidate:
    """A GPU as CUDA could list it.

    Attributes:
        index: NVML's, which is the order on the PCI bus.
        instances: UUIDs of its MIG instances; with any, CUDA sees one of them and never the whole GPU.
    """

    index: int
    uuid: str
    name: str
    instances: tuple[str, ...] = ()


def visible_devices(gpus: Sequence[Candidate], environ: Mapping[str, str]) -> Reading[tuple[str, ...]]:
    """UUIDs of cuda:0, cuda:1, ... for a process with this environment.

    ``CUDA_VISIBLE_DEVICES`` holds indices or UUIDs (or their beginnings). As CUDA does, the list ends at the first
    entry that names no GPU or more than one, and is empty if an entry repeats. Indices follow the PCI bus if
    ``CUDA_DEVICE_ORDER`` says PCI_BUS_ID; else the fastest GPU is first, which only tells the order where all GPUs
    are alike (CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA_VISIBLE_DEVICES").
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    entries = None if variable is None else [entry.strip() for entry in variable.split(",")]
    by_index = entries is None or any(entry.isdigit() for entry in entries)
    ordered = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) <= 1
    if by_index and not ordered:
        return Unknown(
            "CUDA puts the fastest of different GPUs first; CUDA_DEVICE_ORDER=PCI_BUS_ID would tell the order"
        )
    if entries is None:
        seen = [_whole(gpu) for gpu in gpus]
    else:
        seen = []
        for entry in entries:
            named = _named(entry, gpus)
            if len(named) != 1:
                break
            if named[0] in seen:
                return ()
            seen.append(named[0])
    instances = {uuid for gpu in gpus for uuid in gpu.instances}
    partial = [uuid for uuid in seen if uuid in instances]
    return (partial[0],) if partial else tuple(seen)  # CUDA lists a single MIG instance and nothing beside it


def _whole(gpu: Candidate) -> str:
    return gpu.instances[0] if gpu.instances else gpu.uuid


def _named(entry: str, gpus: Sequence[Candidate]) -> list[str]:
    """Every device that an entry may mean."""
    if entry.isdigit():
        return [_whole(gpu) for gpu in gpus if gpu.index == int(entry)]
    if entry.startswith("GPU-"):
        return [_whole(gpu) for gpu in gpus if gpu.uuid.startswith(entry)]
    if entry.startswith("MIG-"):
        return [uuid for gpu in gpus for uuid in gpu.instances if uuid.startswith(entry)]
    return []
