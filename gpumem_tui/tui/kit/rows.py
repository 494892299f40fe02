"""Lines that a cursor can stand on: what the Plan screen's lists are made of."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpumem_tui.tui.kit.figures import MUTED, Span


@dataclass(frozen=True)
class ListRow:
    """One line.

    Attributes:
        key: what Enter and the explanation act on; "" for a line that the cursor passes over.
    """

    spans: tuple[Span, ...] = ()
    key: str = ""

    @property
    def text(self) -> str:
        """The line without its styles."""
        return "".join(text for text, _ in self.spans)


Rows = Callable[[int, str], list[ListRow]]
"""The lines for a width in cells and the key of the row under the cursor ("": none yet)."""


def no_rows(width: int, selected: str) -> list[ListRow]:
    """Nothing to show."""
    return []


def row(*spans: Span, key: str = "") -> ListRow:
    """A line of spans."""
    return ListRow(spans, key)


def heading(text: str) -> ListRow:
    """A line over others."""
    return ListRow(((text, "bold $primary"),))


def paragraph(text: str, width: int, style: str = MUTED, *, indent: int = 0) -> list[ListRow]:
    """Text broken at words into lines of a width."""
    lines = textwrap.wrap(text, max(8, width - indent), break_on_hyphens=False) or [""]
    return [ListRow(((" " * indent + line, style),)) for line in lines]


def said(rows: Iterable[ListRow]) -> list[str]:
    """The lines as text, for reading and for tests."""
    return [line.text.rstrip() for line in rows]
