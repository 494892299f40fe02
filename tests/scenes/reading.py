"""The text of a screen, for checks that need no picture."""

from __future__ import annotations

import re
from html import unescape

from rich.cells import cell_len
from textual.app import App

from gpumem_tui.tui.kit.lines import Lines
from tests.scenes.pictures import Before

_CELL = 12.2
"""The width of a cell in Rich's SVG export: 20 px letters of 61 % their height (rich/console.py, export_svg)."""

_TEXT = re.compile(r'<text [^>]*x="([\d.]+)"[^>]*clip-path="url\(#[\w-]*line-(\d+)\)"[^>]*>([^<]*)</text>')


def read_picture(svg: str) -> str:
    """The lines of a terminal in an SVG of Rich's."""
    lines: dict[int, str] = {}
    for x, number, content in _TEXT.findall(svg):
        line, column = lines.get(int(number), ""), round(float(x) / _CELL)
        lines[int(number)] = (
            line + " " * (column - cell_len(line)) + unescape(content).replace("\xa0", " ").rstrip("\n")
        )
    return "\n".join(lines.get(number, "") for number in range(max(lines, default=0) + 1))


def text_of(widget: Lines) -> str:
    """Its text."""
    return "\n".join("".join(part for part, _ in row) for row in widget.rows)


async def assert_shown(app: App[int], *wanted: str, size: tuple[int, int], before: Before) -> None:
    """Run the program, do what comes before, and look for every text on its screen."""
    async with app.run_test(size=size) as pilot:
        await before(pilot)
        text = read_picture(app.export_screenshot())
        missing = [part for part in wanted if part not in text]
        assert not missing, f"{missing} not in\n{text}"
