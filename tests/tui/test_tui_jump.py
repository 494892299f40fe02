"""Jump labels, and the help of the pane that has the keys."""

from __future__ import annotations

from gpumem_tui.tui.kit.help import HelpScreen
from gpumem_tui.tui.kit.jump import JumpScreen, panes_of
from tests.scenes import plan as plan_scene
from tests.scenes.pictures import SIZES, until
from tests.scenes.plan import GPT2
from tests.scenes.reading import read_picture


async def test_each_pane_has_a_letter_that_gives_it_the_keys() -> None:
    async with plan_scene.app(GPT2).run_test(size=SIZES["120x40"]) as pilot:
        screen = await plan_scene.settled(pilot)
        panes = panes_of(screen)
        assert [pane.id for pane in panes] == ["controls", "ledger", "facts", "pane"]
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(pilot.app.screen, JumpScreen))
        await until(pilot, lambda: " a Plan " in read_picture(pilot.app.export_screenshot()))
        await pilot.press("f")
        await until(pilot, lambda: pilot.app.screen is screen)
        assert screen.focused is panes[3]
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(pilot.app.screen, JumpScreen))
        await pilot.press("escape")
        await until(pilot, lambda: pilot.app.screen is screen)
        assert screen.focused is panes[3], "esc leaves all as it was"


async def test_the_help_begins_with_the_pane_that_has_the_keys() -> None:
    async with plan_scene.app(GPT2).run_test(size=SIZES["120x40"]) as pilot:
        screen = await plan_scene.settled(pilot)
        for pane, words in (("ledger", "by bucket, at the peak"), ("controls", "Model and training")):
            screen.query_one(f"#{pane}").focus()
            await pilot.press("question_mark")
            await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))
            shown = pilot.app.screen
            assert isinstance(shown, HelpScreen)
            first = "\n".join("".join(part for part, _ in row) for row in shown._lines[:3])
            assert first.startswith("This pane")
            assert words in first
            await pilot.press("escape")
            await until(pilot, lambda: pilot.app.screen is screen)
