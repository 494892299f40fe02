"""An error that only the program can have made is named on the screen, with its place, and the program continues."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.tui.monitor.state import Feed
from gpumem_tui.tui.run.screen import CommandPane
from gpumem_tui.tui.search.screen import SearchScreen
from gpumem_tui.tui.search.state import Stage
from tests.scenes import monitor as scene
from tests.scenes import run as run_scene
from tests.scenes import search as search_scene
from tests.scenes.pictures import until


async def _fails() -> None:
    raise ZeroDivisionError("by nothing")


async def test_a_worker_that_fails_ends_nothing(own_errors: list[str]) -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=(120, 40)) as pilot:
        screen = scene.screen_of(app)
        screen.run_worker(_fails())
        await until(pilot, lambda: bool(own_errors))
        assert "an error of gpumem-tui itself: ZeroDivisionError: by nothing (test_tui_own_errors.py:" in own_errors[0]
        await until(pilot, lambda: any("ZeroDivisionError" in note.message for note in app._notifications))
        await pilot.press("t")
        await until(pilot, lambda: screen.state.tree)


async def test_a_picture_that_cannot_be_drawn_is_not_the_last(
    own_errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=(120, 40)) as pilot:
        screen = scene.screen_of(app)
        broken = iter([True])

        def look(feed: Feed) -> bool:
            if next(broken, False):
                raise KeyError("hotspot_c")
            return right(feed)

        right = Feed.look
        monkeypatch.setattr(Feed, "look", look)
        source = screen.feed.source
        later = scene.machine(2)
        source.show(scene.machine(1))  # type: ignore[attr-defined]
        await until(pilot, lambda: bool(own_errors))
        assert "KeyError: 'hotspot_c'" in own_errors[0]
        source.show(later)  # type: ignore[attr-defined]
        await until(pilot, lambda: screen.state.snapshot is later)
        assert isinstance(app.screen, MonitorScreen)


async def test_a_search_that_breaks_off_names_the_place() -> None:
    def broken(config: object, control: object) -> Iterator[object]:
        yield from ()
        raise ZeroDivisionError("by nothing")

    app = search_scene.app(search_scene.config(), broken)  # type: ignore[arg-type]
    async with app.run_test(size=(120, 40)) as pilot:
        screen = app.screen
        assert isinstance(screen, SearchScreen)
        await until(pilot, lambda: screen.state.stage is Stage.FAILED)
        assert screen.state.failure is not None
        assert "the search itself broke off: an error of gpumem-tui itself" in screen.state.failure.message
        assert "test_tui_own_errors.py:" in screen.state.failure.message


async def test_lines_of_a_command_that_cannot_be_kept_do_not_end_it(
    own_errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = run_scene.Command()
    app = run_scene.app(command)
    async with app.run_test(size=(120, 40)) as pilot:
        pane = app.screen.query_one(CommandPane)
        printed = app.screen.printed  # type: ignore[attr-defined]
        right = printed.add

        def add(text: str) -> None:
            if "bad" in text:
                raise ValueError(text)
            right(text)

        monkeypatch.setattr(printed, "add", add)
        command.say("bad\n")
        await until(pilot, lambda: bool(own_errors))
        command.say("good\n")
        await until(pilot, lambda: "good" in pane.text)
        assert not app.screen.query_one("#too-small", Lines).display
        command.end()
