"""The web server: a page with a terminal in it, a websocket and a process for each visitor."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from string import Template

from aiohttp import WSMsgType, web

from gpumem_tui.addresses import in_url
from gpumem_tui.connections import FIRST_BYTE_S
from gpumem_tui.errors import OptionError
from gpumem_tui.serve.access import Access
from gpumem_tui.serve.listening import Listening, Seldom
from gpumem_tui.serve.visit import Visit
from gpumem_tui.system import host_name

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The token is in the page's URL: no cache keeps it, no other site gets it, none is loaded from."""
_CLOSE_S = 2.0
"""How long a browser has to say that it has closed."""
_HEARTBEAT_S = 15.0
"""A browser that does not answer within half of this has left."""
_OF_A_PAGE, _CONNECTIONS = 8, 64
"""Connections of a visitor's page, as browsers open them at most, and of all others."""
_BACKLOG = 128
_LARGEST_MESSAGE_BYTES = 1 << 20
_CELLS = range(1, 1001)
_SMALLEST_FONT, _LARGEST_FONT = 6, 48
_FONT_PX = 15
_AGAIN_S = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class WebServer:
    """The program in browsers.

    Args:
        command: starts the process of a visitor.
        token: what a visitor must know.
        visitors: how many there may be at once.
    """

    def __init__(self, command: Sequence[str], token: str, visitors: int) -> None:
        self._command = command
        self._token = token
        self._access = Access(token)
        self._most = visitors
        self._visits: dict[Visit, web.WebSocketResponse] = {}
        self._listening = Listening(_OF_A_PAGE * visitors + _CONNECTIONS)

    async def run(self, host: str, port: int, say: Callable[[str], None]) -> None:
        """Serve until a signal asks for the end, which ends every visitor's process.

        Args:
            host, port: where; port 0 is one that is free.
            say: told the URL, token and all, once visitors may come.

        Raises:
            OptionError: the address is in use, not of this machine, or not permitted.
        """
        logging.getLogger("textual-serve").setLevel(logging.CRITICAL)  # a visitor who leaves early is no error
        stopped = asyncio.Event()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        Seldom(partial(print, "gpumem-tui serve:", file=sys.stderr, flush=True)).listen()
        runner = web.AppRunner(
            self._application(), access_log=None, shutdown_timeout=_CLOSE_S, keepalive_timeout=FIRST_BYTE_S
        )
        await runner.setup()
        assert runner.server is not None
        self._listening.server = runner.server
        listening: asyncio.Server | None = None
        try:
            try:
                loop = asyncio.get_running_loop()
                listening = await loop.create_server(self._listening.protocol, host, port, backlog=_BACKLOG)
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                where = f"--port: {in_url(host, port)} cannot be listened on"
                raise OptionError(f"{where}: {reason}; --port 0 takes one that is free") from error
            say(f"http://{in_url(host, listening.sockets[0].getsockname()[1])}/?token={self._token}")
            await stopped.wait()
        finally:
            if listening is not None:
                listening.close()
            await runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._listening.at_work, self._check_origin])
        application.add_routes(
            [
                web.get("/", self._page),
                web.get("/page.js", _script),
                web.get("/ws/{token}", self._websocket),
                web.static("/static", Path(str(files("textual_serve") / "static"))),
            ]
        )
        application.on_response_prepare.append(_add_headers)
        application.on_shutdown.append(self._end_visits)
        return application

    @web.middleware
    async def _check_origin(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse what comes from elsewhere, static files included."""
        if not request.headers.get("Host"):
            return _message(400, "No host", "gpumem-tui serve: the header Host is empty.")
        if reason := self._access.foreign(request.host, request.headers.get("Origin")):
            return _message(403, "Not from here", f"gpumem-tui serve: {reason}.")
        return await handler(request)

    async def _page(self, request: web.Request) -> web.Response:
        if not self._access.knows_token(request.query.get("token", "")):
            return _no_token()
        if len(self._visits) >= self._most:
            return self._full()
        websocket = f"ws://{request.host}/ws/{self._token}"
        page = _terminal_page(host_name(), websocket, request.query.get("fontsize", ""))
        policy = f"{_POLICY} ws://{request.host}"  # not every browser takes 'self' for a websocket too
        return web.Response(text=page, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        if not self._access.knows_token(request.match_info["token"]):
            return _no_token()
        if len(self._visits) >= self._most:
            return self._full()
        connection = web.WebSocketResponse(
            timeout=_CLOSE_S, heartbeat=_HEARTBEAT_S, max_msg_size=_LARGEST_MESSAGE_BYTES
        )
        visit = Visit(self._command, connection.send_bytes, connection.send_str, connection.close)
        self._visits[visit] = connection  # before the first wait: nobody takes the same place
        with self._listening.stays(request):
            try:
                await connection.prepare(request)
                await visit.start(_cells(request.query.get("width"), 80), _cells(request.query.get("height"), 24))
                await _converse(connection, visit)
            finally:
                await visit.stop()
                del self._visits[visit]
        return connection

    async def _end_visits(self, _application: web.Application) -> None:
        """End the processes first, also while browsers are connected."""
        connections = list(self._visits.values())
        await asyncio.gather(*(visit.stop() for visit in self._visits))
        await asyncio.gather(*(connection.close() for connection in connections if connection.prepared))

    def _full(self) -> web.Response:
        text = (
            f"{self._most} visitors are here, and --visitors {self._most} admits no more: each is a process on "
            "this machine. This page tries again every few seconds."
        )
        return _message(503, "All places are taken", text, reloads=True)


async def _converse(connection: web.WebSocketResponse, visit: Visit) -> None:
    """Pass on what the browser states until it leaves. A message that textual-serve's script would not send ends it."""
    async for message in connection:
        if message.type is not WSMsgType.TEXT:
            return
        try:
            kind, *rest = json.loads(message.data)
        except (ValueError, TypeError):
            return
        said: object = rest[0] if rest else None
        if kind == "stdin" and isinstance(said, str):
            await visit.send_bytes(said.encode("utf-8", "replace"))
        elif kind == "resize" and isinstance(said, dict):
            await visit.set_terminal_size(_cells(said.get("width"), 80), _cells(said.get("height"), 24))
        elif kind == "ping":
            await connection.send_json(["pong", said])
        elif kind == "focus":
            await visit.focus()
        elif kind == "blur":
            await visit.blur()


def _cells(given: object, usual: int) -> int:
    """Return a width or height that a browser names; the usual one where it is none that a terminal has."""
    with suppress(ValueError):
        cells = int(given) if isinstance(given, (int, str)) else usual
        return cells if cells in _CELLS else usual
    return usual


async def _script(_request: web.Request) -> web.FileResponse:
    return web.FileResponse(Path(__file__).with_name("page.js"))


def _no_token() -> web.Response:
    text = "This address needs the token that `gpumem-tui serve` has printed: open the whole of its URL, ?token=… too."
    return _message(403, "No token, or not the one", text)


def _message(status: int, title: str, text: str, *, reloads: bool = False) -> web.Response:
    page = _message_page(title, text, reloads=reloads)
    return web.Response(status=status, text=page, content_type="text/html")


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


# Pages: none of them asks anything of another server, they work without a network


def _terminal_page(host_name: str, websocket: str, font_px: str) -> str:
    """Return the terminal that textual-serve's script draws into: it looks for the class and two ``data`` attributes.

    Args:
        websocket: the URL that the script connects to, to which it appends ``?width=…&height=…``.
        font_px: as the page's URL asks for it; what is no size gets the usual one.
    """
    size = int(font_px) if font_px.isdecimal() else _FONT_PX
    size = min(max(_SMALLEST_FONT, size), _LARGEST_FONT)
    return _filled("terminal.html", host=html.escape(host_name), websocket=html.escape(websocket), font_size=str(size))


def _message_page(title: str, text: str, *, reloads: bool = False) -> str:
    """Return a page with one message; with `reloads` the browser asks again every few seconds."""
    head = f'<meta http-equiv="refresh" content="{_AGAIN_S}">' if reloads else ""
    return _filled("message.html", head=head, title=html.escape(title), text=html.escape(text))


@cache
def _template(name: str) -> Template:
    return Template(Path(__file__).with_name(name).read_text("utf-8"))


def _filled(name: str, **parts: str) -> str:
    return _template(name).substitute(parts)
