"""A recipe worked out for a network, once: its records, its weights, and what of them is trained, frozen and shared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parameters import ParameterTensor, parameter_tensors
from gpumem_tui.formula.recipe import NO_EXTRAS, Extras, Recipe
from gpumem_tui.formula.records import (
    OPTIMIZER_RECORDS,
    PRECISION_RECORDS,
    SHARDING_RECORDS,
    ZERO3,
    OptimizerRecord,
    PrecisionRecord,
    ShardingRecord,
)
from gpumem_tui.formula.weights import (
    Counts,
    Weights,
    as_trained,
    counted,
    frozen_blocks,
    only_head,
    tail,
    targets,
    trains_head,
    weights,
)


def fused(shape: ModelShape, recipe: Recipe) -> bool:
    """Return whether attention never writes its scores to memory.

    True for ``auto``: PyTorch's own choice is such a kernel unless `as_run_on` chose another. False with attention
    sinks, regardless of the recipe.
    """
    return recipe.attention != "math" and not shape.sinks


@dataclass(frozen=True, eq=False)
class Resolved:
    """A step of one network by one recipe, worked out, on a GPU that runs it alone.

    Attributes:
        shape: the network, or a GPU's part of it. `after`: what comes after its frozen blocks.
        tensors: every weight tensor of the network, adapters aside.
        recipe: as the network itself runs: in 16 bits throughout where an engine sees to the rest.
        extras: techniques that only the formula knows.
        precision: its record; `trained_as`: of what is trained, which adapters may keep in fp32 over less.
        width: bytes of an activation; `residual`: of a value of the residual stream, which adds up in the dtype of
            the embedding's weights; `is_autocast`: whether these differ.
        has_own_precision: the engine keeps its own formats instead of autocast's.
        weights: by what becomes of them, and their `counts`. `targets`: the linear layers with adapters; none without.
        frozen_blocks: how many, the first ones. `only_head`: whether the last layer alone is trained.
        trains_head: whether the output head's weight has a gradient.
        fused: whether attention never writes its scores to memory.
        over: GPUs that the recipe spreads its share of the fixed memory over.
    """

    shape: ModelShape
    after: ModelShape
    tensors: tuple[ParameterTensor, ...]
    recipe: Recipe
    extras: Extras
    precision: PrecisionRecord
    trained_as: PrecisionRecord
    width: int
    residual: int
    is_autocast: bool
    sharding: ShardingRecord
    optimizer: OptimizerRecord
    has_own_precision: bool
    weights: Weights
    counts: Counts
    targets: frozenset[str]
    frozen_blocks: int
    only_head: bool
    trains_head: bool
    fused: bool
    over: int


@lru_cache(4096)
def resolve(shape: ModelShape, recipe: Recipe, extras: Extras = NO_EXTRAS) -> Resolved:
    """Work out a recipe for a network.

    Raises:
        ShapeError: adapters that this network cannot have.
    """
    asked, sharding = PRECISION_RECORDS[recipe.precision], SHARDING_RECORDS[recipe.sharding]
    in_16_bits = sharding.own_precision and asked.is_mixed  # throughout: the engine sees to the rest
    run = replace(recipe, precision="bf16") if in_16_bits else recipe
    precision, is_fused = PRECISION_RECORDS[run.precision], fused(shape, run)
    tensors = parameter_tensors(shape)
    copies, gathers = bool(precision.working_copy_bytes), sharding.stage == ZERO3 or sharding.by_fsdp
    return Resolved(
        shape=shape,
        after=tail(shape, run),
        tensors=tensors,
        recipe=run,
        extras=extras,
        precision=precision,
        trained_as=PRECISION_RECORDS[as_trained(run).precision],
        width=precision.compute_bytes,
        residual=precision.parameter_bytes,
        is_autocast=precision.parameter_bytes != precision.compute_bytes,
        sharding=sharding,
        optimizer=OPTIMIZER_RECORDS[run.optimizer],
        has_own_precision=sharding.keeps_masters or in_16_bits,
        weights=weights(shape, run),
        counts=counted(shape, run, copies=copies, gathers=gathers),
        targets=targets(shape, run) if run.has_adapters else frozenset(),
        frozen_blocks=frozen_blocks(shape, run),
        only_head=only_head(run),
        trains_head=trains_head(shape, run),
        fused=is_fused,
        over=run.sharded_over,
    )
