"""The catalog's networks in plain torch, true to the implementations that people train."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gpumem_tui.catalog.shapes import Family, LackingFamily, ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.encoders import Bert, Gpt2, Vit
from gpumem_tui.workload.models.layers import check_recompute
from gpumem_tui.workload.models.llama import Llama
from gpumem_tui.workload.models.plain import Mlp, ResNet

NETWORKS: dict[Family, Callable[[ModelShape, Recipe], nn.Module]] = {
    "gpt2": Gpt2,
    "llama": Llama,
    "moe": Llama,
    "bert": Bert,
    "vit": Vit,
    "resnet": ResNet,
    "mlp": Mlp,
}


def build_model(shape: ModelShape, recipe: Recipe) -> nn.Module:
    """Build the network of `shape`, in training mode, on torch's default device and in its default dtype.

    Raises:
        WorkloadError: the recipe's recompute does not exist for this family.
        LackingFamily: there is no network of this family.
    """
    check_recompute(shape, recipe)
    if shape.family not in NETWORKS:
        raise LackingFamily(shape.family, "network", "workload/models/__init__.py")
    return NETWORKS[shape.family](shape, recipe)
