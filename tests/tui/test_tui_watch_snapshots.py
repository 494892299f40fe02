"""How watching looks on the Monitor. After a change that is meant: `pytest tests/tui --snapshot-update`, and look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from textual.app import App
from textual.pilot import Pilot

from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.tui.kit.pages import PagesScreen
from gpumem_tui.tui.monitor.process_actions import look_report
from gpumem_tui.watch.published import Published
from tests.tui import monitor_scene as scene
from tests.tui import watch_scene
from tests.tui.pictures import SIZES, Compare, pressed

Scene = tuple[Snapshot, Published]


def app_of(shown: Scene, *, ascii_only: bool = False, **options: object) -> App[int]:
    snapshot, published = shown
    return scene.app(snapshot, ascii_only=ascii_only, theme="", probes=watch_scene.Said(published), **options)


def settled(*keys: str, prepare: Callable[[Pilot[int]], None] = lambda pilot: None) -> object:
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
        replace(first, history=history), second
    )


def after_an_end() -> Scene:
    """A process ended for want of memory beside one that goes on."""
    snapshot, published = watch_scene.training()
    return snapshot, Published((*published.processes, watch_scene.out_of_memory(snapshot.gpus[0].uuid)))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_watched_process(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = app_of(watch_scene.training(), history=scene.history(600, 1, probed=True))
    assert snap_compare(app, terminal_size=size, run_before=settled("down"))


def test_at_its_peak_with_its_own_history(snap_compare: Compare) -> None:
    app = app_of(watch_scene.training())
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("down", "p", "h"))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
def test_its_details(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = app_of(watch_scene.training())
    assert snap_compare(app, terminal_size=size, run_before=settled("down", "enter"))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_ranks(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = app_of(watch_scene.ranks())
    assert snap_compare(app, terminal_size=size, run_before=settled("down", "R"))


@pytest.mark.parametrize("page", ["bucket", "module", "source"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_look(snap_compare: Compare, size: tuple[int, int], page: str) -> None:
    shown = watch_scene.training()
    process = shown[1].processes[0].process

    def open_it(pilot: Pilot[int]) -> None:
        screen = PagesScreen(look_report(process, watch_scene.look()))
        pilot.app.push_screen(screen)
        for _ in range(["bucket", "module", "source"].index(page)):
            pilot.app.call_after_refresh(screen.action_turn, 1)

    assert snap_compare(app_of(shown), terminal_size=size, run_before=settled(prepare=open_it))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_post_mortem(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(after_an_end()), terminal_size=size, run_before=settled("down", "enter"))


def test_one_that_ended_stays_listed(snap_compare: Compare) -> None:
    assert snap_compare(app_of(after_an_end()), terminal_size=(120, 40), run_before=settled())


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_training_without_a_gpu(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(cpu_training()), terminal_size=size, run_before=settled("down"))


def test_without_colour_and_in_ascii(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_of(watch_scene.training(), ascii_only=True)
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("down"))
