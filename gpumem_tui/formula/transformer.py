"""What transformer blocks keep for backward, tensor by tensor, after Korthikanti et al. 2022.

For a GPT block in 16-bit with ffn = 4h and dropout the tensors sum to S·b·h·(34 + 5·a·S/h) bytes. The same
accounting carries over to blocks the paper does not treat (SwiGLU, grouped keys, no dropout); it then
is an adaptation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.blocks import (
    FP32_BYTES,
    BlockBytes,
    block_bytes,
    expert_gradients,
    is_autocast,
    residual_bytes,
)
from gpumem_tui.formula.extras import OFFLOADED_BLOCKS
from gpumem_tui.formula.freezing import only_head, trains_head
from gpumem_tui.formula.precision import MASK_BYTES, PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FORWARD_ENDS, IN_A_BLOCK, FormulaRow, Moment, batch_row, there
from gpumem_tui.memory import Bucket

PAPER = "Korthikanti et al. 2022"
ADAPTED = "adapted from Korthikanti et al. 2022"
FUSED_SOURCE = "Dao et al. 2022"
_SCORES_AT_ONCE = 2
ONE_BLOCK = ", one block while recomputed"
"""Suffix of the rows that only one block at a time needs."""


def activation_rows(shape: ModelShape, recipe: Recipe, batch_size: int, *, offloaded: bool = False) -> list[FormulaRow]:
    """Everything the network keeps for backward short of the output head.

    Args:
        shape: of frozen layers, what comes after them.
        offloaded: what the blocks keep lies in host memory, but for the block that runs and the one on its way.
    """
    blocks = min(shape.layers, OFFLOADED_BLOCKS) if offloaded else shape.layers
    outside = [_outside_row(shape, recipe, batch_size)] if shape.has_head else []
    if not shape.layers:
        return outside
    kept = [*block_rows(shape, recipe, batch_size, blocks), *outside]
    return [*kept, *_first_block_rows(shape, recipe, batch_size), _gradients_row(shape, recipe, batch_size)]


def block_rows(shape: ModelShape, recipe: Recipe, batch_size: int, blocks: int | None = None) -> list[FormulaRow]:
    """What `blocks` blocks (None: all) keep for backward under the recipe's recompute and attention."""
    blocks = shape.layers if blocks is None else blocks
    saved = block_bytes(shape, recipe, is_dense=shape.experts is None)
    if recipe.recompute == "full":
        inputs = _row(shape, "inputs of the blocks", shape.hidden * residual_bytes(recipe), batch_size, blocks)
        again = [
            *_linear_rows(shape, saved, batch_size, 1, ONE_BLOCK),
            *_core_rows(shape, saved, batch_size, 1, suffix=ONE_BLOCK),
        ]
        return [*there(FORWARD_ENDS, [inputs]), *there(IN_A_BLOCK, again)]
    linear = there(FORWARD_ENDS, _blocks_rows(shape, recipe, batch_size, blocks))
    if recipe.recompute == "selective":
        core = _core_rows(shape, saved, batch_size, 1, Bucket.TEMPORARY, ONE_BLOCK)
        return [*linear, *there(IN_A_BLOCK, core)]
    return [*linear, *there(FORWARD_ENDS, _core_rows(shape, saved, batch_size, blocks))]


def _first_block_rows(shape: ModelShape, recipe: Recipe, batch_size: int) -> list[FormulaRow]:
    """What is left as backward runs through the first block; with full recompute `block_rows` has it."""
    if recipe.recompute == "full":
        return []
    rows = [row for row in block_rows(shape, recipe, batch_size, 1) if Moment.FIRST_BLOCK not in row.moments]
    return there({Moment.FIRST_BLOCK}, [replace(row, name=row.name + THE_FIRST_BLOCK) for row in rows])


def _gradients_row(shape: ModelShape, recipe: Recipe, batch_size: int) -> FormulaRow:
    """The gradients of activations that one block's backward holds at most, as it runs through its feed-forward.

    Of the residual sum and of what went into it, and of the inner values: SwiGLU's gate, up and product, whose own
    operand is free by then; GELU's output alone, whose operand is what its own gradient replaces.
    """
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    sums = residual_bytes(recipe) + (width if shape.dropout or is_autocast(recipe) else 0)
    if shape.experts is None:
        inner = (2 if shape.record.is_gated else 1) * shape.ffn * width
        note = "of the residual sum and of the feed-forward's inner values; backward holds one block's at a time"
    else:
        inner = expert_gradients(shape, shape.experts, recipe)
        note = "of the residual sum, and of what the experts made: before and after it is weighed, and of its weights"
    if shape.sinks:
        values = FP32_BYTES if is_autocast(recipe) else width
        inner = max(inner, _SCORES_AT_ONCE * shape.heads * shape.tokens * values)
        note = "of the scores, two of them at once beside the softmax, or of what the experts made"
    row = batch_row(
        Bucket.TEMPORARY,
        "gradients inside a block",
        (batch_size, shape.tokens, shape.hidden * sums + inner),
        "PyTorch autograd",
        note,
    )
    return there(IN_A_BLOCK, [row])[0]


WITHOUT_EXPERTS = ", blocks without experts"
"""Suffix of the rows of a network's dense blocks beside those that have experts."""

THE_FIRST_BLOCK = ", the first block's"
"""Suffix of the rows that are left as backward ends."""

_NOTES: Mapping[str, str] = MappingProxyType(
    {
        "attention": "inputs of the projections, queries, keys, values",
        "feed-forward": "inputs of both products, input of the activation function",
        "experts": "router; of each active expert what goes in, gate, SiLU of the gate, up, product, what comes out",
        "normalization of queries and keys": "or of what they are made of: in fp32, and normalized",
        "normalization": "inputs of both normalizations",
        "residual stream": "in the dtype of the weights, so fp32 under autocast; an RMSNorm also keeps fp32 values",
        "inputs cast again": "autocast keeps a 16-bit copy of the input for each projection that reads it",
        "repeated keys and values": "grouped ones, expanded to every query head before attention",
        "dropout masks": "one byte an element in every precision",
        "adapters' values": "between each one's two matrices; its input in a wider format; of DoRA what is scaled",
        "inputs of the blocks": "all that full recompute keeps of a block",
    }
)
_BEYOND: Mapping[str, str] = MappingProxyType(
    {
        "residual stream": "PyTorch autocast; transformers' LlamaRMSNorm",
        "inputs cast again": "PyTorch autocast",
        "repeated keys and values": "transformers' repeat_kv",
        "experts": "transformers 5, integrations/moe.py",
        "normalization of queries and keys": "transformers' Qwen3RMSNorm, DeepseekV3Attention",
    }
)
"""Sources of what the textbook's blocks do not have."""
_SWIGLU_NOTE = "input, gate, SiLU of the gate, up, product: SwiGLU as unfused PyTorch code runs it"


def _blocks_rows(shape: ModelShape, recipe: Recipe, batch_size: int, blocks: int) -> list[FormulaRow]:
    """Of all blocks those that are dense and those with experts; of some, with experts where there are any."""
    if shape.experts is None:
        return _linear_rows(shape, block_bytes(shape, recipe), batch_size, blocks)
    dense = shape.dense_layers if blocks == shape.layers else 0
    rows = _linear_rows(shape, block_bytes(shape, recipe, is_dense=False), batch_size, blocks - dense)
    if not dense:
        return rows
    return [*rows, *_linear_rows(shape, block_bytes(shape, recipe), batch_size, dense, WITHOUT_EXPERTS)]


def _linear_rows(
    shape: ModelShape, saved: BlockBytes, batch_size: int, blocks: int, suffix: str = ""
) -> list[FormulaRow]:
    """The part linear in the sequence length, 34·S·b·h in the paper's case."""
    groups = {
        "attention": saved.attention,
        "feed-forward": saved.feed_forward,
        "experts": saved.experts,
        "normalization of queries and keys": saved.narrow,
        "normalization": saved.normalization,
        "residual stream": saved.residual,
        "inputs cast again": saved.casts,
        "repeated keys and values": saved.repeated,
        "dropout masks": saved.masks,
        "adapters' values": saved.adapters,
    }
    return [_row(shape, name, per_token, batch_size, blocks, suffix) for name, per_token in groups.items() if per_token]


def _row(shape: ModelShape, name: str, per_token: int, batch_size: int, blocks: int, suffix: str = "") -> FormulaRow:
    swiglu = shape.record.is_gated and name == "feed-forward"
    return batch_row(
        Bucket.ACTIVATIONS,
        name + suffix,
        (blocks, *_token_factors(shape, batch_size, per_token)),
        _BEYOND.get(name, _source(shape)),
        _SWIGLU_NOTE if swiglu else _NOTES[name],
    )


def _core_rows(
    shape: ModelShape,
    saved: BlockBytes,
    batch_size: int,
    blocks: int,
    bucket: Bucket = Bucket.ACTIVATIONS,
    suffix: str = "",
) -> list[FormulaRow]:
    """The attention core: 5·a·S² a sample in the paper's case, or a fused kernel's log-sum-exp."""
    if saved.logsumexp:
        return [
            batch_row(
                bucket,
                "attention log-sum-exp" + suffix,
                (blocks, batch_size, shape.heads, shape.tokens, saved.logsumexp),
                FUSED_SOURCE,
                "all that a fused kernel keeps of the S × S scores: one fp32 value a row",
            )
        ]
    dropout = "softmax, its dropout mask, what is left after dropout" if shape.dropout else "softmax"
    return [
        batch_row(
            bucket,
            "attention scores" + suffix,
            (blocks, batch_size, shape.heads, shape.tokens, shape.tokens, saved.scores),
            _source(shape),
            f"{dropout}; grows with the square of the sequence",
        )
    ]


def _outside_row(shape: ModelShape, recipe: Recipe, batch_size: int) -> FormulaRow:
    """What the embedding, the last (BERT: first) normalization and a language model's head save."""
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    head = width if shape.record.predicts_tokens and trains_head(shape, recipe) else 0  # a frozen one keeps no input
    mask = MASK_BYTES if shape.dropout > 0 and not recipe.has_frozen_layers else 0
    norm = residual_bytes(recipe) + (FP32_BYTES if shape.record.is_gated else 0)
    if only_head(recipe) or (recipe.has_frozen_layers and shape.family == "bert"):
        norm = 0  # it is frozen, with nothing trained before it
    row = batch_row(
        Bucket.ACTIVATIONS,
        "outside the blocks",
        _token_factors(shape, batch_size, shape.hidden * (norm + head + mask)),
        _source(shape),
        "embedding dropout mask, inputs of the lone normalization and of the vocabulary projection",
    )
    return there(FORWARD_ENDS, [row])[0]


def _token_factors(shape: ModelShape, batch_size: int, per_token: int) -> tuple[int, ...]:
    """S·b·h·coefficient where the bytes are a multiple of the hidden size, as the paper writes it."""
    if per_token % shape.hidden:
        return shape.tokens, batch_size, per_token
    return shape.tokens, batch_size, shape.hidden, per_token // shape.hidden


def _source(shape: ModelShape) -> str:
    paper = not shape.record.remark and shape.dropout > 0 and shape.ffn == 4 * shape.hidden
    return PAPER if paper else ADAPTED
