"""Types of values that commands take, and groups of options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., object])
T = TypeVar("T")


class Decorator(Protocol):
    """An option, as it is given to a command."""

    def __call__(self, command: Command, /) -> Command:
        """Return the command with it."""


class Whole(click.IntRange):
    """A whole number of a range."""

    name = "integer"


class Finite(click.FloatRange):
    """A number of a range; not a number is in none. click gives it a text, and types it as a number."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, if it is one."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Percent(Finite):
    """A number of percent, with the sign or without."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, if it is one."""
        return super().convert(value.removesuffix("%") if isinstance(value, str) else value, param, ctx)


class Typed(click.ParamType[T]):
    """A value that a function reads from a text.

    Args:
        name: what click calls it.
        read: raises a `ValueError` of one line where the text is none.
    """

    def __init__(self, name: str, read: Callable[[str], T]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: str | T, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """Return the value of a text; a default is a value already."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


AT_LEAST_ONE = Whole(min=1)


def with_options(*groups: Iterable[Decorator]) -> Callable[[Command], Command]:
    """Return a decorator that gives a command groups of options, in their order."""

    def decorate(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate
