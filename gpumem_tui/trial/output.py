"""What a process has printed when it ends."""

from __future__ import annotations

import sys
from contextlib import suppress


def flush_output() -> None:
    """Write out what the program has printed, before the process ends without taking itself apart."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or the program's own
            stream.flush()
