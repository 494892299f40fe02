"""Tables as plain text: columns with a width and an alignment, and long lists that end in a line for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

Item = TypeVar("Item")


class TextColumn(Struct, frozen=True):
    """A column of a text table.

    Attributes:
        width: in characters; a longer text is printed whole, and moves what follows, unless `cut`.
        align: ``<`` left, ``>`` right.
        cut: shorten a longer text to the width.
    """

    title: str
    width: int = 0
    align: Literal["<", ">"] = "<"
    cut: bool = False

    def cell(self, text: str) -> str:
        """Return a text as it is in this column."""
        return f"{text[: self.width] if self.cut else text:{self.align}{self.width}}"


class TextTable:
    """Lines of aligned cells.

    Args:
        columns: from left to right.
        gap: what is between two columns.
    """

    def __init__(self, *columns: TextColumn, gap: str = "  ") -> None:
        self._columns = columns
        self._gap = gap

    @property
    def header(self) -> str:
        """The titles of the columns, aligned as their cells are."""
        return self.row(*(column.title for column in self._columns))

    def row(self, *cells: str) -> str:
        """Return one line; cells that are left out on the right are empty."""
        columns = self._columns[: len(cells)]
        return self._gap.join(column.cell(text) for column, text in zip(columns, cells, strict=True)).rstrip()

    def lines(self, rows: Iterable[Sequence[str]]) -> Iterator[str]:
        """Yield the header, then each row."""
        yield self.header
        for cells in rows:
            yield self.row(*cells)


def largest_first(
    items: Sequence[Item], most: int, line: Callable[[Item], str], rest: Callable[[Sequence[Item]], str]
) -> Iterator[str]:
    """Yield a line for each of the first `most` items, then one line of `rest` for all that follow them, if any do."""
    for item in items[:most]:
        yield line(item)
    if others := items[most:]:
        yield rest(others)


def cut_to(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield the lines, each cut to `width` characters with an ellipsis at its end."""
    for line in lines:
        yield line if len(line) <= width else line[: width - 1].rstrip() + "…"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "process", "processes"), counted(2, "trial")
    ('1 process', '2 trials')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def ago(seconds: float) -> str:
    """Return a span of time as a person reads it.

    >>> ago(4), ago(7200)
    ('4 s ago', '2 h ago')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
