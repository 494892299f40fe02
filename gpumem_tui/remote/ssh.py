"""How hosts are reached: the words of the user's ssh, and what is called at its other end.

What is called is taken by the login shell of the user there, whichever that is: a script is handed to ``sh`` between
single quotes, in which POSIX shells, csh and fish all leave it as it is, so it has neither quotes of this kind, nor
backslashes, nor exclamation marks, nor more than one line.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from gpumem_tui.remote.hosts import RemoteHost

PROGRAM = "gpumem-tui"
OFFERS = "gpumem-tui is offered by: "
"""Before the name of what could run it, on stderr of a host that lacks it."""

_FIND_AND_RUN = (
    f'p=$(command -v {PROGRAM}) && exec "$p" "$@"; '
    f'p=$HOME/.local/bin/{PROGRAM}; [ -x "$p" ] && exec "$p" "$@"; '
    f'p=$("$SHELL" -lc "command -v {PROGRAM}" </dev/null 2>/dev/null | tail -n 1); [ -x "$p" ] && exec "$p" "$@"; '
    "for t in uvx pipx; do "
    f'command -v $t >/dev/null && {{ echo "{OFFERS}$t" >&2; exit 127; }}; '
    f'[ -x "$HOME/.local/bin/$t" ] && {{ echo "{OFFERS}~/.local/bin/$t" >&2; exit 127; }}; '
    "done; exit 127"
)
"""Runs the program from where users install it. A login shell is asked last: it may take long, or print."""


@dataclass(frozen=True)
class SshOptions:
    """How hosts are reached.

    Attributes:
        remote_command: what is called there, as its shell takes it; empty to look for the program.
        interval_s: between two readings.
        ssh: the program that connects.
    """

    remote_command: str = ""
    interval_s: float = 1.0
    ssh: str = "ssh"

    @property
    def called(self) -> str:
        """What is called, for people."""
        return self.remote_command or PROGRAM

    def command(self, host: RemoteHost) -> list[str]:
        """The words of the process whose lines are the host's readings."""
        arguments = f"monitor --json --interval {self.interval_s:g}"
        if self.remote_command:
            return self.words(host, f"{self.remote_command} {arguments}")
        return self.words(host, f"{in_sh(_FIND_AND_RUN)} {PROGRAM} {arguments}")

    def words(self, host: RemoteHost, there: str) -> list[str]:
        """To run something there; `BatchMode` so that no question waits for an answer (ssh_config(5))."""
        port = [] if host.port is None else ["-p", str(host.port)]
        return [*shlex.split(self.ssh), "-T", "-o", "BatchMode=yes", *port, "--", host.destination, there]


def in_sh(script: str) -> str:
    """A script as the first words of a command for any login shell; the words after it are its $0, $1, …."""
    assert not set(script) & set("'\\!\n"), script
    return f"sh -c '{script}'"
