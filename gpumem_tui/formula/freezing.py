"""Frozen layers: which weights a step leaves alone, and what it then makes no gradients of.

`--freeze N` freezes what comes before the blocks and the first N of them, as `requires_grad_(False)` on these modules
does. Autograd then keeps nothing in them and stops before them; a head that is tied to the embedding is frozen with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parameters import ParameterTensor, head_tensors, parameter_tensors, residual_tensors
from gpumem_tui.formula.recipe import ALL_BUT_HEAD, NOTHING_FROZEN, Recipe


def block_count(shape: ModelShape) -> int:
    """Blocks of a network: of a ResNet those of all stages, of an MLP the layers before the last."""
    if shape.record.has_batch_norm:
        return sum(shape.stages)
    return shape.layers if shape.record.has_attention else shape.layers - 1


def frozen_blocks(shape: ModelShape, recipe: Recipe) -> int:
    """How many of a network's blocks are frozen, the first ones, and all before them; 0 if every weight is trained."""
    if recipe.freeze == NOTHING_FROZEN:
        return 0
    blocks = block_count(shape)
    return blocks if recipe.freeze == ALL_BUT_HEAD else min(blocks, int(recipe.freeze))


def only_head(recipe: Recipe) -> bool:
    """Whether the last layer alone is trained."""
    return recipe.freeze == ALL_BUT_HEAD


def freeze_fault(shape: ModelShape, recipe: Recipe) -> str | None:
    """Why this cannot be frozen of the network, and what to do; None if it can."""
    if not recipe.has_frozen_layers:
        return None
    if recipe.pipeline_parallel > 1:
        return "frozen layers are counted without pipeline parallel; take --pipeline-parallel 1"
    blocks = block_count(shape)
    if only_head(recipe):
        if shape.tied_head:
            return f"the head of {shape.name} shares its weight with the embedding; freeze the first {blocks} blocks"
        return None
    if not counts_blocks(recipe.freeze) or int(recipe.freeze) > blocks:
        return f"takes {NOTHING_FROZEN}, {ALL_BUT_HEAD} or how many of the {blocks} blocks of {shape.name}"
    return None


def counts_blocks(freeze: str) -> bool:
    """Whether it says a number of blocks, from 1 on."""
    return freeze.isdecimal() and int(freeze) > 0


def tail(shape: ModelShape, recipe: Recipe) -> ModelShape:
    """What comes after the frozen blocks, as a network of its own; of a ResNet, whose blocks differ, all of it."""
    frozen = frozen_blocks(shape, recipe)
    if not recipe.has_frozen_layers or shape.record.has_batch_norm:
        return shape
    if not shape.record.has_attention:
        return replace(shape, layers=shape.layers - frozen, inputs=shape.hidden)
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, dense_layers=max(0, experts.dense_layers - frozen))
    return replace(shape, layers=shape.layers - frozen, experts=experts, part="last")


def trains_head(shape: ModelShape, recipe: Recipe) -> bool:
    """Whether the output head's weight has a gradient."""
    return not recipe.has_adapters and not (recipe.has_frozen_layers and shape.tied_head)


@lru_cache(256)
def split(shape: ModelShape, recipe: Recipe) -> tuple[tuple[ParameterTensor, ...], tuple[ParameterTensor, ...]]:
    """The weights that are trained, and those that are frozen."""
    every = parameter_tensors(shape)
    if not recipe.has_frozen_layers:
        return every, ()
    if only_head(recipe):
        trained = head_tensors(shape)
    elif shape.record.has_batch_norm:
        trained = residual_tensors(shape, frozen_blocks(shape, recipe))
    else:
        after = tail(shape, recipe)
        tied = head_tensors(shape) if shape.tied_head else ()
        trained = tuple(_without(parameter_tensors(after), tied))
    return trained, tuple(_without(every, trained))


def _without(tensors: Iterable[ParameterTensor], taken: Iterable[ParameterTensor]) -> Iterator[ParameterTensor]:
    """`tensors` with as many copies fewer of each as are `taken`."""
    left: Counter[ParameterTensor] = Counter()
    for tensor in taken:
        left[replace(tensor, copies=1)] += tensor.copies
    for tensor in tensors:
        one = replace(tensor, copies=1)
        gone = min(left[one], tensor.copies)
        left[one] -= gone
        if tensor.copies > gone:
            yield replace(tensor, copies=tensor.copies - gone)
