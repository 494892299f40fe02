"""Keys that arrive in one write act one after the other, as over a slow line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from gpumem_tui.tui.kit.dialogs import PickScreen
from tests.scenes import plan as plan_scene
from tests.scenes import search as scene
from tests.scenes.pictures import SIZES, until
from tests.scenes.plan import GPT2, choose, controls, plan_now

PLAN = replace(GPT2, target_batch=None)


def press_at_once(pilot: Pilot[int], keys: Sequence[str]) -> None:
    """All of them before the program can act on the first."""
    for key in keys:
        event = Key(key, key if len(key) == 1 else None)
        event.set_sender(pilot.app)
        pilot.app.post_message(event)


async def test_a_digit_behind_an_arrow_is_typed_into_the_row_that_the_arrow_leads_to() -> None:
    async with plan_scene.app(PLAN).run_test(size=SIZES["120x40"]) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "vocab")
        press_at_once(pilot, ["down", "9"])  # the micro-batch
        await until(pilot, lambda: plan_now(pilot).batch_size == 9)
        assert plan_now(pilot).shape == PLAN.shape
        press_at_once(pilot, ["1", "6", "enter", "down", "5", "1", "2", "up"])
        await until(pilot, lambda: controls(pilot).key == "batch_size" and plan_now(pilot).shape.seq_len == 512)
        assert plan_now(pilot).batch_size == 916


async def test_keys_behind_one_that_opens_a_list_reach_the_list() -> None:
    async with plan_scene.app(PLAN).run_test(size=SIZES["120x40"]) as pilot:
        await plan_scene.settled(pilot)
        await choose(pilot, "recompute")
        press_at_once(pilot, ["enter", "escape", "right"])
        await until(pilot, lambda: plan_now(pilot).recipe.recompute == "selective")
        assert not isinstance(pilot.app.screen, PickScreen)


async def test_a_digit_behind_tab_is_typed_into_the_next_field() -> None:
    async with scene.app(scene.config(), scene.missing_torch, autostart=False).run_test(size=SIZES["120x40"]) as pilot:
        await pilot.press("e")
        form = pilot.app.screen
        form.query_one("#attention").focus()
        await until(pilot, lambda: form.focused is form.query_one("#attention"))
        press_at_once(pilot, ["tab", "2", "5", "6"])
        await until(pilot, lambda: form.query_one("#seq_len", Input).value == "256")
