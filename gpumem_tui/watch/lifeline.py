"""Ends a command, and all that it started, when the other machine that runs it leaves or is cut off.

That machine holds our stdin. Where it is a terminal, a cut connection hangs it up; else lines on it say what a user
there did (`interrupt`, `terminate`, `alive`), and its end, or silence, that the machine is gone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from contextlib import suppress

import psutil

SIGNALS = {b"interrupt": signal.SIGINT, b"terminate": signal.SIGTERM}
SILENCE_S = 300.0
"""Without a line for so long, where stdin is no terminal, the other machine counts as gone."""
_GRACE_S = 5.0
"""After SIGTERM, until what still runs is killed."""
_SET_CHILD_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` (man 2 prctl): what outlives its parent becomes our child, so none is lost."""


class Lifeline:
    """Watches stdin. Made before the command is started, so that stdin is not the command's; `hold` once it runs."""

    def __init__(self) -> None:
        self._is_terminal = os.isatty(0)
        self._fd = os.dup(0)
        if not self._is_terminal:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def hold(self) -> None:
        """From here on; call it in the thread that waits for the command, whose signals it sends."""
        wait = self._until_hung_up if self._is_terminal else self._until_let_go

        def follow() -> None:
            wait()
            self.end_all()

        threading.Thread(target=follow, name="lifeline", daemon=True).start()

    def _until_hung_up(self) -> None:
        hung_up = select.poll()
        hung_up.register(self._fd, 0)  # POLLHUP alone: what is typed is the command's
        hung_up.poll()

    def _until_let_go(self) -> None:
        rest = b""
        while select.select([self._fd], [], [], SILENCE_S)[0] and (data := os.read(self._fd, 4096)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line in SIGNALS:
                    os.kill(os.getpid(), SIGNALS[line])

    @staticmethod
    def end_all() -> None:
        """End every process below this one: asked first, killed after a while."""
        until_s = time.monotonic() + _GRACE_S
        number = signal.SIGTERM
        while below := psutil.Process().children(recursive=True):
            for process in below:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            _, left = psutil.wait_procs(below, timeout=max(0.1, until_s - time.monotonic()))
            number = signal.SIGKILL if left else number
