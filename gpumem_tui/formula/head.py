"""The output head and the loss: absent from the textbook's activations, and often the peak of a step.

The training loop holds the logits to the end of the step. While the loss is computed there are beside them an fp32 copy
of 16-bit logits and the log-softmax; when cross-entropy's backward has just run, the log-softmax that it reads and the
two gradients, of the log-softmax and of the logits, that it makes.
"""

from __future__ import annotations

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.extras import LOSS_CHUNKS
from gpumem_tui.formula.precision import LOSS_BYTES, PRECISION_RECORDS
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import AFTER_FORWARD, FORWARD_ENDS, FormulaRow, Moment, batch_row, fixed_row, there
from gpumem_tui.memory import Bucket

_SOURCE = "PyTorch cross_entropy"
_CHUNKED_SOURCE = "Hsu et al. 2024 (Liger Kernel)"
_GRADIENTS = 2
_GRADIENTS_OF_PARTS = 3
"""Of a vocabulary that is cut: the targets' share, the softmax, and their sum (torch.distributed.tensor.parallel,
loss.py, `_nll_loss_and_log_softmax_backward`)."""


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
    logits = "the training loop holds them through backward" if pieces == 1 else f"of one piece of {pieces}"
    row = batch_row(
        Bucket.ACTIVATIONS,
        "output head: logits",
        (*outputs, compute_bytes),
        _SOURCE,
        f"not in the textbook form; {logits}",
    )
    rows = there(AFTER_FORWARD, [row])
    softmax = batch_row(
        Bucket.ACTIVATIONS,
        "output head: log-softmax",
        (*outputs, LOSS_BYTES),
        _SOURCE,
        "in fp32, saved for the loss's backward",
    )
    rows += there({Moment.LOSS, Moment.LOSS_BACKWARD}, [softmax])
    if compute_bytes != LOSS_BYTES:
        copy = batch_row(
            Bucket.TEMPORARY, "output head: logits in fp32", (*outputs, LOSS_BYTES), _SOURCE, "gone as the loss returns"
        )
        rows += there({Moment.LOSS}, [copy])
    count, note = _GRADIENTS, "of the log-softmax and of the logits, both in fp32, as backward begins"
    if recipe.tensor_parallel > 1:
        count, note = _GRADIENTS_OF_PARTS, "in fp32, as backward begins: PyTorch's loss_parallel makes three"
    factors = (*outputs, count, LOSS_BYTES)
    gradients = batch_row(Bucket.TEMPORARY, "output head: gradients", factors, _SOURCE, note)
    rows += there({Moment.LOSS_BACKWARD}, [gradients])
    if pieces > 1:
        gradient = batch_row(
            Bucket.ACTIVATIONS,
            "output head: gradient of its input",
            (batch_size, shape.seq_len, shape.hidden, compute_bytes),
            _CHUNKED_SOURCE,
            "made in forward, piece by piece, and kept for backward",
        )
        rows += there(FORWARD_ENDS, [gradient])
    return rows


def tied_gradients_row(values: int, gradient_bytes: int) -> FormulaRow:
    """What backward holds beside the gradients as it reaches an embedding whose weight is the head's too.

    Args:
        values: of that weight.
        gradient_bytes: of each of its gradients.
    """
    row = fixed_row(
        Bucket.TEMPORARY,
        "gradients of the tied embedding",
        (2, values, gradient_bytes),
        "PyTorch autograd",
        "the embedding's dense gradient beside the head's, until both are summed in a third",
    )
    return there({Moment.EMBEDDING}, [row])[0]
