"""The manual on the screen: topics to pick from, keys that do not leave it, code that is not cut."""

from __future__ import annotations

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import OptionList
from textual.widgets._markdown import MarkdownFence

from gpumem_tui.manual import TOPICS, titles
from gpumem_tui.tui.kit.dialogs import TextScreen
from gpumem_tui.tui.kit.manual import ManualApp, ManualScreen
from tests.scenes.pictures import until
from tests.scenes.reading import read_picture


def shown(pilot: Pilot[None]) -> str:
    return read_picture(pilot.app.export_screenshot())


def manual_of(app: App[None]) -> ManualScreen:
    assert isinstance(app.screen, ManualScreen)
    return app.screen


async def test_a_topic_is_picked_by_enter_and_by_a_click_and_esc_leads_back() -> None:
    app = ManualApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: titles()["accuracy"] in shown(pilot))
        await pilot.press("down", "enter")
        await until(pilot, lambda: titles()[TOPICS[1]] in shown(pilot) and not app.screen.query_one(OptionList).display)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen.query_one(OptionList).display)
        await pilot.press("escape")
        assert app.is_running
        manual_of(app)
        await pilot.click(OptionList, offset=(4, 4))
        await until(pilot, lambda: not app.screen.query_one(OptionList).display)
        await pilot.press("n", "q")
    assert not app.is_running


async def test_a_question_mark_shows_the_keys_and_does_not_leave() -> None:
    app = ManualApp("plan")
    async with app.run_test(size=(80, 24)) as pilot:
        manual = manual_of(app)
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        await until(pilot, lambda: "the list of topics; enter or a click opens one" in shown(pilot).lower())
        await pilot.press("question_mark")
        await until(pilot, lambda: app.screen is manual)


@pytest.mark.parametrize("topic", ["commands", "plan"])
async def test_code_is_whole_at_80_columns(topic: str) -> None:
    app = ManualApp(topic)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: bool(app.screen.query(MarkdownFence)))
        await pilot.pause()
        fences = list(app.screen.query(MarkdownFence))
        assert any(len(line) > 72 for fence in fences for line in fence.code.splitlines()), "nothing to wrap"
        for fence in fences:
            assert fence.virtual_size.width <= fence.size.width
