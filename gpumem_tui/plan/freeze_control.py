"""The control of frozen layers: how many of the blocks, the first ones, are left alone."""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.catalog.shapes import ShapeError
from gpumem_tui.formula.freezing import block_count
from gpumem_tui.formula.recipe import ALL_BUT_HEAD, NOTHING_FROZEN
from gpumem_tui.plan.control import Option
from gpumem_tui.plan.draft import Draft

_QUARTERS = {1: "a quarter", 2: "half", 3: "three quarters", 4: "all"}


def freeze_options(draft: Draft) -> tuple[Option, ...]:
    """Nothing, quarters of the blocks, all but the head where it has a weight of its own, and what was typed."""
    try:
        blocks = block_count(draft.base.overridden(**draft.changes))
    except ShapeError:
        blocks = block_count(draft.base)
    found = {NOTHING_FROZEN: "every weight is trained"}
    for quarters, words in _QUARTERS.items():
        if count := blocks * quarters // 4:
            found.setdefault(str(count), f"{words} of the {blocks} blocks, and all before them")
    if not draft.base.tied_head:
        found[ALL_BUT_HEAD] = "only the last layer is trained"
    found.setdefault(draft.recipe.freeze, "as given")
    return tuple(Option(value, note) for value, note in found.items())


def put_freeze(draft: Draft, value: str) -> Draft:
    """What is frozen instead."""
    return replace(draft, recipe=replace(draft.recipe, freeze=value))
