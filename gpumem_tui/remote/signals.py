"""Ending a process of a host: the same one that was shown there, whatever its pid means by then."""

from __future__ import annotations

import subprocess
from typing import Literal

from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.remote.explain import explained
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.ssh import SshOptions, in_sh
from gpumem_tui.text import shortened

RemoteSignal = Literal["TERM", "KILL"]

_PATIENCE_S = 30.0
_GONE, _ANOTHER, _REFUSED = 81, 82, 83
_SEND = (
    f"s=$(cat /proc/$1/stat 2>/dev/null) || exit {_GONE}; "
    "p=$1; began=$2; signal=$3; set -- ${s##*) }; "
    "hz=$(getconf CLK_TCK); boot=$(while read -r k v; do [ $k = btime ] && echo $v; done </proc/stat); "
    "d=$((boot + ${20} / hz - began)); "
    f"[ $d -ge -1 ] && [ $d -le 1 ] || exit {_ANOTHER}; "
    f"kill -s $signal $p || exit {_REFUSED}"
)
"""Field 22 of /proc/PID/stat, the 20th after the name, is the start in clock ticks since the boot, whose time is btime
in /proc/stat (proc(5)); a second is allowed for, as `monitor.processes` does."""


class NotSignalled(Exception):
    """The process was not signalled; one line says why."""


def send_signal(host: RemoteHost, options: SshOptions, process: HostProcess, signal: RemoteSignal) -> None:
    """Signal a process there. Takes as long as ssh does: not for the event loop.

    Raises:
        NotSignalled: it has ended, its pid is another process's, it may not be signalled, ssh failed.
    """
    there = f"{in_sh(_SEND)} gpumem-tui {process.pid} {int(process.start_time_s)} {signal}"
    command = options.words(host, there)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, check=False,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise NotSignalled(f"{command[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise NotSignalled(f"{host.name} has not answered for {_PATIENCE_S:.0f} s; see whether it was ended") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        raise NotSignalled(_why_not(done.returncode, said, host, options, process))


def _why_not(code: int, said: list[str], host: RemoteHost, options: SshOptions, process: HostProcess) -> str:
    which = f"pid {process.pid} on {host.name}"
    if code == _GONE:
        return f"{which} is not there any more"
    if code == _ANOTHER:
        return f"{which} is another process by now: not signalled"
    if code == _REFUSED:
        return f"{which} of {process.user} was not signalled: {shortened(said[-1] if said else 'kill failed', 120)}"
    problem, _ = explained(code, said, host, options)
    return f"{which} was not signalled: {problem}"
