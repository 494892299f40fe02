"""A real terminal of a given size, in which the real program runs: a pty read by a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyte

from tests.sharing import WarmPython
from tests.waiting import DEADLINE_S


class Terminal:
    """The program and what it shows.

    Attributes:
        heard: what it has written so far.
    """

    def __init__(
        self, arguments: list[str], columns: int, lines: int, env: dict[str, str], python: str, cwd: Path | None
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.heard = b""
        self.pid, self._fd = pty.fork()
        size = struct.pack("HHHH", lines, columns, 0, 0)
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, size)  # before the program asks
            # An environment of its own: GNU readline, which pytest imports, puts COLUMNS and LINES where os.environ
            # does not see them, and they would count for more than the terminal's size.
            own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            os.chdir(cwd or ".")
            own |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", **env}
            os.execve(sys.executable, [python, "-m", "gpumem_tui", *arguments], own)

    @property
    def text(self) -> str:
        """The screen, line by line."""
        return "\n".join(self.screen.display)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._fd, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the terminal's size while the program runs."""
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    def wait_for(self, *wanted: str, deadline_s: float = DEADLINE_S) -> str:
        """Read until every text is on the screen, perhaps broken at a space into two lines; the screen then.

        Raises:
            AssertionError: it did not come in time; the message is the screen.
        """

        def there(text: str) -> bool:
            unbroken = " ".join(text.split())
            return all(part in text or part in unbroken for part in wanted)

        return self.wait_until(there, str(wanted), deadline_s)

    def wait_until(self, there: Callable[[str], bool], what: str, deadline_s: float = DEADLINE_S) -> str:
        """Read until `there` holds of the screen."""
        end = time.monotonic() + deadline_s
        while not there(self.text):
            if time.monotonic() > end:
                raise AssertionError(f"{what} did not come:\n{self.text}")
            self._read(0.1)
        return self.text

    def clear(self) -> None:
        """Another program writes all over the screen, after what this one has written."""
        while select.select([self._fd], [], [], 0)[0]:
            self._read(0)
        self.screen.reset()

    def is_stopped(self) -> bool:
        """Whether the program was stopped by a signal."""
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def children(self) -> list[psutil.Process]:
        """The program's processes, without itself."""
        return psutil.Process(self.pid).children(recursive=True)

    def exit_code(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the program's end; minus the signal's number if one killed it."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            self._read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"the program did not end:\n{self.text}")

    def close(self) -> None:
        """Kill what still runs."""
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it has ended and was waited for
        os.close(self._fd)

    def _read(self, timeout_s: float) -> None:
        if select.select([self._fd], [], [], timeout_s)[0]:
            try:
                written = os.read(self._fd, 1 << 16)
                self.heard += written
                self._stream.feed(written)
            except OSError:
                time.sleep(timeout_s)  # Linux reports the closed end of a pty so


@contextmanager
def terminal(
    *arguments: str,
    columns: int = 120,
    lines: int = 40,
    env: dict[str, str] | None = None,
    python: str = "",
    cwd: Path | None = None,
) -> Iterator[Terminal]:
    """Run `gpumem-tui ARGUMENTS` in a terminal.

    Args:
        python: what the program runs its steps with; else one that starts with torch imported.
        cwd: the folder to run in; else this process's.
    """
    running = Terminal(list(arguments), columns, lines, env or {}, python or WarmPython.path(), cwd)
    try:
        yield running
    finally:
        running.close()
