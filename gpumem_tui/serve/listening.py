"""Connections to the web server: their number and their time are bounded, and errors are reported once a minute."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from gpumem_tui.connections import FIRST_BYTE_S, REQUEST_S, Admission, Admitted

_SELDOM_S = 60.0
_LOGGERS = ("aiohttp", "asyncio")
_NUMBER = re.compile(r"\b(0x[0-9a-f]+|\d+)\b")
"""A descriptor, an object or a port, which each connection has its own of."""


class Listening:
    """Makes a protocol for each connection that comes, and lets in as many as an `Admission` has room for.

    Args:
        most: connections at once.

    Attributes:
        server: makes aiohttp's own protocols; set before the first connection.
    """

    server: web.Server

    def __init__(self, most: int) -> None:
        self._gate = Admission(most, most)  # all come from loopback: of an address is of everybody
        self._admitted: dict[asyncio.BaseTransport, Admitted] = {}
        self._answered: set[asyncio.BaseTransport] = set()

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol of one more connection."""
        return _Bounded(self.server(), self)

    def admit(self, transport: asyncio.Transport) -> bool:
        """Let a connection in, if there is room."""
        admitted = self._gate.admit("", transport.abort)
        if admitted is not None:
            self._admitted[transport] = admitted
        return admitted is not None

    def leave(self, transport: asyncio.BaseTransport) -> None:
        """Forget one that has ended."""
        if (admitted := self._admitted.pop(transport, None)) is not None:
            self._gate.leave(admitted)

    def is_idle(self, transport: asyncio.BaseTransport) -> bool:
        """Return whether a connection has not said what it wants."""
        return transport in self._admitted and transport not in self._answered

    @web.middleware
    async def at_work(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Take note that a connection has said what it wants, until it has that: on a slow line that may take long."""
        if (transport := request.transport) is None:
            return await handler(request)
        self._answered.add(transport)
        try:
            return await handler(request)
        finally:
            self._answered.discard(transport)

    @contextmanager
    def stays(self, request: web.Request) -> Iterator[None]:
        """Have a connection go for no other, as one of a visitor: whoever reads no answer could keep all others out."""
        admitted = None if request.transport is None else self._admitted.get(request.transport)
        if admitted is not None:
            admitted.is_idle = False
        try:
            yield
        finally:
            if admitted is not None:
                admitted.is_idle = True


class _Bounded(asyncio.Protocol):
    """aiohttp's protocol of a connection, which is closed where it gives nothing, or not in time what it wants."""

    def __init__(self, inner: asyncio.Protocol, listening: Listening) -> None:
        self._inner = inner
        self._listening = listening
        self._transport: asyncio.Transport | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._is_silent = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._listening.admit(transport):
            transport.abort()
            return
        self._transport = transport
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(FIRST_BYTE_S, self._heard), loop.call_later(REQUEST_S, self._asked)]
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._is_silent = False
        if self._transport is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._transport is not None:
            self._listening.leave(self._transport)
            self._inner.connection_lost(exc)

    def _heard(self) -> None:
        if self._is_silent and self._transport is not None:
            self._transport.abort()

    def _asked(self) -> None:
        if self._transport is not None and self._listening.is_idle(self._transport):
            self._transport.abort()


class Seldom(logging.Handler):
    """Reports for each kind of error one line a minute; a traceback for each connection helps nobody."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._said_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Report it, unless one of its kind was reported within the minute."""
        error = record.exc_info[1] if record.exc_info else None
        kind = f"{_NUMBER.sub('', _first_line(record.msg))}{type(error).__name__ if error else ''}"
        now_s = time.monotonic()
        if now_s - self._said_at.get(kind, -_SELDOM_S) >= _SELDOM_S:
            self._said_at[kind] = now_s
            because = f": {type(error).__name__}: {error}" if error else ""
            self._say(" ".join(f"{_first_line(record.getMessage())}{because}".split()))

    def listen(self) -> None:
        """Take the place of the handlers that print a traceback."""
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [self], False


def _first_line(message: object) -> str:
    """Return what a message is about: below it asyncio lists the connection's objects, which are others each time."""
    return str(message).partition("\n")[0]
