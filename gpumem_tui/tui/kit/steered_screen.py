"""A main screen behind which something runs that can be ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from gpumem_tui.run.control import Control
from gpumem_tui.tui.kit.main_screen import MainScreen

_ENDS_WITHIN_S = 1.0

Tell = Callable[[Callable[[], None]], object]
"""Takes, in any thread, what the screen is to do about news of a run."""


class SteeredScreen(MainScreen):
    """A screen of runs, one after the other, each in a thread of its own; news of one before the last is not shown."""

    def __init__(self) -> None:
        super().__init__()
        self._control = Control()
        self._ended = threading.Event()
        self._ended.set()

    def run_behind(self, work: Callable[[Control, Tell], None]) -> None:
        """Begin a run, which `work` does and then returns."""
        control, ended = self._control, self._ended = Control(), threading.Event()

        def run() -> None:
            try:
                work(control, lambda step: self.call_later(self._show_news, control, step))
            finally:
                ended.set()

        self.run_worker(run, thread=True, exit_on_error=False)

    def _show_news(self, origin: Control, step: Callable[[], None]) -> None:
        if origin is self._control:
            step()

    def cancel(self) -> None:
        """End the run; safe to call from any thread."""
        self._control.cancel()

    async def end(self) -> int:
        """End the run, and wait until its processes are gone."""
        code = await super().end()
        await asyncio.to_thread(self._ended.wait, _ENDS_WITHIN_S)
        return code
