"""Rows that change: only the cells that differ are made, with the same characters as the whole row has."""

from __future__ import annotations

import gc
import random

import pytest
from rich.cells import cached_cell_len
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.strip import Strip

from gpumem_tui.tui.kit.figures import Row, span_width
from gpumem_tui.tui.kit.lines import Lines, _differing
from tests.scenes import monitor as scene

_WIDTH = 60
_TEXTS = ("abc ", "· free 54.62 ", "█▓▒", "進捗 ", "a進b", "─" * 9, "é…", " ")
_STYLES = ("", "bold", "$warning")


class _Program(App[None]):
    def compose(self) -> ComposeResult:
        yield Lines()


def _row(numbers: random.Random) -> Row:
    return [(numbers.choice(_TEXTS), numbers.choice(_STYLES)) for _ in range(numbers.randrange(9))]


def _cells(strip: Strip) -> list[tuple[str, object]]:
    return [(character, segment.style) for segment in strip for character in segment.text]


async def test_a_part_of_a_row_is_a_part_of_the_whole() -> None:
    numbers = random.Random(40)
    program = _Program()
    async with program.run_test(size=(_WIDTH, 4)):
        lines = program.query_one(Lines)
        for _ in range(300):
            lines.show_rows([_row(numbers)])
            whole = lines.render_line(0)
            begin = numbers.randrange(_WIDTH - 1)
            end = numbers.randrange(begin + 1, _WIDTH + 1)
            [part] = lines.render_lines(Region(begin, 0, end - begin, 1))
            assert part.cell_length == end - begin == sum(segment.cell_length for segment in part)
            assert _cells(part) == _cells(whole.crop(begin, end))


def test_cells_outside_of_what_differs_are_equal() -> None:
    numbers = random.Random(41)
    for _ in range(2000):
        old = _row(numbers)
        new = [*old]
        if new:
            new[numbers.randrange(len(new))] = (numbers.choice(_TEXTS), numbers.choice(_STYLES))
        if old == new:
            continue
        begin, end = _differing(old, new)
        before, after = ([(text, style) for text, style in row for text in text] for row in (old, new))
        assert _at(before, 0, begin) == _at(after, 0, begin)
        most = max(span_width(old), span_width(new))
        assert begin < end <= most
        assert _at(before, end, most) == _at(after, end, most)


def _at(row: Row, begin: int, end: int) -> Row:
    """Return the characters of a row that begin in these cells."""
    found, at = [], 0
    for span in row:
        if begin <= at < end:
            found.append(span)
        at += span_width([span])
    return found


@pytest.mark.parametrize("gpus", [8])
async def test_a_monitor_that_stays_open_has_no_text_kept_by_rich(gpus: int) -> None:
    program = scene.app(scene.at(0, gpus))
    async with program.run_test(size=(120, 40)) as pilot:
        source = scene.screen_of(program).feed.source
        kept = 0
        for second in range(1, 41):
            source.show(scene.at(second, gpus))  # type: ignore[attr-defined]
            scene.screen_of(program).look()
            await pilot.pause()
            if second == 10:
                kept = cached_cell_len.cache_info().currsize
        assert cached_cell_len.cache_info().currsize - kept < 30


async def test_a_line_that_was_drawn_is_gone_with_the_last_who_has_it() -> None:
    program = _Program()
    async with program.run_test(size=(_WIDTH, 4)):
        line = program.query_one(Lines).render_line(0)
        gc.collect()
        assert line.divide([line.cell_length]) == [line] == line.divide([line.cell_length, line.cell_length + 9])
        assert [piece.text for piece in line.divide([1, 3])] == [" ", "  "]
        del line
        assert gc.collect() == 0
