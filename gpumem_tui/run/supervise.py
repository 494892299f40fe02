"""Runs a command and ends everything it started when it is over, or when whoever asked for it is gone.

A script of its own, run by path with the standard library alone: ``supervise.py LIFELINE_FD COMMAND...``. Processes
that leave their group or outlive their parent become children of this one (a "child subreaper"), so none is lost.
"""

import ctypes
import os
import select
import shutil
import signal
import sys
from contextlib import suppress

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


def _start(command: list[str]) -> int:
    """Start the command's process, which keeps nothing of ours open. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except FileNotFoundError as error:
        print(f"{error.filename or command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(_NOT_FOUND)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(_NOT_RUNNABLE)


def main(lifeline_fd: int, command: list[str]) -> int:
    """Run the command. Returns its exit code, 128 and the signal's number if a signal ended it."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever asked ends this by closing the lifeline
    woken_fd, wake_fd = os.pipe()
    for fd in (lifeline_fd, woken_fd, wake_fd):
        os.set_inheritable(fd, False)
    os.set_blocking(wake_fd, False)
    signal.set_wakeup_fd(wake_fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started = _start(command)
    while True:
        ready, _, _ = select.select([lifeline_fd, woken_fd], [], [])
        if lifeline_fd in ready:
            _end_all()
            shutil.rmtree(os.environ.get(_DIRECTORY, ""), ignore_errors=True)  # whoever asked may have had no time to
            return 1
        os.read(woken_fd, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == started:
                _end_all()
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
