"""Frozen layers in torch: `requires_grad_(False)` on what comes first in a network."""

from __future__ import annotations

from torch import nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.freezing import frozen_blocks, only_head
from gpumem_tui.formula.recipe import Recipe

_BLOCKS = "blocks"


def freeze_layers(model: nn.Module, shape: ModelShape, recipe: Recipe) -> None:
    """Freeze a network of the catalog as the recipe says."""
    if only_head(recipe):
        model.requires_grad_(False)
        model.get_submodule("classifier" if shape.family == "bert" else "head").requires_grad_(True)
    elif recipe.has_frozen_layers:
        freeze_first(model, _BLOCKS, frozen_blocks(shape, recipe))


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
