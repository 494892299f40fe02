"""How the Plan screen looks. After a change that is meant: `pytest tests/tui --snapshot-update`, then the report."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from tests.scenes import plan as plan_scene
from tests.scenes.command_plan import ScriptedRuns, command_app, command_config
from tests.scenes.command_plan import plan_screen as command_screen
from tests.scenes.pictures import SIZES, Before, Compare, pressed, stands_still
from tests.scenes.plan import FITS, GPT2, LLAMA, RESNET
from tests.scenes.reading import assert_shown, read_picture

MEDIUM, SMALL = SIZES["120x40"], SIZES["80x24"]


def after(*keys: str) -> Before:
    """Wait until everything is worked out, press keys, and wait again."""

    return pressed(*keys, there=lambda pilot: plan_scene.plan_screen(pilot.app).settled)


async def held(pilot: Pilot[int]) -> None:
    """Wait for what can be had without the trace."""
    await stands_still(pilot)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_too_large(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(plan_scene.app(LLAMA), terminal_size=size, run_before=after())


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_command_that_is_too_large(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = command_app(ScriptedRuns(command_config(), batch_size=64))
    there = pressed(there=lambda _: command_screen(app).settled)
    assert snap_compare(app, terminal_size=size, run_before=there)


def test_it_fits(snap_compare: Compare) -> None:
    assert snap_compare(plan_scene.app(FITS), terminal_size=MEDIUM, run_before=after("v"))


def test_memory_over_a_step(snap_compare: Compare) -> None:
    keys = ("v", *["down"] * 4)
    assert snap_compare(plan_scene.app(GPT2), terminal_size=SIZES["200x60"], run_before=after(*keys))


def test_a_convolutional_network(snap_compare: Compare) -> None:
    assert snap_compare(plan_scene.app(RESNET), terminal_size=MEDIUM, run_before=after("j", "end"))


def test_without_colour(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(plan_scene.app(LLAMA), terminal_size=MEDIUM, run_before=after())


def test_what_cannot_be_is_explained_beside_the_control(snap_compare: Compare) -> None:
    keys = ("down", "down", "down", "7")
    assert snap_compare(plan_scene.app(GPT2), terminal_size=SMALL, run_before=after(*keys))


# Asserted as text


async def test_it_fits_in_a_small_terminal() -> None:
    wanted = ("✓ fits", "Largest batch by sequence length", "1 ← this plan")
    await assert_shown(plan_scene.app(FITS), *wanted, size=SMALL, before=after("v"))


@pytest.mark.parametrize(
    ("pane", "wanted"),
    [
        ("t", ["alone", "largest"]),
        ("v", ["Largest batch by model size", "0.132       40 ← gpt2", "1.56        8   gpt2-xl"]),
        ("j", ["micro-batch  at 40 %  at 60 %", "1     7.88     11.7", "roofline, not measured: 40 to 60 %"]),
        (
            "c",
            [
                "layers                   13       12",
                "activations          8.15     7.77    +0.39",
                "40       42       −2",
            ],
        ),
    ],
    ids=["techniques", "curves", "judgement", "compare"],
)
async def test_every_pane_at_80x24(pane: str, wanted: list[str]) -> None:
    keys = after("down", "right", pane, "down")
    await assert_shown(plan_scene.app(GPT2), "layers      ← 13 *", *wanted, size=SMALL, before=keys)


async def test_while_the_step_is_traced() -> None:
    wanted = ("traced   … tracing one step without a GPU", "= allocated peak    12.22        …", "formula ≈42")
    await assert_shown(plan_scene.app(GPT2, holds=True), *wanted, size=MEDIUM, before=held)


async def test_picking_a_model() -> None:
    wanted = ("llama-3-8b        8.03 B parameters", "llama-3.1-8b      8.03 B parameters")
    await assert_shown(plan_scene.app(GPT2), *wanted, size=SMALL, before=after("enter", *"llama 8b"))


async def test_an_explanation() -> None:
    wanted = ("Activations", "12 · 1024 · 8 · 768 · 36 = 2.53 GiB", "Source: Korthikanti et al. 2022")
    keys = after("n", "down", "down", "down", "h")
    await assert_shown(plan_scene.app(GPT2), *wanted, size=MEDIUM, before=keys)


async def test_the_keys() -> None:
    keys = after("question_mark")
    await assert_shown(plan_scene.app(GPT2), "esc closes", "undo", "copy", size=MEDIUM, before=keys)


async def test_ascii_only() -> None:
    async with plan_scene.app(GPT2, ascii_only=True).run_test(size=MEDIUM) as pilot:
        await after("v")(pilot)
        assert read_picture(pilot.app.export_screenshot()).isascii()


@pytest.mark.parametrize("size", [(68, 18), (40, 10)], ids=["smallest", "tiny"])
async def test_small_terminals(size: tuple[int, int]) -> None:
    said = f"needs 72×18, this is {size[0]}×{size[1]}"
    await assert_shown(plan_scene.app(GPT2), said, size=size, before=after())
