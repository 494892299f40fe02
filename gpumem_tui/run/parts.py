"""Names parts of a bucket where a program has several: frozen and quantized weights, copies of a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpumem_tui.memory import Bucket
from gpumem_tui.step.walking import (
    buffers_in,
    holding_memory,
    instances_of,
    modules_in,
    outermost,
    parameters_in,
    parts_of,
    tensors_in,
)

EMA_COPIES = "EMA copies"
MODEL_COPIES = "model copies"
"""Weights that nobody trains, and no step calls: those that are written as training continues, and others."""

QUANTIZED = "quantized"
BUFFERS = "buffers"

_EMA = re.compile(r"EMA|Ema(?![a-z])|AveragedModel|ExponentialMovingAverage")
"""In the names of classes: timm's `ModelEmaV3`, diffusers' `EMAModel`, `torch.optim.swa_utils.AveragedModel`,
torch_ema's `ExponentialMovingAverage`, `LitEma` of the latent diffusion models, ema_pytorch's `EMA`."""

_PACKED_BUFFERS = ("qweight", "qzeros", "scales", "W_q")
"""Names under which GPTQ, AWQ and HQQ keep packed weights and their scales as buffers."""

Named = tuple[Bucket, str, list[torch.Tensor]]
"""A bucket, the part of it, and tensors that are that."""


def parts_of_models(models: Iterable[nn.Module], has_copies: bool) -> list[Named]:
    """Return the parameters and buffers of models by what is done to them; nothing where all are trained, uncopied."""
    found: dict[str, list[torch.Tensor]] = {}
    others: list[torch.Tensor] = []
    for model in models:
        for parameter in parameters_in(model):
            found.setdefault(_part(parameter), []).extend((parameter, *scales([parameter])))
        for name, buffer in nn.Module.named_buffers(model):
            is_packed = name.rpartition(".")[2] in _PACKED_BUFFERS
            (found.setdefault(QUANTIZED, []) if is_packed else others).append(buffer)
    if not has_copies and all(part.startswith("trained") for part in found):
        return []
    found[BUFFERS] = others
    return [(Bucket.PARAMETERS, part, tensors) for part, tensors in found.items()]


def _part(parameter: torch.Tensor) -> str:
    kind = str(parameter.dtype).rpartition(".")[2]
    if parameter.requires_grad:
        return f"trained {kind}"
    inner = parts_of(parameter)
    held = [parameter] if inner is None else inner
    if hasattr(parameter, "quant_state") or any(one.element_size() == 1 for one in held):
        return QUANTIZED
    return f"frozen {kind}"


def scales(parameters: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield what quantized parameters keep next to their data, as bitsandbytes' ``quant_state``: scales and tables."""
    for parameter in parameters:
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from tensors_in(vars(state))
            state = getattr(state, "state2", None)


def copies(things: list[Any], called: Iterable[nn.Module], trained: set[int]) -> Iterator[Named]:
    """Yield the copies of a model that no optimizer trains: moving averages; targets and snapshots that no step calls.

    Args:
        things: all objects that the garbage collector knows.
        called: the models that the program trains with.
        trained: the `id` of each parameter that an optimizer has.
    """
    models, modules = list(called), instances_of(nn.Module, things)
    shapes = {tuple(one.shape for one in parameters_in(model)) for model in models}
    parts = list(modules_in(*models))
    learning = [one for one in parts if not trained.isdisjoint(map(id, one._parameters.values()))] or parts
    own = [one for part in learning for one in (*part._parameters.values(), *part._buffers.values())]
    theirs = {at for one in own if one is not None for at in _memory(one)}

    def others(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [one for one in tensors if theirs.isdisjoint(_memory(one))]

    for module in modules:
        if _EMA.search(type(module).__name__):  # ema_pytorch's `EMA` has the model itself next to the copy
            yield Bucket.PARAMETERS, EMA_COPIES, others(_tensors_of(module))
    for holder in _holders(things):
        inner = [module for module in vars(holder).values() if isinstance(module, nn.Module)]
        held = [tensors_in(vars(holder)), *map(_tensors_of, inner)]
        yield Bucket.PARAMETERS, EMA_COPIES, [one for tensors in held for one in others(tensors)]
    for module in outermost(modules):
        if tuple(one.shape for one in parameters_in(module)) in shapes and set(parts).isdisjoint(modules_in(module)):
            found = others(_tensors_of(module))
            yield Bucket.PARAMETERS, EMA_COPIES if any(one._version for one in found) else MODEL_COPIES, found


def _memory(tensor: torch.Tensor) -> set[int]:
    return set() if is_lazy(tensor) else {held.untyped_storage()._cdata for held in holding_memory(tensor)}


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*parameters_in(module), *buffers_in(module)]


def _holders(things: list[Any]) -> list[Any]:
    """Return objects of classes that keep moving averages and are no modules."""
    kinds = {kind for kind in set(map(type, things)) if _EMA.search(kind.__name__) and not issubclass(kind, nn.Module)}
    return [thing for thing in things if type(thing) in kinds and hasattr(thing, "__dict__")]


# Blocks


def has_parameters(root: nn.Module) -> bool:
    """Return whether a module has parameters, or one within it."""
    return next(parameters_in(root), None) is not None


def repeated_blocks(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules made of others, of which a list or sequence has two or more of one class.

    A sequence of blocks within one of these (a stage) is gone into instead.
    """
    inside: set[int] = set()
    for container in modules_in(root):
        if id(container) in inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for block in _alike(container):
            if not any(isinstance(part, nn.Sequential) and _alike(part) for part in modules_in(block)):
                inside.update(map(id, modules_in(block)))
                yield block


def repeated_layers(root: nn.Module) -> list[nn.Module]:
    """Return the largest group of single layers of one class in a list or sequence; empty for none."""
    groups = (_of_one_class(one) for one in modules_in(root) if isinstance(one, (nn.ModuleList, nn.Sequential)))
    layers = ([child for child in group if not child._modules and has_parameters(child)] for group in groups)
    return max(layers, key=len, default=[])


def _alike(container: nn.Module) -> list[nn.Module]:
    return [child for child in _of_one_class(container) if child._modules]


def _of_one_class(container: nn.Module) -> list[nn.Module]:
    children = [child for child in container._modules.values() if child is not None]
    classes = Counter(map(type, children))
    return [child for child in children if classes[type(child)] > 1]
