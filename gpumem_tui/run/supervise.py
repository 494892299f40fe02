"""Runs a command and ends everything it started when it is over, or when whoever asked for it is gone.

A script of its own, run by path with the standard library alone: ``supervise.py LIFELINE_FD STATUS_FD COMMAND...``; a
forked process of an interpreter that has torch imported calls `main`. Processes that leave their group or outlive their
parent become children of this one (a "child subreaper"), so none is lost.
"""

import ctypes
import os
import select
import shutil
import signal
import sys
from contextlib import suppress

TYPE_CHECKING = False  # as type checkers read it
if TYPE_CHECKING:
    from collections.abc import Callable

_SET_CHILD_SUBREAPER = 36
_DIRECTORY = "GPUMEM_TUI_TRIAL"
"""Names the folder of the request and the socket."""

_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def _processes_below(root: int) -> list[int]:
    """Return every process that `root` or one of its descendants started."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended
        children.setdefault(parent, []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _end_all() -> None:
    """Kill until nothing is left: what is killed may have started another one meanwhile."""
    while True:
        living = _processes_below(os.getpid())
        if not living:
            return
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def run_command(command: list[str]) -> None:
    """Become the command; where that cannot be, end as a shell does."""
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except FileNotFoundError as error:
        print(f"{error.filename or command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(_NOT_FOUND)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(_NOT_RUNNABLE)


def main(lifeline_fd: int, status_fd: int, run: "Callable[[], None]") -> None:
    """Run the command in a process that keeps nothing of ours open, and end it when the lifeline's other end is closed.

    Shows its own process id, and how the command ended: its exit code, 128 and the signal's number if a signal did. The
    folder of the trial goes when the lifeline does: whoever asked may have had no time to remove it.

    Args:
        status_fd: what it states that to, a line each.
        run: called in the command's process.
    """
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _say(status_fd, os.getpid())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever asked ends this by closing the lifeline
    woken_fd, wake_fd = os.pipe()
    for fd in (lifeline_fd, status_fd):
        os.set_inheritable(fd, False)
    os.set_blocking(wake_fd, False)
    signal.set_wakeup_fd(wake_fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started = os.fork()
    if started == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for fd in (lifeline_fd, status_fd, woken_fd, wake_fd):
            os.close(fd)
        run()
        return
    code = _wait(started, lifeline_fd, woken_fd)
    _end_all()
    if code is not None:
        _say(status_fd, code)
        select.select([lifeline_fd], [], [])
    shutil.rmtree(os.environ.get(_DIRECTORY, ""), ignore_errors=True)
    os._exit(0)


def _say(status_fd: int, number: int) -> None:
    with suppress(OSError):  # whoever asked is gone
        os.write(status_fd, f"{number}\n".encode())


def _wait(started: int, lifeline_fd: int, woken_fd: int) -> "int | None":
    """Return how the process that was started has ended; None if the lifeline did before."""
    while True:
        ready, _, _ = select.select([lifeline_fd, woken_fd], [], [])
        if lifeline_fd in ready:
            return None
        os.read(woken_fd, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == started:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def _run() -> None:
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # as Python found them, before it set its own
    run_command(sys.argv[3:])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), _run)
