"""Values that forward keeps for backward, gradients that backward makes, the output head and loss, and the batch.

Transformer blocks are counted tensor by tensor after Korthikanti et al. 2022. For a GPT block in 16-bit with ffn = 4h
and dropout the tensors sum to S·b·h·(34 + 5·a·S/h) bytes. The same accounting carries over to blocks the paper does not
treat (SwiGLU, grouped keys, no dropout); it then is an adaptation.

The head is absent from the textbook's activations, and often the peak of a step. The training loop holds the logits to
the end of the step. While the loss is computed there are next to them an fp32 copy of 16-bit logits and the
log-softmax; when cross-entropy's backward has just run, the log-softmax that it reads and the two gradients, of the
log-softmax and of the logits, that it makes.
"""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.catalog.shapes import LackingFamily, ModelShape
from gpumem_tui.formula import convnet
from gpumem_tui.formula.blocks import BlockBytes, block_bytes, expert_gradients
from gpumem_tui.formula.recipe import LOSS_CHUNKS, OFFLOADED_BLOCKS
from gpumem_tui.formula.records import FP32_BYTES, LOSS_BYTES, MASK_BYTES
from gpumem_tui.formula.resolved import Resolved
from gpumem_tui.formula.rows import (
    AFTER_FORWARD,
    ALWAYS,
    FIRST_BLOCK,
    FORWARD_ENDS,
    IN_A_BLOCK,
    LAST_BLOCK,
    LOSS,
    LOSS_BACKWARD,
    OF_THE_LOSS,
    ONE_BLOCK,
    THE_FIRST_BLOCK,
    WITHOUT_EXPERTS,
    FormulaRow,
    Moment,
    Moments,
    row,
)
from gpumem_tui.memory import Bucket

_PAPER = "Korthikanti et al. 2022"
_ADAPTED = "adapted from Korthikanti et al. 2022"
_ID_BYTES = _INDEX_BYTES = 8
_COLOURS = 3
_SCORES_AT_ONCE = 2
_GATED_VALUES, _PLAIN_VALUES = 3, 2
"""Values of the feed-forward's width at once: SiLU of the gate, up and product; what GELU reads and makes."""
_MAPS, _MAPS_WITH_SHORTCUT = 2, 3
"""Maps of a residual block at once next to its input: what a normalization reads and makes; the branch's, too."""
_GRADIENTS, _GRADIENTS_OF_PARTS = 2, 3
"""Copies of the logits in the loss. For a vocabulary that is cut: the targets' share, the softmax, and their sum
(torch.distributed.tensor.parallel, loss.py, `_nll_loss_and_log_softmax_backward`)."""


def activation_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return everything that grows with the batch: what the network keeps, the head, the loss and the batch."""
    after = r if r.after is r.shape else replace(r, shape=r.after)
    if r.shape.record.has_attention:
        rows = _transformer_rows(after, batch_size)
    elif r.shape.record.has_batch_norm:
        rows = _convolution_rows(r, batch_size)
    elif r.shape.record.inputs == "features":
        rows = _mlp_rows(after, batch_size)
    else:
        raise LackingFamily(r.shape.family, "activations", "formula/activations.py")
    if r.frozen_blocks:
        rows += _frozen_block_rows(r, batch_size)
    if r.shape.has_head:
        rows += _head_rows(r, batch_size)
    return [*rows, *_batch_data_rows(r, batch_size)]


# Transformers


def _transformer_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return what the blocks and what is outside of them keep, short of the output head."""
    shape = r.shape
    outside = [_outside_row(r, batch_size)] if shape.has_head else []
    if not shape.layers:
        return outside
    # Offloaded blocks keep their values in host memory, but for the block that runs and the one on its way.
    blocks = min(shape.layers, OFFLOADED_BLOCKS) if "offload-activations" in r.extras else shape.layers
    kept = [*block_rows(r, batch_size, blocks), *outside]
    return [*kept, *_first_block_rows(r, batch_size), _gradients_row(r, batch_size)]


def block_rows(r: Resolved, batch_size: int, blocks: int | None = None) -> list[FormulaRow]:
    """Return what `blocks` blocks (None: all) keep for backward under the recipe's recompute and attention."""
    shape, recompute = r.shape, r.recipe.recompute
    blocks = shape.layers if blocks is None else blocks
    saved = block_bytes(r, is_dense=shape.experts is None)
    if recompute == "full":
        return [
            _row(r, "inputs of the blocks", shape.hidden * r.residual, batch_size, blocks),
            *_linear_rows(r, saved, batch_size, 1, ONE_BLOCK, IN_A_BLOCK),
            _core_row(r, saved, batch_size, 1, ONE_BLOCK, IN_A_BLOCK),
        ]
    linear = _blocks_rows(r, batch_size, blocks)
    if recompute == "selective":
        core = _core_row(r, saved, batch_size, 1, ONE_BLOCK, IN_A_BLOCK)
        return [*linear, replace(core, bucket=Bucket.TEMPORARY)]
    return [*linear, _core_row(r, saved, batch_size, blocks, "", FORWARD_ENDS)]


def _first_block_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return what is left as backward runs through the first block; with full recompute `block_rows` has it."""
    if r.recipe.recompute == "full":
        return []
    rows = [one for one in block_rows(r, batch_size, 1) if Moment.FIRST_BLOCK not in one.moments]
    return [replace(one, name=one.name + THE_FIRST_BLOCK, moments=FIRST_BLOCK) for one in rows]


def _gradients_row(r: Resolved, batch_size: int) -> FormulaRow:
    """Return the gradients of activations that one block's backward holds at most, in its feed-forward.

    They are of the residual sum and its operands, and of the inner values: SwiGLU's gate, up and product, whose own
    operand is free by then; GELU's output alone, whose operand is what its own gradient replaces.
    """
    shape = r.shape
    sums = r.residual + (r.width if shape.dropout or r.is_autocast else 0)
    if shape.experts is None:
        inner = (2 if shape.record.is_gated else 1) * shape.ffn * r.width
        note = "of the residual sum and of the feed-forward's inner values; backward holds one block's at a time"
    else:
        inner = expert_gradients(r, shape.experts)
        note = "of the residual sum, and of what the experts made: before and after it is weighed, and of its weights"
    if shape.sinks:
        values = FP32_BYTES if r.is_autocast else r.width
        inner = max(inner, _SCORES_AT_ONCE * shape.heads * shape.tokens * values)
        note = "of the scores, two of them at once next to the softmax, or of what the experts made"
    factors = (batch_size, shape.tokens, shape.hidden * sums + inner)
    return row("gradients inside a block", *factors, at=IN_A_BLOCK, note=note)


def _blocks_rows(r: Resolved, batch_size: int, blocks: int) -> list[FormulaRow]:
    """Return of all blocks those that are dense and those with experts; of some, those with experts if there are."""
    shape = r.shape
    if shape.experts is None:
        return _linear_rows(r, block_bytes(r), batch_size, blocks)
    dense = shape.dense_layers if blocks == shape.layers else 0
    rows = _linear_rows(r, block_bytes(r, is_dense=False), batch_size, blocks - dense)
    if not dense:
        return rows
    return [*rows, *_linear_rows(r, block_bytes(r), batch_size, dense, WITHOUT_EXPERTS)]


def _linear_rows(
    r: Resolved, saved: BlockBytes, batch_size: int, blocks: int, suffix: str = "", at: Moments = FORWARD_ENDS
) -> list[FormulaRow]:
    """Return the part linear in the sequence length, 34·S·b·h in the paper's case."""
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
    return [_row(r, name, per_token, batch_size, blocks, suffix, at) for name, per_token in groups.items() if per_token]


_SWIGLU_NOTE = "input, gate, SiLU of the gate, up, product: SwiGLU as unfused PyTorch code runs it"


def _row(  # noqa: PLR0913 - what rows of blocks differ in
    r: Resolved, name: str, per_token: int, batch_size: int, blocks: int, suffix: str = "", at: Moments = FORWARD_ENDS
) -> FormulaRow:
    note = _SWIGLU_NOTE if r.shape.record.is_gated and name == "feed-forward" else None
    factors = (blocks, *_token_factors(r.shape, batch_size, per_token))
    made = row(name, *factors, at=at, suffix=suffix, note=note)
    return made if made.source else replace(made, source=_source(r.shape))


def _core_row(r: Resolved, saved: BlockBytes, batch_size: int, blocks: int, suffix: str, at: Moments) -> FormulaRow:
    """Return the attention core: 5·a·S² a sample in the paper's case, or a fused kernel's log-sum-exp."""
    shape = r.shape
    factors = (blocks, batch_size, shape.heads, shape.tokens)
    if saved.logsumexp:
        return row("attention log-sum-exp", *factors, saved.logsumexp, at=at, suffix=suffix)
    note = "softmax, its dropout mask, what is left after dropout; grows with the square of the sequence"
    return row(
        "attention scores",
        *factors,
        shape.tokens,
        saved.scores,
        at=at,
        suffix=suffix,
        source=_source(shape),
        note=note if shape.dropout else None,
    )


def _outside_row(r: Resolved, batch_size: int) -> FormulaRow:
    """Return what the embedding, the last (BERT: first) normalization and a language model's head save."""
    shape, freezes = r.shape, r.recipe.has_frozen_layers
    head = r.width if shape.record.predicts_tokens and r.trains_head else 0  # a frozen one keeps no input
    mask = MASK_BYTES if shape.dropout > 0 and not freezes else 0
    norm = r.residual + (FP32_BYTES if shape.record.is_gated else 0)
    if r.only_head or (freezes and shape.record.normalizes_sums):
        norm = 0  # it is frozen, with nothing trained before it
    factors = _token_factors(shape, batch_size, shape.hidden * (norm + head + mask))
    return row("outside the blocks", *factors, at=FORWARD_ENDS, source=_source(shape))


def _token_factors(shape: ModelShape, batch_size: int, per_token: int) -> tuple[int, ...]:
    """Return S·b·h·coefficient where the bytes are a multiple of the hidden size, as the paper writes it."""
    if per_token % shape.hidden:
        return shape.tokens, batch_size, per_token
    return shape.tokens, batch_size, shape.hidden, per_token // shape.hidden


def _source(shape: ModelShape) -> str:
    paper = not shape.record.remark and shape.dropout > 0 and shape.ffn == 4 * shape.hidden
    return _PAPER if paper else _ADAPTED


# Convolutions


def _convolution_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return what a ResNet keeps for backward. Selective recompute has no attention to drop and changes nothing."""
    network, frozen, width = convnet.resnet(r.shape), r.frozen_blocks, r.width
    blocks, recomputes = network.blocks[frozen:], r.recipe.recompute == "full"
    if not blocks:
        return []
    convolved = 0 if frozen else network.stem.values
    activated = blocks[0].input_values + convolved
    if recomputes:
        activated += sum(block.input_values for block in blocks[1:])  # the first one's is the pooled map
        note = "the input of every block" if frozen else "the stem's, and of the maps the input of every block"
    else:
        convolved += sum(block.convolution_values for block in blocks)
        activated += sum(block.activated_values for block in blocks)
        count = sum(len(block.convolutions) for block in blocks) + (not frozen)
        note = f"C·H·W summed over {count} convolutions at their real sizes"
    rows = [
        row("convolution outputs", batch_size, convolved, width, at=FORWARD_ENDS, note=note),
        row("normalized and activated maps", batch_size, activated, width, at=FORWARD_ENDS),
    ]
    first, stem = blocks[0], network.stem.values
    if not frozen:
        indices = (batch_size, network.pooled_values, _INDEX_BYTES)
        rows.append(row("pooling indices", *indices, at=FORWARD_ENDS | IN_A_BLOCK))
        rows.append(row("the stem's maps", batch_size, 2 * stem + network.pooled_values, width, at=FIRST_BLOCK))
    elif not recomputes:
        values = first.input_values + first.convolution_values + first.activated_values
        rows.append(row("the first trained block's maps", batch_size, values, width, at=FIRST_BLOCK))
    ends = ((blocks[-1], LAST_BLOCK), (first, FIRST_BLOCK))
    if recomputes:
        rows += [
            row("maps of one block while recomputed", batch_size, block.kept_values, width, at=at) for block, at in ends
        ]
    note = "of the block's output and of what its last normalization was given"
    return rows + [
        row("gradients inside a block", batch_size, 2, block.path[-1].values, width, at=at, note=note)
        for block, at in ends
    ]


# A stack of linear layers


def _mlp_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return b·L·H values, one tensor a layer: what ReLU saves is what the next layer saves as its input.

    Recompute changes nothing: the layers' boundaries are all there is.
    """
    shape, note = r.shape, "of a layer's output, before and after its activation function"
    return [
        row("layer outputs", batch_size, shape.layers, shape.hidden, r.width, at=FORWARD_ENDS),
        row("gradients inside a block", batch_size, 2, shape.hidden, r.width, at=IN_A_BLOCK, note=note),
    ]


# Frozen blocks, which keep nothing: the peak where little is trained


def _frozen_block_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return the most that a frozen block, or a ResNet's stem, holds as it runs, with autocast's copy of one weight."""
    shape, at = r.shape, frozenset({Moment.FORWARD})
    if shape.record.has_batch_norm:
        sample_bytes = _frozen_maps(r) * r.width
    elif shape.record.has_attention:
        # The block's input, the sum after attention, that normalized (BERT normalizes the sum itself), cast.
        sums = (2 if shape.record.normalizes_sums else 3) * r.residual + (r.width if r.is_autocast else 0)
        sample_bytes = shape.tokens * (shape.hidden * sums + _frozen_inner(r) * r.width)
    else:
        sample_bytes = _PLAIN_VALUES * shape.hidden * r.width
    rows = [row("values inside a frozen block", batch_size, sample_bytes, at=at)]
    matrices = [tensor.values // tensor.copies for tensor in r.tensors if tensor.linear]
    if r.is_autocast and matrices:
        rows.append(row("16-bit copy of a frozen weight", max(matrices), r.width, at=at))
    return rows


def _frozen_inner(r: Resolved) -> int:
    """Return values a token, of attention or of the feed-forward network, whichever are more."""
    shape = r.shape
    queries, keys = shape.heads * shape.attention_width, shape.kv_heads * shape.attention_width
    scores = 0 if r.fused else _SCORES_AT_ONCE * shape.heads * shape.tokens
    attention = 2 * queries + 2 * keys + scores + (2 * queries if keys < queries else 0)
    values = _GATED_VALUES if shape.record.is_gated else _PLAIN_VALUES
    if shape.experts is None:
        return max(attention, values * shape.ffn)
    return max(attention, shape.experts.active * (2 * shape.hidden + values * shape.ffn))


def _frozen_maps(r: Resolved) -> int:
    """Return values of an image, in the stem or in the frozen block that holds the most."""
    network = convnet.resnet(r.shape)
    image = _COLOURS * r.shape.image_size**2 if r.is_autocast else 0  # cast
    sizes = [image + _MAPS * network.stem.values]
    for block in network.blocks[: r.frozen_blocks]:
        largest = max(conv.values for conv in block.convolutions)
        summed = _MAPS if block.shortcut is None else _MAPS_WITH_SHORTCUT
        sizes.append(block.input_values + max(_MAPS * largest, summed * block.path[-1].values))
    return max(sizes)


# The output head and the batch


def _head_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return the logits and what the loss makes of them: b·S·V for a language model, b·classes for a classifier.

    A chunked loss runs a language model's head and loss on one piece of each sequence at a time, gradients included, so
    that only one piece's logits exist; a classifier is not cut.
    """
    shape, language_model = r.shape, r.shape.record.predicts_tokens
    pieces = LOSS_CHUNKS if "chunked-loss" in r.extras and language_model else 1
    outputs: tuple[int, ...] = (batch_size, shape.classes)
    if language_model:
        outputs = (batch_size, -(-shape.seq_len // pieces), shape.vocab)
    of_a_piece = f"not in the textbook form; of one piece of {pieces}"
    rows = [
        row("output head: logits", *outputs, r.width, at=AFTER_FORWARD, note=of_a_piece if pieces > 1 else None),
        row("output head: log-softmax", *outputs, LOSS_BYTES, at=OF_THE_LOSS),
    ]
    if r.width != LOSS_BYTES:
        rows.append(row("output head: logits in fp32", *outputs, LOSS_BYTES, at=LOSS))
    count, note = _GRADIENTS, None
    if r.recipe.tensor_parallel > 1:
        count, note = _GRADIENTS_OF_PARTS, "in fp32, as backward begins: PyTorch's loss_parallel makes three"
    rows.append(row("output head: gradients", *outputs, count, LOSS_BYTES, at=LOSS_BACKWARD, note=note))
    if pieces > 1:
        factors = (batch_size, shape.seq_len, shape.hidden, r.width)
        rows.append(row("output head: gradient of its input", *factors, at=FORWARD_ENDS))
    return rows


def _batch_data_rows(r: Resolved, batch_size: int) -> list[FormulaRow]:
    """Return inputs in the dtype of the weights that they meet, or int64 ids; and targets, int64."""
    shape = r.shape
    targets: tuple[int, ...] = (batch_size, _ID_BYTES)
    if shape.record.inputs == "tokens":
        ids = (batch_size, shape.seq_len, _ID_BYTES)
        data = row("token ids", *ids, at=ALWAYS)
        targets = ids if shape.record.predicts_tokens else targets
    elif shape.record.inputs == "features":
        data = row("features", batch_size, shape.inputs, r.residual)
    else:
        data = row("images", batch_size, _COLOURS, shape.image_size, shape.image_size, r.residual)
    return [data, row("targets", *targets)]
