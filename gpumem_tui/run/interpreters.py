"""Interpreters that have torch imported, which fork runs of commands.

Importing torch takes longer than most traces. An interpreter that is not needed ends after `IDLE_S`.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from gpumem_tui.run.stand_ins import of_every_run

IDLE_S = 30.0
"""So long an interpreter waits for the next request: a user who changes one option after another is served at once."""

_SERVER = Path(__file__).with_name("command_server.py")


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
                [program, str(_SERVER), str(other.fileno())],
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
        """End it; what it has forked continues."""
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
    """Return the interpreter that runs a command on simulated GPUs, started if missing, to be given back.

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
    simulated = options.startswith(("predict", "fit")) or "sim:" in options
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


_of_commands: dict[Any, CommandServer] = {}
_lock = threading.Lock()


def close_idle() -> None:
    """End the interpreters that wait."""
    with _lock:
        waiting = [server for server in _of_commands.values() if not server.users and not server.is_closed]
    for server in waiting:
        server.close()
