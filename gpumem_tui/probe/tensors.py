"""Which memory a tensor holds: storages, so that tied weights and views count once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from gpumem_tui.probe.wire import CPU

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEEPEST = 8


def memory_of(tensor: torch.Tensor) -> list[tuple[int, torch.UntypedStorage]]:
    """The devices and storages behind a tensor, on this rank: of a DTensor its shard, of others that wrap their parts.

    Nothing for a tensor that holds no memory on a CPU or CUDA device (meta, fake). Nothing is computed or copied.
    """
    plain = type(tensor) in _PLAIN
    parts = None if plain else _parts(tensor)
    if parts is None and tensor.layout is not torch.strided:
        parts = _sparse_parts(tensor)
    if parts is not None:
        return [memory for part in parts for memory in memory_of(part)]
    if tensor.is_cuda:
        device = tensor.get_device()
    elif tensor.is_cpu:
        device = CPU
    else:
        return []
    storage = tensor.untyped_storage()
    if not plain and storage.device.type == "meta":  # a fake tensor claims a device that its storage is not on
        return []
    return [(device, storage)]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that a wrapper wraps; None for a tensor that is itself the memory."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return [local]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else None


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor within mappings, lists, tuples, sets and dataclasses, down to a depth that no state has."""
    found: list[torch.Tensor] = []
    _collect(value, found, 0)
    return found


def _collect(value: Any, found: list[torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif depth == _DEEPEST or value is None or isinstance(value, (int, float, str)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found, depth + 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _collect(item, found, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _collect(getattr(value, field.name, None), found, depth + 1)
