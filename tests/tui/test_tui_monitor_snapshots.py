"""How the Monitor looks. After a change that is meant: `pytest tests/tui --snapshot-update`, and look at the report."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from gpumem_tui.monitor.snapshot import Snapshot
from tests.tui import monitor_scene as scene
from tests.tui.pictures import Compare, pressed

SIZES = {"40x10": (40, 10), "80x24": (80, 24), "120x40": (120, 40), "200x60": (200, 60)}
PROBLEM = "NVIDIA driver and library versions differ: reboot, or reload the driver"


def settled(*keys: str) -> object:
    """Wait until the Monitor is drawn, press keys, and wait until that is drawn too."""

    def there(pilot: Pilot[int]) -> bool:
        feed = scene.screen_of(pilot.app).feed
        return feed.latest is feed.source.latest()

    return pressed(*keys, there=there)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("gpus", [1, 8])
def test_gpus(snap_compare: Compare, size: tuple[int, int], gpus: int) -> None:
    app = scene.app(scene.at(0, gpus), history=scene.history(600, gpus))
    assert snap_compare(app, terminal_size=size, run_before=settled())


def test_sixteen_gpus_in_a_small_terminal(snap_compare: Compare) -> None:
    app = scene.app(scene.machine(16))
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled("g", "down", "down"))


def _faulty() -> Snapshot:
    whole = scene.at(0, 8)
    return scene.of([scene.stale(whole.gpus[0]), *whole.gpus[1:6], scene.lost(whole.gpus[6]), whole.gpus[7]])


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
def test_one_gpu_stale_and_one_lost(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = scene.app(_faulty(), history=scene.history(600, 8))
    assert snap_compare(app, terminal_size=size, run_before=settled())


@pytest.mark.parametrize("size", [(40, 10), (80, 24)], ids=["40x10", "80x24"])
def test_no_driver(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = scene.app(scene.of([], problem=PROBLEM))
    assert snap_compare(app, terminal_size=size, run_before=settled())


def test_the_tree(snap_compare: Compare) -> None:
    app = scene.app(scene.machine(2))
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("t", "down"))


def test_the_filter(snap_compare: Compare) -> None:
    app = scene.app(scene.machine(8))
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled("slash", "a", "d", "a", "enter"))


def test_the_details(snap_compare: Compare) -> None:
    app = scene.app(scene.machine(8))
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled("down", "enter"))


def test_the_question_before_a_kill(snap_compare: Compare) -> None:
    app = scene.app(scene.machine(8))
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled("down", "K"))


def test_the_help(snap_compare: Compare) -> None:
    app = scene.app(scene.machine(1))
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("question_mark"))


def test_in_ascii(snap_compare: Compare) -> None:
    app = scene.app(scene.at(0, 8), history=scene.history(600, 8), ascii_only=True)
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("down"))


def test_without_colour(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = scene.app(scene.at(0, 8), history=scene.history(600, 8))
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("down"))


@pytest.mark.parametrize("theme", ["gpumem-light", "gpumem-contrast"])
def test_themes(snap_compare: Compare, theme: str) -> None:
    app = scene.app(scene.at(0, 8), history=scene.history(600, 8, probed=True), theme=theme)
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("down"))


def test_a_tiny_terminal(snap_compare: Compare) -> None:
    app = scene.app(scene.machine(1))
    assert snap_compare(app, terminal_size=(30, 6), run_before=settled())
