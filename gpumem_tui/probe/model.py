"""The model document: the shapes from which a viewer can tell what model this is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gpumem_tui.probe.documents import Model, Optimizer, Parameter

_MOST_PARAMETERS = 20_000


def describe_models(roots: Iterable[nn.Module]) -> list[Model]:
    """What is trained, parameter by parameter. Nothing is copied from a device."""
    found: list[Model] = []
    for root in roots:
        named = list(root.named_parameters())
        parameters = [
            Parameter(
                name=name,
                shape=list(parameter.shape),
                dtype=str(parameter.dtype).replace("torch.", ""),
                trained=parameter.requires_grad,
            )
            for name, parameter in named[:_MOST_PARAMETERS]
        ]
        found.append(Model(name=_name(root), parameters=parameters, truncated=len(named) > _MOST_PARAMETERS))
    return found


def describe_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[Optimizer]:
    """The optimizers and the options of their first groups."""
    return [
        Optimizer(
            name=_name(optimizer),
            parameters=sum(len(group["params"]) for group in optimizer.param_groups),
            options={key: value for key, value in optimizer.param_groups[0].items() if _is_plain(value)},
        )
        for optimizer in optimizers
        if optimizer.param_groups
    ]


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, str))
