"""One rank of a model trained over several GPUs, by PyTorch's own engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.sharding import has_own_precision, stage_of
from gpumem_tui.workload.adapters import trained
from gpumem_tui.workload.optimizers import OptimizerFactory

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

MakeModel = Callable[[], nn.Module]


def build_sharded(
    make_model: MakeModel, make_optimizer: OptimizerFactory, recipe: Recipe, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """This rank's part of a model, and its optimizer. The default process group must exist.

    ZeRO-1 is `DistributedDataParallel` with `ZeroRedundancyOptimizer`; ZeRO-3 is FSDP2 (`fully_shard`) by block, and
    ZeRO-2 the same without resharding after forward, which is what FSDP2 has for it: between steps parameters are
    sharded too. Under ``fsdp2`` its own mixed precision takes the place of autocast.
    """
    if recipe.sharding == "zero1":
        return _replicated(make_model, make_optimizer, device)
    return _fully_sharded(make_model, make_optimizer, device, recipe)


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
    make_model: MakeModel, make_optimizer: OptimizerFactory, device: torch.device, recipe: Recipe
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Made without memory, sharded, then given memory: no rank ever holds the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    reshard, policy = stage_of(recipe) == 3, _policy(recipe)
    mesh = init_device_mesh(device.type, (recipe.gpus,))
    with torch.device("meta"):
        model = make_model()
    for block in cast("nn.ModuleList", model.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    model.to_empty(device=device)
    return model, make_optimizer(trained(model))


def _policy(recipe: Recipe) -> MixedPrecisionPolicy:
    """What FSDP2 casts: weights as they are gathered, and gradients back to fp32 as they are reduced."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not has_own_precision(recipe):
        return MixedPrecisionPolicy()
    computes_in = getattr(torch, PRECISION_RECORDS[recipe.precision].computes_in)
    return MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32)
