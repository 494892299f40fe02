"""What transformer blocks keep for backward, tensor by tensor, after Korthikanti et al. 2022.

For a GPT block in 16-bit with ffn = 4h and dropout the tensors sum to S·b·h·(34 + 5·a·S/h) bytes. The same
accounting carries over to blocks the paper does not treat (SwiGLU, grouped keys, no dropout); it then
is an adaptation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.extras import OFFLOADED_BLOCKS
from gpumem_tui.formula.precision import MASK_BYTES, PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FormulaRow, batch_row
from gpumem_tui.memory import Bucket

PAPER = "Korthikanti et al. 2022"
ADAPTED = "adapted from Korthikanti et al. 2022"
FUSED_SOURCE = "Dao et al. 2022"
_LOGSUMEXP_BYTES = 4
ONE_BLOCK = ", one block while recomputed"
"""Suffix of the rows that only one block at a time needs."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes that one block saves per token, by what saves them.

    Attributes:
        attention: the projections' inputs, queries, keys, values.
        feed_forward: the inputs of its matrix products and of its activation function.
        normalization: the inputs of both normalizations.
        masks: the dropout masks after attention and feed-forward.
        scores: what unfused attention saves per head and per position attended to; fused kernels save none.
        logsumexp: what fused attention saves per head instead.
    """

    attention: int
    feed_forward: int
    normalization: int
    masks: int
    scores: int
    logsumexp: int


def fused(recipe: Recipe) -> bool:
    """Whether attention never writes its scores to memory.

    True for ``auto``: PyTorch's own choice is such a kernel on any GPU of the catalog.
    """
    return recipe.attention != "math"


def block_bytes(shape: ModelShape, recipe: Recipe) -> BlockBytes:
    """What one block saves without recompute."""
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    queries = shape.heads * shape.attention_width
    keys = shape.kv_heads * shape.attention_width
    # GELU: its input and output. SwiGLU: gate, SiLU of the gate, up, and their product, each an operand.
    inner = (4 if shape.record.is_gated else 2) * shape.ffn
    dropout = shape.dropout > 0
    # Dropout turns one saved tensor, the softmax, into three: softmax, mask and what attention multiplies.
    scores = 2 * width + MASK_BYTES if dropout else width
    return BlockBytes(
        attention=(shape.hidden + queries + 2 * keys + queries) * width,
        feed_forward=(shape.hidden + inner) * width,
        normalization=2 * shape.hidden * width,
        masks=2 * shape.hidden * MASK_BYTES if dropout else 0,
        scores=0 if fused(recipe) else scores,
        logsumexp=_LOGSUMEXP_BYTES if fused(recipe) else 0,
    )


def activation_rows(shape: ModelShape, recipe: Recipe, batch_size: int, *, offloaded: bool = False) -> list[FormulaRow]:
    """Everything the network keeps for backward short of the output head.

    Args:
        offloaded: what the blocks keep lies in host memory, but for the block that runs and the one on its way.
    """
    blocks = min(shape.layers, OFFLOADED_BLOCKS) if offloaded else shape.layers
    outside = [_outside_row(shape, recipe, batch_size)] if shape.has_head else []
    return [*block_rows(shape, recipe, batch_size, blocks), *outside]


def block_rows(shape: ModelShape, recipe: Recipe, batch_size: int, blocks: int | None = None) -> list[FormulaRow]:
    """What `blocks` blocks (None: all) keep for backward under the recipe's recompute and attention."""
    saved = block_bytes(shape, recipe)
    blocks = shape.layers if blocks is None else blocks
    if recipe.recompute == "none":
        return [*_linear_rows(shape, saved, batch_size, blocks), *_core_rows(shape, saved, batch_size, blocks)]
    if recipe.recompute == "selective":
        core = _core_rows(shape, saved, batch_size, 1, Bucket.TEMPORARY, ONE_BLOCK)
        return [*_linear_rows(shape, saved, batch_size, blocks), *core]
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    return [
        _row(shape, "inputs of the blocks", shape.hidden * width, batch_size, blocks),
        *_linear_rows(shape, saved, batch_size, 1, ONE_BLOCK),
        *_core_rows(shape, saved, batch_size, 1, suffix=ONE_BLOCK),
    ]


_NOTES: Mapping[str, str] = MappingProxyType(
    {
        "attention": "inputs of the projections, queries, keys, values",
        "feed-forward": "inputs of both products, input of the activation function",
        "normalization": "inputs of both normalizations",
        "dropout masks": "one byte an element in every precision",
        "inputs of the blocks": "all that full recompute keeps of a block",
    }
)
_SWIGLU_NOTE = "input, gate, SiLU of the gate, up, product: SwiGLU as unfused PyTorch code runs it"


def _linear_rows(
    shape: ModelShape, saved: BlockBytes, batch_size: int, blocks: int, suffix: str = ""
) -> list[FormulaRow]:
    """The part linear in the sequence length, 34·S·b·h in the paper's case."""
    groups = {
        "attention": saved.attention,
        "feed-forward": saved.feed_forward,
        "normalization": saved.normalization,
        "dropout masks": saved.masks,
    }
    return [_row(shape, name, per_token, batch_size, blocks, suffix) for name, per_token in groups.items() if per_token]


def _row(shape: ModelShape, name: str, per_token: int, batch_size: int, blocks: int, suffix: str = "") -> FormulaRow:
    swiglu = shape.record.is_gated and name == "feed-forward"
    return batch_row(
        Bucket.ACTIVATIONS,
        name + suffix,
        (blocks, *_token_factors(shape, batch_size, per_token)),
        _source(shape),
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
    tensors = 2 if shape.record.predicts_tokens else 1
    mask = MASK_BYTES if shape.dropout > 0 else 0
    return batch_row(
        Bucket.ACTIVATIONS,
        "outside the blocks",
        _token_factors(shape, batch_size, shape.hidden * (tensors * width + mask)),
        _source(shape),
        "embedding dropout mask, inputs of the lone normalization and of the vocabulary projection",
    )


def _token_factors(shape: ModelShape, batch_size: int, per_token: int) -> tuple[int, ...]:
    """S·b·h·coefficient where the bytes are a multiple of the hidden size, as the paper writes it."""
    if per_token % shape.hidden:
        return shape.tokens, batch_size, per_token
    return shape.tokens, batch_size, shape.hidden, per_token // shape.hidden


def _source(shape: ModelShape) -> str:
    paper = shape.family == "gpt2" and shape.dropout > 0 and shape.ffn == 4 * shape.hidden
    return PAPER if paper else ADAPTED
