"""How soon the program is there: first full frame in a real terminal, next to a bare Textual app's.

`pytest -m bench -s -n 0 tests/bench/test_start.py`
"""

from __future__ import annotations

import os
import pty
import select
import signal
import statistics
import sys
import time
from contextlib import suppress

import pyte
import pytest

pytestmark = pytest.mark.bench

_RUNS = 9
_LONGEST_S = 10.0
"""A program that shows nothing more for so long comes to no frame."""

_BARE = """
from textual.app import App
from textual.widgets import Static
class Bare(App):
    def compose(self):
        yield Static("ready")
Bare().run()
"""


def _first_frame(command: list[str], wanted: str) -> tuple[float, str]:
    """Seconds from exec until `wanted` is on the screen, and the screen then, or as the program's end left it."""
    screen = pyte.Screen(80, 24)
    stream = pyte.ByteStream(screen)
    started = time.perf_counter()
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"})
        os.execv(sys.executable, [sys.executable, *command])
    try:
        with suppress(OSError):  # it has ended
            while not any(wanted in line for line in screen.display) and select.select([fd], [], [], _LONGEST_S)[0]:
                stream.feed(os.read(fd, 1 << 16))
        return time.perf_counter() - started, "\n".join(screen.display)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(fd)


def test_first_frame() -> None:
    bare, ours = list[float](), list[float]()
    for _ in range(_RUNS + 1):  # in turn, so that the machine's drift meets both; the first pair warms up
        for seconds, command, wanted in ((bare, ["-c", _BARE], "ready"), (ours, ["-m", "gpumem_tui"], "palette")):
            taken_s, shown = _first_frame(command, wanted)
            assert wanted in shown
            seconds.append(taken_s)
    bare_s, ours_s = statistics.median(bare[1:]), statistics.median(ours[1:])
    print(f"\nfirst full frame: bare Textual app {bare_s:.3f} s, gpumem-tui {ours_s:.3f} s, {ours_s - bare_s:+.3f} s")
