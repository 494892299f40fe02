"""The connection between a process of a command and whoever asked for the trial. Standard library only."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gpumem_tui.trial.events import Ended, Failed, Joined, encode

if TYPE_CHECKING:
    from gpumem_tui.trial.events import ChildEvent

REQUEST_FILE, SOCKET_FILE = "request.json", "events.sock"


class Link:
    """Events go out as JSON lines; ``pause`` and ``resume`` come in, and are read at the end of each step."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX)
        self._lock = threading.Lock()
        self.is_concluded = False
        self.has_all_steps = False
        self.steps: Callable[[], int] = lambda: 0
        self.on_end: Callable[[], None] = lambda: None
        try:
            self._socket.connect(os.path.join(directory, SOCKET_FILE))
        except OSError:  # who asked is gone, and all of this is about to be ended
            self._socket = None
            return
        rank, ranks = (int(os.environ.get(name) or default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        self.report(Joined(os.getpid(), rank, ranks, " ".join(sys.argv[:1])))

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

    def wait_while_paused(self) -> None:
        """Come back at once, or after a pause when the run is resumed or ended."""
        paused = False
        while self._socket is not None:
            if not paused and not select.select([self._socket], [], [], 0)[0]:
                return
            try:
                words = self._socket.recv(1024)
            except OSError:
                return
            if not words:
                return
            paused = words.rstrip().endswith(b"pause")
            if not paused:
                return
