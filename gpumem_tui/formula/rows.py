"""One line of a closed-form prediction: bytes, and the arithmetic and the source behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

from gpumem_tui.memory import Bucket

TEXTBOOK = "textbook accounting"
"""Source of the forms every text on training memory shares: bytes per parameter, bytes per input value."""


class Moment(Enum):
    """When in a step memory can be highest. The value says it in words.

    In between memory moves evenly: backward frees one block's activations and makes its gradients, block by block.
    """

    FORWARD = "as forward runs through a frozen block"
    LOSS = "as the loss is computed"
    LOSS_BACKWARD = "as backward begins, with the loss's own gradients"
    LAST_BLOCK = "as backward runs through the last block"
    FIRST_BLOCK = "as backward ends, with all gradients"
    EMBEDDING = "as backward reaches the embedding, whose weight is the head's too"
    UPDATE = "as the optimizer updates the weights"


ALWAYS = frozenset(Moment)
FORWARD_ENDS = frozenset({Moment.LOSS, Moment.LOSS_BACKWARD, Moment.LAST_BLOCK})
"""Everything that forward keeps is there: through the loss, until backward has run through the first block it meets."""
AFTER_FORWARD = ALWAYS - {Moment.FORWARD}
IN_A_BLOCK = frozenset({Moment.LAST_BLOCK, Moment.FIRST_BLOCK})


@dataclass(frozen=True, slots=True)
class FormulaRow:
    """One term of the prediction.

    Attributes:
        size_bytes: on one GPU.
        expression: the formula with its numbers put in, e.g. ``12 · 1024 · 8 · 768 · 34``.
        source: the paper or the library behaviour that the term comes from.
        note: what is assumed, or where the term stops being right.
        grows_with_batch: `size_bytes` is proportional to the batch size; otherwise it does not depend on it.
        moments: when in a step it is there.
    """

    bucket: Bucket
    name: str
    size_bytes: int
    expression: str
    source: str
    note: str = ""
    grows_with_batch: bool = False
    moments: frozenset[Moment] = ALWAYS


def fixed_row(bucket: Bucket, name: str, factors: Sequence[int], source: str, note: str = "") -> FormulaRow:
    """A row whose bytes are the product of `factors`, whatever the batch size."""
    return FormulaRow(bucket, name, prod(factors), _product(factors), source, note)


def batch_row(bucket: Bucket, name: str, factors: Sequence[int], source: str, note: str = "") -> FormulaRow:
    """A row whose bytes are the product of `factors`, one of which is the batch size."""
    return FormulaRow(bucket, name, prod(factors), _product(factors), source, note, grows_with_batch=True)


def there(moments: Iterable[Moment], rows: Iterable[FormulaRow]) -> list[FormulaRow]:
    """The same rows, there at these moments only."""
    at = frozenset(moments)
    return [replace(row, moments=at) for row in rows]


def _product(factors: Sequence[int]) -> str:
    """Separators only where a number is long: 1024 reads better as it is, a parameter count does not."""
    return " · ".join(f"{factor:,}" if factor >= 10_000 else str(factor) for factor in factors)
