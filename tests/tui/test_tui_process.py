"""The program in a terminal of its own: what it imports, and how it ends when a signal or a hang-up comes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
_PROGRAM = """
import sys
from gpumem_tui.tui.app import run_app
from tests.scenes import search as scene

config = scene.config()
sys.exit(run_app(scene.app(config, scene.scripted(scene.running(config)))))
"""


@contextmanager
def in_terminal(*, is_controlling: bool = True) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program on a pseudo-terminal, once its screen is up; a controlling one sends a signal when it is closed."""
    ours, theirs = pty.openpty()

    def take_control() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        start_new_session=True,
        preexec_fn=take_control if is_controlling else None,
    )
    os.close(theirs)
    try:
        assert ENTER_SCREEN in read_until(ours, b"SEARCHING"), "the screen never came up"
        yield process, ours
    finally:
        process.kill()
        process.wait()


def read_until(descriptor: int, mark: bytes, timeout_s: float = 15.0) -> bytes:
    """The program's output, up to a mark, its end or a time limit."""
    drawn, deadline = b"", time.monotonic() + timeout_s
    while mark not in drawn and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                drawn += os.read(descriptor, 1 << 16)
            except OSError:  # the other end is closed
                break
    return drawn


def test_a_terminate_signal_restores_the_terminal() -> None:
    with in_terminal() as (process, terminal):
        process.send_signal(signal.SIGTERM)
        assert LEAVE_SCREEN in read_until(terminal, LEAVE_SCREEN)
        assert process.wait(5) == 128 + signal.SIGTERM


@pytest.mark.parametrize("is_controlling", [True, False])
def test_a_lost_terminal_ends_the_program(is_controlling: bool) -> None:
    with in_terminal(is_controlling=is_controlling) as (process, terminal):
        os.close(terminal)
        assert process.wait(8) == 128 + signal.SIGHUP


def test_importing_the_app_brings_neither_torch_nor_numpy() -> None:
    code = "import sys, gpumem_tui.tui.app; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
