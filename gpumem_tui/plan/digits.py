"""A digit typed on a choice picks the value at that place, where it has a place."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.memory import Unknown

_DIGITS = 9


def by_digit(values: Sequence[str], digit: int) -> str | Unknown:
    """The value at that place, the first by 1; or why there is none.

    >>> by_digit(("fp32", "bf16"), 2)
    'bf16'
    """
    if len(values) > _DIGITS:
        return Unknown(f"{len(values)} to choose from, too many for a digit: Enter lists them")
    if not 1 <= digit <= len(values):
        return Unknown(f"{digit} picks nothing: 1 to {len(values)} are {', '.join(values)}")
    return values[digit - 1]
