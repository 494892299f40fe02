"""The catalog's networks in plain torch, one file a family, true to the implementations that people train."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gpumem_tui.catalog.families import Family
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.bert import Bert
from gpumem_tui.workload.models.gpt2 import Gpt2
from gpumem_tui.workload.models.llama import Llama
from gpumem_tui.workload.models.mlp import Mlp
from gpumem_tui.workload.models.recompute import check_recompute
from gpumem_tui.workload.models.resnet import ResNet
from gpumem_tui.workload.models.vit import Vit

_FAMILIES: dict[Family, Callable[[ModelShape, Recipe], nn.Module]] = {
    "gpt2": Gpt2,
    "llama": Llama,
    "moe": Llama,
    "bert": Bert,
    "vit": Vit,
    "resnet": ResNet,
    "mlp": Mlp,
}


def build_model(shape: ModelShape, recipe: Recipe) -> nn.Module:
    """The network of `shape`, in training mode, on torch's default device and in its default dtype.

    Raises:
        WorkloadError: the recipe's recompute does not exist for this family.
    """
    check_recompute(shape, recipe)
    return _FAMILIES[shape.family](shape, recipe)
