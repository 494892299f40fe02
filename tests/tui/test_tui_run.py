"""`run --tui`: a command and the Monitor on it. After a change that is meant: `pytest --snapshot-update`, and look."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Button

from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.main_screen import KeyBar
from gpumem_tui.tui.monitor.history import HistoryChart
from gpumem_tui.tui.monitor.processes import ProcessTable
from gpumem_tui.tui.run.screen import CommandPane, RunScreen
from tests.scenes import run as run_scene
from tests.scenes.monitor import shown
from tests.scenes.pictures import SIZES, Compare, stands_still, until
from tests.scenes.reading import text_of
from tests.scenes.run import Command

SIZE = (120, 40)


def screen_of(pilot: Pilot[int]) -> RunScreen:
    screen = pilot.app.screen_stack[0]
    assert isinstance(screen, RunScreen)
    return screen


def pane_of(pilot: Pilot[int]) -> CommandPane:
    return screen_of(pilot).query_one(CommandPane)


async def trains(pilot: Pilot[int]) -> None:
    """Wait until the Monitor has found the command's process, and the pane its output."""
    await until(pilot, lambda: screen_of(pilot).state.cursor is not None and "420/1000" in pane_of(pilot).text)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_the_output_and_the_monitor_on_the_command(size: tuple[int, int]) -> None:
    command = Command()
    async with run_scene.app(command).run_test(size=size) as pilot:
        await trains(pilot)
        assert pane_of(pilot).text.splitlines() == [
            "$ python train.py --epochs 10",
            "loading the corpus",
            "epoch 0: loss 3.000",
            "epoch 1: loss 1.500",
            "epoch 2: loss 1.000",
            "epoch 3:  42%|████▏     | 420/1000 [02:05<02:52,  3.36it/s]",
        ]
        assert "▸  0    4100 ada" in shown(pilot, ProcessTable)
        region = pane_of(pilot).scrollable_content_region
        await until(pilot, lambda: command.sizes[-1] == (region.width, region.height))
        beside, monitor = pane_of(pilot).region, screen_of(pilot).query_one("#monitor-pane").region
        assert not beside.intersection(monitor).area
        assert beside.area + monitor.area == size[0] * (size[1] - 1)
        command.end(0)


async def test_an_unfinished_line_is_written_over() -> None:
    command = Command()
    async with run_scene.app(command).run_test(size=SIZE) as pilot:
        await trains(pilot)
        command.say("\r\x1b[31mepoch 3:  99%\x1b[2K\x07")
        await until(pilot, lambda: pane_of(pilot).text.endswith("\nepoch 3:  99%"))
        command.say("\repoch 3: done\nepoch 4")
        await until(pilot, lambda: pane_of(pilot).text.endswith("\nepoch 3: done\nepoch 4"))
        command.end(0)


@pytest.mark.parametrize(("exit_code", "signal", "code"), [(0, None, 0), (3, None, 3), (None, 9, 137), (None, 2, 130)])
async def test_it_ends_with_the_command_and_its_exit_code(exit_code: int | None, signal: int | None, code: int) -> None:
    command = Command()
    app = run_scene.app(command)
    async with app.run_test(size=(80, 24)) as pilot:
        await trains(pilot)
        command.end(exit_code, signal)
        await until(pilot, lambda: app.return_value is not None)
    assert app.return_value == code


async def test_q_asks_before_it_ends_the_command() -> None:
    command = Command()
    app = run_scene.app(command)
    async with app.run_test(size=SIZE) as pilot:
        await trains(pilot)
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, ModalScreen))
        await pilot.press("n")
        await until(pilot, lambda: not isinstance(app.screen, ModalScreen))
        assert command.ended is None
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, ModalScreen))
        await pilot.press("y")
        await until(pilot, lambda: app.return_value is not None)
    assert app.return_value == 128 + 15
    assert not command.killed


async def test_the_question_has_one_answer_that_goes_on() -> None:
    command = Command()
    app = run_scene.app(command)
    async with app.run_test(size=SIZE) as pilot:
        await trains(pilot)
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, ModalScreen))
        assert app.screen.query_one("#confirm").border_title == "Stop training and quit?"
        assert [str(each.label) for each in app.screen.query(Button)] == ["Keep running (n)", "Stop (y)"]
        await pilot.press("n")
        command.end(0)


@pytest.mark.parametrize("size", [(40, 16), (80, 24), (120, 40), (160, 40)])
async def test_help_and_quit_are_always_among_the_keys(size: tuple[int, int]) -> None:
    command = Command()
    async with run_scene.app(command).run_test(size=size) as pilot:
        await trains(pilot)
        assert (
            text_of(screen_of(pilot).query_one(KeyBar))
            .split("palette")[0]
            .split("^p")[0]
            .rstrip()
            .endswith("? help  q quit")
        )
        command.end(0)


async def test_a_command_that_does_not_end_is_killed() -> None:
    command = Command()
    command.obeys = False
    app = run_scene.app(command)
    async with app.run_test(size=(80, 24)) as pilot:
        await trains(pilot)
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, ModalScreen))
        await pilot.press("y")
        await until(pilot, lambda: app.return_value is not None)
    assert (command.killed, app.return_value) == (True, 137)


async def test_ctrl_c_and_what_is_typed_into_its_pane_go_to_the_command() -> None:
    command = Command()
    app = run_scene.app(command)
    async with app.run_test(size=SIZE) as pilot:
        await trains(pilot)
        await pilot.press("ctrl+c")
        assert command.sent == b"\x03"
        await pilot.press("slash", "escape")
        assert command.sent == b"\x03", "the Monitor has the keys"
        pane_of(pilot).focus()
        await pilot.pause()
        assert "keys go to it" in str(pane_of(pilot).border_title)
        await pilot.press("y", "e", "s", "q", "backspace", "enter", "ctrl+c")
        assert command.sent == b"\x03yesq\x7f\r\x03"
        assert not isinstance(app.screen, ModalScreen)
        command.end(0)


async def test_each_pane_alone() -> None:
    command = Command()
    app = run_scene.app(command)
    async with app.run_test(size=SIZE) as pilot:
        await trains(pilot)
        await pilot.press("z")
        await until(pilot, lambda: pane_of(pilot).region.height == 39)
        await pilot.press("z")
        await until(pilot, lambda: screen_of(pilot).query_one("#monitor-pane").region.height == 39)
        assert command.sent == b""
        await pilot.press("z")
        await until(pilot, lambda: 0 < pane_of(pilot).region.height < 39)
        assert pane_of(pilot).text.count("epoch 1") == 1
        command.end(0)


async def test_a_terminal_that_is_too_small() -> None:
    command = Command()
    app = run_scene.app(command)
    async with app.run_test(size=(60, 12)) as pilot:
        await until(pilot, lambda: "needs 40×16, this is 60×12" in text_of(app.screen.query_one("#too-small", Lines)))
        command.end(0)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_how_it_looks(snap_compare: Compare, size: tuple[int, int]) -> None:
    command = Command()

    async def settled(pilot: Pilot[int]) -> None:
        await trains(pilot)
        if size[0] > 80:
            await until(pilot, lambda: "PID 4100" in shown(pilot, HistoryChart))
        await stands_still(pilot)

    assert snap_compare(run_scene.app(command), terminal_size=size, run_before=settled)
    command.end(0)
