"""How soon a key press on the Plan screen is on the terminal, driving the real program with the real tracer.

`pytest -m bench -s -n 0 tests/bench/test_plan_speed.py`
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

_PRESSES = 100
_RIGHT = b"\x1b[C"
_DOWN = b"\x1b[B"
_MEDIAN_S, _P95_S = 0.030, 0.060
_QUIET_S = 1.5
_GAPS_S = (0.03, 0.15, 0.3)
"""Between presses: a key held down, a finger, a reader. Panes and replays run in the longer ones."""
_ESCAPES = re.compile(rb"\x1b[\[\]][0-9;?<>=]*[ -/]*[@-~]")


class _Program:
    """The program in a terminal of 120×40, told what it prints."""

    def __init__(self, data_home: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(
                {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", "XDG_DATA_HOME": str(data_home)}
            )
            os.execv(sys.executable, [sys.executable, "-m", "gpumem_tui", "plan", "--model", "gpt2", "--gpu",
                                      "sim:a100-80gb"])  # fmt: skip

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def read_until(self, wanted: bytes, deadline_s: float) -> float:
        """Seconds until the text is printed; escape sequences between its letters do not matter."""
        started, seen = time.perf_counter(), b""
        while time.perf_counter() - started < deadline_s:
            if select.select([self._fd], [], [], 0.5)[0]:
                seen += os.read(self._fd, 1 << 16)
                if wanted in _ESCAPES.sub(b"", seen):
                    return time.perf_counter() - started
        raise AssertionError(f"{wanted!r} was not printed in {deadline_s} s")

    def drain(self, seconds: float) -> None:
        """Read what comes for so long."""
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            if select.select([self._fd], [], [], left_s)[0]:
                os.read(self._fd, 1 << 16)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


def test_key_press_to_numbers(tmp_path: Path) -> None:
    program = _Program(tmp_path)
    try:
        program.read_until(b" left", 120)  # the trace is there: every batch size is also replayed
        for _ in range(6):  # down to the micro-batch
            program.press(_DOWN)
            program.drain(0.2)
        program.drain(_QUIET_S)
        seconds = []
        for batch_size in range(2, _PRESSES + 2):
            program.press(_RIGHT)
            seconds.append(program.read_until(f"1 pass × {batch_size}".encode(), 10))
            program.drain(_GAPS_S[batch_size % len(_GAPS_S)])
    finally:
        program.end()
    median, p95 = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
    print(f"\nkey press to numbers on the terminal: median {1000 * median:.1f} ms, 95 % {1000 * p95:.1f} ms")
    assert median < _MEDIAN_S
    assert p95 < _P95_S
