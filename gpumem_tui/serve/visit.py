"""A visitor's process, spoken to in textual-serve's packets. All use of textual-serve's internals is here.

Written for textual-serve 1.1 (checked on 1.1.3), which `pyproject.toml` asks for. `AppService._open_app_process` starts
the process by a shell and leaves it in the server's process group; `_process` and `_stdin` are what it sets, and
`_task` is what `start` makes of `run`. `tests/serve/test_visit.py` names what a later version lacks.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

USED = ("_open_app_process", "_process", "_stdin", "_task", "_build_environment")
"""Members of `AppService` that it does not promise to keep."""

_ORDERLY_S = 4.0
"""How long a process has to end by itself; it ends itself the hard way after two seconds."""
_SENT_S = 1.0
"""How long what it drew last may take to be sent, to a browser that may take nothing any more."""


class Visit(AppService):
    """A process of the program for one visitor, for as long as the visitor stays.

    Args:
        command: starts it.
        write: sends drawn bytes to the browser; write_text: sends a message to its script; close: ends the connection.
    """

    def __init__(
        self,
        command: Sequence[str],
        write: Callable[[bytes], Awaitable[None]],
        write_text: Callable[[str], Awaitable[None]],
        close: Callable[[], Awaitable[object]],
    ) -> None:
        async def close_it() -> None:
            await close()

        super().__init__(
            "", write_bytes=write, write_str=write_text, close=close_it, download_manager=DownloadManager()
        )
        self._command = tuple(command)
        self._is_ending = False

    async def _open_app_process(self, width: int = 80, height: int = 24) -> asyncio.subprocess.Process:
        """Start it in a session of its own: ctrl+c in the server's terminal is the server's to see to."""
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe, stdout=pipe, stderr=pipe,
            env=_environment(self._build_environment(width, height)),
            start_new_session=True,
        )  # fmt: skip
        self._stdin = process.stdin
        return process

    async def run(self) -> None:
        """Pass on what the process draws; once it draws no more, the connection ends."""
        await super().run()
        if not self._is_ending:
            await self.remote_close()

    async def on_data(self, payload: bytes) -> None:
        """Send it; what is drawn for a visitor who has left is dropped, so that the process need not wait."""
        with suppress(ConnectionError):
            await super().on_data(payload)

    async def stop(self) -> None:
        """Hang up, and wait until the process has ended, with what it started.

        May be called twice, and waits for no browser.
        """
        self._is_ending = True
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGHUP)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _ORDERLY_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_SENT_S)
            self._task.cancel()
            await asyncio.wait({self._task})


def _environment(made: dict[str, str]) -> dict[str, str]:
    """Describe the browser's terminal, of which the server's gives nothing."""
    left = {name: value for name, value in made.items() if name not in ("NO_COLOR", "LINES", "TEXTUAL_FPS")}
    return {"GPUMEM_TUI_ASCII": "0", **left, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
