"""What every command shares: exit codes, whether there is a terminal, and how a complaint is made."""

from __future__ import annotations

import sys

EXIT_BAD_INPUT = 2
EXIT_FAILED = 4
EXIT_INTERRUPTED = 130


def is_terminal() -> bool:
    """Textual draws on stderr and reads stdin; all three must be the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()


def complain(message: str, code: int) -> int:
    """One line on stderr; returns the exit code."""
    print(f"gpumem-tui: {' '.join(message.split())}", file=sys.stderr)
    return code
