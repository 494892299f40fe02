"""How watching looks on the Monitor. After a change that is meant: `pytest tests/tui --snapshot-update`, and look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs
from textual.app import App
from textual.pilot import Pilot

from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.tui.kit.dialogs import PagesScreen
from gpumem_tui.tui.monitor.reports import look_report
from gpumem_tui.watch.published import Published
from tests.scenes import monitor as scene
from tests.scenes import watch as watch_scene
from tests.scenes.pictures import SIZES, Before, Compare, pressed
from tests.scenes.reading import assert_shown, read_picture

Scene = tuple[Snapshot, Published]
SMALL = SIZES["80x24"]


def app_of(shown: Scene, *, ascii_only: bool = False, **options: object) -> App[int]:
    snapshot, published = shown
    return scene.app(snapshot, ascii_only=ascii_only, theme="", probes=watch_scene.Said(published), **options)


def settled(*keys: str, prepare: Callable[[Pilot[int]], None] = lambda pilot: None) -> Before:
    """Wait until the Monitor is drawn, press keys, and wait until that is drawn too."""

    def there(pilot: Pilot[int]) -> bool:
        feed = scene.screen_of(pilot.app).feed
        return feed.latest is feed.source.latest()

    return pressed(*keys, there=there, then=prepare)


def cpu_training() -> Scene:
    """A machine without a GPU on which two processes train."""
    first = watch_scene.watched(4100, (watch_scene.on_cpu(step=2_340), ""))
    history = tuple(
        replace(sample, record=watch_scene.on_cpu(step=sample.record.step - 10_000, wall_ns=sample.record.wall_ns))
        for sample in watch_scene.history()
    )
    second = watch_scene.watched(4101, (watch_scene.on_cpu(step=12), ""))
    return scene.of([], problem="no NVIDIA driver on this machine"), watch_scene.published(
        structs.replace(first, history=history), second
    )


def after_an_end() -> Scene:
    """A process ended for want of memory next to one that continues."""
    snapshot, published = watch_scene.training()
    return snapshot, Published((*published.processes, watch_scene.out_of_memory(snapshot.gpus[0].uuid)))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_watched_process(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = app_of(watch_scene.training(), history=scene.history(600, 1, probed=True))
    assert snap_compare(app, terminal_size=size, run_before=settled("down"))


def test_at_its_peak_with_its_own_history(snap_compare: Compare) -> None:
    app = app_of(watch_scene.training())
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("down", "p", "h"))


def test_the_ranks(snap_compare: Compare) -> None:
    assert snap_compare(app_of(watch_scene.ranks()), terminal_size=SIZES["120x40"], run_before=settled("down", "R"))


PAGES = ("bucket", "module", "source")


def looked(page: str) -> tuple[App[int], Before]:
    """The program on which a look is open at a page, and what opens it."""
    shown = watch_scene.training()
    process = shown[1].processes[0].process

    def open_it(pilot: Pilot[int]) -> None:
        screen = PagesScreen(look_report(process, watch_scene.look()))
        pilot.app.push_screen(screen)
        for _ in range(PAGES.index(page)):
            pilot.app.call_after_refresh(screen.action_turn, 1)

    return app_of(shown), settled(prepare=open_it)


@pytest.mark.parametrize(("size", "page"), [("80x24", "bucket"), ("120x40", "module"), ("200x60", "source")])
def test_a_look(snap_compare: Compare, size: str, page: str) -> None:
    app, before = looked(page)
    assert snap_compare(app, terminal_size=SIZES[size], run_before=before)


def test_a_post_mortem(snap_compare: Compare) -> None:
    assert snap_compare(app_of(after_an_end()), terminal_size=SIZES["120x40"], run_before=settled("down", "enter"))


def test_training_without_a_gpu(snap_compare: Compare) -> None:
    assert snap_compare(app_of(cpu_training()), terminal_size=SMALL, run_before=settled("down"))


# Asserted as text


async def test_its_details() -> None:
    wanted = (
        "15.00 GiB reserved by the allocator, 1.00 GiB CUDA context",
        "probe        started by gpumem-tui run, torch 2.13.0; 0.4 s old",
        "allocator    0 retries; out of memory 0 times; 0.12 GiB free in pieces",
        "now  at the peak    predicted        error",
        "optimizer state        0.93 GiB     0.93 GiB     0.93 GiB",
        "= reserved            15.00 GiB    15.00 GiB",
        "batch data: not seen from outside the step",
        "Predicted as gpt2, fp32, adamw.",
    )
    await assert_shown(app_of(watch_scene.training()), *wanted, size=SMALL, before=settled("down", "enter"))


async def test_the_ranks_in_a_small_terminal() -> None:
    wanted = (
        "8 of 16 ranks",
        "▲    5  GPU 5    12,340     0.46     0.46     0.93    14.96        1",
        "spread                         0        0        0     1.02",
        "▲ rank 5 holds the most: it runs out first",
        "8 of 16 ranks do not publish here: on other machines, or not yet",
    )
    await assert_shown(app_of(watch_scene.ranks()), *wanted, size=SMALL, before=settled("down", "R"))


@pytest.mark.parametrize(
    ("page", "rows"),
    [
        ("module", ["1.39 GiB    9.9%  █▒", "transformer.wte", "transformer.h.11.mlp.c_fc"]),
        ("source", ["8.14 GiB   58.1%  ▚▚▚▚▚▚▚▚▚▚", "model.py:88", "(allocated before this step)", "train.py:31"]),
    ],
)
async def test_a_look_in_a_small_terminal(page: str, rows: list[str]) -> None:
    app, before = looked(page)
    said = ("step 12,341, recorded in 400 ms", "recorded by the allocator history")
    await assert_shown(app, *said, *rows, size=SMALL, before=before)


async def test_a_post_mortem_in_a_small_terminal() -> None:
    wanted = (
        "✗ ran out of memory in step 12, 3 min ago",
        "the failed request: 4.00 GiB on cuda:0 at train.py:34, 1.00 GiB was free",
        "68.15 GiB   85.2%  activations, batch data and the rest",
        "the cache held 5.00 GiB in pieces too small for the request:",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help",
    )
    await assert_shown(app_of(after_an_end()), *wanted, size=SMALL, before=settled("down", "enter"))


async def test_one_that_ended_stays_listed() -> None:
    await assert_shown(app_of(after_an_end()), "4104", "out of memory", size=SIZES["120x40"], before=settled())


async def test_in_ascii() -> None:
    async with app_of(watch_scene.training(), ascii_only=True).run_test(size=SIZES["120x40"]) as pilot:
        await settled("down")(pilot)
        assert read_picture(pilot.app.export_screenshot()).isascii()
