"""Which memory a tensor holds: storages, so that tied weights and views count once."""

from __future__ import annotations

import torch

from gpumem_tui.probe.wire import CPU
from gpumem_tui.step.walking import PLAIN_TENSORS, parts_of


def memory_of(tensor: torch.Tensor) -> list[tuple[int, torch.UntypedStorage]]:
    """The devices and storages behind a tensor, on this rank: of a DTensor its shard, of others that wrap their parts.

    Nothing for a tensor that holds no memory on a CPU or CUDA device (meta, fake). Nothing is computed or copied.
    """
    parts = parts_of(tensor)
    if parts is not None:
        return [memory for part in parts for memory in memory_of(part)]
    if tensor.is_cuda:
        device = tensor.get_device()
    elif tensor.is_cpu:
        device = CPU
    else:
        return []
    storage = tensor.untyped_storage()
    is_fake = type(tensor) not in PLAIN_TENSORS and storage.device.type == "meta"  # and claims to be elsewhere
    return [] if is_fake else [(device, storage)]


def host_memory_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor that are in host memory."""
    return [storage for device, storage in memory_of(tensor) if device == CPU]
