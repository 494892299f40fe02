"""What the allocator holds beside the tensors: free pieces of its segments that nothing asked for fits into.

PyTorch's allocator gives a request the smallest cached block that is large enough and splits it
(`get_free_block` in c10/cuda/CUDACachingAllocator.cpp). Where memory is short it gives whole free segments back, but a
segment of which a piece is in use stays. Which pieces those are only a replay tells; these are what the traced steps of
the catalog's models came to, on twelve GPUs: `python -m tests.published.formula_vs_trace`.
"""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula import convnet
from gpumem_tui.formula.adapters import copied_parameters
from gpumem_tui.formula.precision import LOSS_BYTES, PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import IN_A_BLOCK, Moment

SHARE = 0.05
"""Of what is reserved, that lies in such pieces at the largest batch."""

_SHORT_PATH = 2
"""Convolutions in a block of the shallower ResNets; deeper ones have three."""

_OF_THE_LOSS = frozenset({Moment.LOSS, Moment.LOSS_BACKWARD})


def pieces_bytes(shape: ModelShape, recipe: Recipe, batch_size: int, moment: Moment) -> int:
    """What lies in pieces because of the batch.

    Of a language model one fp32 block of its logits: the next step's forward finds the blocks that the last loss had,
    splits them for its small tensors, and when the loss asks for them again one of them is in pieces. (With full
    recompute that ends at some batch size, about 40 for GPT-2 small: beyond it this says too much.) Of a recomputed
    ResNet the maps of its largest block, which forward frees between the ones that it keeps. Of recomputed experts
    what they made.
    """
    if moment is Moment.UPDATE:
        return 0
    if shape.record.has_batch_norm and recipe.recompute == "full":
        values = max(_freed_between(block) for block in convnet.resnet(shape).blocks)
        return batch_size * values * PRECISION_RECORDS[recipe.precision].compute_bytes
    if shape.experts is not None and recipe.recompute == "full" and moment in IN_A_BLOCK:
        made = shape.seq_len * shape.experts.active * shape.hidden
        return batch_size * made * PRECISION_RECORDS[recipe.precision].parameter_bytes
    if shape.record.predicts_tokens and moment in _OF_THE_LOSS:
        return batch_size * shape.seq_len * shape.vocab * LOSS_BYTES
    return 0


def _freed_between(block: convnet.ConvBlock) -> int:
    """Values of one image; where two convolutions are all, what ReLU makes of them is no smaller than what follows."""
    return block.convolution_values + (block.activated_values if len(block.path) == _SHORT_PATH else 0)


def left_copies_bytes(shape: ModelShape, recipe: Recipe, moment: Moment) -> int:
    """Under autocast with full recompute: where the 16-bit weights lay that forward made, between the kept inputs."""
    if recipe.has_adapters or recipe.recompute != "full" or moment in (Moment.LOSS, Moment.UPDATE):
        return 0
    copied, _ = copied_parameters(shape, recipe)
    return copied * PRECISION_RECORDS[recipe.precision].working_copy_bytes


def reserved_bytes(allocated_bytes: int, recipe: Recipe, moment: Moment) -> int:
    """What the allocator holds for so much, at the largest batch.

    A fully recomputed step has little in between when the weights are updated: its pieces are used for gradients.
    """
    if moment is Moment.UPDATE and recipe.recompute == "full":
        return allocated_bytes
    return round(allocated_bytes / (1 - SHARE))
