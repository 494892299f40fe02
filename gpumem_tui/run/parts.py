"""Names parts of a bucket where a program has several: frozen and quantized weights, copies of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gpumem_tui.memory import Bucket
from gpumem_tui.step.walking import instances_of, outermost, parts_of, tensors_in

EMA_COPIES = "EMA copies"
MODEL_COPIES = "model copies"
"""Weights that nobody trains, and no step calls: those that are written as training goes on, and others."""

QUANTIZED = "quantized"
BUFFERS = "buffers"

_EMA = re.compile(r"EMA|Ema(?![a-z])|AveragedModel|ExponentialMovingAverage")
"""In the names of classes: timm's `ModelEmaV3`, diffusers' `EMAModel`, `torch.optim.swa_utils.AveragedModel`,
torch_ema's `ExponentialMovingAverage`, `LitEma` of the latent diffusion models, ema_pytorch's `EMA`."""

_PACKED_BUFFERS = ("qweight", "qzeros", "scales", "W_q")
"""Names under which GPTQ, AWQ and HQQ keep packed weights and their scales as buffers."""

Named = tuple[Bucket, str, list[torch.Tensor]]
"""A bucket, the part of it, and tensors that are that."""


def parts_of_model(model: nn.Module) -> list[Named]:
    """Return the parameters and buffers of a model by what is done to them; nothing of a model that is all trained."""
    found: dict[str, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        found.setdefault(_part(parameter), []).extend((parameter, *scales([parameter])))
    packed: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        (packed if name.rpartition(".")[2] in _PACKED_BUFFERS else others).append(buffer)
    if packed:
        found.setdefault(QUANTIZED, []).extend(packed)
    if all(part.startswith("trained") for part in found):
        return []
    found[BUFFERS] = others
    return [(Bucket.PARAMETERS, part, tensors) for part, tensors in found.items()]


def _part(parameter: torch.Tensor) -> str:
    if parameter.requires_grad:
        return f"trained {_type_of(parameter)}"
    inner = parts_of(parameter)
    held = [parameter] if inner is None else inner
    if hasattr(parameter, "quant_state") or any(one.element_size() == 1 for one in held):
        return QUANTIZED
    return f"frozen {_type_of(parameter)}"


def _type_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).rpartition(".")[2]


def scales(parameters: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield what quantized parameters keep beside their data, as bitsandbytes' ``quant_state``: scales and tables."""
    for parameter in parameters:
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from tensors_in(vars(state))
            state = getattr(state, "state2", None)


def copies(things: list[Any], called: Iterable[nn.Module], trained: set[int]) -> Iterator[Named]:
    """Yield the copies of a model that no optimizer trains and no step calls: moving averages, targets, snapshots.

    Args:
        things: all objects that the garbage collector knows.
        called: the models that the program trains with.
        trained: the `id` of each parameter that an optimizer has.
    """
    modules = instances_of(nn.Module, things)
    models = list(called)
    theirs = trained.union(id(one) for model in models for one in (*model.parameters(), *model.buffers()))
    for module in modules:
        if _EMA.search(type(module).__name__):  # ema_pytorch's `EMA` has the model itself beside the copy
            held = (*module.parameters(), *module.buffers())
            yield Bucket.PARAMETERS, EMA_COPIES, [one for one in held if id(one) not in theirs]
    for holder in _holders(things):
        yield Bucket.PARAMETERS, EMA_COPIES, [one for one in tensors_in(vars(holder)) if id(one) not in trained]
    used = {id(part) for model in models for part in model.modules()}
    shapes = {tuple(_shapes(model)) for model in models}
    for module in outermost(modules):
        is_used = any(id(part) in used for part in module.modules())
        if not is_used and tuple(_shapes(module)) in shapes:
            found = _untrained(module, trained)
            yield Bucket.PARAMETERS, EMA_COPIES if any(one._version for one in found) else MODEL_COPIES, found


def _untrained(module: nn.Module, trained: set[int]) -> list[torch.Tensor]:
    parameters = list(module.parameters())
    if any(id(parameter) in trained for parameter in parameters):  # it has the model itself as well
        return []
    return [*parameters, *module.buffers()]


def _holders(things: list[Any]) -> list[Any]:
    """Return objects of classes that keep moving averages and are no modules."""
    kinds = {kind for kind in set(map(type, things)) if _EMA.search(kind.__name__) and not issubclass(kind, nn.Module)}
    return [thing for thing in things if type(thing) in kinds and hasattr(thing, "__dict__")]


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]
