"""One control of the Plan screen: a choice or a number, its steps, and which values it refuses.

Nudges land on values that go together with the other controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.plan import Draft, has_field

_DIGITS = 9


class PlanError(ValueError):
    """Controls that contradict each other. `control` is the key of the one to change, the message shows how."""

    def __init__(self, control: str, message: str) -> None:
        super().__init__(message)
        self.control = control


# Steps of a number

Steps = Callable[[Draft, int, int], int]
"""The next value in a direction (−1, +1), of a draft and the present value; it may be out of the range."""

ALIGNMENT = 128
"""Sequence lengths, vocabularies and inner widths that people choose are multiples of it."""
_HEAD_ALIGNMENT = 64
_RESNET_STRIDE = 32


def by(step: int) -> Steps:
    """Return steps of this size."""
    return lambda _, value, way: value + way * step


def multiple(of: Callable[[Draft], int]) -> Steps:
    """Return steps to the next multiple, so that odd values fall in step."""

    def step(draft: Draft, value: int, way: int) -> int:
        unit = of(draft)
        return (value // unit + 1) * unit if way > 0 else (-(-value // unit) - 1) * unit

    return step


def power(_draft: Draft, value: int, way: int) -> int:
    """Step to the next power of two."""
    if way > 0:
        return 1 << value.bit_length()
    return 1 << (value - 1).bit_length() - 1 if value > 1 else 0


def double(_draft: Draft, value: int, way: int) -> int:
    """Double the value, or halve it."""
    return value * 2 if way > 0 else value // 2


def divisor(of: Callable[[Draft], int], fits: Callable[[Draft, int], bool]) -> Steps:
    """Return steps to the next divisor of another control's number that `fits`; without one the value stays."""

    def step(draft: Draft, value: int, way: int) -> int:
        whole = of(draft)
        candidates = range(value + 1, whole + 1) if way > 0 else range(value - 1, 0, -1)
        return next((n for n in candidates if whole % n == 0 and fits(draft, n)), value)

    return step


def hidden_unit(draft: Draft) -> int:
    """Return a width that keeps whole heads of an even width and, where it can be, a multiple of 64 for the kernels."""
    if draft.shape.head_dim or not has_field(draft.shape, "heads"):
        return _HEAD_ALIGNMENT
    return lcm(2 * max(1, draft.shape_value("heads")), _HEAD_ALIGNMENT)


def heads_fit(draft: Draft, heads: int) -> bool:
    """Return whether so many heads keep the head width even for rotary positions and the query groups whole."""
    shape = draft.shape
    grouped = shape.kv_heads != shape.heads or "kv_heads" in draft.changes
    even = shape.record.positions != "rotary" or shape.head_dim or (draft.shape_value("hidden") // heads) % 2 == 0
    return bool(even) and not (grouped and heads % max(1, draft.shape_value("kv_heads")))


def image_unit(draft: Draft) -> int:
    """Return the pixels a side that the network divides evenly."""
    return draft.shape.patch_size or _RESNET_STRIDE


# Controls


@dataclass(frozen=True)
class Option:
    """A value of a choice, and what helps to choose it."""

    value: str
    note: str = ""


def by_digit(values: Sequence[str], digit: int) -> str | Unknown:
    """Return the value that a typed digit picks by its place, the first by 1; or why it picks none.

    >>> by_digit(("fp32", "bf16"), 2)
    'bf16'
    """
    if len(values) > _DIGITS:
        return Unknown(f"{len(values)} to choose from, too many for a digit: Enter lists them")
    if not 1 <= digit <= len(values):
        return Unknown(f"{digit} picks nothing: 1 to {len(values)} are {', '.join(values)}")
    return values[digit - 1]


@dataclass(frozen=True)
class Choice:
    """A control with named values."""

    key: str
    label: str
    group: str
    hint: str
    options: Callable[[Draft], tuple[Option, ...]]
    get: Callable[[Draft], str]
    put: Callable[[Draft, str], Draft]

    def text(self, draft: Draft) -> str:
        """Return the value as the control shows it."""
        return self.get(draft)

    def stepped(self, draft: Draft, way: int, *, jump: bool) -> Draft:
        """Choose the option before (`way` −1) or after (+1) the present one, or with `jump` the first or last."""
        values = [option.value for option in self.options(draft)]
        here = values.index(self.get(draft))
        there = (0 if way < 0 else len(values) - 1) if jump else min(max(0, here + way), len(values) - 1)
        return self.put(draft, values[there])


@dataclass(frozen=True)
class Number:
    """A control with a whole number in a range.

    Attributes:
        nudge, jump: the next value for an arrow key alone and with shift.
        optional: nothing (None) is a value too, below `least`.
        show: the value as the control shows it, where that is more than the number.
    """

    key: str
    label: str
    group: str
    hint: str
    most: int
    nudge: Steps
    jump: Steps
    get: Callable[[Draft], int | None]
    put: Callable[[Draft, int | None], Draft]
    least: int = 1
    optional: bool = False
    show: Callable[[Draft], str] | None = None

    def text(self, draft: Draft) -> str:
        """Return the value as the control shows it."""
        value = self.get(draft)
        if self.show is not None:
            return self.show(draft)
        return "none" if value is None else f"{value:,}"

    def stepped(self, draft: Draft, way: int, *, jump: bool) -> Draft:
        """Set the next value below (`way` −1) or above (+1), as far as the range goes."""
        wanted = (self.jump if jump else self.nudge)(draft, self.get(draft) or 0, way)
        if wanted < self.least:
            return self.put(draft, None) if self.optional else draft
        return self.put(draft, min(wanted, self.most))

    def check(self, draft: Draft) -> None:
        """Raise PlanError if the value is out of the range."""
        value = self.get(draft)
        if value is None:
            return
        if value < self.least:
            raise PlanError(self.key, f"give at least {self.least:,}, not {value:,}")
        if value > self.most:
            raise PlanError(self.key, f"give at most {self.most:,}, not {value:,}")


Control = Choice | Number
