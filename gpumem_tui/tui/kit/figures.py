"""Numbers as the panels write them, short and of a known width; and lines of styled text."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import overload

from msgspec import Struct
from rich.cells import cell_len, set_cell_size

from gpumem_tui.memory import GIB, KIB, MIB, Unknown, Value
from gpumem_tui.tui.kit.glyphs import PROGRAM

Span = tuple[str, str]
"""Text and its style (Textual's, with theme variables); "" for none."""

Row = list[Span]
"""A line of the screen."""

ABSENT = "–"
_ELLIPSIS = "…"
_FACT_LEAD = " · "
_NARROW = re.compile(r"[ -~\u00a0-\u00ac\u00ae-\u02ff\u2013\u2026\u2212\u2500-\u25fc\u2800-\u28ff]*")
"""Texts of one cell a character; a test holds each of them to Rich's table."""

RULE = "$foreground 25%"

MUTED = "$foreground 60%"
"""The style of what may be read second."""


def compact_bytes(value: Value) -> str:
    """Return a size in at most 7 characters and a sign; a dash for unknown.

    From 0.1 GiB up it is GiB without a unit; what is smaller or huge has its unit's name.

    >>> compact_bytes(32_000_000_000)
    '29.80'
    >>> compact_bytes(12 * 1024 * 1024)
    '12 MiB'
    """
    if isinstance(value, Unknown):
        return ABSENT
    sign, size = "−" if value < 0 else "", abs(value)
    if size >= 9999.995 * GIB:
        for unit in ("TiB", "PiB", "EiB"):
            size //= 1024
            if size < 999.5 * GIB:
                return f"{sign}{size / GIB:.0f} {unit}"
        return f"{sign}>1 ZiB"
    if size >= GIB // 10:
        return f"{sign}{size / GIB:.2f}"
    if size >= 1000 * KIB:
        return f"{sign}{size / MIB:.{0 if size >= 10 * MIB else 1}f} MiB"
    if size >= 1000:
        return f"{sign}{size / KIB:.0f} KiB"
    return f"{sign}{size} B" if size else "0"


def signed(value: Value) -> str:
    """Return `compact_bytes` with a plus before what is more than nothing; at most 8 characters."""
    plus = "+" if isinstance(value, int) and value > 0 else ""
    return f"{plus}{compact_bytes(value)}"


def percent(share: float | None) -> str:
    """Return a relative error with its sign where that shows, at most 6 characters; a dash for None.

    >>> percent(0.0123)
    '+1.2%'
    """
    if share is None:
        return ABSENT
    if share == 0:
        return "0%"
    sign = "+" if share > 0 else "−"
    size = abs(share) * 100
    if size < 0.05:
        return "<0.1%"
    if size > 999:
        return f"{sign}>999%"
    return f"{sign}{size:.{1 if size < 99.95 else 0}f}%"


def proportions(sizes: list[int], cells: int) -> list[int]:
    """Whole cells for each size, summing to `cells`; what is there at all gets a cell while there is room.

    >>> proportions([1, 500, 499], 10)
    [1, 5, 4]
    """
    total = sum(sizes)
    if not total or cells <= 0:
        return [0] * len(sizes)
    exact = [size * cells / total for size in sizes]
    given = [max(int(share), 1 if size else 0) for share, size in zip(exact, sizes, strict=True)]
    while sum(given) != cells:
        too_many = sum(given) > cells
        surplus = [have - want for have, want in zip(given, exact, strict=True)]
        if too_many:
            spare = [index for index, have in enumerate(given) if have > 1] or [
                index for index, have in enumerate(given) if have
            ]
            given[max(spare, key=lambda index: surplus[index])] -= 1
        else:
            given[min(range(len(given)), key=lambda index: surplus[index])] += 1
    return given


def wrapped(items: list[list[Span]], width: int, gap: int) -> list[list[Span]]:
    """Lay items out in columns of equal width, as many as fit in `width` cells, row by row."""
    if not items:
        return []
    cell = max(span_width(item) for item in items)
    columns = max(1, (width + gap) // (cell + gap))
    rows = []
    for start in range(0, len(items), columns):
        row: list[Span] = []
        for item in items[start : start + columns]:
            row += [*item, (" " * (cell - span_width(item) + gap), "")]
        rows.append(row[:-1])
    return rows


def joined(cells: Sequence[Span]) -> list[Span]:
    """Neighbours of one style as one span."""
    spans: list[Span] = []
    for text, style in cells:
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + text, style)
        else:
            spans.append((text, style))
    return spans


def span_width(spans: Sequence[Span]) -> int:
    """Cells of a line: a process may have a name of wide characters."""
    width = 0
    for text, _ in spans:
        width += text_width(text)
    return width


def is_narrow(text: str) -> bool:
    """Return whether each character takes one cell: so do ASCII, Latin, box drawing, blocks and braille."""
    return (text.isascii() and text.isprintable()) or _NARROW.fullmatch(text) is not None


@lru_cache(1024)  # most texts are those of a second ago; Rich keeps the last 4,096 that it measured itself
def text_width(text: str) -> int:
    """Cells of a text."""
    return len(text) if is_narrow(text) else cell_len(text)


def fit(text: str, width: int) -> str:
    """Return the text in exactly `width` cells: padded, or cut with an ellipsis, without control characters."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    if text.isascii():
        return text.ljust(width) if len(text) <= width else f"{text[: max(0, width - 1)]}{_ELLIPSIS}"[: max(0, width)]
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - 1)) + _ELLIPSIS if width > 0 else ""


def fit_right(text: str, width: int) -> str:
    """Return the text at the right of `width` cells."""
    return text.rjust(width) if len(text) <= width else fit(text, width)


def ruled(left: list[Span], right: list[Span], width: int) -> list[Span]:
    """Return a heading: a thin line between its left and its right text."""
    gap = width - span_width(left) - span_width(right)
    if gap < 3:
        return [*left, (" " * max(0, gap), ""), *right]
    line = f" {'─' * (gap - 2)} " if right else f" {'─' * (gap - 1)}"
    return [*left, (line, RULE), *right]


def header_line(subject: Span, facts: Sequence[Span], right: Row, width: int) -> Row:
    """Return a screen's first line: the program, what is shown, and facts as far as there is room next to `right`."""
    left: Row = [(PROGRAM, "bold $primary"), ("  ", "")]
    text, style = subject
    room = width - span_width(left) - span_width(right) - 1
    left.append((text if cell_len(text) <= room else fit(text, room), style))
    for fact in facts:
        if span_width(left) + len(_FACT_LEAD) + cell_len(fact[0]) + span_width(right) + 1 <= width:
            left += [(_FACT_LEAD, MUTED), fact]
    return [*left, (" " * max(0, width - span_width(left) - span_width(right)), ""), *right]


def age(seconds: float) -> str:
    """Return a duration in at most 6 characters, in its largest units, so that it seldom changes.

    >>> age(200000)
    '2d07h'
    """
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 60:
        return f"{whole}s"
    if hours < 1:
        return f"{minutes}m"
    if days < 1:
        return f"{hours}h{minutes % 60:02}m"
    return f"{days}d{hours % 24:02}h" if days < 100 else f"{days}d"


def seconds(reading: float | Unknown) -> str:
    """Return a duration in three digits or so.

    >>> seconds(0.0123), seconds(12.3)
    ('12.3 ms', '12.3 s')
    """
    if isinstance(reading, Unknown):
        return ABSENT
    if reading < 1:
        return f"{reading * 1e3:.3g} ms" if reading < 0.9995 else "1 s"
    return f"{reading:.3g} s" if reading < 999.5 else f"{reading:,.0f} s"


def age_text(age_s: float | Unknown, rarer: str = "") -> str:
    """Return how old the figures are, and why they come more rarely than usual if they do."""
    if isinstance(age_s, Unknown):
        return age_s.reason
    return f"{age_s:.{1 if age_s < 10 else 0}f} s old{f', {rarer}' if rarer else ''}"


def clock(time_s: float) -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


class ListRow(Struct, frozen=True):
    """A line of a list.

    Attributes:
        key: what Enter and the explanation act on; "" for a line that the cursor passes over.
    """

    spans: tuple[Span, ...] = ()
    key: str = ""

    @property
    def text(self) -> str:
        """The line without its styles."""
        return "".join(text for text, _ in self.spans)


class LazyRows(Sequence[ListRow]):
    """Rows that are made when they are looked at: of thousands, those in sight.

    Args:
        keys: of each row; "" for a line that the cursor passes over.
        make: a row by its place.
    """

    def __init__(self, keys: Sequence[str], make: Callable[[int], ListRow]) -> None:
        self.keys = keys
        self._make = make
        self._made: dict[int, ListRow] = {}

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> ListRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[ListRow]: ...

    def __getitem__(self, index: int | slice) -> ListRow | list[ListRow]:
        places = range(len(self.keys))[index]
        return self._row(places) if isinstance(places, int) else list(map(self._row, places))

    def _row(self, place: int) -> ListRow:
        if place not in self._made:
            self._made[place] = self._make(place)
        return self._made[place]


def keys_of(rows: Sequence[ListRow]) -> Sequence[str]:
    """Return the key of each row."""
    return rows.keys if isinstance(rows, LazyRows) else [row.key for row in rows]


Rows = Callable[[int, str], Sequence[ListRow]]
"""The lines for a width in cells and the key of the row under the cursor ("": none yet)."""


def no_rows(_width: int, _selected: str) -> Sequence[ListRow]:
    """Return no lines: there is nothing to show."""
    return []


def row(*spans: Span, key: str = "") -> ListRow:
    """Return a line of spans."""
    return ListRow(spans, key)


def heading(text: str) -> ListRow:
    """Return a line over others."""
    return ListRow(((text, "bold $primary"),))


def paragraph(text: str, width: int, style: str = MUTED, *, indent: int = 0) -> list[ListRow]:
    """Text broken at words into lines of a width."""
    lines = textwrap.wrap(text, max(8, width - indent), break_on_hyphens=False) or [""]
    return [ListRow(((" " * indent + line, style),)) for line in lines]


def said(rows: Iterable[ListRow]) -> list[str]:
    """Return the lines as text, for reading and for tests."""
    return [line.text.rstrip() for line in rows]
