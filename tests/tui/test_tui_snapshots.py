"""How the screens look. After a change that is meant: `pytest tests/tui --snapshot-update`, and look at the report."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from gpumem_tui.tui.search.state import Stage
from tests.tui import scene
from tests.tui.pictures import SIZES, Compare, pressed

CONFIG = scene.config()
BIG = scene.config("llama-2-7b", "t4-16gb")


def settled(stage: Stage, *keys: str) -> object:
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


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_finished(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)))
    assert snap_compare(app, terminal_size=size, run_before=settled(Stage.FOUND))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
def test_empty(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    assert snap_compare(app, terminal_size=size, run_before=settled(Stage.IDLE))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
def test_nothing_fits(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = scene.app(BIG, scene.scripted(scene.nothing_fits(BIG)))
    assert snap_compare(app, terminal_size=size, run_before=settled(Stage.NOTHING_FITS))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
def test_a_trial_that_was_out_of_memory(snap_compare: Compare, size: tuple[int, int]) -> None:
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)))
    assert snap_compare(app, terminal_size=size, run_before=settled(Stage.FOUND, "down"))


def test_failed(snap_compare: Compare) -> None:
    app = scene.app(CONFIG, scene.missing_torch)
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled(Stage.FAILED))


def test_the_plot_at_80x24(snap_compare: Compare) -> None:
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)))
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled(Stage.FOUND, "v"))


def test_the_smallest_terminal(snap_compare: Compare) -> None:
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)))
    assert snap_compare(app, terminal_size=(60, 16), run_before=settled(Stage.FOUND))


def test_a_tiny_terminal(snap_compare: Compare) -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    assert snap_compare(app, terminal_size=(40, 10), run_before=settled(Stage.IDLE))


def test_paused(snap_compare: Compare) -> None:
    app = scene.app(CONFIG, scene.scripted(scene.running(CONFIG)))
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled(Stage.RUNNING, "p"))


def test_ascii_only(snap_compare: Compare) -> None:
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)), ascii_only=True)
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled(Stage.FOUND))


def test_without_colour(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = scene.app(CONFIG, scene.scripted(scene.found(CONFIG)))
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled(Stage.FOUND))


def test_the_form(snap_compare: Compare) -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled(Stage.IDLE, "e"))


def test_the_help(snap_compare: Compare) -> None:
    app = scene.app(CONFIG, scene.missing_torch, autostart=False)
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled(Stage.IDLE, "question_mark"))
