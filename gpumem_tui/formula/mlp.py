"""A stack of linear layers with ReLU between them."""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import TEXTBOOK, FormulaRow, batch_row
from gpumem_tui.memory import Bucket


def activation_rows(shape: ModelShape, recipe: Recipe, batch_size: int) -> list[FormulaRow]:
    """b·L·H values, one tensor a layer: what ReLU saves is what the next layer saves as its input.

    Recompute changes nothing: the layers' boundaries are all there is.
    """
    return [
        batch_row(
            Bucket.ACTIVATIONS,
            "layer outputs",
            (batch_size, shape.layers, shape.hidden, PRECISION_RECORDS[recipe.precision].compute_bytes),
            TEXTBOOK,
            "counts the last layer as wide as the others",
        )
    ]
