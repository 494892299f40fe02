"""From one main screen to another, with what the user had in hand."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from textual.app import ComposeResult
from textual.command import CommandPalette
from textual.containers import Vertical
from textual.events import Event, Resize
from textual.geometry import Size
from textual.widgets import Static

from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.plan.planned import of_model
from gpumem_tui.tui.plan.screen import PlanScreen
from gpumem_tui.tui.search.screen import SearchScreen
from gpumem_tui.tui.search.state import Stage
from tests.scenes import plan as plan_scene
from tests.scenes import search as scene
from tests.scenes.command_plan import ScriptedRuns, command_app, command_config, plan_screen, state_of
from tests.scenes.pictures import until
from tests.scenes.plan import plan_now


def _program() -> tuple[GpuMemApp, SearchScreen]:
    """On the Plan screen, with a Search screen that has another model and never ends a search by itself."""
    config = scene.config()
    search = scene.search_screen(scene.app(config, scene.scripted(scene.running(config)), autostart=False))
    wanted = replace(plan_scene.GPT2, recipe=Recipe("amp-bf16"))
    plan: MainScreen = PlanScreen(of_model(wanted, plan_scene.HandTracer), clock=scene.noon)
    return GpuMemApp({"search": lambda: search, "plan": lambda: plan}, "plan"), search


async def test_a_plan_is_searched(tmp_path: Path) -> None:
    app, search = _program()
    async with app.run_test(size=(120, 40)) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press("s")
        await until(pilot, lambda: app.screen is search and search.state.stage is Stage.RUNNING)
        config = search.state.config
        assert config.workload.shape == plan_scene.GPT2.shape
        assert config.workload.recipe == Recipe("amp-bf16")
        assert (config.device.gpu.name, config.device.simulated) == ("a100-80gb", True)
        assert config.target_batch == plan_scene.GPT2.target_batch


async def test_a_running_search_is_not_replaced(tmp_path: Path) -> None:
    app, search = _program()
    async with app.run_test(size=(120, 40)) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press("f2")
        await until(pilot, lambda: app.screen is search)
        await pilot.press("s")
        await until(pilot, lambda: search.state.stage is Stage.RUNNING)
        before = search.state.config
        await pilot.press("3")
        await until(pilot, lambda: isinstance(app.screen, PlanScreen))
        await pilot.press("s")
        await until(pilot, lambda: any("cancel it first" in toast.message for toast in app._notifications))
        assert search.state.config is before


async def test_another_plan_is_taken_up_and_undo_leads_back() -> None:
    app = plan_scene.app(plan_scene.GPT2)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await plan_scene.settled(pilot)
        screen.take_over(plan_scene.FITS)
        assert plan_now(pilot) == plan_scene.FITS
        await pilot.press("u")
        assert plan_now(pilot) == plan_scene.GPT2


async def test_a_model_is_not_planned_on_the_screen_of_a_command() -> None:
    app = command_app(ScriptedRuns(command_config()))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: plan_screen(app).settled and state_of(app).plan is not None)
        app.screen.post_message(MainScreen.Wanted("plan", plan_scene.GPT2))
        await until(pilot, lambda: any("a command is planned here" in toast.message for toast in app._notifications))


# Typed ahead: the key that leaves comes before what an earlier one opened is there


class _Slow(Vertical):
    """Takes a while to be put up, and fails if the program is left meanwhile; `begun` is set in the middle."""

    def __init__(self, begun: asyncio.Event) -> None:
        super().__init__()
        self._begun = begun

    async def on_mount(self) -> None:
        self._begun.set()
        await asyncio.sleep(0.3)
        await self.mount(Static())


class _SlowScreen(MainScreen):
    """A screen that takes a while to be put up."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    def compose_parts(self) -> ComposeResult:
        yield _Slow(self.begun)


@pytest.mark.parametrize("is_dialogue", [False, True])
async def test_leaving_waits_for_a_screen_that_is_being_put_up(is_dialogue: bool) -> None:
    slow = _SlowScreen()
    app = GpuMemApp({"monitor": MainScreen, "search": lambda: slow}, "monitor")
    async with app.run_test():
        if is_dialogue:
            app.push_screen(slow)
        else:
            app.action_show("search")
        await slow.begun.wait()
        await app.action_quit()
        assert slow.query(Static)
    assert app.return_value == 0


async def test_a_screen_that_is_made_while_the_program_is_left_is_not_shown() -> None:
    released = threading.Event()

    class Slowly(MainScreen):
        async def end(self) -> int:
            released.set()
            await asyncio.sleep(0.3)  # what was held up continues
            return await super().end()

    class Late(MainScreen):
        def __init__(self) -> None:
            released.wait(30)
            super().__init__()

    app = GpuMemApp({"monitor": Slowly, "search": Late}, "monitor")
    async with app.run_test() as pilot:
        await pilot.press("2")
        await app.action_quit()
        assert isinstance(app.screen, Slowly)
    assert app.return_value == 0


async def test_a_palette_that_was_opened_while_a_screen_was_made_does_not_stay() -> None:
    go_on = threading.Event()

    class Late(MainScreen):
        def __init__(self) -> None:
            go_on.wait(30)
            super().__init__()

    app = GpuMemApp({"monitor": MainScreen, "search": Late}, "monitor")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2", "ctrl+p")
        assert isinstance(app.screen, CommandPalette)
        go_on.set()
        await until(pilot, lambda: isinstance(app.screen, Late))
        await pilot.press("ctrl+p")
        assert isinstance(app.screen, CommandPalette)
        await pilot.press("escape", "1")
        await until(pilot, lambda: type(app.screen) is MainScreen)


async def test_no_key_begins_anything_once_the_program_is_left() -> None:
    app = GpuMemApp({"monitor": MainScreen}, "monitor")
    async with app.run_test():
        await app.action_quit()
        assert not await app.run_action("command_palette")
    assert app.return_value == 0


async def test_sizes_that_come_at_once_do_not_call_each_other_up_for_ever() -> None:
    resized: list[Size] = []
    endless = asyncio.Event()

    class Counting(MainScreen):
        async def on_event(self, event: Event) -> None:
            if not endless.is_set() or not isinstance(event, Resize):
                await super().on_event(event)

        def on_resize(self, event: Resize) -> None:
            resized.append(event.size)
            if len(resized) == 20:
                endless.set()
            self.call_later(lambda: None)  # with a message between them, sizes that wait are not merged

    async def rounds() -> None:
        """Wait until what waits for the screen and the app is done, and what that calls up, and so on many times."""
        for node in (app.screen, app) * 60:
            done = asyncio.Event()
            node.call_later(done.set)
            await done.wait()

    app = GpuMemApp({"monitor": Counting}, "monitor")
    async with app.run_test(size=(120, 40)) as pilot:
        for size in (Size(80, 24), Size(120, 40), Size(60, 20), Size(120, 40)):
            app.screen.post_message(Resize(size, size))
            app.screen.call_later(lambda: None)
        settled = asyncio.create_task(rounds())
        await asyncio.wait((settled, asyncio.create_task(endless.wait())), return_when=asyncio.FIRST_COMPLETED)
        assert not endless.is_set()
        told = len(resized)
        await rounds()
        assert len(resized) == told
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: (app.screen.size, resized[-1]) == (Size(80, 24), Size(80, 24)))


async def test_a_screen_is_made_once_however_the_keys_come(tmp_path: Path) -> None:
    """1, 3, 1 before the Monitor is there: a second one would read the driver for ever, and nobody would see it."""
    app, _ = _program()
    go_on = threading.Event()
    made: list[MainScreen] = []

    def slowly() -> MainScreen:
        made.append(MainScreen())
        go_on.wait(30)
        return made[-1]

    app._makers = {**app._makers, "monitor": slowly}
    app.add_mode("monitor", lambda: app.main_screen("monitor"))
    async with app.run_test(size=(120, 40)) as pilot:
        await plan_scene.settled(pilot)
        for name in ("monitor", "search", "monitor"):
            app.action_show(name)
            await pilot.pause(0.1)
        go_on.set()
        await until(pilot, lambda: bool(made) and app.screen is made[0])
    assert len(made) == 1
