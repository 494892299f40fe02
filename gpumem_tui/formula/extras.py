"""Techniques that the closed form knows and the traced workloads do not: formula only, wherever they are shown."""

from __future__ import annotations

from typing import Literal, get_args

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.sharding import SHARDING_RECORDS

Extra = Literal["chunked-loss", "offload-optimizer", "offload-activations"]
EXTRAS: tuple[Extra, ...] = get_args(Extra)
Extras = frozenset[Extra]
NO_EXTRAS: Extras = frozenset()

LOSS_CHUNKS = 8
"""Pieces into which a chunked loss cuts each sequence."""

OFFLOADED_BLOCKS = 2
"""Blocks whose activations are on the GPU under offloading: the one that runs and the one on its way."""


def why_not(extra: Extra, shape: ModelShape, recipe: Recipe) -> str | None:
    """Why `extra` means nothing for this network and recipe; None if it does."""
    if extra == "chunked-loss" and not shape.record.predicts_tokens:
        return "a classifier's head has no vocabulary to cut"
    has_masters = SHARDING_RECORDS[recipe.sharding].keeps_masters
    if extra == "offload-optimizer" and recipe.optimizer == "sgd" and not has_masters:
        return "plain SGD keeps no state to move"
    if extra == "offload-activations" and not shape.record.has_attention:
        return "modelled for transformer blocks only"
    return None
