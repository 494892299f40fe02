"""One rank of a model whose blocks are cut over several GPUs, by PyTorch's own tensor parallel on DTensor.

The plan is that of PyTorch's tutorial on Llama and of torchtitan: what each half of a block begins with is cut by
columns, what it ends with by rows; the vocabulary is cut, and the loss is computed on the parts (`loss_parallel`). With
sequence parallel what lies between is cut along the sequence, and gathered before each half of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "qkv", "gate_proj", "up_proj", "0")
"""What layers are called that a half of a block begins with; in a `Sequential` the first."""
_BY_ROWS = ("out_proj", "proj", "down_proj", "2")
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
    parallelize_module(model, mesh, _around_blocks(shape, recipe))
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


def _around_blocks(shape: ModelShape, recipe: Recipe) -> dict[str, ParallelStyle]:
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
    """Modules with weights of their own that every rank has whole."""
    from torch.distributed.tensor import DTensor

    return [
        module
        for module in model.modules()
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
    ]


def _replicate(module: nn.Module, mesh: DeviceMesh, *, cut_input: bool) -> None:
    """Every rank has the weights, as one update of all of a model's weights asks for.

    Args:
        cut_input: along its first dimension, each rank for its own part.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    def prepared(_: nn.Module, inputs: tuple[Tensor, ...], over: DeviceMesh) -> DTensor:
        whole = DTensor.from_local(inputs[0], over, [Replicate()], run_check=False)
        return whole.redistribute(over, [Shard(0)]) if cut_input else whole

    def local(_: nn.Module, output: DTensor, over: DeviceMesh) -> Tensor:
        found: Tensor = output.to_local()
        return found

    distribute_module(module, mesh, input_fn=prepared, output_fn=local)


def _as_long_as_the_sequence(ways: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Angles are of all positions, which the attention sees; only the length is read of what it is given."""
    x = inputs[0]
    return (x[:, :1].expand(-1, ways * x.size(_SEQUENCE), -1),)
