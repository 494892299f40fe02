"""Textual's undocumented parts that the program uses are in the installed version."""

from __future__ import annotations

import os
import pty
import threading
from collections.abc import Callable
from importlib.metadata import version

import pytest
from textual._styles_cache import StylesCache
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.css.stylesheet import Stylesheet
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key
from textual.screen import Screen
from textual.widget import Widget

from gpumem_tui.tui.kit import textual_internals
from gpumem_tui.tui.kit.textual_internals import USED, TerminalDriver


def made(kind: type) -> object:
    """One of a kind: some names are of instances only."""
    makers: dict[type, Callable[[], object]] = {
        XTermParser: XTermParser,
        LinuxDriver: lambda: LinuxDriver(App[int]()),
        StylesCache: StylesCache,
        Stylesheet: Stylesheet,
        Widget: Widget,
        Screen: Screen,
        App: App,
        Key: lambda: Key("a", "a"),
    }
    return makers[kind]()


@pytest.mark.parametrize("kind", USED, ids=lambda kind: kind.__name__)
async def test_textual_has_what_is_used_of_it(kind: type) -> None:
    one = made(kind)
    lacking = [name for name in USED[kind] if not hasattr(one, name)]
    assert not lacking, f"textual {version('textual')}: {kind.__name__} has no {', '.join(lacking)}"


class _Reading(threading.Thread):
    def join(self, timeout: float | None = 30) -> None:
        super().join(timeout)


async def test_the_wait_for_keys_ends_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for the end ten times a second, as Textual does, was half of the time that quitting took."""
    monkeypatch.setattr(textual_internals, "_TICK_S", None)
    driver = TerminalDriver(App[int](), mouse=False)
    ours, driver.fileno = pty.openpty()
    driver._key_thread = reading = _Reading(target=driver.run_input_thread, daemon=True)
    reading.start()
    driver.disable_input()
    assert not reading.is_alive()
    os.close(ours)
    os.close(driver.fileno)
