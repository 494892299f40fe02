"""The program for one visitor: a process that the server starts, draws through, and outlives.

Run as ``python -m gpumem_tui.serve.visitor [--read-only] [--settings FILE] [--host NAME]…`` with textual-serve's
environment and pipes.
"""

from __future__ import annotations

import ctypes
import select
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from gpumem_tui.settings import Notify, load

_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` (man 2 prctl)."""


@dataclass(frozen=True)
class Hosts:
    """The machines that visitors see instead of this one.

    Attributes:
        names: none for this machine.
        remote_command, interval_s: before what the settings say; empty and None for that.
    """

    names: tuple[str, ...] = ()
    remote_command: str = ""
    interval_s: float | None = None


def command(settings: Path | None, *, read_only: bool, hosts: Hosts | None = None) -> list[str]:
    """Return what starts it: no module comes from the working directory, and text is UTF-8 regardless of the locale."""
    hosts = hosts or Hosts()
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    options = ["--read-only"] if read_only else []
    if settings is not None:
        options += ["--settings", str(settings)]
    options += [f"--host={name}" for name in hosts.names]
    options += [f"--remote-command={hosts.remote_command}"] if hosts.remote_command else []
    options += [f"--interval={hosts.interval_s}"] if hosts.interval_s is not None else []
    return [sys.executable, *safe_path, "-X", "utf8", "-m", __name__, *options]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code.

    Raises:
        SettingsError: the file is invalid.
    """
    parser = ArgumentParser()
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--host", action="append", default=[])
    parser.add_argument("--remote-command", default="")
    parser.add_argument("--interval", type=float)
    given = parser.parse_args(arguments)
    if not _bound_to_server():
        return 0
    from gpumem_tui.tui.start import open_named_hosts, open_program

    settings = load(given.settings)
    settings = structs.replace(
        settings,
        read_only=given.read_only or settings.read_only,
        interval_s=given.interval or settings.interval_s,
        remote_command=given.remote_command or settings.remote_command,
        notify=Notify(),  # alerts go to the one who runs the program, not once by each visitor
    )
    if given.host:
        return open_named_hosts(given.host, settings, allow_signals=not settings.read_only)
    return open_program(settings)


def _bound_to_server() -> bool:
    """Have the server's end be a hang-up here, for any reason; False if it has ended already."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGHUP, 0, 0, 0)
    pipe = select.poll()
    pipe.register(0, select.POLLHUP)
    return not pipe.poll(0)


if __name__ == "__main__":
    sys.exit(main())
