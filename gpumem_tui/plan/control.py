"""One control of the Plan screen: a choice or a number, what it shows and how it steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpumem_tui.plan.draft import Draft
from gpumem_tui.plan.steps import Steps


class PlanError(ValueError):
    """The controls contradict each other. `control` is the key of the one to change, the message says how."""

    def __init__(self, control: str, message: str) -> None:
        super().__init__(message)
        self.control = control


@dataclass(frozen=True)
class Option:
    """One value of a choice, and what helps to choose it."""

    value: str
    note: str = ""


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
        """The value as the control shows it."""
        return self.get(draft)

    def stepped(self, draft: Draft, way: int, *, jump: bool) -> Draft:
        """The option before (`way` −1) or after (+1) the present one, or with `jump` the first or last."""
        values = [option.value for option in self.options(draft)]
        here = values.index(self.get(draft))
        there = (0 if way < 0 else len(values) - 1) if jump else min(max(0, here + way), len(values) - 1)
        return self.put(draft, values[there])


@dataclass(frozen=True)
class Number:
    """A control with a whole number in a range.

    Attributes:
        nudge, jump: the next value for an arrow key alone and with shift.
        optional: nothing (None) is a value too; it lies below `least`.
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
        """The value as the control shows it."""
        value = self.get(draft)
        if self.show is not None:
            return self.show(draft)
        return "none" if value is None else f"{value:,}"

    def stepped(self, draft: Draft, way: int, *, jump: bool) -> Draft:
        """The next value below (`way` −1) or above (+1), as far as the range goes."""
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
            raise PlanError(self.key, f"must be at least {self.least:,}, not {value:,}")
        if value > self.most:
            raise PlanError(self.key, f"must be at most {self.most:,}, not {value:,}")


Control = Choice | Number
