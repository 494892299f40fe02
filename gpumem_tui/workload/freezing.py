"""Frozen layers in torch: `requires_grad_(False)` on what comes first in a network."""

from __future__ import annotations

from typing import Any

from torch import nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.freezing import frozen_blocks, only_head
from gpumem_tui.formula.recipe import ALL_BUT_HEAD, Recipe
from gpumem_tui.step.workload import WorkloadError

_BLOCKS = "blocks"


def freeze_layers(model: nn.Module, shape: ModelShape, recipe: Recipe) -> None:
    """Freeze a network of the catalog as the recipe says."""
    if only_head(recipe):
        model.requires_grad_(False)
        model.get_submodule("classifier" if shape.family == "bert" else "head").requires_grad_(True)
    elif recipe.has_frozen_layers:
        freeze_first(model, _BLOCKS, frozen_blocks(shape, recipe))


def freeze_transformers(model: Any, what: str) -> None:
    """Freeze a model that transformers built.

    Args:
        what: as `Recipe.freeze`; but the head, its `base_model`, as its guides to fine-tuning do.

    Raises:
        WorkloadError: it has no such blocks, or none in one list; or nothing is left to train.
    """
    name = type(model).__name__
    if what == ALL_BUT_HEAD:
        model.base_model.requires_grad_(False)
    else:
        lists = _lists_of_blocks(model)
        if len(lists) != 1:
            found = f"these: {', '.join(lists)}" if lists else "none"
            raise WorkloadError(f"--freeze {what}: {name} has not one list of blocks but {found}; use {ALL_BUT_HEAD}")
        (blocks, count), *_ = lists.items()
        if not 1 <= int(what) <= count:
            raise WorkloadError(f"--freeze {what}: {name} has {count} blocks, in {blocks}; freeze 1 to {count}")
        freeze_first(model, blocks, int(what))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(f"--freeze {what}: nothing of {name} is left to train; freeze fewer blocks")


def _lists_of_blocks(model: nn.Module) -> dict[str, int]:
    """The lists of modules that lie in no other one, and their lengths."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(name.startswith(f"{one}.") for one in found):
            found[name] = len(module)
    return found


def freeze_first(model: nn.Module, blocks: str, count: int) -> None:
    """Freeze what a model has before its blocks, in the order of its modules, and the first of these.

    Args:
        blocks: what the list of them is called in the model. `count`: how many.
    """
    reached = False
    for name, parameter in model.named_parameters():
        if name.startswith(f"{blocks}."):
            reached = True
            parameter.requires_grad_(int(name.removeprefix(f"{blocks}.").partition(".")[0]) >= count)
        else:
            parameter.requires_grad_(reached)
