"""Starting a training command under the probe, with no change to it; and why processes publish nothing anyway."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpumem_tui.launchers import bypass
from gpumem_tui.probe.files import SITE_DIRECTORY, Folder, WireError, default_directory
from gpumem_tui.watch import hosts
from gpumem_tui.watch.folders import why_unusable
from gpumem_tui.watch.supervising import Supervised, TerminalCommand

_T = TypeVar("_T")


class CannotRun(Exception):
    """The command cannot be started; one line. `code` is what a shell would exit with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def environment(before: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which every Python that starts carries the probe. Launchers hand it on to ranks."""
    path = [str(SITE_DIRECTORY), before.get("PYTHONPATH", "")]
    return {**before, "PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}


def warnings(command: Sequence[str], directory: Path) -> list[str]:
    """Why the probe may not get in, or not be heard, one line each.

    Args:
        directory: where the probe is to publish.
    """
    found = []
    if bypassed := bypass(command):
        found.append(f"{bypassed} keeps the probe out: remove it to watch")
    if reason := why_unusable(directory):
        found.append(f"nothing will be published: {reason}; set GPUMEM_TUI_DIR to another folder")
    return found


def start(command: Sequence[str], tick: Callable[[], None] = lambda: None) -> Supervised:
    """Start the command as our child: its output, input and terminal are its own.

    Args:
        tick: called about once a second while it runs.

    Raises:
        CannotRun: there is no such command, or it may not be run.
    """
    return _started(command, lambda: Supervised(command, environment(os.environ), default_directory(), tick))


def start_in_terminal(command: Sequence[str]) -> TerminalCommand:
    """Start the command in a terminal of its own, of the size of ours.

    Raises:
        CannotRun: as `start`.
    """
    columns, lines = shutil.get_terminal_size()
    where = default_directory()
    return _started(command, lambda: TerminalCommand(command, environment(os.environ), (columns, lines), where))


def _started(command: Sequence[str], begin: Callable[[], _T]) -> _T:
    if shutil.which(command[0]) is None and os.sep not in command[0]:
        raise CannotRun(f"there is no command {command[0]} in PATH; write its path, or run `which {command[0]}`", 127)
    try:
        return begin()
    except FileNotFoundError as error:
        raise CannotRun(f"{command[0]}: {error.strerror}; check its path", 127) from error
    except OSError as error:
        raise CannotRun(f"{command[0]} cannot be run: {error.strerror}; see `ls -l {command[0]}`", 126) from error


# Why processes that might train publish nothing, as far as that shows from outside

RUN_AFTER_S = 60.0
"""Torch, a model and its data take that long to load now and then."""
WATCH_AFTER_S = 10.0
_MOST_LINES = 8


def why_silent(host: hosts.Host, *, under_run: bool = False) -> str:
    """Why a process does not publish, and what would help; a few words.

    Args:
        under_run: `gpumem-tui run` started it, or what started it.
    """
    files = hosts.loaded(host)
    attach = f": `gpumem-tui attach {host.pid}`"
    if host.is_kernel_thread or not (files and hosts.is_python(host, files)):
        return "it is no Python process"
    if hosts.is_launcher(host):
        return "it starts the processes that train, and trains nothing itself"
    if was_attached_to(host):
        waits_for = "no optimizer has stepped since it came" if hosts.has_torch(files) else "torch is not imported"
        return f"the probe is in it, but {waits_for}"
    if not hosts.has_torch(files):
        return "it has not imported torch"
    if not _has_our_path(host):
        if under_run or any(_has_our_path(above) for above in _ancestors(host)):
            return f"its environment was reset, PYTHONPATH is lost{attach}"
        return f"it was not started by `gpumem-tui run`{attach}"
    if option := bypass(host.command):
        return f"{option} keeps the probe out{attach}"
    parent = hosts.find(host.parent_pid, host.proc.parent)
    if parent is not None and parent.command == host.command:
        return f"it was forked from PID {parent.pid} and has not stepped an optimizer; one that loads data never does"
    return "no optimizer has stepped in it yet: it loads or evaluates, or it is a script that never trains"


def was_attached_to(host: hosts.Host) -> bool:
    """Return whether `gpumem-tui attach` has put the probe into it: it publishes, or will once it trains."""
    with suppress(OSError, WireError), Folder(host.files.directory, (host.uid,)) as folder:
        folder.status(host.files.attached.name)
        return True
    return False


def silent_below(pid: int, published: Collection[int]) -> list[str]:
    """Why nothing is published by a command that runs, one line a process; empty if something is.

    Args:
        pid: the command's process.
        published: the pids of those that publish.
    """
    command = hosts.find(pid)
    if command is None:
        return []
    found = [command, *hosts.descendants(pid)]
    found += [host for host in hosts.every() if _is_stray(host, command) and host not in found]
    if any(host.pid in published for host in found):
        return []
    python = [host for host in found if hosts.is_python(host, hosts.loaded(host))]
    if not python:
        return [f"{command.title}: no Python process runs below it"]
    return _lines((host, why_silent(host, under_run=True)) for host in python)


def silent_anywhere(published: Collection[int]) -> list[str]:
    """Say why processes with torch that we may look at do not publish, one line each.

    Processes that only load data for one that publishes are left out.
    """
    return _lines(
        (host, why_silent(host))
        for host in hosts.every()
        if host.pid not in published
        and host.parent_pid not in published
        and os.geteuid() in (0, host.uid)
        and hosts.has_torch(hosts.loaded(host))
    )


class SilenceNote:
    """Shows once, after a while, why nothing publishes.

    Args:
        after_s: how long it may be silent. reasons: finds them, one line each. say: is given each.
        clock: seconds, any origin.
    """

    def __init__(
        self,
        after_s: float,
        reasons: Callable[[], Iterable[str]],
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._due_s = clock() + after_s
        self._reasons = reasons
        self._say = say
        self._is_over = False

    def tick(self) -> None:
        """Look whether it is time; call it now and then."""
        if not self._is_over and self._clock() >= self._due_s:
            self._is_over = True
            for reason in self._reasons():
                self._say(reason)


def _lines(found: Iterable[tuple[hosts.Host, str]]) -> list[str]:
    lines = [f"{host.title}: {why}" for host, why in found]
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"and {more} more"]


def _has_our_path(host: hosts.Host) -> bool:
    """Return whether it was started with the probe on its PYTHONPATH."""
    return str(SITE_DIRECTORY) in host.environ().get("PYTHONPATH", "").split(os.pathsep)


def _is_stray(host: hosts.Host, command: hosts.Host) -> bool:
    """Return whether a command may have started it, which it left as daemons do: to process 1 or a systemd."""
    parent = hosts.find(host.parent_pid, host.proc.parent)
    left = host.parent_pid == 1 or (parent is not None and parent.name == "systemd")
    return left and host.start_ticks >= command.start_ticks and _has_our_path(host)


def _ancestors(host: hosts.Host) -> Iterable[hosts.Host]:
    above = hosts.find(host.parent_pid, host.proc.parent)
    while above is not None:
        yield above
        above = hosts.find(above.parent_pid, above.proc.parent)
