"""Finds what a training program holds: tensors within values, the memory behind tensors, optimizers, modules.

Imports nothing of ours but `step`, and beyond the standard library only torch, and is Python 3.9: a user's training
process speaks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import nn

from gpumem_tui.step import CPU

_DEEPEST = 8
_PLAIN = (torch.Tensor, nn.Parameter)
"""Types whose tensors wrap no others."""

T = TypeVar("T")


# Tensors


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor within mappings, lists, tuples, sets and dataclasses, down to a depth that no state has."""
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is on this rank: of a DTensor its shard, of any other the tensor itself."""
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the tensors that hold a tensor's memory in its place; None for one that holds it itself.

    For a DTensor they are its shard, for a tensor that wraps others these, for a sparse one its indices and values.
    Nothing is computed or copied.
    """
    if type(tensor) not in _PLAIN:
        shard = getattr(tensor, "_local_tensor", None)
        if isinstance(shard, torch.Tensor):
            return [shard]
        if hasattr(type(tensor), "__tensor_flatten__"):
            wrapper: Any = tensor
            return [getattr(tensor, name) for name in wrapper.__tensor_flatten__()[0]]
    return None if tensor.layout is torch.strided else _sparse_parts(tensor)


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def holding_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose storages are a tensor's memory on this rank, within what `torch.func` wrapped."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    parts = parts_of(tensor)
    return [tensor] if parts is None else [held for part in parts for held in holding_memory(part)]


def memory_of(tensor: torch.Tensor) -> list[tuple[int, torch.UntypedStorage]]:
    """Return devices and storages behind a tensor on this rank: of a DTensor its shard, of wrappers their parts.

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
    is_fake = type(tensor) not in _PLAIN and storage.device.type == "meta"  # and claims to be elsewhere
    return [] if is_fake else [(device, storage)]


def host_memory_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages behind a tensor that are in host memory."""
    return [storage for device, storage in memory_of(tensor) if device == CPU]


# Optimizers


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in tensors_in(group["params"])]


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the existing gradients. Only leaves are asked: others answer with a warning."""
    return [p.grad for p in parameters if p.is_leaf and p.grad is not None]


def state_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, list[torch.Tensor]]:
    """Return the tensors that optimizers keep, by the `id` of their parameter.

    One that wraps another (ZeroRedundancyOptimizer) keeps them there. No property of the program's is called.
    """
    kept_in: dict[int, dict[str, Any]] = {}
    for optimizer in optimizers:
        for holder in (optimizer, _attributes(optimizer).get("optim")):
            kept_in[id(holder)] = _attributes(holder)
    found: dict[int, list[torch.Tensor]] = {}
    for attributes in kept_in.values():
        kept = attributes.get("state")
        for parameter, value in kept.items() if isinstance(kept, Mapping) else ((None, kept),):
            found.setdefault(id(parameter), []).extend((*tensors_in(value), *_in_objects(value)))
    return found


def _in_objects(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of objects in a parameter's state, as GaLore keeps its projections."""
    for value in state.values() if isinstance(state, Mapping) else ():
        if not isinstance(value, (torch.Tensor, Mapping)) and not is_dataclass(value):
            yield from tensors_in(_attributes(value))


def _attributes(thing: object) -> dict[str, Any]:
    return getattr(thing, "__dict__", {})


# Modules


def instances_of(kind: type[T], things: list[Any]) -> list[T]:
    """Return objects of a kind, by their type: `isinstance` would make lazy objects load what they stand for."""
    wanted = {one for one in set(map(type, things)) if issubclass(one, kind)}
    return list(compress(things, map(wanted.__contains__, map(type, things)))) if wanted else []


def modules_in(*roots: nn.Module) -> Iterator[nn.Module]:
    """Yield these modules and all within them, each once, in torch's order.

    By what torch keeps, as a program may hide `modules`, `parameters` or `buffers` by attributes of its own: Megatron's
    DistributedDataParallel has a list of buckets called `buffers`.
    """
    known: set[int] = set()
    waiting = list(reversed(roots))
    while waiting:
        module = waiting.pop()
        if id(module) not in known:
            known.add(id(module))
            yield module
            waiting += [part for part in reversed([*module._modules.values()]) if part is not None]


def parameters_in(*roots: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of modules and of all within them, each once."""
    return _each_once(parameter for module in modules_in(*roots) for parameter in module._parameters.values())


def buffers_in(*roots: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers of modules and of all within them, each once."""
    return _each_once(buffer for module in modules_in(*roots) for buffer in module._buffers.values())


def _each_once(things: Iterable[T | None]) -> Iterator[T]:
    known: set[int] = set()
    for thing in things:
        if thing is not None and id(thing) not in known:
            known.add(id(thing))
            yield thing


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that are no part of another one."""
    parts = {id(part) for module in modules for part in module._modules.values()}
    return [module for module in modules if id(module) not in parts]
