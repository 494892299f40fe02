"""Interpreters that have torch imported: one forks a child, and is given back for the next one; or runs of a command.

Importing torch takes longer than most traces. An interpreter that is not needed ends after `IDLE_S`.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from gpumem_tui.run.stand_ins import of_every_run
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


class CommandServer:
    """A process of `command_server`, which forks runs of commands, several at a time."""

    def __init__(self, program: str, directory: str, environment: Mapping[str, str]) -> None:
        self.users = 0
        self.is_closed = False
        self._retires = threading.Timer(IDLE_S, self._retire)
        with ExitStack() as ours, ExitStack() as theirs:
            control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control = ours.enter_context(control)
            theirs.enter_context(other)
            self._process = subprocess.Popen(
                [program, str(_FORK_SERVER), str(other.fileno()), "commands"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(other.fileno(),),
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
            ours.pop_all()

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """Return whether the interpreter has ended, as where there is no torch: it runs nothing more."""
        return self._process.poll() is not None

    def fork(self, words: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> bool:
        """Have a run begin as soon as torch is imported. Returns whether it hears of it.

        Args:
            words: the command.
            descriptors: its standard input, what it prints to, its supervisor's lifeline and status.
        """
        try:
            task = {"words": list(words), "environment": dict(environment)}
            socket.send_fds(self._control, [json.dumps(task).encode()], descriptors)
        except OSError:  # it has ended, or the environment is too large
            return False
        return True

    def borrow(self) -> None:
        """Note that a run begins; under the lock."""
        self.users += 1
        self._retires.cancel()

    def give_back(self) -> None:
        """Note that a run is over; `IDLE_S` after the last one it ends."""
        with _lock:
            self.users -= 1
            self.expire()

    def expire(self) -> None:
        """End after `IDLE_S`, unless a run begins; under the lock."""
        if not self.users:
            self._retires = threading.Timer(IDLE_S, self._retire)
            self._retires.daemon = True
            self._retires.start()

    def _retire(self) -> None:
        with _lock:
            self.is_closed = not self.users
        if self.is_closed:
            self.close()

    def close(self) -> None:
        """End it; what it has forked goes on."""
        self.is_closed = True
        self._retires.cancel()
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def for_command(words: Sequence[str], directory: str) -> CommandServer | None:
    """Return the interpreter that runs a command on simulated GPUs, started if there is none, to be given back.

    None for a command that is no Python (but a script that starts one, a launcher), has options for it, runs no file,
    or has the interpreter start otherwise by a variable.
    """
    script = next((word for word in words[1:3] if word != "-u"), "")
    program = words[0] if os.sep in words[0] else shutil.which(words[0]) or ""
    is_plain = _IS_PYTHON.fullmatch(os.path.basename(words[0])) and "PYTHONSAFEPATH" not in os.environ
    if not (is_plain and os.path.isfile(os.path.join(directory, script)) and _is_binary(directory, program)):
        return None
    environment = of_every_run()
    key = program, directory, tuple(sorted(environment.items()))
    with _lock:
        server = _of_commands.get(key)
        if server is None or server.is_closed:
            server = _of_commands[key] = CommandServer(program, directory, environment)
            atexit.register(server.close)
        elif server.is_over:
            return None
        server.borrow()
    return server


def begin_early(arguments: Sequence[str]) -> None:
    """Have torch be imported for a command on simulated GPUs while this process gets ready to run it.

    Args:
        arguments: of the command line.
    """
    options, *rest = " ".join(arguments).split(" -- ", 1)
    simulated = options.startswith("predict") or "sim:" in options
    if not (rest and simulated):
        return
    with suppress(OSError):  # said where it is run
        server = for_command(arguments[arguments.index("--") + 1 :], os.getcwd())
        if server is not None:
            server.give_back()


_IS_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def _is_binary(directory: str, program: str) -> bool:
    """Return whether a program is one itself, and no script that may do this and that first."""
    try:
        with open(os.path.join(directory, program), "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


_idle: dict[tuple[str, bool], tuple[ForkServer, threading.Timer]] = {}
_of_commands: dict[Any, CommandServer] = {}
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
        commands = [server for server in _of_commands.values() if not server.users and not server.is_closed]
    for server, timer in waiting:
        timer.cancel()
        server.close()
    for one in commands:
        one.close()


def _retire(server: ForkServer) -> None:
    with _lock:
        if _idle.get(server.key, (None,))[0] is not server:
            return  # it was borrowed at this moment
        del _idle[server.key]
    server.close()
