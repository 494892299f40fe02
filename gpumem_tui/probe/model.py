"""The model document: the shapes from which a viewer can tell what model this is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from gpumem_tui.probe.documents import TrainedModel, TrainedOptimizer, TrainedParameter, Untrained
from gpumem_tui.probe.finding import parameters_in
from gpumem_tui.step.walking import memory_of

_MOST_PARAMETERS = 20_000


def describe_models(roots: Iterable[nn.Module]) -> list[TrainedModel]:
    """What is trained, parameter by parameter. Nothing is copied from a device."""
    found: list[TrainedModel] = []
    for root in roots:
        named = list(nn.Module.named_parameters(root))
        parameters = tuple(
            TrainedParameter(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).replace("torch.", ""),
                trained=parameter.requires_grad,
            )
            for name, parameter in named[:_MOST_PARAMETERS]
        )
        found.append(TrainedModel(name=_name(root), parameters=parameters, truncated=len(named) > _MOST_PARAMETERS))
    return found


def describe_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[TrainedOptimizer]:
    """The optimizers and the options of their first groups."""
    return [
        TrainedOptimizer(
            name=_name(optimizer),
            parameters=sum(len(group["params"]) for group in optimizer.param_groups),
            options={key: value for key, value in optimizer.param_groups[0].items() if _is_plain(value)},
        )
        for optimizer in optimizers
        if optimizer.param_groups
    ]


def describe_untrained(untrained: Iterable[nn.Module], trained: Iterable[nn.Module]) -> list[Untrained]:
    """What `untrained` trees hold, by class and device. A storage counts once, and not where a trained tree has it."""
    counted = {storage._cdata for root in trained for _, storage in _storages(root)}
    sizes: dict[tuple[str, int], int] = {}
    for root in untrained:
        for device, storage in _storages(root):
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                key = _name(root), device
                sizes[key] = sizes.get(key, 0) + storage.nbytes()
    return [Untrained(name=name, device=device, bytes=size) for (name, device), size in sizes.items() if size]


def _storages(root: nn.Module) -> Iterator[tuple[int, torch.UntypedStorage]]:
    return (memory for tensor in chain(parameters_in(root), nn.Module.buffers(root)) for memory in memory_of(tensor))


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, str))
