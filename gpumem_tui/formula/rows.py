"""One line of a closed-form prediction: bytes, and the arithmetic and the source behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import prod

import msgspec

from gpumem_tui.catalog.loader import toml_tables
from gpumem_tui.memory import Bucket


class Moment(Enum):
    """When in a step memory can be highest. The value is its phrase.

    In between memory moves evenly: backward frees one block's activations and makes its gradients, block by block.
    """

    FORWARD = "as forward runs through a frozen block"
    LOSS = "as the loss is computed"
    LOSS_BACKWARD = "as backward begins, with the loss's own gradients"
    LAST_BLOCK = "as backward runs through the last block"
    FIRST_BLOCK = "as backward ends, with all gradients"
    EMBEDDING = "as backward reaches the embedding, whose weight is the head's too"
    UPDATE = "as the optimizer updates the weights"


Moments = frozenset[Moment]
ALWAYS: Moments = frozenset(Moment)
FORWARD_ENDS: Moments = frozenset({Moment.LOSS, Moment.LOSS_BACKWARD, Moment.LAST_BLOCK})
"""Everything that forward keeps is there: through the loss, until backward has run through the first block it meets."""
AFTER_FORWARD: Moments = ALWAYS - {Moment.FORWARD}
IN_A_BLOCK: Moments = frozenset({Moment.LAST_BLOCK, Moment.FIRST_BLOCK})
LOSS: Moments = frozenset({Moment.LOSS})
LOSS_BACKWARD: Moments = frozenset({Moment.LOSS_BACKWARD})
OF_THE_LOSS: Moments = LOSS | LOSS_BACKWARD
LAST_BLOCK: Moments = frozenset({Moment.LAST_BLOCK})
FIRST_BLOCK: Moments = frozenset({Moment.FIRST_BLOCK})
UPDATE: Moments = frozenset({Moment.UPDATE})

ONE_BLOCK = ", one block while recomputed"
"""Suffix of the rows that only one block at a time needs."""
WITHOUT_EXPERTS = ", blocks without experts"
"""Suffix of the rows of a network's dense blocks besides those that have experts."""
THE_FIRST_BLOCK = ", the first block's"
"""Suffix of the rows that are left as backward ends."""
AS_BACKWARD_ENDS = ", as backward ends"
"""Suffix of what GPUs still exchange then."""


@dataclass(frozen=True, slots=True)
class FormulaRow:
    """A row of the prediction: one term of the formula, with its bytes.

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
    moments: Moments = ALWAYS

    def over(self, gpus: int, source: str = "") -> FormulaRow:
        """Return one GPU's share of the row, rounded up to a byte. `source`: of that share."""
        return replace(
            self,
            size_bytes=-(-self.size_bytes // gpus),
            expression=f"{self.expression} / {gpus}",
            source=f"{self.source}; {source}" if source else self.source,
        )


class RowWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of a row, regardless of its numbers: a table of rows.toml.

    Attributes:
        bucket: of the ledger; `grows`: with the batch.
        formula: in symbols. `limits`: where it stops being right.
    """

    bucket: Bucket
    formula: str
    grows: bool = False
    source: str = ""
    note: str = ""
    limits: str = ""


ROW_WORDS = msgspec.convert(toml_tables("rows.toml"), dict[str, RowWords])
"""By a row's name, without its suffix."""


def row(
    name: str, *factors: int, at: Moments = ALWAYS, suffix: str = "", source: str = "", note: str | None = None
) -> FormulaRow:
    """Return the row of that name, whose bytes are the product of its factors, of which one may be the batch size.

    Args:
        name: of `ROW_WORDS`. `suffix`: what its name ends with.
        factors: bytes, values and their counts.
        at: when in a step it is there.
        source: where the term is from, instead of the usual; `note`: likewise.
    """
    words = ROW_WORDS[name]
    return FormulaRow(
        bucket=words.bucket,
        name=name + suffix,
        size_bytes=prod(factors),
        # Separators only where a number is long: 1024 reads better as it is, a parameter count does not.
        expression=" · ".join(f"{factor:,}" if factor >= 10_000 else str(factor) for factor in factors),
        source=source or words.source,
        note=words.note if note is None else note,
        grows_with_batch=words.grows,
        moments=at,
    )
