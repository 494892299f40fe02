"""How far each number can go with the others as they are: a line each; enter takes it."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.plan.limit_report import capitalized
from gpumem_tui.plan.limits import Limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, ListRow, fit, heading, paragraph, row
from gpumem_tui.tui.plan.numbers import PENDING

_NAME_WIDTH = 26
_VALUE_WIDTH = 12
_FORMULA_WIDTH = 12
_ROOMY = _NAME_WIDTH + _VALUE_WIDTH + _FORMULA_WIDTH + 14
"""Cells from which how it is known has a column."""
_HOW = {"verified": "verified", "traced": "by trace", "formula": "estimate"}


def limit_rows(found: Sequence[Limit], plan: Plan, width: int, selected: str) -> list[ListRow]:
    """A line a number; the one under the cursor also says what bounds it and how that is known."""
    name_width = max(10, min(_NAME_WIDTH, width - 2 - _VALUE_WIDTH - _FORMULA_WIDTH))
    head = f"  {fit('others as they are', name_width)}{'':>{_VALUE_WIDTH}}{'formula':>{_FORMULA_WIDTH}}"
    lines = [heading(f"How far each number goes, {100 * plan.headroom:g} % left free"), row((head, f"bold {MUTED}"))]
    for one in found:
        lines += _limit_rows(one, width, name_width, here=one.quantity == selected)
    return lines


def _limit_rows(one: Limit, width: int, name_width: int, *, here: bool) -> list[ListRow]:
    value = "none" if one.value is None else f"{'≈' if one.how == 'formula' else ''}{one.value:,}"
    if one.wanted:
        value = f"{PENDING} {value}"
    formula = ABSENT if one.formula is None else f"≈{one.formula:,}"
    line = row(
        ("✓ " if one.how == "verified" and not one.wanted else "  ", "$text-success"),
        (fit(capitalized(one.quantity), name_width), ""),
        (f"{value:>{_VALUE_WIDTH}}", "bold"),
        (f"{formula:>{_FORMULA_WIDTH}}", MUTED),
        (f"  {_how(one)}" if width >= _ROOMY else "", MUTED),
        key=one.quantity,
    )
    return (
        [line, *(part for text in _said(one, width) for part in paragraph(text, width, indent=2))] if here else [line]
    )


def _how(one: Limit) -> str:
    return f"{PENDING} tracing" if one.wanted else _HOW[one.how]


def _said(one: Limit, width: int) -> list[str]:
    said = [] if width >= _ROOMY else [_how(one)]
    if one.how == "verified" and not one.wanted:
        said.append("traced, and it fits" if one.beyond is None else f"traced, and it fits; {one.beyond:,} does not")
    return [*said, one.note] if one.note else said
