"""What a program prints: cut into lines that are fit for a terminal, and written out before a process ends early."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress

from gpumem_tui.text import printable

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONGEST_LINE = 1 << 16


class OutputLines:
    """Lines without control codes; of a line that is written over, its last state.

    Attributes:
        last: the last line that was not empty.
    """

    def __init__(self) -> None:
        self.last = ""
        self._rest = b""

    @property
    def unfinished(self) -> str:
        """The text of the unfinished line: a progress bar, a question."""
        return _shown(self._rest)

    def split(self, chunk: bytes) -> Iterator[str]:
        """The lines that this much more output ends; empty ones are left out."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        for line in lines:
            yield from self._kept(line)

    def rest(self) -> Iterator[str]:
        """The line that the command did not end."""
        rest, self._rest = self._rest, b""
        yield from self._kept(rest)

    def _kept(self, line: bytes) -> Iterator[str]:
        text = _shown(line)
        if text:
            self.last = text
            yield text


def _shown(line: bytes) -> str:
    written = [part for part in line.decode(errors="replace").split("\r") if part.strip()]
    return printable(_ESCAPES.sub("", written[-1].expandtabs())).rstrip() if written else ""


def flush_output() -> None:
    """Write out what the program has printed, before the process ends without taking itself apart."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or the program's own
            stream.flush()
