"""Threads next to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from gpumem_tui.tui.kit.background import setter_for


async def test_another_thread_wakes_the_loop() -> None:
    news = asyncio.Event()
    threading.Timer(0.05, setter_for(news)).start()
    await asyncio.wait_for(news.wait(), 10)


def test_a_thread_that_outlives_the_loop_tells_nobody() -> None:
    async def subscribed() -> tuple[asyncio.Event, Callable[[], None]]:
        news = asyncio.Event()
        return news, setter_for(news)

    news, tell = asyncio.run(subscribed())
    tell()
    assert not news.is_set()
