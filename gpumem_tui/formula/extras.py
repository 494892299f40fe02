"""Techniques that the closed form knows and the traced workloads do not: formula only, wherever they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.price import Axis, Price
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


@dataclass(frozen=True, slots=True)
class ExtraRecord:
    """One of these techniques.

    Attributes:
        axis: what it changes.
        name: as a reader knows it.
        control: of a plan, which has it.
        cost: in words; `source`: where that is from; `price`: as a comparison sees it.
        arithmetic: what becomes of the formula's terms.
        caveat: what else to know.
    """

    axis: Axis
    name: str
    control: Literal["loss", "offload"]
    cost: str
    source: str
    price: Price
    arithmetic: str
    caveat: str


EXTRA_RECORDS: Mapping[Extra, ExtraRecord] = MappingProxyType(
    {
        "chunked-loss": ExtraRecord(
            axis="loss",
            name="chunked loss",
            control="loss",
            cost="none: the result is exact; needs a fused loss such as the liger-kernel package's",
            source="Hsu et al. 2024 (Liger Kernel)",
            price=Price(changes=1),
            arithmetic=f"b·S·V · (w + 12) / {LOSS_CHUNKS}, and b·S·h·w",
            caveat="only where the loss is a plain cross-entropy over the vocabulary",
        ),
        "offload-optimizer": ExtraRecord(
            axis="state",
            name="optimizer in host memory",
            control="offload",
            cost="gradients and weights cross the bus at every update, and the CPU runs it; as much host memory",
            source="Ren et al. 2021 (ZeRO-Offload)",
            price=Price(offloads=1, changes=1),
            arithmetic="optimizer state: 0 on the GPU",
            caveat="the host must hold the state of all its GPUs",
        ),
        "offload-activations": ExtraRecord(
            axis="blocks",
            name="activations in host memory",
            control="offload",
            cost="what the blocks keep crosses the bus twice a step; as much pinned host memory",
            source="Rajbhandari et al. 2021 (ZeRO-Infinity)",
            price=Price(offloads=1, changes=1),
            arithmetic=f"L → {OFFLOADED_BLOCKS} blocks' activations on the GPU",
            caveat="the bus must keep up: long samples hide it better",
        ),
    }
)


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
