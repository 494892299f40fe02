"""Panes and dialogues of the Plan screen, and what leaves it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from gpumem_tui.plan.answers import answer
from gpumem_tui.plan.combination import Combination, Techniques
from gpumem_tui.plan.export import command_line
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import cheapest_combination, techniques
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.dialogs import TextScreen
from gpumem_tui.tui.kit.help import HelpScreen, key_lines
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.plan.numbers import PANES
from gpumem_tui.tui.plan.planned import of_model
from gpumem_tui.tui.plan.screen import PlanScreen
from tests.scenes import plan as plan_scene
from tests.scenes.pictures import SIZES, until
from tests.scenes.plan import GPT2, LLAMA, choose, controls, plan_now, text_of

MEDIUM, SMALL = SIZES["120x40"], SIZES["80x24"]


# Panes


async def test_every_pane_is_reachable_at_80x24() -> None:
    async with plan_scene.app(LLAMA).run_test(size=SMALL) as pilot:
        screen = await plan_scene.settled(pilot)
        for key, said in (
            ("t", "Cheapest combination"),
            ("v", "Largest batch by sequence"),
            ("j", "Throughput against batch"),
            ("c", "Compared with: as opened"),
        ):
            await pilot.press(key)
            await plan_scene.settled(pilot)
            assert said in text_of(pilot, "#pane")
            assert screen.query_one("#pane").has_focus
            assert not screen.query_one("#numbers").display
        await pilot.press("right")
        assert screen.query_one("#numbers").display
        await pilot.press("left", "escape")
        await plan_scene.settled(pilot)
        assert "Compared" in text_of(pilot, "#pane")
        assert controls(pilot).has_focus


async def test_a_pane_can_be_clicked() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        gap = 1 + len("techniques")
        for x, is_next in ((gap, False), (gap + 1, True), (gap - 1, False)):
            await pilot.click("PaneNames.inner", offset=(x, 0))
            await plan_scene.settled(pilot)
            assert ("Largest batch by model size" in text_of(pilot, "#pane")) == is_next


async def test_enter_applies_the_cheapest_combination() -> None:
    best = cheapest_combination(LLAMA)
    assert isinstance(best, Combination)
    async with plan_scene.app(LLAMA).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press("t", "home", "enter")
        assert plan_now(pilot) == best.plan
        assert answer(plan_now(pilot)).fits
        await plan_scene.settled(pilot)
        assert "It fits as it is" in text_of(pilot, "#pane")
        await pilot.press("u")
        assert plan_now(pilot) == LLAMA


async def test_the_best_comes_first_until_the_cursor_is_moved() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        screen = await plan_scene.settled(pilot)
        pane = screen.query_one("#pane", RowList)
        assert pane.key == "chunked-loss"
        await choose(pilot, "batch_size")
        await pilot.press("6", "0", "t")
        await plan_scene.settled(pilot)
        assert pane.key == "combination"
        await pilot.press("down", "down")
        there = pane.key
        await pilot.press("escape", "right")
        await plan_scene.settled(pilot)
        assert pane.key == there
        await pilot.press("t")
        assert pane.key == "combination"


async def test_enter_applies_a_single_technique() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        screen = await plan_scene.settled(pilot)
        pane = screen.query_one("#pane", RowList)
        await pilot.press("t")
        pane.move_to("pure-bf16")
        await pilot.press("enter")
        assert plan_now(pilot).recipe.precision == "bf16"


async def test_what_means_nothing_here_is_explained_instead() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        screen = await plan_scene.settled(pilot)
        await pilot.press("t")
        screen.query_one("#pane", RowList).move_to("fused-attention")
        await pilot.press("enter")
        assert isinstance(pilot.app.screen, TextScreen)
        assert plan_now(pilot) == GPT2


async def test_each_row_explains_itself() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        screen = await plan_scene.settled(pilot)
        for pane, name in (("t", "#ledger"), ("t", "#facts"), ("t", "#pane"), ("v", "#pane"), ("j", "#pane")):
            await pilot.press(pane)
            await plan_scene.settled(pilot)
            rows = screen.query_one(name, RowList)
            keys = [row.key for row in rows.rows if row.key]
            for key in keys[-1:]:  # that none is left out is in tests/plan/test_explain.py
                rows.focus()
                rows.move_to(key)
                await pilot.press("h")
                assert isinstance(pilot.app.screen, TextScreen), (pane, name, key)
                await pilot.press("escape", "question_mark")
                assert isinstance(pilot.app.screen, HelpScreen), (pane, name, key)
                await pilot.press("escape")
        await pilot.press("escape")
        await choose(pilot, "sharding")
        await pilot.press("h")
        assert isinstance(pilot.app.screen, TextScreen)


async def test_a_technique_of_the_plan_before_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    go.set()

    def slow(*given: Any) -> Techniques:
        assert go.wait(30)
        return techniques(*given)

    monkeypatch.setattr("gpumem_tui.plan.recommended.techniques", slow)
    async with plan_scene.app(LLAMA).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "batch_size")
        go.clear()
        await pilot.press("right", "t", "home", "enter")
        assert plan_now(pilot) == replace(LLAMA, batch_size=2)
        go.set()
        await plan_scene.settled(pilot)
        await pilot.press("enter")
        best = cheapest_combination(replace(LLAMA, batch_size=2))
        assert isinstance(best, Combination)
        assert plan_now(pilot) == best.plan


@pytest.mark.parametrize("pane", ["v", "j", "c"])
async def test_help_opens_in_every_pane(pane: str) -> None:
    async with plan_scene.app(GPT2).run_test(size=SMALL) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press(pane)
        await plan_scene.settled(pilot)
        for key in ("question_mark", "h"):
            await pilot.press(key)
            assert isinstance(pilot.app.screen, TextScreen | HelpScreen)
            await pilot.press("escape")


async def test_the_help_names_the_key_of_every_pane() -> None:
    async with plan_scene.app(GPT2).run_test(size=SMALL) as pilot:
        await plan_scene.settled(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, PlanScreen)
        named = {word for line in key_lines(screen) for word in "".join(text for text, _ in line[:1]).split()}
    assert set(PANES.values()) <= named


# Copying


async def test_a_plan_is_compared_as_it_was_opened_and_as_it_was_marked() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "precision")
        await pilot.press("right", "c")
        await until(pilot, lambda: "Compared with: as opened" in text_of(pilot, "#pane"))
        compared = text_of(pilot, "#pane")
        assert "amp-bf16" in compared
        assert "fp32" in compared
        await plan_scene.settled(pilot)
        await pilot.press("home", "enter")
        await until(pilot, lambda: "Compared with: as marked" in text_of(pilot, "#pane"))
        assert "fp32" not in text_of(pilot, "#pane")
        await pilot.press("u")
        await until(pilot, lambda: "fp32" in text_of(pilot, "#pane"))


async def test_the_line_that_opens_the_plan_is_copied() -> None:
    async with plan_scene.app(GPT2).run_test(size=MEDIUM, notifications=True) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "precision")
        await pilot.press("right", "y")
        await pilot.pause()
        assert pilot.app.clipboard == command_line(plan_now(pilot))
        assert "--precision amp-bf16" in pilot.app.clipboard


async def test_a_plan_that_no_line_opens_says_why() -> None:
    async with plan_scene.app(replace(GPT2, gpu=replace(GPT2.gpu, name="mine"))).run_test(notifications=True) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press("y")
        await until(pilot, lambda: any("none of the catalog's" in one.message for one in pilot.app._notifications))
        assert not pilot.app.clipboard


async def test_the_search_gets_the_same_settings() -> None:
    wanted: list[Plan] = []

    class Listening(GpuMemApp):
        CSS_PATH = None

        def on_main_screen_wanted(self, message: MainScreen.Wanted) -> None:
            assert message.screen == "search"
            assert isinstance(message.what, Plan)
            wanted.append(message.what)
            message.prevent_default()  # there is no Search screen here

    def screen() -> PlanScreen:
        return PlanScreen(of_model(GPT2, plan_scene.HandTracer))

    async with Listening({"plan": screen}, "plan").run_test(size=MEDIUM, notifications=True) as pilot:
        await plan_scene.settled(pilot)
        await pilot.press("s")
        await until(pilot, lambda: wanted == [GPT2])
        await choose(pilot, "loss")
        await pilot.press("right", "s")
        await pilot.pause()
        assert wanted == [GPT2]
        await until(pilot, lambda: bool(pilot.app.screen.query("Toast")))
