"""What every command shares: exit codes, whether there is a terminal, and how a complaint is made."""

from __future__ import annotations

import os
import sys

EXIT_BAD_INPUT = 2
EXIT_FAILED = 4
EXIT_INTERRUPTED = 130


def is_terminal() -> bool:
    """Textual draws on stderr and reads stdin; all three must be the terminal, and one that can be drawn on."""
    streams = (sys.stdin, sys.stdout, sys.stderr)  # None where whoever started the program closed them
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"


def drop_output() -> None:
    """What stdout still holds is not wanted, or has no place: without this it would be written at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str, code: int) -> int:
    """One line on stderr; returns the exit code."""
    print(f"gpumem-tui: {' '.join(message.split())}", file=sys.stderr)
    return code
