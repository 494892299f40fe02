"""How a control's number steps: nudges land on values that go together with the other controls."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

from gpumem_tui.plan.draft import Draft, has_field

ALIGNMENT = 128
"""Sequence lengths, vocabularies and inner widths that people choose are multiples of it."""
_HEAD_ALIGNMENT = 64
_RESNET_STRIDE = 32

Steps = Callable[[Draft, int, int], int]
"""The next value in a direction (−1, +1), of a draft and the present value; it may be out of the range."""


def by(step: int) -> Steps:
    """So much up or down."""
    return lambda draft, value, way: value + way * step


def multiple(of: Callable[[Draft], int]) -> Steps:
    """To the next multiple, so that odd values fall in step."""

    def step(draft: Draft, value: int, way: int) -> int:
        unit = of(draft)
        return (value // unit + 1) * unit if way > 0 else (-(-value // unit) - 1) * unit

    return step


def power(draft: Draft, value: int, way: int) -> int:
    """To the next power of two."""
    if way > 0:
        return 1 << value.bit_length()
    return 1 << (value - 1).bit_length() - 1 if value > 1 else 0


def double(draft: Draft, value: int, way: int) -> int:
    """Twice or half."""
    return value * 2 if way > 0 else value // 2


def divisor(of: Callable[[Draft], int], fits: Callable[[Draft, int], bool]) -> Steps:
    """To the next number that divides another one; stays where there is none."""

    def step(draft: Draft, value: int, way: int) -> int:
        whole = of(draft)
        candidates = range(value + 1, whole + 1) if way > 0 else range(value - 1, 0, -1)
        return next((n for n in candidates if whole % n == 0 and fits(draft, n)), value)

    return step


def hidden_unit(draft: Draft) -> int:
    """A width that keeps whole heads, of an even width and, where it can be, a multiple of what kernels like."""
    if draft.base.head_dim or not has_field(draft.base, "heads"):
        return _HEAD_ALIGNMENT
    return lcm(2 * max(1, draft.shape_value("heads")), _HEAD_ALIGNMENT)


def heads_fit(draft: Draft, heads: int) -> bool:
    """Rotary positions need an even head width, grouped queries a whole number of heads a group."""
    base = draft.base
    grouped = base.kv_heads != base.heads or "kv_heads" in draft.changes
    even = base.record.positions != "rotary" or base.head_dim or (draft.shape_value("hidden") // heads) % 2 == 0
    return bool(even) and not (grouped and heads % max(1, draft.shape_value("kv_heads")))


def image_unit(draft: Draft) -> int:
    """Pixels a side that the network divides evenly."""
    return draft.base.patch_size or _RESNET_STRIDE
