"""How tests of screens wait, however slow the machine is; and what those of pictures share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from textual._compositor import LayoutUpdate
from textual.app import App
from textual.pilot import Pilot
from textual.strip import Strip

Before = Callable[[Pilot[int]], Awaitable[None]]
"""The acts, and waits, before a screen is looked at."""

_DEADLINE_S = 120.0

SIZES = {"80x24": (80, 24), "120x40": (120, 40), "200x60": (200, 60)}


class Compare(Protocol):
    """pytest-textual-snapshot's fixture."""

    def __call__(self, app: App[int], *, terminal_size: tuple[int, int], run_before: object) -> bool: ...


async def until(pilot: Pilot[int] | Pilot[None], there: Callable[[], bool]) -> None:
    """Wait for a condition; the picture does not depend on the machine's speed."""
    deadline = time.monotonic() + _DEADLINE_S
    while not there():
        assert time.monotonic() < deadline, f"the screen did not get there in {_DEADLINE_S} s"
        await pilot.pause(0.02)


async def stands_still(pilot: Pilot[int]) -> None:
    """Wait until the picture has not changed for three looks."""
    pictures: list[list[list[Strip]]] = []

    def same() -> bool:
        app = pilot.app
        drawn = app.screen._compositor.render_update(full=True, screen_stack=app._background_screens)
        assert isinstance(drawn, LayoutUpdate)
        pictures.append([list(line) for line in drawn.strips])
        return len(pictures) >= 3 and pictures[-1] == pictures[-2] == pictures[-3]

    await until(pilot, same)


def pressed(
    *keys: str, there: Callable[[Pilot[int]], bool], then: Callable[[Pilot[int]], None] = lambda pilot: None
) -> Before:
    """For `run_before`: wait until `there` and all of it is drawn, press keys, do `then`, and wait for its picture."""

    async def wait(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: there(pilot))
        await stands_still(pilot)
        for key in keys:
            await pilot.press(key)
            await until(pilot, lambda: there(pilot))
        then(pilot)
        await stands_still(pilot)

    return wait
