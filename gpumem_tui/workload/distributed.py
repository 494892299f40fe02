"""One rank of a model trained over several GPUs, by PyTorch's own engines, or cut by its tensor parallel on DTensor.

The plan of the cut is that of PyTorch's tutorial on Llama and of torchtitan: what each half of a block begins with is
cut by columns, what it ends with by rows; the vocabulary is cut, and the loss is computed on the parts
(`loss_parallel`). With sequence parallel what is between is cut along the sequence, and gathered before each half of
a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.records import PRECISION_RECORDS, has_own_precision, stage_of
from gpumem_tui.workload.optimizers import OptimizerFactory
from gpumem_tui.workload.trained import trained

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

MakeModel = Callable[[], nn.Module]


def build_sharded(
    make_model: MakeModel, make_optimizer: OptimizerFactory, recipe: Recipe, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return this rank's part of a model, and its optimizer. The default process group must exist.

    ZeRO-1 is `DistributedDataParallel` with `ZeroRedundancyOptimizer`; ZeRO-3 is FSDP2 (`fully_shard`) by block, and
    ZeRO-2 as FSDP2 without resharding after forward, which is what FSDP2 has for it: between steps parameters are
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
    """Make a model without memory, shard it, then give it memory: no rank ever holds the whole model."""
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
    """Return what FSDP2 casts: weights as they are gathered, gradients back to fp32 as they are reduced."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not has_own_precision(recipe):
        return MixedPrecisionPolicy()
    computes_in = getattr(torch, PRECISION_RECORDS[recipe.precision].computes_in)
    return MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32)


# Tensor parallel

_BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "qkv", "gate_proj", "up_proj", "0")
"""Names of the layers that a half of a block begins with; in a `Sequential` the first."""
_SEQUENCE = 1


def cut_model(model: nn.Module, shape: ModelShape, recipe: Recipe, device: torch.device) -> None:
    """Cut a Llama or a GPT-2 of the catalog over the recipe's GPUs. The default process group must exist.

    Args:
        model: on ``meta``, whole; afterwards this rank's part, there too.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    ways = recipe.tensor_parallel
    mesh = init_device_mesh(device.type, (ways,))
    parallelize_module(model, mesh, _around_blocks(recipe))
    for block in cast("nn.ModuleList", model.blocks):
        attention = cast(Any, block).attention
        attention.heads //= ways
        if shape.record.is_gated:
            attention.kv_heads //= ways
        parallelize_module(block, mesh, _of_block(block, recipe))
    if shape.tied_head:
        cast(Any, model).head.weight = cast(Any, model).token_embedding.weight
    for module in _uncut(model):
        _replicate(module, mesh, cut_input=recipe.sequence_parallel)
    if recipe.sequence_parallel and shape.record.is_gated:
        rotary = cast(Any, model).rotary
        rotary.register_forward_pre_hook(lambda _, inputs: _as_long_as_the_sequence(ways, inputs))


def _around_blocks(recipe: Recipe) -> dict[str, ParallelStyle]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    between = Shard(_SEQUENCE) if recipe.sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if recipe.sequence_parallel:
        plan["norm"] = SequenceParallel()
    return plan


def _of_block(block: nn.Module, recipe: Recipe) -> dict[str, ParallelStyle]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(_SEQUENCE) if recipe.sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    for name, layer in block.named_modules():
        if isinstance(layer, nn.Linear):
            first = name.rpartition(".")[2] in _BY_COLUMNS
            plan[name] = ColwiseParallel() if first else RowwiseParallel(output_layouts=between)
    if recipe.sequence_parallel:
        further = 2 if hasattr(cast(Any, block).attention, "kv_heads") else 0  # cosines and sines, which are whole
        gathered = (Replicate(), *[None] * further)
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        plan["attention"] = PrepareModuleInput(
            input_layouts=(Shard(_SEQUENCE), *[None] * further), desired_input_layouts=gathered
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(_SEQUENCE),), desired_input_layouts=(Replicate(),))
    return plan


def _uncut(model: nn.Module) -> list[nn.Module]:
    """Return the modules with weights of their own that every rank has whole."""
    from torch.distributed.tensor import DTensor

    return [
        module
        for module in model.modules()
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
    ]


def _replicate(module: nn.Module, mesh: DeviceMesh, *, cut_input: bool) -> None:
    """Return every rank has the weights, as one update of all of a model's weights asks for.

    Args:
        cut_input: along its first dimension, each rank for its own part.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    def prepared(_: nn.Module, inputs: tuple[Tensor, ...], over: DeviceMesh) -> DTensor:
        whole = DTensor.from_local(inputs[0], over, [Replicate()], run_check=False)
        return whole.redistribute(over, [Shard(0)]) if cut_input else whole

    def local(_: nn.Module, output: DTensor, _over: DeviceMesh) -> Tensor:
        found: Tensor = output.to_local()
        return found

    distribute: Any = distribute_module  # its annotations leave out that both functions may return what is passed on
    distribute(module, mesh, input_fn=prepared, output_fn=local)


def _as_long_as_the_sequence(ways: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return an input as long as the sequence: angles are of all positions, and only its length is read."""
    x = inputs[0]
    return (x[:, :1].expand(-1, ways * x.size(_SEQUENCE), -1),)
