"""The connection between a process of a command and whoever asked for the trial. Standard library only."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gpumem_tui.search.events import Ended, Failed, Joined, StandsAt, encode

if TYPE_CHECKING:
    from types import FrameType

    from gpumem_tui.search.events import ChildEvent

REQUEST_FILE, SOCKET_FILE = "request.json", "events.sock"


class Link:
    """Events go out as JSON lines; ``pause``, ``resume`` and ``where`` come in, followed by a thread."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX)
        self._lock = threading.Lock()
        self.may_run = threading.Event()
        self.may_run.set()
        self.is_concluded = False
        self.steps: Callable[[], int] = lambda: 0
        self.on_end: Callable[[], None] = lambda: None
        try:
            self._socket.connect(os.path.join(directory, SOCKET_FILE))
        except OSError:  # who asked is gone, and all of this is about to be ended
            self._socket = None
            return
        rank, ranks = (int(os.environ.get(name) or default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        self.report(Joined(os.getpid(), rank, ranks, " ".join(sys.argv[:1])))
        self._main = threading.main_thread().ident
        threading.Thread(target=self._listen, args=(self._socket,), daemon=True).start()

    def request(self) -> bytes:
        """The request as it was written."""
        with open(os.path.join(self._directory, REQUEST_FILE), "rb") as file:
            return file.read()

    def report(self, event: ChildEvent) -> None:
        """Send an event; a receiver that is gone is no error of the program's."""
        with self._lock, suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(encode(event))

    def conclude(self, event: ChildEvent) -> None:
        """Send the outcome of the trial. The first one counts."""
        if not self.is_concluded:
            self.is_concluded = True
            self.report(event)

    def failed(self, detail: str) -> None:
        """An error ends this process."""
        if not self.is_concluded:
            self.report(Failed("workload", detail))
            self.is_concluded = True

    def ended(self) -> None:
        """The interpreter exits."""
        self.on_end()
        if not self.is_concluded:
            self.report(Ended(self.steps()))

    def leave(self) -> None:
        """Let go of the connection in a forked child."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self.is_concluded = True
        self.on_end = lambda: None
        self._lock = threading.Lock()

    def _listen(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection.makefile("r") as lines:
            for line in lines:
                word = json.loads(line)
                if word == "where":
                    self.report(StandsAt(self._place()))
                elif word == "pause":
                    self.may_run.clear()
                elif word == "resume":
                    self.may_run.set()

    def _place(self) -> str:
        """``file:line`` at which the main thread stands, the innermost that is no installed library's."""
        from gpumem_tui.command.errors import is_users

        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        innermost = frame
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        found = frame or innermost
        return "" if found is None else f"{os.path.relpath(found.f_code.co_filename)}:{found.f_lineno}"
