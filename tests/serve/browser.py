"""A real headless Chromium, driven by the DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.serve.serving import Screen
from tests.waiting import DEADLINE_S, wait_for_file

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_CTRL, _SHIFT = 2, 8
"""Modifiers, as the protocol has them."""
_COLOURS = """
(async () => {
  const picture = new Image();
  picture.src = "data:image/png;base64,%s";
  await picture.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [picture.width, picture.height];
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel & 0xffffff, (counts.get(pixel & 0xffffff) ?? 0) + 1);
  return [...counts];
})()
"""


def find_chromium() -> str | None:
    """Where one is installed."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Page:
    """A page of the browser, and all that it asked the network for.

    Attributes:
        asked: the URLs, websockets' too. screen: what came through a websocket, as a terminal shows it.
    """

    def __init__(self, connection: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self._connection = connection
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.asked: list[str] = []
        self.screen = Screen()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = len(self._answers) + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._connection.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], DEADLINE_S)
        assert "error" not in answer, f"{method}: {answer}"
        result: dict[str, Any] = answer["result"]
        return result

    async def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def open(self, url: str, width: int, height: int) -> None:
        """Go to a page."""
        await self.call("Network.enable")
        await self.call("Page.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Page.navigate", url=url)

    async def press(self, character: str) -> None:
        """A key that types a character."""
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=character, key=character)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    async def press_ctrl_c(self) -> None:
        """As a user does: the browser's own command to copy goes with it."""
        key: dict[str, Any] = {"key": "c", "code": "KeyC", "windowsVirtualKeyCode": 67, "modifiers": _CTRL}
        await self.call("Input.dispatchKeyEvent", type="rawKeyDown", commands=["copy"], **key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def drag_with_shift(self, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Select what is between two points."""
        for kind, (x, y), buttons in (
            ("mousePressed", begin, 1), ("mouseMoved", end, 1), ("mouseReleased", end, 0)
        ):  # fmt: skip
            await self._mouse(kind, x, y, buttons, _SHIFT)

    async def click(self, at: tuple[int, int]) -> None:
        """Press and let go, which ends a selection."""
        for kind, buttons in (("mousePressed", 1), ("mouseReleased", 0)):
            await self._mouse(kind, *at, buttons, 0)

    async def _mouse(self, kind: str, x: int, y: int, buttons: int, modifiers: int) -> None:
        button = "none" if kind == "mouseMoved" else "left"
        await self.call(
            "Input.dispatchMouseEvent",
            type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1, modifiers=modifiers,
        )  # fmt: skip

    async def picture(self) -> bytes:
        """The picture, as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    async def picture_with(self, colour: tuple[int, int, int]) -> tuple[bytes, dict[tuple[int, int, int], int]]:
        """The first picture that has a colour, and how many pixels have each: what came is drawn a little later."""
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while True:
            picture = await self.picture()
            colours = await self.colours(picture)
            if colour in colours:
                return picture, colours
            assert asyncio.get_running_loop().time() < end, f"{colour} is not on the page: {colours}"

    async def wait_until_true(self, expression: str) -> None:
        """Until an expression in the page holds."""
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not await self.value(expression):
            assert asyncio.get_running_loop().time() < end, expression
            await asyncio.sleep(0.05)

    async def colours(self, picture: bytes) -> dict[tuple[int, int, int], int]:
        """How many pixels of a picture have each colour (red, green, blue)."""
        counted = await self.value(_COLOURS % base64.b64encode(picture).decode())
        return {(pixel & 255, pixel >> 8 & 255, pixel >> 16 & 255): count for pixel, count in counted}

    async def wait_until(self, there: Callable[[], Any], what: str) -> None:
        """Wait for something that comes with the page's events."""
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not there():
            assert asyncio.get_running_loop().time() < end, f"{what} did not come:\n{self.screen.text}\n{self.asked}"
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Listen no more."""
        self._reading.cancel()

    async def _read(self) -> None:
        async for message in self._connection:
            said = message.json()
            if "id" in said:
                self._answers[said["id"]].set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.asked.append(said["params"]["request"]["url"])
            elif said["method"] == "Network.webSocketCreated":
                self.asked.append(said["params"]["url"])
            elif said["method"] == "Network.webSocketFrameReceived" and said["params"]["response"]["opcode"] == 2:
                self.screen.feed(base64.b64decode(said["params"]["response"]["payloadData"]))


@asynccontextmanager
async def browsing(chromium: str, folder: Path) -> AsyncIterator[Page]:
    """A browser with one page and no past; `folder` is where it keeps what it keeps."""
    options = ["--headless=new", "--no-sandbox", "--no-first-run", "--remote-debugging-port=0", "--hide-scrollbars"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-background-networking"]
    process = subprocess.Popen(
        [chromium, *options, *offline, "--disable-dev-shm-usage", f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)}, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_file(folder / "DevToolsActivePort")
        port = (folder / "DevToolsActivePort").read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = await answer.json()
            target = next(target for target in targets if target["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as connection:
                page = Page(connection)
                yield page
                await page.close()
    finally:
        os.killpg(process.pid, 9)
        process.wait()
