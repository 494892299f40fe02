"""Work next to the event loop that may never come back, and what goes wrong in it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from textual.app import App

from gpumem_tui.errors import own_error

T = TypeVar("T")


def setter_for(event: asyncio.Event) -> Callable[[], None]:
    """Return what sets an event of this event loop, from any thread; it does nothing once the loop has ended."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        if event.is_set():  # whoever waits will look at all there is
            return
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(event.set)

    return tell


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise what it raises.

    Unlike asyncio's own threads, one that hangs does not hold up the end of the program.
    """
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(context.run(work))
        except Exception as error:  # noqa: BLE001  raised again where it is awaited
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


def report_error(app: App[T], error: BaseException) -> None:
    """Show an unexpected error on the screen as the program's own, with its file and line; the program continues."""
    app.notify(own_error(error), title="Error", severity="error", timeout=_READ_S, markup=False)


_READ_S = 30.0
"""How long an error stays on the screen: it is to be reported."""
