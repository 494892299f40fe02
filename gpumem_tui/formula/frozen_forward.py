"""What forward holds for a moment inside a frozen block, which keeps nothing: the peak where little is trained."""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula import convnet
from gpumem_tui.formula.blocks import fused, is_autocast, residual_bytes
from gpumem_tui.formula.freezing import frozen_blocks
from gpumem_tui.formula.parameters import parameter_tensors
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FormulaRow, Moment, batch_row, fixed_row, there
from gpumem_tui.memory import Bucket

_SOURCE = "PyTorch: without a gradient each tensor goes as soon as its last reader has run"
_GATED_VALUES, _PLAIN_VALUES = 3, 2
"""Values of the feed-forward's width at once: SiLU of the gate, up and product; what GELU reads and makes."""
_SCORES = 2
_COLOURS = 3
_MAPS, _MAPS_WITH_SHORTCUT = 2, 3
"""Maps of a residual block at once beside its input: what a normalization reads and makes; the branch's, too."""


def frozen_block_rows(shape: ModelShape, recipe: Recipe, batch_size: int) -> list[FormulaRow]:
    """The most that a frozen block, or a ResNet's stem, holds while it runs; autocast's copy of one weight with it."""
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    if shape.record.has_batch_norm:
        sample_bytes = _maps(shape, recipe) * width
    elif shape.record.has_attention:
        sample_bytes = shape.tokens * (_residual(shape, recipe) + _inner(shape, recipe) * width)
    else:
        sample_bytes = _PLAIN_VALUES * shape.hidden * width
    note = "one at a time; nothing stays of it"
    row = batch_row(Bucket.TEMPORARY, "values inside a frozen block", (batch_size, sample_bytes), _SOURCE, note)
    rows = [row]
    if is_autocast(recipe) and (cast := _largest_matrix(shape)):
        copy = (cast, PRECISION_RECORDS[recipe.precision].compute_bytes)
        note = "the largest: autocast keeps no copy of a weight without a gradient"
        rows.append(fixed_row(Bucket.TEMPORARY, "16-bit copy of a frozen weight", copy, "PyTorch autocast", note))
    return there({Moment.FORWARD}, rows)


def _largest_matrix(shape: ModelShape) -> int:
    """Values of the largest linear layer of the blocks; 0 for a network of convolutions."""
    return max((tensor.values // tensor.copies for tensor in parameter_tensors(shape) if tensor.linear), default=0)


def _residual(shape: ModelShape, recipe: Recipe) -> int:
    """Bytes a token: what came into the block, the sum after attention, that normalized, and under autocast cast.

    BERT normalizes the sum itself.
    """
    cast = PRECISION_RECORDS[recipe.precision].compute_bytes if is_autocast(recipe) else 0
    return shape.hidden * ((2 if shape.family == "bert" else 3) * residual_bytes(recipe) + cast)


def _inner(shape: ModelShape, recipe: Recipe) -> int:
    """Values a token, of attention or of the feed-forward network, whichever are more."""
    queries, keys = shape.heads * shape.attention_width, shape.kv_heads * shape.attention_width
    scores = 0 if fused(shape, recipe) else _SCORES * shape.heads * shape.tokens
    attention = 2 * queries + 2 * keys + scores + (2 * queries if keys < queries else 0)
    values = _GATED_VALUES if shape.record.is_gated else _PLAIN_VALUES
    if shape.experts is None:
        return max(attention, values * shape.ffn)
    return max(attention, shape.experts.active * (2 * shape.hidden + values * shape.ffn))


def _maps(shape: ModelShape, recipe: Recipe) -> int:
    """Values of an image."""
    network = convnet.resnet(shape)
    image = _COLOURS * shape.image_size**2 if is_autocast(recipe) else 0  # cast
    sizes = [image + _MAPS * network.stem.values]
    for block in network.blocks[: frozen_blocks(shape, recipe)]:
        largest = max(conv.values for conv in block.convolutions)
        summed = _MAPS if block.shortcut is None else _MAPS_WITH_SHORTCUT
        sizes.append(block.input_values + max(_MAPS * largest, summed * block.path[-1].values))
    return max(sizes)
