"""A program that only watches: every act that reaches out of it is refused, whichever way it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from textual.screen import ModalScreen

from gpumem_tui.errors import OptionError
from gpumem_tui.options.configuration import Options
from gpumem_tui.settings import Settings
from gpumem_tui.tui import start
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.main_screen import EVERY_ACT, Act, KeyBar, refusal
from gpumem_tui.tui.monitor.process_actions import ProcessActions
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.tui.search.state import Stage
from tests.monitor.scripted import Scripted
from tests.scenes import monitor as monitor_scene
from tests.scenes import plan as plan_scene
from tests.scenes import search as scene
from tests.scenes import watch as watch_scene
from tests.scenes.monitor import shown
from tests.scenes.pictures import until

SIZE = (120, 40)


def _monitor() -> GpuMemApp:
    snapshot, published = watch_scene.training()
    app = monitor_scene.app(snapshot, probes=watch_scene.Said(published))
    app.forbidden = EVERY_ACT
    return app


def _notices(app: GpuMemApp) -> set[str]:
    return {note.message for note in app._notifications}


async def test_the_monitor_offers_none_of_it() -> None:
    app = _monitor()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down")
        await until(pilot, lambda: "details" in shown(pilot, KeyBar))
        keys = shown(pilot, KeyBar)
        assert not any(word in keys for word in ("look", "attach", "terminate", "kill"))
        await pilot.press("l", "a", "T", "K", "C")
        assert not isinstance(app.screen, ModalScreen)


@pytest.mark.parametrize(
    ("act", "ask"),
    [
        (Act.END, lambda screen: screen.action_end("kill")),
        (Act.ATTACH, lambda screen: screen.action_attach()),
        (Act.LOOK, lambda screen: screen.action_look()),
        (Act.WRITE, lambda screen: screen.action_keep_context()),
    ],
)
async def test_asked_for_past_the_keys_it_is_refused(act: Act, ask: Callable[[ProcessActions], None]) -> None:
    app = _monitor()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down")
        ask(monitor_scene.screen_of(app))
        await until(pilot, lambda: refusal(act) in _notices(app))
        assert not isinstance(app.screen, ModalScreen)


async def test_no_search_is_started_nor_its_form_opened() -> None:
    config = scene.config()
    search = scene.search_screen(scene.app(config, scene.scripted(scene.running(config)), autostart=False))
    app = GpuMemApp({"search": lambda: search}, "search", forbidden=EVERY_ACT)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("s", "e")
        assert not isinstance(app.screen, ModalScreen)
        assert "start" not in {active.binding.action for active in search.active_bindings.values() if active.enabled}
        search.action_start()
        await until(pilot, lambda: refusal(Act.SEARCH) in _notices(app))
        assert search.state.stage is Stage.IDLE


async def test_no_picture_of_the_screen_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = plan_scene.app(plan_scene.GPT2)
    async with app.run_test(size=SIZE) as pilot:
        await plan_scene.settled(pilot)
        app._save_picture()
        assert [path.suffix for path in tmp_path.iterdir()] == [".svg"]
        app.forbidden = EVERY_ACT
        app._save_picture()
        await until(pilot, lambda: refusal(Act.WRITE) in _notices(app))
    assert len(list(tmp_path.iterdir())) == 1


async def test_settings_that_are_read_only_hold_for_the_whole_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the Monitor there is no way to a search; who types `search` gets one, but ends no process from it."""
    opened: list[GpuMemApp] = []

    def run_app(app: GpuMemApp) -> int:
        opened.append(app)
        return 0

    monkeypatch.setattr("gpumem_tui.tui.app.run_app", run_app)
    start.open_monitor(Scripted(monitor_scene.machine(1)), Settings(read_only=True))
    start.open_search(Options(), scene.config(), autostart=False, settings=Settings(read_only=True))
    start.open_monitor(Scripted(monitor_scene.machine(1)), Settings())
    watching, searching, usual = opened
    assert watching.forbidden == EVERY_ACT
    with pytest.raises(OptionError, match="read-only: no search is started"):
        watching.main_screen("search")
    assert searching.forbidden == {Act.END, Act.ATTACH, Act.LOOK}
    assert usual.forbidden == set()
    assert isinstance(usual.main_screen("monitor"), MonitorScreen)
