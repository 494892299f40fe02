"""Work beside the event loop that may never come back."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def setter_for(event: asyncio.Event) -> Callable[[], None]:
    """Sets an event of this event loop, from whatever thread; nothing happens once the loop has ended."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(event.set)

    return tell


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """The result of `work`, or what it raises. Unlike asyncio's own threads, one that hangs does not hold up the end
    of the program."""
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
