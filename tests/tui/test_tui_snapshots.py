"""How the screens look. After a change that is meant: `pytest tests/tui --snapshot-update`, and look at the report."""

from __future__ import annotations

from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot

from gpumem_tui.tui.search.state import Stage
from tests.scenes import search as scene
from tests.scenes.pictures import SIZES, Before, Compare, pressed
from tests.scenes.reading import assert_shown, read_picture

SMALL, MEDIUM = SIZES["80x24"], SIZES["120x40"]
CONFIG = scene.config()
BIG = scene.config("llama-2-7b", "t4-16gb")


def settled(stage: Stage, *keys: str) -> Before:
    """Wait until the search is where it should be and all of it is drawn, then press keys."""

    def there(pilot: Pilot[int]) -> bool:
        screen = scene.search_screen(pilot.app)
        state = screen.state
        said = state.running is not None and state.running.sample is not None
        return screen.settled and state.stage is stage and (said or stage is not Stage.RUNNING)

    return pressed(*keys, there=there)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_running(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = scene.app(CONFIG, scene.scripted(scene.running(CONFIG)))
    assert snap_compare(app, terminal_size=size, run_before=settled(Stage.RUNNING))


def found(**options: Any) -> App[int]:
    """A search that has ended."""
    return scene.app(CONFIG, scene.scripted(scene.found(CONFIG)), **options)


def idle() -> App[int]:
    """A search that nobody has started."""
    return scene.app(CONFIG, scene.missing_torch, autostart=False)


def test_finished(snap_compare: Compare) -> None:
    assert snap_compare(found(), terminal_size=MEDIUM, run_before=settled(Stage.FOUND))


def test_a_trial_that_was_out_of_memory(snap_compare: Compare) -> None:
    assert snap_compare(found(), terminal_size=MEDIUM, run_before=settled(Stage.FOUND, "down"))


def test_the_plot_at_80x24(snap_compare: Compare) -> None:
    assert snap_compare(found(), terminal_size=SMALL, run_before=settled(Stage.FOUND, "v"))


def test_without_colour(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(found(), terminal_size=MEDIUM, run_before=settled(Stage.FOUND))


# Asserted as text


async def test_finished_in_a_small_terminal() -> None:
    wanted = (
        "Ledger at batch 40 · trial 2",
        "activations        38.83   46.88     46.88    −8.05 −17.2%",
        "= device used          –   78.85     78.85",
        "2      40  ✓ fits           64.03 GiB  78.43 GiB  78.85 GiB    −8.48   0.8",
        "SAFE  Safe batch 39 on simulated NVIDIA A100 80 GB; batch 40 ran with 78.85",
        "Batch 35 keeps 10 % (8.00 GiB) free",
    )
    await assert_shown(found(), *wanted, size=SMALL, before=settled(Stage.FOUND))


@pytest.mark.parametrize("size", [SMALL, MEDIUM], ids=["80x24", "120x40"])
async def test_empty(size: tuple[int, int]) -> None:
    wanted = (
        "Ledger at batch 42",
        "READY",
        "s finds the largest batch of gpt2 that fits · e edits first",
        "no trial yet",
    )
    await assert_shown(idle(), *wanted, size=size, before=settled(Stage.IDLE))


@pytest.mark.parametrize("size", [SMALL, MEDIUM], ids=["80x24", "120x40"])
async def test_nothing_fits(size: tuple[int, int]) -> None:
    app = scene.app(BIG, scene.scripted(scene.nothing_fits(BIG)))
    wanted = (
        "✗ out of memory",
        "NOTHING FITS",
        "optimizer state alone needs 50.21 GiB of the card's 15.00 GiB",
        "--adapter lora --base-quantization nf4-dq --recompute full",
    )
    await assert_shown(app, *wanted, size=size, before=settled(Stage.NOTHING_FITS))


async def test_a_trial_that_was_out_of_memory_in_a_small_terminal() -> None:
    wanted = (
        "wanted 15.70 GiB, 14.06 GiB free",
        "Simulated: reached by then · Traced: what batch 41 needs",
        "3      41  ✗ out of memory  64.66 GiB",
    )
    await assert_shown(found(), *wanted, size=SMALL, before=settled(Stage.FOUND, "down"))


async def test_failed() -> None:
    app = scene.app(CONFIG, scene.missing_torch)
    await assert_shown(app, "FAILED", "cannot import torch", size=MEDIUM, before=settled(Stage.FAILED))


async def test_the_smallest_terminal() -> None:
    wanted = ("2      40  ✓ fits           64.03 GiB  78.85 GiB", "SAFE  Safe batch 39 on simulated", "keeps 10 %")
    await assert_shown(found(), *wanted, size=(60, 16), before=settled(Stage.FOUND))


async def test_a_tiny_terminal() -> None:
    await assert_shown(idle(), "needs 60×16, this is 40×10", size=(40, 10), before=settled(Stage.IDLE))


async def test_paused() -> None:
    app = scene.app(CONFIG, scene.scripted(scene.running(CONFIG)))
    await assert_shown(app, "PAUSED", "p continue", size=MEDIUM, before=settled(Stage.RUNNING, "p"))


async def test_ascii_only() -> None:
    async with found(ascii_only=True).run_test(size=MEDIUM) as pilot:
        await settled(Stage.FOUND)(pilot)
        assert read_picture(pilot.app.export_screenshot()).isascii()


async def test_the_form() -> None:
    wanted = ("Workload", "Model       gpt2", "Optimizer   adamw", "Strategy    guided")
    await assert_shown(idle(), *wanted, size=SMALL, before=settled(Stage.IDLE, "e"))


async def test_the_help() -> None:
    await assert_shown(idle(), "esc closes", "edit", "quit", size=MEDIUM, before=settled(Stage.IDLE, "question_mark"))
