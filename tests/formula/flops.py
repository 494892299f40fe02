"""The arithmetic of a step, as papers count it."""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.matmuls import matmuls
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown


def training_flops(shape: ModelShape, recipe: Recipe) -> int:
    """Return floating-point operations of forward and backward for one sample, of which nothing is recomputed."""
    products = matmuls(shape, recipe)
    assert not isinstance(products, Unknown)
    return sum(product.flops * (1 + product.backward) for product in products)
