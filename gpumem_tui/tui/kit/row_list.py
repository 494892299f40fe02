"""A list of lines with a cursor on those that mean something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.binding import Binding, BindingType
from textual.events import Click, MouseEvent
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.style import Style

from gpumem_tui.tui.kit.figures import ListRow, Rows, keys_of, no_rows
from gpumem_tui.tui.kit.glyphs import LEAST_CONTRAST, contrast

CURSOR = "▌"
_CHOOSE, _TURN = "Choose a row", "The list before, the next list"
_OVERLAP = 3
"""Lines that stay in sight from one screenful to the next."""


class RowList(ScrollView, can_focus=True):
    """Draws the rows that a view makes for its width, again only those that changed.

    The cursor is on the first row with a key, or on the one to begin at, until it is moved; from then on it stays on
    its key however the rows move. Where no row has a key, the arrows scroll.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--cursor"}
    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False, tooltip=_CHOOSE),
        Binding("down", "move(1)", show=False, tooltip=_CHOOSE),
        Binding("pageup", "page(-1)", show=False, tooltip=_CHOOSE),
        Binding("pagedown", "page(1)", show=False, tooltip=_CHOOSE),
        Binding("left", "screen.turn(-1)", show=False, tooltip=_TURN),
        Binding("right", "screen.turn(1)", show=False, tooltip=_TURN),
        Binding("home", "edge(0)", show=False, tooltip=_CHOOSE),
        Binding("end", "edge(-1)", show=False, tooltip=_CHOOSE),
        Binding("enter", "choose", show=False, tooltip="All there is to say of the row"),
    ]

    @dataclass
    class OfRow(Message):
        """Something about the row with a key."""

        rows: RowList
        key: str

        @property
        def control(self) -> RowList:
            """The list that sent the message."""
            return self.rows

    class Moved(OfRow):
        """The cursor has moved to another row."""

    class Chosen(OfRow):
        """Enter was pressed, or the row under the cursor was clicked twice."""

    def __init__(self, *, id: str | None = None, title: str = "") -> None:  # noqa: A002  Textual's own name for it
        super().__init__(id=id)
        self.border_title = title or self.BORDER_TITLE
        self._view: Rows = no_rows
        self._start = ""
        self._rows: Sequence[ListRow] = ()
        self._keys: Sequence[str] = ()
        self._cursor = ""
        self._moved = False
        self._rich_styles: dict[tuple[str, bool], RichStyle] = {}

    @property
    def key(self) -> str:
        """The row under the cursor; "" for none."""
        return self._cursor

    @property
    def rows(self) -> Sequence[ListRow]:
        """Return the rows that are shown."""
        return self._rows

    def show(self, view: Rows, start: str = "") -> None:
        """Draw what a view makes.

        Args:
            start: the key of the row that the cursor is on until it is moved; "" for the first.
        """
        self._view, self._start = view, start
        self._redraw()
        if start and not self._moved:
            self.call_after_refresh(self._into_sight)

    def begin(self) -> None:
        """Begin at the top again, as if the cursor had never been moved."""
        self._moved = False
        self.scroll_home(animate=False)
        self._redraw()
        self.refresh()

    def move_to(self, key: str) -> None:
        """Put the cursor on the row with that key, and bring it into sight."""
        self._moved = True
        if key != self._cursor and key in self._keys:
            self._cursor = key
            self._redraw()
            self.refresh()
            self.post_message(self.Moved(self, key))
        self._into_sight()

    # Keys and the mouse

    def action_move(self, way: int) -> None:
        """Move to the next row with a key; where that is out of sight, first scroll to it, a screenful at a time."""
        here, places = self._place_of(self._cursor), self._places()
        further = [index for index in places if (index > here if way > 0 else index < here)]
        top, height = self.scroll_offset.y, self.scrollable_content_region.height
        if not further:
            self.scroll_relative(y=way, animate=False)
            return
        target = further[0] if way > 0 else further[-1]
        hidden = target - (top + height - 1) if way > 0 else top - target
        if hidden <= 1:
            self.move_to(self._keys[target])
        else:
            self.scroll_relative(y=way * min(hidden, max(1, height - _OVERLAP)), animate=False)

    def action_page(self, way: int) -> None:
        """Scroll a screenful up or down, and the cursor with it."""
        lines = max(1, self.scrollable_content_region.height - 1)
        wanted = self._place_of(self._cursor) + way * lines
        self.scroll_relative(y=way * lines, animate=False)
        if places := self._places():
            self.move_to(self._keys[min(places, key=lambda index: abs(index - wanted))])

    def action_edge(self, index: int) -> None:
        """Move to the first or the last row."""
        if places := self._places():
            self.move_to(self._keys[places[index]])
        self.scroll_to(y=0 if index == 0 else self.max_scroll_y, animate=False)

    def action_choose(self) -> None:
        """Act on the row under the cursor."""
        if self._cursor:
            self.post_message(self.Chosen(self, self._cursor))

    def on_click(self, event: Click) -> None:
        """Choose a row; a second click on it acts."""
        key = self.row_at(event)
        if key and key == self._cursor and event.chain > 1:
            self.action_choose()
        elif key:
            self.move_to(key)

    def row_at(self, event: MouseEvent) -> str:
        """Return the key of the row under the pointer."""
        index = event.get_content_offset_capture(self).y + self.scroll_offset.y
        return self._keys[index] if 0 <= index < len(self._keys) else ""

    # Drawing

    def on_resize(self) -> None:
        """Lines are made for a width."""
        self._redraw()

    def on_focus(self) -> None:
        """Show the cursor where the keys go."""
        self.refresh()

    def on_blur(self) -> None:
        """Hide the cursor when the keys go elsewhere."""
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Render one line of the widget."""
        width, index = self.size.width, y + self.scroll_offset.y
        if not 0 <= index < len(self._rows):
            return Strip.blank(width, self._rich_style("", here=False))
        line = self._rows[index]
        here = self.has_focus and bool(line.key) and line.key == self._cursor
        segments = [Segment(CURSOR if here else " ", self._rich_style("$primary", here=here))]
        segments += [Segment(text, self._rich_style(style, here=here)) for text, style in line.spans if text]
        return Strip(segments).adjust_cell_length(width, self._rich_style("", here=here))

    def notify_style_update(self) -> None:
        """Another theme: other colours."""
        self._rich_styles.clear()
        super().notify_style_update()

    def _rich_style(self, style: str, *, here: bool) -> RichStyle:
        """Return a style over the widget's colours, or over the cursor's."""
        if (style, here) not in self._rich_styles:
            ground = self.get_visual_style("rows--cursor") if here else self.visual_style
            drawn = ground + Style.parse(style) if style else ground
            self._rich_styles[style, here] = (_seen(drawn, ground) if here else drawn).rich_style
        return self._rich_styles[style, here]

    def _redraw(self) -> None:
        width = self.scrollable_content_region.width - len(CURSOR)
        if width <= 0:
            return
        before, self._rows = self._rows, self._view(width, self._cursor)
        self._keys = keys_of(self._rows)
        if not self._moved or self._cursor not in self._keys:
            keys = [key for key in self._keys if key]
            first = self._start if self._start in keys else next(iter(keys), "")
            if first != self._cursor:
                self._cursor = first
                self._rows = self._view(width, first)
                self._keys = keys_of(self._rows)
        self.virtual_size = Size(width, len(self._rows))
        if len(before) != len(self._rows):
            self.refresh()
            return
        top = self.scroll_offset.y
        for index in range(max(0, top), min(len(before), top + self.size.height)):
            if before[index] != self._rows[index]:
                self.refresh(Region(0, index - top, self.size.width, 1))

    def _into_sight(self) -> None:
        """Scroll to the row under the cursor and to what belongs to it: the lines up to the next row with a key."""
        if not self._cursor:
            return
        here = self._place_of(self._cursor)
        end = next((index for index in self._places() if index > here), len(self._rows))
        if end - here > self.scrollable_content_region.height:
            self.scroll_to(y=here, animate=False, force=True)
        else:
            self.scroll_to_region(Region(0, here, 1, end - here), animate=False, force=True)

    def _places(self) -> list[int]:
        """Return the lines that the cursor can be on."""
        return [index for index, key in enumerate(self._keys) if key]

    def _place_of(self, key: str) -> int:
        """Return the line with that key; the first line for none."""
        return self._keys.index(key) if key and key in self._keys else 0


class FixedRows(RowList, can_focus=False):
    """Lines that are only looked at."""


def _seen(drawn: Style, ground: Style) -> Style:
    """Return a style with the ground's own colour where its colour can hardly be seen on that ground."""
    on, colour = drawn.background, drawn.foreground
    if on is None or colour is None or on != ground.background or contrast(on + colour, on) >= LEAST_CONTRAST:
        return drawn
    return replace(drawn, foreground=ground.foreground)
