"""The terminal program in a terminal of its own: what it shows is kept as text and as a picture."""

from __future__ import annotations

import io
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

_PLAIN_COLOURS = {"brown": "yellow", "brightbrown": "bright_yellow", "bfightmagenta": "bright_magenta"}
"""pyte's names for some of the sixteen colours, one with a slip; the others are rich's, but for the underscore."""


def keep(screen: Any, path: Path) -> None:
    """Write what a `pyte.Screen` shows next to `path`: .txt, and .svg in the look of the README's pictures."""
    path.with_suffix(".txt").write_text("\n".join(line.rstrip() for line in screen.display) + "\n", encoding="utf-8")
    path.with_suffix(".svg").write_text(picture(screen, path.stem), encoding="utf-8")


def picture(screen: Any, name: str) -> str:
    """A `pyte.Screen` as SVG, as Textual exports its own; `name` in the place of an id that rich makes at random."""
    console = Console(
        width=screen.columns, height=screen.lines, file=io.StringIO(), force_terminal=True, color_system="truecolor",
        record=True, legacy_windows=False,
    )  # fmt: skip
    console.print(Text("\n").join(_line(screen, row) for row in range(screen.lines)), end="", no_wrap=True)
    return re.sub(r"terminal-\d+", f"terminal-{name}", console.export_svg(title="gpumem-tui"))


def _line(screen: Any, row: int) -> Text:
    """A row, with one span for neighbours that look alike."""
    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    spans = ((style, "".join(cell.data for cell in alike)) for style, alike in groupby(cells, _style))
    return Text.assemble(*((text, style) for style, text in spans))


def _style(cell: Any) -> Style:
    return Style(
        color=_colour(cell.fg),
        bgcolor=_colour(cell.bg),
        bold=cell.bold,
        italic=cell.italics,
        underline=cell.underscore,
        strike=cell.strikethrough,
        reverse=cell.reverse,
    )


def _colour(name: str) -> str | None:
    """A colour of pyte's in rich's words; None for the terminal's own."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return _PLAIN_COLOURS.get(name) or name.replace("bright", "bright_")
