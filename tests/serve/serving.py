"""`gpumem-tui serve` as a process, and visitors of it: what a browser's script states and hears, without the
browser."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import psutil
import pyte

from tests.waiting import DEADLINE_S, wait_until

COLUMNS, LINES = 120, 40


@dataclass(frozen=True)
class Served:
    """A server that runs.

    Attributes:
        url: as it printed it, with the token.
    """

    process: subprocess.Popen[str]
    url: str

    @property
    def base(self) -> str:
        """Scheme and address."""
        return self.url.partition("/?")[0]

    @property
    def token(self) -> str:
        """The token of a visitor."""
        return self.url.partition("token=")[2]

    @property
    def websocket(self) -> str:
        """Where the page's script connects to."""
        return f"{self.base}/ws/{self.token}?width={COLUMNS}&height={LINES}"

    def children(self) -> list[psutil.Process]:
        """The visitors' processes and what they have started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_visitors(self, count: int) -> None:
        """Until there are as many processes of visitors."""
        wait_until(lambda: len(psutil.Process(self.process.pid).children()) == count, f"{count} visitors' processes")


@contextmanager
def serving(environment: Mapping[str, str], *options: str) -> Iterator[Served]:
    """The server on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpumem_tui", "serve", "--port", "0", *options],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        assert first.startswith("http://"), first + process.stdout.read()
        yield Served(process, first)
    except AssertionError:
        process.kill()
        print("The server's last words:", process.stdout.read() if process.stdout is not None else "")
        raise
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class Screen:
    """The screen of a terminal that got these bytes."""

    def __init__(self) -> None:
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self.copied = ""
        """The last text that the program put into the browser's clipboard (OSC 52)."""

    def feed(self, data: bytes) -> None:
        """Draw."""
        if b"\x1b]52;c;" in data:
            encoded = data.partition(b"\x1b]52;c;")[2].partition(b"\x07")[0]
            self.copied = base64.b64decode(encoded).decode()
        self._stream.feed(data)

    @property
    def text(self) -> str:
        """Line by line."""
        return "\n".join(self._screen.display)


class Visitor:
    """One who has come in. It reads everything, as a browser does: the server drops who answers no ping."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self._connection = connection
        self._screen = Screen()
        self._drawn = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._connection:
            if message.type is aiohttp.WSMsgType.BINARY:
                self._screen.feed(message.data)
                self._drawn.set()

    @property
    def copied(self) -> str:
        """The last text that the program put into the browser's clipboard."""
        return self._screen.copied

    async def press(self, keys: str) -> None:
        """Type."""
        await self._connection.send_json(["stdin", keys])

    async def send(self, text: str) -> None:
        """Say what no browser would."""
        await self._connection.send_str(text)

    async def see(self, *wanted: str) -> str:
        """Wait until all of it is on the screen; the screen then."""
        return await self.see_that(lambda text: all(part in text for part in wanted), str(wanted))

    async def see_that(self, there: Callable[[str], bool], what: str) -> str:
        """Wait until it holds of the screen."""

        async def look() -> None:
            while not there(self._screen.text):
                self._drawn.clear()
                drawn = asyncio.create_task(self._drawn.wait())
                await asyncio.wait({drawn, self._reading}, return_when=asyncio.FIRST_COMPLETED)
                drawn.cancel()
                ended = self._reading.done() and not there(self._screen.text)
                assert not ended, f"closed ({self._connection.close_code}), without {what}:\n{self._screen.text}"

        try:
            await asyncio.wait_for(look(), DEADLINE_S)
        except asyncio.TimeoutError as error:
            raise AssertionError(f"{what} did not come:\n{self._screen.text}") from error
        return self._screen.text

    async def until_closed(self) -> None:
        """Until the server ends the connection."""
        await asyncio.wait_for(asyncio.shield(self._reading), DEADLINE_S)

    async def leave(self) -> None:
        """Close the connection, as a closed tab does."""
        await self._connection.close()


@asynccontextmanager
async def visiting(served: Served, **headers: str) -> AsyncIterator[Visitor]:
    """Come in, and leave at the end."""
    async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(served.websocket) as connection:
        visitor = Visitor(connection)
        yield visitor
    await visitor.until_closed()
