"""The output head and the loss: absent from the textbook's activations, and often the peak of a step.

Counted at the moment when cross-entropy's backward has just run: the logits (which the training loop still
holds), the log-softmax that its backward reads, and the two gradients, of the log-softmax and of the logits, that it
makes. Before that, in forward, the loss holds an fp32 copy of 16-bit logits; it is freed when the loss returns and is
smaller than the gradients, so it is not counted on top of them.
"""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.extras import LOSS_CHUNKS
from gpumem_tui.formula.precision import LOSS_BYTES, PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FormulaRow, batch_row
from gpumem_tui.memory import Bucket

_SOURCE = "PyTorch cross_entropy"
_CHUNKED_SOURCE = "Hsu et al. 2024 (Liger Kernel)"
_GRADIENTS = 2


def head_rows(shape: ModelShape, recipe: Recipe, batch_size: int, *, chunked: bool = False) -> list[FormulaRow]:
    """The logits and what the loss makes of them: b·S·V for a language model, b·classes for a classifier.

    Args:
        chunked: a language model's head and loss run on one piece of each sequence at a time, gradients included, so
            that only one piece's logits exist; a classifier is not cut.
    """
    language_model = shape.record.predicts_tokens
    pieces = LOSS_CHUNKS if chunked and language_model else 1
    if language_model:
        outputs: tuple[int, ...] = (batch_size, -(-shape.seq_len // pieces), shape.vocab)
    else:
        outputs = (batch_size, shape.classes)
    compute_bytes = PRECISION_RECORDS[recipe.precision].compute_bytes
    cast = "" if compute_bytes == LOSS_BYTES else "; the fp32 copy of the logits is gone by then"
    logits = "the training loop holds them through backward" if pieces == 1 else f"of one piece of {pieces}"
    rows = [
        batch_row(
            Bucket.ACTIVATIONS,
            "output head: logits",
            (*outputs, compute_bytes),
            _SOURCE,
            f"not in the textbook form; {logits}",
        ),
        batch_row(
            Bucket.ACTIVATIONS,
            "output head: log-softmax",
            (*outputs, LOSS_BYTES),
            _SOURCE,
            "in fp32, saved for the loss's backward",
        ),
        batch_row(
            Bucket.TEMPORARY,
            "output head: gradients",
            (*outputs, _GRADIENTS, LOSS_BYTES),
            _SOURCE,
            f"of the log-softmax and of the logits, both in fp32, as backward begins{cast}",
        ),
    ]
    if pieces > 1:
        gradient = batch_row(
            Bucket.ACTIVATIONS,
            "output head: gradient of its input",
            (batch_size, shape.seq_len, shape.hidden, compute_bytes),
            _CHUNKED_SOURCE,
            "made in forward, piece by piece, and kept for backward",
        )
        rows.append(gradient)
    return rows
