"""A stack of linear layers with ReLU between them."""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FORWARD_ENDS, IN_A_BLOCK, TEXTBOOK, FormulaRow, batch_row, there
from gpumem_tui.memory import Bucket

_GRADIENTS = 2


def activation_rows(shape: ModelShape, recipe: Recipe, batch_size: int) -> list[FormulaRow]:
    """b·L·H values, one tensor a layer: what ReLU saves is what the next layer saves as its input.

    Recompute changes nothing: the layers' boundaries are all there is.
    """
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    outputs = batch_row(
        Bucket.ACTIVATIONS,
        "layer outputs",
        (batch_size, shape.layers, shape.hidden, width),
        TEXTBOOK,
        "counts the last layer as wide as the others",
    )
    gradients = batch_row(
        Bucket.TEMPORARY,
        "gradients inside a block",
        (batch_size, _GRADIENTS, shape.hidden, width),
        "PyTorch autograd",
        "of a layer's output, before and after its activation function",
    )
    return [*there(FORWARD_ENDS, [outputs]), *there(IN_A_BLOCK, [gradients])]
