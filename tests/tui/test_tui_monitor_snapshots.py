"""How the Monitor looks. After a change that is meant: `pytest tests/tui --snapshot-update`, and look at the report."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from gpumem_tui.monitor.snapshot import Snapshot
from tests.scenes import monitor as scene
from tests.scenes.pictures import SIZES, Before, Compare, pressed
from tests.scenes.reading import assert_shown, read_picture

SMALL, MEDIUM = SIZES["80x24"], SIZES["120x40"]
PROBLEM = "NVIDIA driver and library versions differ: reboot, or reload the driver"


def settled(*keys: str) -> Before:
    """Wait until the Monitor is drawn, press keys, and wait until that is drawn too."""

    def there(pilot: Pilot[int]) -> bool:
        feed = scene.screen_of(pilot.app).feed
        return feed.latest is feed.source.latest()

    return pressed(*keys, there=there)


@pytest.mark.parametrize(("gpus", "size"), [(8, "80x24"), (1, "120x40"), (8, "120x40"), (8, "200x60")])
def test_gpus(snap_compare: Compare, size: str, gpus: int) -> None:
    app = scene.app(scene.at(0, gpus), history=scene.history(600, gpus))
    assert snap_compare(app, terminal_size=SIZES[size], run_before=settled())


# Asserted as text


async def test_sixteen_gpus_in_a_small_terminal() -> None:
    wanted = ("16 GPUs", "△ GPU 9: 84 °C, limit 89 °C", "+5 more", "▸ 1  35.7/80.0   88%", "15  52.0/80.0    0%")
    keys = settled("g", "down", "down")
    await assert_shown(scene.app(scene.machine(16)), *wanted, "1–10 of 48 processes", size=SMALL, before=keys)


def _faulty() -> Snapshot:
    whole = scene.at(0, 8)
    return scene.of([scene.stale(whole.gpus[0]), *whole.gpus[1:6], scene.lost(whole.gpus[6]), whole.gpus[7]])


async def test_one_gpu_stale_and_one_lost() -> None:
    app = scene.app(_faulty(), history=scene.history(600, 8))
    wanted = (
        "▲ GPU 6: lost: it does not answer any more (GPU is lost); a reboot m",
        "▸0 A100-SXM4-80GB    66.30/80.00         stale 4 s",
        "6 A100-SXM4-80GB lost: it does not answer any more",
        "GPU 6: processes unknown: the GPU is lost",
        "1–9 of 20 processes",
    )
    await assert_shown(app, *wanted, size=SMALL, before=settled())


@pytest.mark.parametrize("size", [(40, 10), SMALL], ids=["40x10", "80x24"])
async def test_no_driver(size: tuple[int, int]) -> None:
    """Its details may be cut off where there is no room, not the problem itself."""
    app = scene.app(scene.of([], problem=PROBLEM))
    more = ("3                     Plan: what fits", "gpumem-tui doctor     what works here") if size == SMALL else ()
    await assert_shown(app, "No GPU to watch", "NVIDIA driver and library", *more, size=size, before=settled())


async def test_the_tree() -> None:
    wanted = (
        "▸  1    4116 ada       C        26.00",
        "┌ python train.py",
        "├ /opt/conda/bin/python",
        "└ python serve.py",
    )
    await assert_shown(scene.app(scene.machine(2)), *wanted, size=MEDIUM, before=settled("t", "down"))


async def test_the_filter() -> None:
    wanted = ("8 of 24 processes: matching “ada” · esc for all", "    0    4100 ada           16.00", "esc no filter")
    keys = settled("slash", "a", "d", "a", "enter")
    await assert_shown(scene.app(scene.machine(8)), *wanted, size=SMALL, before=keys)


async def test_the_details() -> None:
    wanted = (
        "pid          4148, compute",
        "GPU memory   46.00 GiB, 57.5% of the device",
        "probe        none: the driver lists only its total",
        "python train.py --model llama-3-8b --batch-size 16 --precision amp-bf16",
    )
    await assert_shown(scene.app(scene.machine(8)), *wanted, size=SMALL, before=settled("down", "enter"))


async def test_the_question_before_a_kill() -> None:
    wanted = (
        "Kill this process?",
        "pid 4148 of ada, 46.00 GiB on GPU 3: python train.py --model llama-3-8b",
        "It ends at once (SIGKILL). Unsaved work is lost.",
        "Leave it (n)",
        "Kill (y)",
    )
    await assert_shown(scene.app(scene.machine(8)), *wanted, size=SMALL, before=settled("down", "K"))


async def test_the_help() -> None:
    await assert_shown(
        scene.app(scene.machine(1)), "esc closes", "terminate", "filter", size=MEDIUM, before=settled("question_mark")
    )


async def test_a_tiny_terminal() -> None:
    await assert_shown(scene.app(scene.machine(1)), "needs 40×8, this is 30×6", size=(30, 6), before=settled())


async def test_in_ascii() -> None:
    app = scene.app(scene.at(0, 8), history=scene.history(600, 8), ascii_only=True)
    async with app.run_test(size=MEDIUM) as pilot:
        await settled("down")(pilot)
        assert read_picture(app.export_screenshot()).isascii()


# Pictures again


def test_without_colour(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = scene.app(scene.at(0, 8), history=scene.history(600, 8))
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("down"))


@pytest.mark.parametrize("theme", ["gpumem-light", "gpumem-contrast"])
def test_themes(snap_compare: Compare, theme: str) -> None:
    app = scene.app(scene.at(0, 8), history=scene.history(600, 8, probed=True), theme=theme)
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("down"))
