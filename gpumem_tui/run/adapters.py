"""Low-rank adapters put into a program's models as it makes its optimizer, as its author would by PEFT."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from gpumem_tui.step.walking import instances_of, modules_in, outermost, parameters_in


def why_not_adapted(roots: Iterable[nn.Module]) -> str:
    """Say why models get no adapters; empty where they can."""
    roots = list(roots)
    if any(map(_has_adapters, roots)):
        return "the command trains adapters already"
    if find_spec("peft") is None:
        return "PEFT, which makes adapters, is not installed"
    if any(isinstance(root, nn.parallel.DistributedDataParallel) for root in roots):
        return "adapters are tried on one rank"
    if not any(map(_is_adaptable, modules_in(*roots))):
        return "it trains no model of transformers"
    if not all(parameter.requires_grad for parameter in parameters_in(*roots)):
        return "some of its weights are frozen already"
    return ""


def adapt_models(count: Callable[[], None]) -> None:
    """Have every optimizer that is made from now on train adapters of its models, and no more. `count`: for each."""
    change_groups(lambda groups: _adapted(groups, count))


def change_groups(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Have every optimizer that is made from now on be made for other groups of parameters."""
    init = torch.optim.Optimizer.__init__

    @functools.wraps(init)
    def changed(optimizer: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        init(optimizer, change([_group(one) for one in params]), defaults)

    kind: Any = torch.optim.Optimizer
    kind.__init__ = changed


def _adapted(groups: list[dict[str, Any]], count: Callable[[], None]) -> list[dict[str, Any]]:
    """Return groups in which adapters stand in the place of the weights that have them, which are frozen."""
    known = {id(parameter) for group in groups for parameter in group["params"]}
    new: list[Any] = []
    for model in outermost([one for one in instances_of(nn.Module, gc.get_objects()) if _is_adaptable(one)]):
        if known.isdisjoint(map(id, parameters_in(model))) or _has_adapters(model):
            continue
        before = set(map(id, parameters_in(model)))
        _put_adapters(model)
        count()
        new += [one for one in parameters_in(model) if one.requires_grad and id(one) not in before]
    if not new:
        return groups
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    first, *others = groups
    first["params"] += new
    return [first, *(group for group in others if group["params"])]


def _group(one: Any) -> dict[str, Any]:
    """Return a group of parameters as a dictionary, however it was given: a tensor, one with its name, a group."""
    given = dict(one) if isinstance(one, dict) else {"params": [one]}
    params = given["params"]
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    return {**given, "params": [entry[1] if isinstance(entry, tuple) else entry for entry in listed]}


def _put_adapters(model: nn.Module) -> None:
    peft: Any = import_module("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules="all-linear"), model)
    import_module("peft.functional").cast_adapter_dtype(model, "default")  # in 32 bits, as `get_peft_model` makes them


def _is_adaptable(module: nn.Module) -> bool:
    return hasattr(module, "supports_gradient_checkpointing") and hasattr(module, "get_output_embeddings")


_ADAPTERS = ("lora_A", "lora_a", "lora_down")
"""Names of the first matrix of an adapter: PEFT's and loralib's, torchtune's, kohya's and diffusers'."""


def _has_adapters(model: nn.Module) -> bool:
    return any(hasattr(module, name) for module in modules_in(model) for name in _ADAPTERS)
