"""Rows of styled text as Textual's content, and on its Line API: there only the cells that differ are drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content
from textual.events import Resize
from textual.filter import ANSIToTruecolor
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from gpumem_tui.tui.kit.figures import Row, Span, is_narrow, span_width, text_width


def assembled(lines: Iterable[Sequence[Span]]) -> Content:
    """Return the lines below each other."""
    return Content("\n").join(Content.assemble(*line) for line in lines)


_PADDING = 1
"""Empty cells left and right; in `Lines`' style sheet too, so that regions and clicks count from the text."""

_STEP = 8
"""Cells by which a region that is drawn again begins and ends: Textual keeps 4,096 pairs of different regions."""


class Line(Strip):
    """A finished line, cut without a trace.

    Textual 8 keeps the pieces of a line in it: the whole of one, in itself, would be garbage. Rich keeps the last 4,096
    texts that it measured: 2 MiB of lines that are gone.
    """

    __slots__ = ()

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """Return the pieces between the cuts; cut at its end alone, it is the only one."""
        ends = [cut for cut in cuts if cut <= self.cell_length]
        return [self.crop(begin, end) for begin, end in pairwise([0, *ends])]

    def crop(self, start: int, end: int | None = None) -> Strip:
        """Return the cells [start, end)."""
        start, end = max(0, start), self.cell_length if end is None else min(end, self.cell_length)
        if (start, end) == (0, self.cell_length):
            return self
        pieces: list[Segment] = []
        at = 0
        for segment in self:
            width = text_width(segment.text)
            if at + width > start and at < end:
                text = _cells_of(segment.text, max(0, start - at), min(width, end - at))
                pieces.append(Segment(text, segment.style))
            at += width
        return Line(pieces, max(0, end - start))


class Lines(Widget):
    """Draws rows from its top; a style is written as in Textual's markup ("bold $warning", "$free on $cache").

    It keeps its finished lines itself. Textual's own cache looks at every line of a widget again when one has changed,
    which is most of what drawing would cost here.
    """

    DEFAULT_CSS = f"Lines {{ padding: 0 {_PADDING}; }}"
    ALLOW_SELECT = False

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002  as Textual's are
        super().__init__(id=id, classes=classes)
        self._rows: Sequence[Row] = ()
        self._rich_styles: dict[str, RichStyle] = {}
        self._strips: dict[int, Strip] = {}

    @property
    def rows(self) -> Sequence[Row]:
        """Return the rows that are shown."""
        return self._rows

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Replace the picture."""
        before, self._rows = self._rows, rows
        changed = list(_changes(before, rows))
        for region in changed:
            self._strips.pop(region.y, None)
        if changed:
            self.refresh(*changed)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the lines of a region; where it is narrower than the widget, only its cells are made."""
        width = self.outer_size.width
        if crop.width == width:
            return [self._strip(y) for y in crop.line_range]
        return [self._cells(y, crop.x, min(crop.right, width)) for y in crop.line_range]

    def render_line(self, y: int) -> Strip:
        """Return a row, in the widget's colours where it has none of its own."""
        return self._cells(y, 0, self.outer_size.width)

    def on_resize(self, _event: Resize) -> None:
        """Another width: other lines."""
        self._strips.clear()

    def notify_style_update(self) -> None:
        """Another theme: other colours."""
        self._rich_styles.clear()
        self._strips.clear()
        super().notify_style_update()

    def _strip(self, y: int) -> Strip:
        if y not in self._strips:
            self._strips[y] = self.render_line(y)
        return self._strips[y]

    def _cells(self, y: int, begin: int, end: int) -> Strip:
        """Return the cells [begin, end) of a row. Filters look at whole words, so these are cut after them."""
        row = self._rows[y] if y < len(self._rows) else ()
        segments: list[Segment] = []
        at = first = 0
        for text, style in chain([(" " * _PADDING, "")], _runs(row), [(" " * max(1, end), "")]):
            if at >= end:
                break
            width = text_width(text)
            if at + width > begin:
                segments.append(Segment(text, self._rich_style_of(style)))
            else:
                first += width
            at += width
        strip = Strip(segments, at - first)
        for line_filter in self.get_line_filters():
            if not isinstance(line_filter, ANSIToTruecolor):  # no style here has a colour by number
                strip = strip.apply_filter(line_filter, self.background_colors[1])
        return Line(strip, at - first).crop(begin - first, end - first)

    def _rich_style_of(self, style: str) -> RichStyle:
        if style not in self._rich_styles:
            own = self.visual_style
            self._rich_styles[style] = (own + Style.parse(style) if style else own).rich_style
        return self._rich_styles[style]


def _runs(row: Sequence[Span]) -> Iterator[Span]:
    """Yield neighbours of one style as one: one sequence for the terminal."""
    for style, run in groupby(row, key=itemgetter(1)):
        yield "".join(text for text, _ in run), style


def _cells_of(text: str, begin: int, end: int) -> str:
    """Return the cells [begin, end) of a text; half of a wide character is a space."""
    if is_narrow(text):
        return text[begin:end]
    return Segment(text).split_cells(end)[0].split_cells(begin)[1].text


def _changes(before: Sequence[Row], after: Sequence[Row]) -> Iterator[Region]:
    """Yield the cells that differ, a region a row."""
    for y in range(max(len(before), len(after))):
        old = before[y] if y < len(before) else []
        new = after[y] if y < len(after) else []
        if old != new:
            first, last = _differing(old, new)
            yield Region(first, y, last - first, 1)


def _differing(old: Row, new: Row) -> tuple[int, int]:
    """Return the first cell that differs, and the one after the last; equal spans are not measured by the cell."""
    most = min(len(old), len(new))
    head = next((at for at in range(most) if old[at] != new[at]), most)
    tail = next((at for at in range(most - head) if old[-1 - at] != new[-1 - at]), most - head)
    old_middle, middle = old[head : len(old) - tail], new[head : len(new) - tail]
    first, old_width, width = span_width(new[:head]), span_width(old_middle), span_width(middle)
    begin = first + _common(old_middle, middle)
    if old_width != width:
        return begin, first + max(old_width, width) + span_width(new[len(new) - tail :])
    return begin, max(begin + 1, first + width - _common(old_middle, middle, from_end=True))


def _common(old: Row, new: Row, *, from_end: bool = False) -> int:
    """Cells that are equal from one end on of two rows whose spans at that end differ, in whole steps."""
    at, step = (-1, -1) if from_end else (0, 1)
    if not old or not new or old[at][1] != new[at][1]:
        return 0
    old_text, text = old[at][0][::step], new[at][0][::step]
    if not (old_text.isascii() and text.isascii()):
        return 0
    shortest = min(len(old_text), len(text))
    equal = next((cell for cell in range(shortest) if old_text[cell] != text[cell]), shortest)
    return equal // _STEP * _STEP
