"""Interpreters that have torch imported: one forks a child, and is given back for the next one.

Importing torch takes longer than most traces. An interpreter that is not needed ends after `IDLE_S`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from gpumem_tui.text import printable

IDLE_S = 30.0
"""So long an interpreter waits for the next request: a user who changes one option after another is served at once."""

_FORK_SERVER = Path(__file__).with_name("fork_server.py")
_END_S = 5.0
_OUTPUT_TAIL_BYTES = 4096
_LARGEST_MESSAGE = 1 << 16


class ForkServer:
    """A process of `fork_server`, and the one child that it has at a time.

    Args:
        python: the interpreter; the user's training environment may be another than the viewer's.
        simulated: whether its children are for simulated GPUs.

    Raises:
        OSError: `python` is not a program that runs here, or no process can be started at all.
    """

    def __init__(self, python: str, *, simulated: bool) -> None:
        self.key = _key(python, simulated)
        self._environment = dict(os.environ)
        with ExitStack() as ours, ExitStack() as theirs:  # of a process that cannot be started, nothing stays open
            control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control = ours.enter_context(control)
            theirs.enter_context(other)
            self._output = ours.enter_context(tempfile.TemporaryFile())
            flags = fcntl.fcntl(self._output, fcntl.F_GETFL)
            fcntl.fcntl(self._output, fcntl.F_SETFL, flags | os.O_APPEND)  # it is emptied after each child
            self._process = subprocess.Popen(
                [python, str(_FORK_SERVER), str(other.fileno()), "simulated" if simulated else "cuda"],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
            ours.pop_all()
        self._child: int | None = None
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Return the child's process id; the interpreter's own until there is one."""
        self._read_messages(0)
        return self._child or self._process.pid

    def fork(self, descriptors: tuple[int, int, int], environment: Mapping[str, str]) -> None:
        """Start a child in this process's working directory, as soon as torch is imported.

        Args:
            descriptors: what it reads commands from, what it writes events to, and its lifeline.
            environment: the child's.

        Raises:
            OSError: the message is too large to be sent, or the working directory is gone.
        """
        self._child = self._code = None
        own = self._environment
        changed = {
            name: environment.get(name) for name in {*environment, *own} if environment.get(name) != own.get(name)
        }
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: `code` says how
            task = {"directory": os.getcwd(), "environment": changed}
            socket.send_fds(self._control, [json.dumps(task).encode()], descriptors)

    def code(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit code of the child, or of the interpreter if that ended first; None while both run."""
        if self._code is None:
            self._read_messages(timeout_s)
        if self._code is None:
            self._code = self._process.poll()
        return self._code

    def last_line(self) -> str:
        """Return what was last printed by the child, or on the way to it; fit for a terminal."""
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _OUTPUT_TAIL_BYTES, max(0, size - _OUTPUT_TAIL_BYTES))
        printed = tail.decode(errors="replace").strip().splitlines()
        return " ".join(printable(printed[-1]).split()) if printed else ""

    def end_child(self) -> bool:
        """Kill the child and everything it started. Returns whether another child can be forked."""
        self._read_messages(0)
        if self._child is None:
            return False  # it imports torch, and hears of nothing before it is done
        with suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)
        if self.code(_END_S) is None or self._process.poll() is not None:
            return False
        os.ftruncate(self._output.fileno(), 0)
        return True

    def close(self) -> None:
        """End the interpreter."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()
        self._output.close()

    def _read_messages(self, timeout_s: float) -> None:
        """Take in the fork server's messages, until the child's end, for so long at most."""
        self._control.settimeout(timeout_s)
        with suppress(BlockingIOError, TimeoutError, ConnectionResetError):
            while self._code is None and (message := self._control.recv(_LARGEST_MESSAGE)):
                word, number = message.split()
                if word == b"pid":
                    self._child = int(number)
                else:
                    self._code = int(number)


_idle: dict[tuple[str, bool], tuple[ForkServer, threading.Timer]] = {}
_lock = threading.Lock()


def _key(python: str, simulated: bool) -> tuple[str, bool]:
    """Return what an interpreter is asked for by; a path may start at the working directory."""
    return os.path.abspath(python) if os.sep in python else python, simulated


def fork(
    python: str, descriptors: tuple[int, int, int], environment: Mapping[str, str], *, simulated: bool
) -> ForkServer:
    """Have an interpreter fork a child, as `ForkServer.fork`; to be given back by `give_back`.

    Raises:
        OSError: as `ForkServer` and its `fork`.
    """
    with _lock:
        server, timer = _idle.pop(_key(python, simulated), (None, None))
    if timer is not None:
        timer.cancel()
    server = server or ForkServer(python, simulated=simulated)
    try:
        server.fork(descriptors, environment)
    except OSError:
        server.close()
        raise
    return server


def give_back(server: ForkServer) -> None:
    """End what the child has started, and keep the interpreter for the next one."""
    if not server.end_child():
        server.close()
        return
    timer = threading.Timer(IDLE_S, _retire, (server,))
    timer.daemon = True
    with _lock:
        other = _idle.pop(server.key, None)
        _idle[server.key] = server, timer
    timer.start()
    if other is not None:
        other[1].cancel()
        other[0].close()


def close_idle() -> None:
    """End the interpreters that wait."""
    with _lock:
        waiting = list(_idle.values())
        _idle.clear()
    for server, timer in waiting:
        timer.cancel()
        server.close()


def _retire(server: ForkServer) -> None:
    with _lock:
        if _idle.get(server.key, (None,))[0] is not server:
            return  # it was borrowed at this moment
        del _idle[server.key]
    server.close()
