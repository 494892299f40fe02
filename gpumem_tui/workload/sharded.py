"""One rank of a model trained over several GPUs, by PyTorch's own engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import nn

from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.adapters import trained
from gpumem_tui.workload.optimizers import OptimizerFactory

MakeModel = Callable[[], nn.Module]


def build_sharded(
    make_model: MakeModel, make_optimizer: OptimizerFactory, recipe: Recipe, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """This rank's part of a model, and its optimizer. The default process group must exist.

    ZeRO-1 is `DistributedDataParallel` with `ZeroRedundancyOptimizer`; ZeRO-3 is FSDP2 (`fully_shard`) by block, and
    ZeRO-2 the same without resharding after forward, which is what FSDP2 has for it: between steps parameters are
    sharded too.
    """
    if recipe.sharding == "zero1":
        return _replicated(make_model, make_optimizer, device)
    return _fully_sharded(make_model, make_optimizer, device, reshard=recipe.sharding == "zero3", ranks=recipe.gpus)


def _replicated(
    make_model: MakeModel, make_optimizer: OptimizerFactory, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    with torch.device(device):
        model = DistributedDataParallel(make_model())

    def local_optimizer(parameters: Iterable[nn.Parameter], **_: object) -> torch.optim.Optimizer:
        return make_optimizer(parameters)

    optimizer_class = cast("type[torch.optim.Optimizer]", local_optimizer)
    return model, ZeroRedundancyOptimizer(trained(model), optimizer_class=optimizer_class)


def _fully_sharded(
    make_model: MakeModel, make_optimizer: OptimizerFactory, device: torch.device, *, reshard: bool, ranks: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Made without memory, sharded, then given memory: no rank ever holds the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    with torch.device("meta"):
        model = make_model()
    for block in cast("nn.ModuleList", model.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    model.to_empty(device=device)
    return model, make_optimizer(trained(model))
