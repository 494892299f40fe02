"""A command's standard input: a terminal without input, or what was piped into this program."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import struct
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

_READS_A_PROGRAM = ("-", "/dev/stdin")
"""Words by which an interpreter or a shell takes its program from standard input, as ``python - <<EOF`` does."""

_ENDS_OF_INPUT = b"\x04" * 256
"""What a terminal reads as the end of its input, once for each (termios(3), VEOF)."""


class CommandInput:
    """The standard input of one run of a command; open until `close`.

    Scripts ask it for the terminal's size (``stty size``), so it is one; a question that they ask there finds the end
    of the input. A program that was piped in is given to every run anew.

    Attributes:
        fd: for the command.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._held: list[int] = []
        piped = _piped() if set(words) & set(_READS_A_PROGRAM) else None
        if piped is not None:
            self.fd = os.memfd_create("stdin")
            os.write(self.fd, piped)
            os.lseek(self.fd, 0, os.SEEK_SET)
        else:
            self.fd = self._terminal()
        self._held.append(self.fd)

    def _terminal(self) -> int:
        try:
            keyboard, terminal = pty.openpty()
        except OSError:  # there are none left, or none at all, as in some containers
            return os.open(os.devnull, os.O_RDONLY)
        self._held.append(keyboard)
        columns, lines = shutil.get_terminal_size()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.write(keyboard, _ENDS_OF_INPUT)
        return terminal

    def close(self) -> None:
        """Give back what was opened; may be called again."""
        while self._held:
            with suppress(OSError):
                os.close(self._held.pop())


@cache
def _piped() -> bytes | None:
    """What was piped into this program, all of it; None if a terminal or nothing is there."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    return sys.stdin.buffer.read()
