"""The help is made from the keys' bindings: no key is without words, and no words stand twice."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import ModalScreen
from textual.widget import Widget

import gpumem_tui.tui
from gpumem_tui.manual import TOPICS
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.help import HelpScreen, manual_tables
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.manual import ManualScreen
from tests.scenes import monitor as monitor_scene
from tests.scenes.pictures import until
from tests.scenes.reading import read_picture

_OTHERWISE = {"app.help": "the help itself is open", "app.show": "said of the keys 1, 2, 3"}
"""Actions whose further keys need no words."""
_REPLAYS = {"a", "space", "left_square_bracket", "right_square_bracket"}
_IN_TURN = {
    "HostMonitor": {"escape"},
    "MonitorScreen": {*_REPLAYS, "escape", "h"},
    "SearchScreen": {"p", "o", "z"},
}
"""Keys with several actions, of which `check_action` offers one at a time."""


def below(kind: type[DOMNode]) -> Iterator[type[DOMNode]]:
    """Yield a class's subclasses, and theirs."""
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def ours() -> list[type[DOMNode]]:
    """Every screen and widget of the program that is no dialogue, and the program itself."""
    for module in pkgutil.walk_packages(gpumem_tui.tui.__path__, "gpumem_tui.tui."):
        importlib.import_module(module.name)
    nodes = {each for each in below(Widget) if each.__module__.startswith("gpumem_tui.")}
    return [GpuMemApp, *sorted((each for each in nodes if not issubclass(each, ModalScreen)), key=lambda e: e.__name__)]


def test_no_method_is_taken_for_a_key() -> None:
    """Textual names each key in words, and calls `key_at` of the focused widget when @ is typed."""
    ours()  # imports them all
    nodes: list[type[DOMNode]] = [
        GpuMemApp,
        *(each for each in below(DOMNode) if each.__module__.startswith("gpumem_tui.")),
    ]
    found = {f"{node.__name__}.{name}" for node in nodes for name in vars(node) if name.startswith(("key_", "_key_"))}
    assert not found


@pytest.mark.parametrize("node", ours(), ids=lambda node: node.__name__)
def test_every_key_has_words_for_the_help(node: type[DOMNode]) -> None:
    own = Binding.make_bindings(node.__dict__.get("BINDINGS", ()))
    silent = [b.key for b in own if not b.tooltip and b.action.partition("(")[0] not in _OTHERWISE]
    assert not silent, f"give these keys a tooltip: {silent}"


@pytest.mark.parametrize("node", ours(), ids=lambda node: node.__name__)
def test_a_key_is_bound_twice_only_to_what_is_offered_in_turn(node: type[DOMNode]) -> None:
    """Textual gives nothing of a key that has another action already."""
    keys = [binding.key for binding in Binding.make_bindings(node.__dict__.get("BINDINGS", ()))]
    assert {key for key in keys if keys.count(key) > 1} == _IN_TURN.get(node.__name__, set())


@pytest.mark.parametrize("node", ours(), ids=lambda node: node.__name__)
def test_every_key_has_an_action(node: type[DOMNode]) -> None:
    """Textual gives nothing of a key whose action is not there."""
    own = Binding.make_bindings(node.__dict__.get("BINDINGS", ()))
    places = {"app": GpuMemApp, "": node}
    for binding in own:
        place, _, name = binding.action.partition("(")[0].rpartition(".")
        if place in places:
            found = hasattr(places[place], f"action_{name}") or hasattr(places[place], f"_action_{name}")
            assert found, f"{binding.key}: {node.__name__} has no action_{name}"


@pytest.mark.parametrize("screen", [each for each in ours() if issubclass(each, MainScreen)])
def test_every_screen_has_a_page_of_the_manual(screen: type[MainScreen]) -> None:
    if screen.SMALLEST != MainScreen.SMALLEST:
        assert screen.TOPIC in TOPICS
        heads = [row[0][0].lower().rstrip("s") for row in manual_tables(screen.TOPIC, screen.TABLES) if row[:1]]
        assert all(table in heads for table in screen.TABLES)


async def test_the_help_has_keys_tables_and_the_way_to_the_manual() -> None:
    app = monitor_scene.app(monitor_scene.machine(2))
    async with app.run_test(size=(120, 60)) as pilot:
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await until(pilot, lambda: "m manual" in read_picture(app.export_screenshot()))
        text = "\n".join("".join(part for part, _ in row) for row in HelpScreen.of(monitor_scene.screen_of(app))._lines)
        for line in (
            "↑ k ↓ j pgup choose a process; page up, page down",
            "T K        terminate it (SIGTERM), kill it (SIGKILL): asks first",
            "g G        the next GPU, the one before: its ledger and its history",
            "GPU MEM    GiB on that device; a process on two GPUs has two lines",
            "stale 4 s  a driver call hangs: the last readings and their age",
            "ctrl+p     all commands by name, and the themes",
        ):
            assert line in text
        assert "recording" not in text, "nothing is played"
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, ManualScreen))
        await until(pilot, lambda: "every byte of the device" in read_picture(app.export_screenshot()))
