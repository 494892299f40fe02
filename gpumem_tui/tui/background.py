"""Work beside the event loop that may never come back."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
