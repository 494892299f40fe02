"""Text from outside (names, messages, what a program prints) made safe to show, where it is read.

Standard library only, and Python 3.9: a user's training process speaks it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
_LONGEST_LINE = 1 << 16
_WARNING = r"(?i)\b(?:[A-Za-z]*Warning|WARN(?:ING)?)\b|^\[?W\d{4} "
"""Lines of Python's warnings, of loggers and of torch's own C++ (``W1128 16:22:04.97 …``)."""


def printable(text: str) -> str:
    """Return a text that cannot move the cursor, colour the terminal or break the line, whoever wrote it."""
    return text if text.isprintable() else "".join(character if character.isprintable() else " " for character in text)


def without_escapes(text: str) -> str:
    r"""Return a text as a terminal would show it, without what colours it, moves the cursor or sets a window's title.

    >>> without_escapes("\x1b]0;me@host: ~\x07\x1b[1mready\x1b[0m")
    'ready'
    """
    return printable(re.sub(_ESCAPES, "", text)).strip()


def minor_of(version: str) -> tuple[int, ...]:
    """Return major and minor of a version such as ``2.13.0+cpu``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def shortened(text: str, length: int = 60) -> str:
    """Return a printable text of at most `length` characters."""
    clean = printable(text)
    return clean if len(clean) <= length else clean[: length - 1] + "…"


def cleaned(value: object) -> object:
    """Return decoded JSON with every text in it printable, the keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [cleaned(one) for one in value]
    return value


def file_text(path: Path) -> str:
    """Return the text of a file; empty where it cannot be read."""
    try:
        with open(os.fspath(path), errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# A program's output


class OutputLines:
    """Lines without control codes; of a line that is written over, its last state.

    Attributes:
        last: the last line with a word or a number in it that is no warning.
    """

    def __init__(self) -> None:
        self.last = ""
        self._rest = b""
        self._warned = False

    @property
    def unfinished(self) -> str:
        """The text of the unfinished line: a progress bar, a question."""
        return _shown(self._rest)

    def split(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that this much more output ends, without empty ones."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        for line in lines:
            yield from self._kept(line)

    def rest(self) -> Iterator[str]:
        """Yield the line that the command did not end."""
        rest, self._rest = self._rest, b""
        yield from self._kept(rest)

    def _kept(self, line: bytes) -> Iterator[str]:
        text = _shown(line)
        if text:
            warns = bool(re.search(_WARNING, text))
            is_its_source = self._warned and text.startswith("  ")
            self._warned = warns
            if not (warns or is_its_source) and any(map(str.isalnum, text)):
                self.last = text
            yield text


def _shown(line: bytes) -> str:
    written = [part for part in line.decode(errors="replace").split("\r") if part.strip()]
    return printable(re.sub(_ESCAPES, "", written[-1].expandtabs())).rstrip() if written else ""


_BAR = r"\d%\s*\||\d+/(?:\d+|\?) ?\[|[━╸╺█▉▊▋▌▍▎▏]{3}|\[[=#]+[>.\s#=-]*\]|\b(?:it|step|batch|s)/(?:s|it)\b"
"""tqdm's, rich's and Lightning's, Keras' and others' bars, and their rates."""


def is_progress_bar(line: str) -> bool:
    """Return whether a line is a state of a progress bar.

    >>> is_progress_bar("  2%|▏         | 1/50 [00:00<00:10,  4.63it/s]"), is_progress_bar("step 1 of 50: loss 0.5")
    (True, False)
    """
    return bool(re.search(_BAR, line))


def flush_output() -> None:
    """Write out what the program has printed, before the process ends without taking itself apart."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or the program's own
            stream.flush()
