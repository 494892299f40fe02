"""Screens and dialogues that are closed leave nothing behind, however often they are opened."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.screen import ModalScreen, Screen
from textual.strip import Strip
from textual.widget import Widget

from gpumem_tui.memory import MIB
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.plan.control import Option
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.dialogs import (
    DetailsScreen,
    Dialog,
    Modal,
    PagesScreen,
    PickScreen,
    QuestionScreen,
    Report,
    ScrolledDialog,
    TextScreen,
    WaitingScreen,
)
from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.help import HelpScreen
from gpumem_tui.tui.kit.jump import JumpScreen, panes_of
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.manual import ManualScreen
from gpumem_tui.tui.monitor.ordering import OrderScreen, choices
from gpumem_tui.tui.monitor.state import MonitorState
from gpumem_tui.tui.plan.planned import of_model
from gpumem_tui.tui.plan.screen import PlanScreen
from gpumem_tui.tui.search.form import Edited, EditScreen
from tests.scenes import monitor as monitor_scene
from tests.scenes import plan as plan_scene
from tests.scenes import search as search_scene
from tests.scenes.pictures import until
from tests.tui.test_tui_help import below, ours

_WARM_UP = 2
_LINES: list[Row] = [[(f"line {number} ", "bold"), ("of a text", "")] for number in range(40)]
_MOST_WIDGETS, _MOST_OBJECTS, _MOST_BYTES = 24, 20_000, 64 * MIB
"""Allowed growth after all these times: a dialogue on its way out, and room for the garbage of seconds."""


@dataclass(frozen=True)
class Held:
    """The live objects of the process, without garbage, and its memory."""

    widgets: int
    strips: int
    objects: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        """Look."""
        gc.collect()
        alive = gc.get_objects()
        return cls(
            sum(isinstance(each, Widget) for each in alive),
            sum(isinstance(each, Strip) for each in alive),
            len(alive),
            psutil.Process().memory_info().rss,
        )


def _edit() -> EditScreen:
    options = WorkloadOptions(model="gpt2")
    edited = Edited(options, search_scene.config())
    return EditScreen(edited, edited)


_DIALOGUES: dict[type[Screen[Any]], Callable[[MainScreen], Screen[Any]]] = {
    CommandPalette: lambda _: CommandPalette(),
    DetailsScreen: lambda _: DetailsScreen(_LINES, may_end=True, may_look=True, may_keep=True),
    EditScreen: lambda _: _edit(),
    HelpScreen: HelpScreen.of,
    JumpScreen: lambda screen: JumpScreen(panes_of(screen)),
    ManualScreen: lambda _: ManualScreen(),
    OrderScreen: lambda _: OrderScreen(list(choices(MonitorState(), None))),
    PagesScreen: lambda _: PagesScreen(Report("a report", {"one": lambda _: _LINES, "two": lambda _: _LINES})),
    PickScreen: lambda _: PickScreen("a list", [Option(f"{number}", "a note") for number in range(40)]),
    QuestionScreen: lambda _: QuestionScreen("Kill", "Kill it?", "process 1", "it ends"),
    TextScreen: lambda _: TextScreen("a text", _LINES),
    WaitingScreen: lambda _: WaitingScreen("a look", "process 1", "it waits"),
}


def test_every_dialogue_is_tried() -> None:
    ours()  # imports them all
    found = {each for each in below(ModalScreen) if each.__module__.startswith("gpumem_tui.")}
    assert found - {Dialog, Modal, ScrolledDialog} <= set(_DIALOGUES)


def _program() -> GpuMemApp:
    """The Monitor, Search and Plan."""
    config = search_scene.config()
    scripted = search_scene.scripted(search_scene.running(config))
    search = search_scene.search_screen(search_scene.app(config, scripted, autostart=False))
    monitor = monitor_scene.screen_of(monitor_scene.app(monitor_scene.machine(2)))
    plan = PlanScreen(of_model(plan_scene.GPT2, plan_scene.HandTracer))
    return GpuMemApp({"monitor": lambda: monitor, "search": lambda: search, "plan": lambda: plan}, "monitor")


async def _open(pilot: Pilot[int], make: Callable[[MainScreen], Screen[Any]]) -> None:
    """Show a dialogue, and close it."""
    main = pilot.app.screen
    assert isinstance(main, MainScreen)
    await pilot.app.push_screen(make(main))
    await pilot.pause()
    pilot.app.pop_screen()
    await until(pilot, lambda: pilot.app.screen is main)


async def _go_round(pilot: Pilot[int]) -> None:
    """Show each main screen."""
    for name in ("search", "plan", "monitor"):
        await pilot.app.run_action(f"app.show({name!r})")
        await until(pilot, lambda name=name: pilot.app.current_mode == name)  # type: ignore[misc]
        await pilot.pause()


async def _kept(pilot: Pilot[int], show: Callable[[Pilot[int]], Awaitable[None]], times: int) -> tuple[Held, Held]:
    """The memory after two times, and after so many more."""
    for _ in range(_WARM_UP):
        await show(pilot)
    before = Held.now()
    for _ in range(times):
        await show(pilot)
    return before, Held.now()


async def test_a_help_that_is_closed_is_gone() -> None:
    async with _program().run_test(size=(120, 40)) as pilot:
        before, after = await _kept(pilot, partial(_open, make=HelpScreen.of), 4)
    assert (after.widgets, after.strips) == (before.widgets, before.strips)


@pytest.mark.slow
async def test_whatever_is_closed_is_gone() -> None:
    opened: dict[str, Callable[[Pilot[int]], Awaitable[None]]] = {
        kind.__name__: partial(_open, make=make) for kind, make in _DIALOGUES.items()
    }
    async with _program().run_test(size=(120, 40)) as pilot:
        for name, show in {"main screens": _go_round, **opened}.items():
            before, _ = await _kept(pilot, show, 20)
            most = before.widgets + _MOST_WIDGETS
            await until(pilot, lambda most=most: Held.now().widgets <= most)  # type: ignore[misc]  # clocks of waits end
            after = Held.now()
            assert after.objects - before.objects <= _MOST_OBJECTS, name
            assert after.resident_bytes - before.resident_bytes <= _MOST_BYTES, name


_ARENAS = """
import sys, threading
if sys.argv[1] == "ours":
    from gpumem_tui.tui.start import _settle_memory
    _settle_memory()
gate = threading.Barrier(9)
def work():
    held = [bytes(2000) for _ in range(2000)]  # larger than what Python allocates by itself
    gate.wait(); gate.wait()
    held.clear()
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
gate.wait()
starts = (int(line.split("-")[0], 16) for line in open("/proc/self/maps") if line.split()[-1] == "0")
print(sum(start % (64 << 20) == 0 for start in starts))
gate.wait()
"""


def _arenas(whose: str) -> int:
    command = [sys.executable, "-c", _ARENAS, whose]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_share_the_c_librarys_arenas() -> None:
    assert _arenas("ours") <= 1 < _arenas("theirs")
