"""The program for one visitor: a process that the server starts, draws through, and outlives.

Run as ``python -m gpumem_tui.serve.visitor [--read-only] [--settings FILE]`` with textual-serve's environment and
pipes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import select
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from gpumem_tui.settings import Notify, load

_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` (man 2 prctl)."""


def command(settings: Path | None, *, read_only: bool) -> list[str]:
    """Return what starts it: no module comes from the working directory, and text is UTF-8 whatever the locale."""
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    options = ["--read-only"] if read_only else []
    if settings is not None:
        options += ["--settings", str(settings)]
    return [sys.executable, *safe_path, "-X", "utf8", "-m", __name__, *options]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code.

    Raises:
        SettingsError: the file is invalid.
    """
    parser = ArgumentParser()
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--settings", type=Path)
    given = parser.parse_args(arguments)
    if not _bound_to_server():
        return 0
    from gpumem_tui.tui.start import open_program

    settings = load(given.settings)
    read_only = given.read_only or settings.read_only
    return open_program(dataclasses.replace(settings, read_only=read_only, notify=Notify()))


def _bound_to_server() -> bool:
    """Have the server's end be a hang-up here, whatever ended it; False if it has ended already."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGHUP, 0, 0, 0)
    pipe = select.poll()
    pipe.register(0, select.POLLHUP)
    return not pipe.poll(0)


if __name__ == "__main__":
    sys.exit(main())
