"""Filters for terminals that cannot show all that is drawn: plain ASCII, and text without colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter, monochrome_style

from gpumem_tui.ascii import to_ascii


class AsciiFilter(LineFilter):
    """Replaces every drawn character by an ASCII one, drawn by any widget."""

    def apply(self, segments: list[Segment], _background: Color) -> list[Segment]:
        """Translate the text of every segment."""
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


class PlainFilter(LineFilter):
    """Under NO_COLOR shades of grey as Textual's own, but what alarms is highlighted more than the rest, never less.

    Args:
        colours: the theme's, by name; asked for at each line, as a theme may be changed.
    """

    def __init__(self, colours: Callable[[], Mapping[str, str]]) -> None:
        super().__init__()
        self._colours = colours

    def apply(self, segments: list[Segment], _background: Color) -> list[Segment]:
        """Write warnings bold, errors reversed; a line or a border that has such a colour is bold."""
        named = self._colours()
        bright = tuple(Color.parse(named[name]).rich_color for name in _BRIGHT)
        plain = Color.parse(named["foreground"]).monochrome.rich_color
        return [Segment(text, _without_colour(style, bright, plain, is_word=_has_word(text))) if style else
                Segment(text) for text, style, _ in segments]  # fmt: skip


_BRIGHT = ("load-heavy", "warning", "text-warning", "error", "text-error")
"""Colours that are as bright as the text without colours: a full GPU is no alarm, but no dimmer than an idle one."""


def _has_word(text: str) -> bool:
    return any(map(str.isalnum, text))


@lru_cache(1024)
def _without_colour(style: Style, bright: tuple[RichColor, ...], plain: RichColor, *, is_word: bool) -> Style:
    grey = monochrome_style(style)
    if style.bgcolor == bright[0]:
        return grey + Style(bgcolor=plain)
    if style.color not in bright:
        return grey
    place = bright.index(style.color)
    is_error = place >= _BRIGHT.index("error")
    return grey + Style(color=plain, bold=place > 0 or None, reverse=True if is_error and is_word else None)
