"""Load is seen at a glance: colours by use, free GPUs, and the order that `o` and a letter choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.color import Color
from textual.command import CommandPalette
from textual.events import Key
from textual.screen import Screen

from gpumem_tui.memory import GIB, MIB, Unknown
from gpumem_tui.monitor.devices import is_free
from gpumem_tui.monitor.snapshot import GpuReading
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.dialogs import TextScreen
from gpumem_tui.tui.kit.figures import ListRow
from gpumem_tui.tui.kit.glyphs import (
    CAPACITY_COLOUR,
    FORMULA_COLOUR,
    LEAST_CONTRAST,
    THEMES,
    TRACED_COLOUR,
    TRIED_COLOUR,
    contrast,
)
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.manual import ManualScreen
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.kit.shares import bar
from gpumem_tui.tui.monitor.gpus import GpuPanel, shares, used_span, utilization_span
from gpumem_tui.tui.monitor.load import busy_colour, load_colour, memory_colour
from gpumem_tui.tui.monitor.ordering import LETTERS, OrderScreen
from gpumem_tui.tui.monitor.state import MonitorState, SortBy
from tests.monitor.snapshots import changed
from tests.scenes import monitor as scene
from tests.scenes.pictures import until
from tests.scenes.reading import text_of

_EVERY = _LIGHT, _MODERATE, _HEAVY = "$load-light", "$load-moderate", "$load-heavy"


def _used(gib: float, busy: int = 0) -> GpuReading:
    return changed(scene.gpu(1, [scene.process(4100, int(gib * GIB))], unaccounted_bytes=0), utilization_percent=busy)


def _free(index: int) -> GpuReading:
    gpu = changed(scene.gpu(index, [], unaccounted_bytes=3 * MIB), utilization_percent=0)
    assert is_free(gpu)
    return gpu


@pytest.mark.parametrize(("gib", "colour"), [(0.5, _LIGHT), (16, _MODERATE), (60, _MODERATE), (70, _HEAVY)])
def test_memory_is_green_yellow_red_by_use(gib: float, colour: str) -> None:
    gpu = _used(gib)
    assert memory_colour(gpu) == colour
    assert colour in used_span(MonitorState(), gpu, 12)[1]


@pytest.mark.parametrize(("busy", "colour"), [(9, _LIGHT), (10, _MODERATE), (74, _MODERATE), (75, _HEAVY)])
def test_utilization_is_green_yellow_red_by_use(busy: int, colour: str) -> None:
    gpu = _used(0.5, busy)
    assert busy_colour(gpu) == utilization_span(gpu)[1] == colour


def test_the_bar_has_the_colour_of_what_the_gpu_is_loaded_with_most() -> None:
    gpu = _used(16, 90)
    assert load_colour(gpu) == _HEAVY
    assert any(style == _HEAVY for _, style in bar(shares(gpu, {}), 40))


def test_what_is_unknown_has_no_colour() -> None:
    gpu = changed(_used(16), utilization_percent=Unknown("not supported"))
    assert busy_colour(gpu) == ""
    assert load_colour(gpu) == memory_colour(gpu) == _MODERATE


def test_a_free_gpu_stands_out() -> None:
    idle, used = (
        next((drawn, style) for drawn, style in bar(shares(gpu, {}), 60) if "free" in drawn)
        for gpu in (_free(0), _used(16))
    )
    assert idle[1] == f"bold $background on {_LIGHT}"
    assert "bold" not in used[1]


async def test_free_gpus_come_first_on_demand() -> None:
    app = scene.app(scene.of([_used(16), _free(2), _used(70), _free(3)]))
    screen = scene.screen_of(app)
    async with app.run_test(size=(120, 40)) as pilot:
        before = [gpu.index for gpu in screen.state.gpus]
        await pilot.press("o", "f")
        await until(pilot, lambda: screen.state.free_first)
        assert [gpu.index for gpu in screen.state.gpus] == [2, 3, 1, 1] != before
        drawn = text_of(screen.query_one(GpuPanel))
        assert drawn.index("2 NVIDIA") < drawn.index("1 NVIDIA")
        await pilot.press("o", "f")
        assert [gpu.index for gpu in screen.state.gpus] == before


@pytest.mark.parametrize(("letter", "column"), LETTERS.items())
async def test_o_then_a_letter_sorts_by_a_column(letter: str, column: SortBy) -> None:
    app = scene.app(scene.machine(2))
    screen = scene.screen_of(app)
    async with app.run_test(size=(120, 40)) as pilot:
        reverse = screen.state.sort is column
        await pilot.press("o", letter)
        assert (screen.state.sort, screen.state.reverse) == (column, reverse)
        await pilot.press("o", letter)
        assert (screen.state.sort, screen.state.reverse) == (column, not reverse)


async def test_a_letter_typed_twice_at_once_closes_the_list_once() -> None:
    app = scene.app(scene.machine(2))
    screen = scene.screen_of(app)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("o")
        opened = app.screen
        for _ in range(2):  # both before the first is answered, as a held key sends them
            opened._forward_event(Key("u", "u"))
        await until(pilot, lambda: app.screen is screen)
        await pilot.pause()
        assert (screen.state.sort, screen.state.reverse) == (SortBy.USER, False)


async def test_the_command_palette_may_be_closed_twice() -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("ctrl+p")
        palette = app.screen
        palette.dismiss()
        palette.dismiss()
        await until(pilot, lambda: app.screen is scene.screen_of(app))


async def test_the_command_palette_opens_again_while_the_last_one_is_taken_away() -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("ctrl+p")
        former = app.screen
        former.dismiss()
        app.action_command_palette()
        assert former.is_attached
        assert app.screen is not former
        await until(pilot, lambda: not former.is_attached)
        assert isinstance(app.screen, CommandPalette)


@pytest.mark.parametrize(
    ("make", "action"),
    [(CommandPalette, "cursor_down"), (CommandPalette, "escape"), (lambda: TextScreen("a text", []), "scroll(1)")],
)
async def test_a_key_that_comes_before_a_dialogue_is_mounted_does_nothing(
    make: Callable[[], Screen[Any]], action: str
) -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=(120, 40)):
        opened, dialogue = app.push_screen(make()), app.screen
        assert not dialogue.query("*")
        await app.run_action(action, dialogue)
        await opened
        assert app.screen is dialogue


async def test_a_page_further_in_a_list_without_a_line_is_nowhere() -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=(120, 40)) as pilot:
        await app.push_screen(ManualScreen())
        await pilot.press("down")
        await pilot.resize_terminal(3, 3)
        await pilot.press("pagedown", "pageup")
        assert isinstance(app.screen, ManualScreen)


async def test_a_dialogue_that_ends_takes_along_what_is_open_over_it() -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("o")
        order = app.screen
        await pilot.press("ctrl+p")
        await until(pilot, lambda: app.screen is not order)
        order.dismiss(None)
        await until(pilot, lambda: app.screen is scene.screen_of(app))


def test_each_column_has_a_letter() -> None:
    assert set(LETTERS.values()) == set(SortBy)
    assert "".join(LETTERS) == "gnscmtupl", "fingers know them"


async def test_o_on_a_process_that_has_no_plan_says_why() -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "o")
        screen = app.screen
        assert isinstance(screen, OrderScreen)
        said = " ".join(text_of(screen.query_one("#letters", Lines)).split())
        assert "no plan: pid 4100 has no probe" in said
        await pilot.press("o")
        await until(pilot, lambda: any("no plan" in each.message for each in app._notifications))
        assert app.screen is scene.screen_of(app)


_DRAWN = *_EVERY, FORMULA_COLOUR, TRACED_COLOUR, TRIED_COLOUR, CAPACITY_COLOUR
_APP = GpuMemApp({}, "monitor")
_CURSOR = "RowList > .rows--cursor { background: $block-cursor-background; color: $block-cursor-foreground; }"
_TERMINALS = {True: Color.parse("black"), False: Color.parse("white")}
"""The background that a theme assumes where it leaves that to the terminal, by whether it is dark."""


@pytest.mark.parametrize("name", sorted(_APP.available_themes))
def test_load_and_plots_are_seen_on_the_background_of_each_theme(name: str) -> None:
    _APP.theme = name
    colours = _APP.get_css_variables()
    own = {"block-cursor-background": _EVERY} if name in {theme.name for theme in THEMES} else {}
    for place, drawn in {"background": _DRAWN, "surface": _DRAWN, **own}.items():
        text = colours[place]
        ground = _TERMINALS[_APP.current_theme.dark] if text.startswith("ansi") else Color.parse(text)
        named = {each: colours[each.removeprefix("$")] for each in drawn}
        found = {each: contrast(Color.parse(colour), ground) for each, colour in named.items() if colour[0] == "#"}
        assert min(found.values()) >= LEAST_CONTRAST, (place, text, found)


@pytest.mark.parametrize("name", sorted(_APP.available_themes))
def test_text_is_seen_under_the_cursor_of_each_theme(name: str) -> None:
    _APP.theme = name
    colours = _APP.get_css_variables()
    cursor, ground = colours["block-cursor-foreground"], Color.parse(colours["block-cursor-background"])
    shown = ground.get_contrast_text(0.87) if cursor.startswith("auto") else Color.parse(cursor)
    assert contrast(shown, ground) >= LEAST_CONTRAST


async def test_what_cannot_be_seen_under_the_cursor_has_the_cursors_colour() -> None:
    app = GpuMemApp({"monitor": MainScreen}, "monitor", theme="catppuccin-mocha")
    async with app.run_test() as pilot:
        app.stylesheet.add_source(_CURSOR)
        await app.screen.mount(rows := RowList())
        rows.focus()
        rows.show(lambda _width, _cursor: [ListRow((("full", f"bold {_HEAVY}"),), key) for key in "ab"])
        await pilot.pause()
        chosen, other = (rows.render_line(y)._segments[1].style for y in range(2))
    assert chosen is not None
    assert other is not None
    assert other.color == Color.parse(app.theme_variables["load-heavy"]).rich_color
    assert chosen.color == Color.parse(app.theme_variables["block-cursor-foreground"]).rich_color
    assert chosen.bold


def test_black_on_white_is_the_largestcontrast() -> None:
    assert contrast(Color.parse("black"), Color.parse("white")) == pytest.approx(21)
