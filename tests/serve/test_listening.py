"""Connections to the web server: who stays and who is let go, and its lines on errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gpumem_tui.connections import Admission
from gpumem_tui.serve import listening as module
from gpumem_tui.serve.listening import Listening, Seldom


def _logged(seldom: Seldom, message: str, error: Exception | None = None) -> None:
    exception = None if error is None else (type(error), error, None)
    seldom.handle(logging.LogRecord("asyncio", logging.ERROR, "", 1, message, (), exception))


def test_of_each_kind_of_error_a_line_is_said_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    said, now = list[str](), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seldom = Seldom(said.append)
    for fd in range(1000):
        _logged(seldom, "socket.accept() out of system resource", OSError(24, "Too many open files"))
        _logged(seldom, f"Fatal error on transport\nprotocol: <_Bounded at {fd}>\ntransport: <fd={fd}>")
        _logged(seldom, f"Exception in callback _add_reader({fd}, <at {fd:#x}>)", FileNotFoundError("gone"))
    assert said == [
        "socket.accept() out of system resource: OSError: [Errno 24] Too many open files",
        "Fatal error on transport",
        "Exception in callback _add_reader(0, <at 0x0>): FileNotFoundError: gone",
    ]
    now[0] = 61.0
    _logged(seldom, "Fatal error on transport\nprotocol: <_Bounded at 7>")
    assert said[3:] == ["Fatal error on transport"]


def test_of_those_that_are_idle_the_oldest_goes_and_who_is_at_work_stays() -> None:
    gate, gone = Admission(4, 3), list[str]()
    at_work = gate.admit("a", lambda: gone.append("at work"))
    assert at_work is not None
    at_work.is_idle = False
    for name in ("1", "2", "3"):
        assert gate.admit("a", lambda name=name: gone.append(name)) is not None  # type: ignore[misc]
    assert gone == ["1"], "three of one address"
    assert gate.admit("b", lambda: gone.append("b")) is not None
    assert gate.admit("c", lambda: gone.append("c")) is not None
    assert gone == ["1", "2"], "four in all"
    gate.leave(at_work)
    assert gate.admit("d", lambda: gone.append("d")) is not None
    assert gone == ["1", "2"]


def test_where_all_are_at_work_nobody_is_let_in() -> None:
    gate = Admission(2, 2)
    for admitted in (gate.admit("a", lambda: None), gate.admit("b", lambda: None)):
        assert admitted is not None
        admitted.is_idle = False
    assert gate.admit("c", lambda: None) is None


class _Inner(asyncio.Protocol):
    """In the place of aiohttp's, which closes connections by itself."""

    made: ClassVar[list[asyncio.BaseTransport]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(transport)


@asynccontextmanager
async def _listening(most: int) -> AsyncIterator[tuple[Listening, Callable[..., Awaitable[asyncio.StreamReader]]]]:
    """Yield what listens, and what connects to it."""
    listening = Listening(most)
    listening.server = _Inner  # type: ignore[assignment]
    _Inner.made.clear()
    server = await asyncio.get_running_loop().create_server(listening.protocol, "127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []

    async def connect(said: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writers.append(writer)
        writer.write(said)
        return reader

    yield listening, connect
    for writer in writers:
        writer.close()
    server.close()


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(1), 30) == b""
    return True


@asynccontextmanager
async def _answering(listening: Listening, transport: asyncio.BaseTransport) -> AsyncIterator[None]:
    """Have a request of a connection answered for as long."""
    done = asyncio.Event()

    async def answer(_: object) -> None:
        await done.wait()

    task = asyncio.ensure_future(listening.at_work(_request(transport), answer))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    yield
    done.set()
    await task


def _request(transport: asyncio.BaseTransport) -> Any:
    return SimpleNamespace(transport=transport)


async def test_who_gives_nothing_goes_then_who_gives_no_whole_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BYTE_S", 0.05)
    monkeypatch.setattr(module, "REQUEST_S", 0.4)
    async with _listening(8) as (listening, connect):
        asking = await connect(b"G")
        silent, half = await connect(), await connect(b"GET / HTTP/1.1\r\n")
        async with _answering(listening, _Inner.made[0]):
            assert await _is_closed(silent)
            assert not half.at_eof()
            assert await _is_closed(half)
            assert not asking.at_eof()


async def test_for_a_new_one_the_oldest_goes_that_is_no_visitors() -> None:
    async with _listening(2) as (listening, connect):
        asking, first, second = await connect(), await connect(), await connect()
        assert await _is_closed(asking)
        async with _answering(listening, _Inner.made[1]):
            third = await connect()
            assert await _is_closed(first), "whose answer may wait for it to read"
        with listening.stays(_request(_Inner.made[2])), listening.stays(_request(_Inner.made[3])):
            assert await _is_closed(await connect()), "all are visitors"
            assert not second.at_eof()
            assert not third.at_eof()
