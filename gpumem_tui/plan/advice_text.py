"""One piece of advice, as every view of it has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading each."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Judgement:
    """One piece of advice.

    Attributes:
        key: names it in code.
        text: the advice, with the plan's numbers.
        source: the papers behind it.
        warning: the plan does what the advice warns of.
    """

    key: str
    title: str
    text: str
    source: str
    table: Table | None = None
    warning: bool = False
