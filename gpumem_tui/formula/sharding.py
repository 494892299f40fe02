"""ZeRO: which of the fixed memory each stage spreads over the GPUs (Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from gpumem_tui.formula.recipe import Recipe, Sharding
from gpumem_tui.formula.rows import FormulaRow
from gpumem_tui.memory import Bucket

_ZERO1 = frozenset({Bucket.OPTIMIZER})
_ZERO2 = _ZERO1 | {Bucket.GRADIENTS}
_ZERO3 = _ZERO2 | {Bucket.PARAMETERS}

SHARDED: Mapping[Sharding, frozenset[Bucket]] = MappingProxyType(
    {"none": frozenset(), "zero1": _ZERO1, "zero2": _ZERO2, "zero3": _ZERO3}
)
"""The fixed rows that a stage divides by the number of GPUs, by bucket."""


def shard_scratch(row: FormulaRow, recipe: Recipe) -> FormulaRow:
    """One GPU's share of what an update makes on the way: under every stage a GPU updates its share of the state."""
    if recipe.gpus == 1 or recipe.sharding == "none":
        return row
    return replace(row, size_bytes=-(-row.size_bytes // recipe.gpus), expression=f"{row.expression} / {recipe.gpus}")


def shard(row: FormulaRow, recipe: Recipe) -> FormulaRow:
    """One GPU's share of a fixed row, rounded up to a byte."""
    if recipe.gpus == 1 or row.bucket not in SHARDED[recipe.sharding]:
        return row
    return replace(
        row,
        size_bytes=-(-row.size_bytes // recipe.gpus),
        expression=f"{row.expression} / {recipe.gpus}",
        source=f"{row.source}; Rajbhandari et al. 2020",
    )
