"""Rows of styled text as Textual's content, and on its Line API: there only the cells that differ are drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content
from textual.events import Resize
from textual.filter import ANSIToTruecolor
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from gpumem_tui.tui.kit.figures import Row, Span, span_width


def assembled(lines: Iterable[Sequence[Span]]) -> Content:
    """Return the lines below each other."""
    return Content("\n").join(Content.assemble(*line) for line in lines)


_PADDING = 1
"""Empty cells left and right; in `Lines`' style sheet too, so that regions and clicks count from the text."""


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
        """Return the lines of a region."""
        strips = [self._strip(y) for y in crop.line_range]
        if crop.width == self.outer_size.width:
            return strips
        return [strip.crop(crop.x, crop.right) for strip in strips]

    def render_line(self, y: int) -> Strip:
        """Return a row, in the widget's colours where it has none of its own."""
        base = self._rich_style_of("")
        row = self._rows[y] if y < len(self._rows) else ()
        runs = groupby(row, key=itemgetter(1))  # neighbours of one style are one sequence for the terminal
        segments = [Segment("".join(text for text, _ in run), self._rich_style_of(style)) for style, run in runs]
        padded = Strip([Segment(" " * _PADDING, base), *segments])
        return padded.adjust_cell_length(self.outer_size.width, base)

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
            strip = self.render_line(y)
            for line_filter in self.get_line_filters():
                if not isinstance(line_filter, ANSIToTruecolor):  # no style here has a colour by number
                    strip = strip.apply_filter(line_filter, self.background_colors[1])
            self._strips[y] = strip
        return self._strips[y]

    def _rich_style_of(self, style: str) -> RichStyle:
        if style not in self._rich_styles:
            own = self.visual_style
            self._rich_styles[style] = (own + Style.parse(style) if style else own).rich_style
        return self._rich_styles[style]


def _changes(before: Sequence[Row], after: Sequence[Row]) -> Iterator[Region]:
    """Yield the cells that differ, a region a row."""
    for y in range(max(len(before), len(after))):
        old = before[y] if y < len(before) else []
        new = after[y] if y < len(after) else []
        if old != new:
            first, last = _differing(old, new)
            yield Region(first, y, last - first, 1)


def _differing(old: Row, new: Row) -> tuple[int, int]:
    """Return the first cell that differs, and the one after the last."""
    first = _common(old, new)
    width, old_width = span_width(new), span_width(old)
    if width != old_width:
        return first, max(width, old_width)
    return first, max(first + 1, width - _common(old, new, from_end=True))


def _common(old: Row, new: Row, *, from_end: bool = False) -> int:
    """Cells that are equal from one end on."""
    step = -1 if from_end else 1
    cells = 0
    for (old_text, old_style), (text, style) in zip(old[::step], new[::step], strict=False):
        if old_style != style:
            break
        if old_text == text:
            cells += cell_len(text)
            continue
        if old_text.isascii() and text.isascii():
            for old_character, character in zip(old_text[::step], text[::step], strict=False):
                if old_character != character:
                    break
                cells += 1
        break
    return cells
