"""Activation recomputation: what is run a second time in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.step.workload import WorkloadError


def check_recompute(shape: ModelShape, recipe: Recipe) -> None:
    """Raise WorkloadError if the recipe's recompute does not exist for this family."""
    if recipe.recompute == "selective" and not shape.record.has_attention:
        raise WorkloadError(
            f"--recompute selective: {shape.name} has no attention to recompute; use --recompute full or none"
        )


def run(function: Callable[..., Tensor], *inputs: Tensor, recompute: bool) -> Tensor:
    """`function(*inputs)`; with `recompute` only the inputs are kept, and backward runs it again."""
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False) if recompute else function(*inputs)
    return output
