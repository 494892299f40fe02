"""What each way of sharding keeps on a GPU (the stages of ZeRO: Rajbhandari et al. 2020), and in which format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe, Sharding
from gpumem_tui.formula.rows import FormulaRow
from gpumem_tui.memory import Bucket

_ZERO1 = frozenset({Bucket.OPTIMIZER})
_ZERO2 = _ZERO1 | {Bucket.GRADIENTS}
_ZERO3 = _ZERO2 | {Bucket.PARAMETERS}
_STAGES = (frozenset[Bucket](), _ZERO1, _ZERO2, _ZERO3)


@dataclass(frozen=True, slots=True)
class ShardingRecord:
    """One way to spread the fixed memory over GPUs.

    Attributes:
        stage: of ZeRO: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        title: for the reader; `keeps`: in a few words, for a choice; `source`: of both.
        own_precision: in mixed precision the network itself runs in 16 bits, instead of under `torch.autocast`.
        keeps_masters: fp32 copies of the weights beside those that the network runs with.
    """

    stage: int
    title: str
    keeps: str
    source: str
    own_precision: bool = False
    keeps_masters: bool = False


_DEEPSPEED = ShardingRecord(1, "DeepSpeed ZeRO-1", "", "DeepSpeed stage_1_and_2.py", True, True)

SHARDING_RECORDS: Mapping[Sharding, ShardingRecord] = MappingProxyType(
    {
        "none": ShardingRecord(0, "no sharding", "each GPU holds everything", "Rajbhandari et al. 2020"),
        "zero1": ShardingRecord(1, "ZeRO-1", "optimizer state", "torch.distributed.optim.ZeroRedundancyOptimizer"),
        "zero2": ShardingRecord(2, "ZeRO-2", "+ gradients", "PyTorch FSDP2, not resharding after forward"),
        "zero3": ShardingRecord(3, "ZeRO-3", "+ parameters (FSDP2, autocast)", "PyTorch FSDP2"),
        "fsdp2": ShardingRecord(3, "FSDP2", "all, with FSDP2's own mixed precision", "PyTorch FSDP2", True),
        "deepspeed-zero1": replace(_DEEPSPEED, keeps="optimizer state and fp32 masters"),
        "deepspeed-zero2": replace(_DEEPSPEED, stage=2, title="DeepSpeed ZeRO-2", keeps="+ gradients"),
        "deepspeed-zero3": replace(
            _DEEPSPEED, stage=3, title="DeepSpeed ZeRO-3", keeps="+ parameters", source="DeepSpeed stage3.py"
        ),
    }
)
"""Every way that a recipe can name."""

SHARDED: Mapping[Sharding, frozenset[Bucket]] = MappingProxyType(
    {name: _STAGES[record.stage] for name, record in SHARDING_RECORDS.items()}
)
"""The fixed rows that each divides by the number of GPUs, by bucket."""


def stage_of(recipe: Recipe) -> int:
    """The stage of ZeRO that the recipe shards by; 0 for none."""
    return SHARDING_RECORDS[recipe.sharding].stage


def has_own_precision(recipe: Recipe) -> bool:
    """Whether the recipe's engine keeps its own formats instead of autocast's."""
    record = SHARDING_RECORDS[recipe.sharding]
    return record.keeps_masters or (record.own_precision and PRECISION_RECORDS[recipe.precision].is_mixed)


def as_run(recipe: Recipe) -> Recipe:
    """The recipe by which the network itself runs: in 16 bits throughout where the engine sees to the rest."""
    if SHARDING_RECORDS[recipe.sharding].own_precision and PRECISION_RECORDS[recipe.precision].is_mixed:
        return replace(recipe, precision="bf16")
    return recipe


def shard_scratch(row: FormulaRow, recipe: Recipe) -> FormulaRow:
    """One GPU's share of what an update makes on the way: under every stage a GPU updates its share of the state."""
    over = recipe.sharded_over
    if over == 1 or recipe.sharding == "none":
        return row
    return replace(row, size_bytes=-(-row.size_bytes // over), expression=f"{row.expression} / {over}")


def shard(row: FormulaRow, recipe: Recipe) -> FormulaRow:
    """One GPU's share of a fixed row, rounded up to a byte."""
    if recipe.sharded_over == 1 or row.bucket not in SHARDED[recipe.sharding]:
        return row
    return replace(
        row,
        size_bytes=-(-row.size_bytes // recipe.sharded_over),
        expression=f"{row.expression} / {recipe.sharded_over}",
        source=f"{row.source}; Rajbhandari et al. 2020",
    )
