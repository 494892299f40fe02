"""A stack of linear layers with ReLU between them.

Recomputing a layer gains nothing here: what it would drop, its ReLU's output, is the next layer's input.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.workload.models.recompute import run


class Mlp(nn.Module):
    """Features [batch, inputs] to logits [batch, classes] through `shape.layers` linear layers in all."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.recompute = recipe.recompute == "full"
        widths = [shape.inputs, *[shape.hidden] * (shape.layers - 1)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], shape.classes)

    def forward(self, features: Tensor) -> Tensor:
        x = features
        for block in self.blocks:
            x = run(block, x, recompute=self.recompute)
        logits: Tensor = self.head(x)
        return logits
