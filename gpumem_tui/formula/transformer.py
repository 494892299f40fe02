"""What transformer blocks keep for backward, tensor by tensor, after Korthikanti et al. 2022.

For a GPT block in 16-bit with ffn = 4h and dropout the tensors sum to S·b·h·(34 + 5·a·S/h) bytes. The same
accounting carries over to blocks the paper does not treat (SwiGLU, grouped keys, no dropout); it then
is an adaptation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpumem_tui.catalog.shapes import Gpu, ModelShape
from gpumem_tui.formula.adapters import targets
from gpumem_tui.formula.extras import OFFLOADED_BLOCKS
from gpumem_tui.formula.precision import MASK_BYTES, PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FORWARD_ENDS, IN_A_BLOCK, FormulaRow, Moment, batch_row, there
from gpumem_tui.memory import Bucket

PAPER = "Korthikanti et al. 2022"
ADAPTED = "adapted from Korthikanti et al. 2022"
FUSED_SOURCE = "Dao et al. 2022"
_LOGSUMEXP_BYTES = 4
_FP32_BYTES = 4
_BF16_ATTENTION_SINCE = (8, 0)
ONE_BLOCK = ", one block while recomputed"
"""Suffix of the rows that only one block at a time needs."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes that one block saves per token, by what saves them.

    Attributes:
        attention: the projections' inputs, queries, keys, values.
        feed_forward: the inputs of its matrix products and of its activation function.
        normalization: the inputs of both normalizations.
        residual: what the residual stream takes beyond that where it is wider than what is computed in, and what an
            RMSNorm written out keeps in fp32 beside its input.
        casts: under autocast, further 16-bit copies of one input, a projection each.
        repeated: grouped keys and values, repeated for every query head.
        masks: the dropout masks after attention and feed-forward.
        scores: what unfused attention saves per head and per position attended to; fused kernels save none.
        logsumexp: what fused attention saves per head instead.
        adapters: the values between the two matrices of each adapter.
    """

    attention: int
    feed_forward: int
    normalization: int
    residual: int
    casts: int
    repeated: int
    masks: int
    scores: int
    logsumexp: int
    adapters: int = 0


def fused(recipe: Recipe) -> bool:
    """Whether attention never writes its scores to memory.

    True for ``auto``: PyTorch's own choice is such a kernel but where `as_run_on` says otherwise.
    """
    return recipe.attention != "math"


def as_run_on(recipe: Recipe, gpu: Gpu) -> Recipe:
    """The recipe with the attention that PyTorch's own choice comes to on a GPU.

    Before compute capability 8.0 no fused kernel takes bfloat16 (sdp_utils.cpp): the scores are written.
    """
    bf16 = recipe.precision in ("bf16", "amp-bf16")
    if recipe.attention == "auto" and bf16 and gpu.compute_capability < _BF16_ATTENTION_SINCE:
        return replace(recipe, attention="math")
    return recipe


def block_bytes(shape: ModelShape, recipe: Recipe) -> BlockBytes:
    """What one block saves without recompute."""
    width = PRECISION_RECORDS[recipe.precision].compute_bytes
    queries = shape.heads * shape.attention_width
    keys = shape.kv_heads * shape.attention_width
    # GELU: its input and output. SwiGLU: gate, SiLU of the gate, up, and their product, each an operand.
    inner = (4 if shape.record.is_gated else 2) * shape.ffn
    unkept = _frozen(shape, recipe)
    dropout = shape.dropout > 0
    llama = shape.record.is_gated
    # RMSNorm squares in fp32: it keeps that and the normalized values, where LayerNorm keeps its input only.
    norms = 2 * shape.hidden * (residual_bytes(recipe) + (_FP32_BYTES if llama else 0))
    inputs_cast = (3 if llama else 2 if shape.family == "bert" else 0) if _is_autocast(recipe) else 0
    # Dropout turns one saved tensor, the softmax, into three: softmax, mask and what attention multiplies.
    scores = 2 * width + MASK_BYTES if dropout else width
    return BlockBytes(
        attention=(shape.hidden + queries + 2 * keys + queries - unkept.attention) * width,
        feed_forward=(shape.hidden + inner - unkept.feed_forward) * width,
        normalization=2 * shape.hidden * width,
        residual=norms - 2 * shape.hidden * width,
        casts=inputs_cast * shape.hidden * width,
        repeated=2 * (queries - keys) * width,
        masks=2 * shape.hidden * MASK_BYTES if dropout else 0,
        scores=0 if fused(recipe) else scores,
        logsumexp=_LOGSUMEXP_BYTES if fused(recipe) else 0,
        adapters=unkept.adapters * width,
    )


@dataclass(frozen=True, slots=True)
class _Frozen:
    """What frozen weights and adapters change of what a block keeps, in values per token.

    Attributes:
        attention, feed_forward: inputs of linear layers that are not kept, as nothing there is trained.
        adapters: what is kept between each adapter's two matrices.
    """

    attention: int = 0
    feed_forward: int = 0
    adapters: int = 0


def _frozen(shape: ModelShape, recipe: Recipe) -> _Frozen:
    """A linear layer keeps its input for the gradient of its weight, or of the adapter beside it.

    The input of the attention's output projection stays all the same: fused attention keeps it as its output.
    """
    if not recipe.has_adapters:
        return _Frozen()
    at = targets(shape, recipe)
    into_attention = at & {"qkv", "q_proj", "k_proj", "v_proj"}
    out_of_attention = fused(recipe) or at & {"proj", "o_proj"}
    into_feed_forward, out_of_feed_forward = at & {"fc1", "gate_proj", "up_proj"}, at & {"fc2", "down_proj"}
    return _Frozen(
        attention=(0 if into_attention else shape.hidden)
        + (0 if out_of_attention else shape.heads * shape.attention_width),
        feed_forward=(0 if into_feed_forward else shape.hidden) + (0 if out_of_feed_forward else shape.ffn),
        adapters=len(at) * recipe.lora_rank,
    )


def residual_bytes(recipe: Recipe) -> int:
    """Bytes per value of the residual stream: it adds up in the dtype of the embedding's weights."""
    return PRECISION_RECORDS[recipe.precision].parameter_bytes


def _is_autocast(recipe: Recipe) -> bool:
    return residual_bytes(recipe) != PRECISION_RECORDS[recipe.precision].compute_bytes


def activation_rows(shape: ModelShape, recipe: Recipe, batch_size: int, *, offloaded: bool = False) -> list[FormulaRow]:
    """Everything the network keeps for backward short of the output head.

    Args:
        offloaded: what the blocks keep lies in host memory, but for the block that runs and the one on its way.
    """
    blocks = min(shape.layers, OFFLOADED_BLOCKS) if offloaded else shape.layers
    kept = [*block_rows(shape, recipe, batch_size, blocks), _outside_row(shape, recipe, batch_size)]
    return [*kept, *_first_block_rows(shape, recipe, batch_size), _gradients_row(shape, recipe, batch_size)]


def block_rows(shape: ModelShape, recipe: Recipe, batch_size: int, blocks: int | None = None) -> list[FormulaRow]:
    """What `blocks` blocks (None: all) keep for backward under the recipe's recompute and attention."""
    saved = block_bytes(shape, recipe)
    blocks = shape.layers if blocks is None else blocks
    if recipe.recompute == "full":
        inputs = _row(shape, "inputs of the blocks", shape.hidden * residual_bytes(recipe), batch_size, blocks)
        again = [
            *_linear_rows(shape, saved, batch_size, 1, ONE_BLOCK),
            *_core_rows(shape, saved, batch_size, 1, suffix=ONE_BLOCK),
        ]
        return [*there(FORWARD_ENDS, [inputs]), *there(IN_A_BLOCK, again)]
    linear = there(FORWARD_ENDS, _linear_rows(shape, saved, batch_size, blocks))
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
    sums = residual_bytes(recipe) + (width if shape.dropout or _is_autocast(recipe) else 0)
    inner = (2 if shape.record.is_gated else 1) * shape.ffn * width
    row = batch_row(
        Bucket.TEMPORARY,
        "gradients inside a block",
        (batch_size, shape.tokens, shape.hidden * sums + inner),
        "PyTorch autograd",
        "of the residual sum and of the feed-forward's inner values; backward holds one block's at a time",
    )
    return there(IN_A_BLOCK, [row])[0]


THE_FIRST_BLOCK = ", the first block's"
"""Suffix of the rows that are left as backward ends."""

_NOTES: Mapping[str, str] = MappingProxyType(
    {
        "attention": "inputs of the projections, queries, keys, values",
        "feed-forward": "inputs of both products, input of the activation function",
        "normalization": "inputs of both normalizations",
        "residual stream": "in the dtype of the weights, so fp32 under autocast; an RMSNorm also keeps fp32 values",
        "inputs cast again": "autocast keeps a 16-bit copy of the input for each projection that reads it",
        "repeated keys and values": "grouped ones, expanded to every query head before attention",
        "dropout masks": "one byte an element in every precision",
        "adapters' inner values": "what each adapter keeps between its two matrices",
        "inputs of the blocks": "all that full recompute keeps of a block",
    }
)
_BEYOND: Mapping[str, str] = MappingProxyType(
    {
        "residual stream": "PyTorch autocast; transformers' LlamaRMSNorm",
        "inputs cast again": "PyTorch autocast",
        "repeated keys and values": "transformers' repeat_kv",
    }
)
"""Sources of what the textbook's blocks do not have."""
_SWIGLU_NOTE = "input, gate, SiLU of the gate, up, product: SwiGLU as unfused PyTorch code runs it"


def _linear_rows(
    shape: ModelShape, saved: BlockBytes, batch_size: int, blocks: int, suffix: str = ""
) -> list[FormulaRow]:
    """The part linear in the sequence length, 34·S·b·h in the paper's case."""
    groups = {
        "attention": saved.attention,
        "feed-forward": saved.feed_forward,
        "normalization": saved.normalization,
        "residual stream": saved.residual,
        "inputs cast again": saved.casts,
        "repeated keys and values": saved.repeated,
        "dropout masks": saved.masks,
        "adapters' inner values": saved.adapters,
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
    head = width if shape.record.predicts_tokens and not recipe.has_adapters else 0  # a frozen one keeps no input
    mask = MASK_BYTES if shape.dropout > 0 else 0
    norm = residual_bytes(recipe) + (_FP32_BYTES if shape.record.is_gated else 0)
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
    paper = shape.family == "gpt2" and shape.dropout > 0 and shape.ffn == 4 * shape.hidden
    return PAPER if paper else ADAPTED
