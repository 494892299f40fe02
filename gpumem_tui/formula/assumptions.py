"""What the closed form takes for granted, in words."""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.extras import Extras
from gpumem_tui.formula.parallel import parallel_assumptions
from gpumem_tui.formula.parameters import active_parameters, count_parameters
from gpumem_tui.formula.recipe import Recipe


def assumptions(shape: ModelShape, recipe: Recipe, extras: Extras) -> list[str]:
    """One sentence each."""
    assumed = [
        "The highest of six moments of a step; between them memory moves evenly.",
        "Allocator cache, CUDA context and library workspaces are not counted.",
    ]
    if shape.record.has_attention:
        assumed += _attention_assumptions(shape, recipe)
    if shape.record.has_batch_norm:
        assumed.append("BatchNorm's running statistics are not counted: they are buffers of a few kilobytes.")
    if recipe.recompute == "selective" and not shape.record.has_attention:
        assumed.append("Selective recompute drops attention scores; this network has none.")
    if recipe.precision == "fp32":
        assumed.append("The activation forms are for 16-bit values; in fp32 all but dropout masks count twice.")
    if recipe.data_parallel > 1 and recipe.sharding == "none":
        assumed.append("Data parallel: each GPU holds everything; communication buckets are not counted.")
    elif recipe.sharded_over > 1 and recipe.sharding != "none":
        assumed.append("Sharded: communication buffers and gradients on their way are not counted.")
    assumed += parallel_assumptions(recipe)
    if recipe.has_frozen_layers:
        assumed.append("Frozen layers come first: nothing is kept in them, and backward ends before them.")
    if recipe.has_adapters:
        assumed.append("No dropout before the adapters; the network's own weights are frozen, and have no gradient.")
    if extras:
        assumed.append(f"Formula only, never traced: {', '.join(sorted(extras))}.")
    return assumed


def _attention_assumptions(shape: ModelShape, recipe: Recipe) -> list[str]:
    assumed = []
    if recipe.attention == "auto":
        assumed.append(
            "PyTorch chooses a fused attention kernel, which drops the textbook's 5·a·S/h term; "
            "--attention math keeps it."
        )
    if recipe.attention == "flash" and recipe.precision == "fp32":
        assumed.append("Flash kernels take 16-bit values only; in fp32 PyTorch's fused kernel is efficient.")
    if shape.record.remark:
        assumed.append(shape.record.remark)
    if shape.experts is not None:
        active, total = active_parameters(shape), count_parameters(shape)
        assumed.append(f"{active / 1e9:.1f} of {total / 1e9:.1f} billion parameters work on one token.")
    if not shape.dropout:
        assumed.append("The model has no dropout, so the textbook's masks are not counted.")
    if recipe.recompute == "selective":
        assumed.append("Selective recompute drops the attention core and rebuilds one block's at a time.")
    return assumed
