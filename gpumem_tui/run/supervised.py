"""A command under its supervisor, as the viewer has it: started, heard of, ended; and its standard input."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from gpumem_tui.run import interpreters

_SUPERVISOR = Path(__file__).with_name("supervise.py")
_END_S = 5.0
_KILLED = 128 + signal.SIGKILL


class SupervisedCommand:
    """A command that runs under a supervisor: one forked by an interpreter that has torch imported, else a fresh one.

    Args:
        words: the command.
        directory: where it runs.
        environment: its own.
        stdin_fd: its standard input.
        may_fork: whether an interpreter may be kept for it (see `interpreters.for_command`).

    Attributes:
        stdout_fd: what it prints. `status_fd`: becomes readable as the supervisor reports something; `code` reads it.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self, words: Sequence[str], directory: str, environment: Mapping[str, str], stdin_fd: int, *, may_fork: bool
    ) -> None:
        self._words, self._directory, self._environment = words, directory, environment
        self._said, self._is_gone = b"", False
        self._process: subprocess.Popen[bytes] | None = None
        self._server = interpreters.for_command(words, directory) if may_fork else None
        with ExitStack() as ours, ExitStack() as theirs:
            if self._server is not None:
                ours.callback(self._server.give_back)
            self.stdout_fd, stdout_fd = open_pipe(ours, theirs)
            self.status_fd, status_fd = open_pipe(ours, theirs)
            self._lifeline = ours.enter_context(ExitStack())
            lifeline_fd, _ = open_pipe(theirs, self._lifeline)
            os.set_blocking(self.status_fd, False)
            self._descriptors = stdin_fd, stdout_fd, lifeline_fd, status_fd
            self._theirs = theirs
            if self._server is None or not self._server.fork(words, environment, self._descriptors):
                self._start()
            else:
                self._theirs = theirs.pop_all()  # until it runs: it may have to be started otherwise
            self._ours = ours.pop_all()

    def _start(self) -> None:
        """Start the command in a fresh process."""
        stdin_fd, stdout_fd, *handed = self._descriptors
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR), *map(str, handed), *self._words],
            stdin=stdin_fd,
            stdout=stdout_fd,
            stderr=subprocess.STDOUT,
            pass_fds=handed,
            env=self._environment,
            cwd=self._directory,
            start_new_session=True,
        )
        self._theirs.close()

    @property
    def pid(self) -> int:
        """Return the supervisor's process id; until there is one, that of the interpreter which forks it."""
        self._listen()
        if self._said:
            return int(self._said.split()[0])
        return self._process.pid if self._process is not None else self._server.pid if self._server is not None else 0

    def code(self) -> int | None:
        """Return the command's exit code, 128 and the signal's number if a signal ended it; None while it runs."""
        self._listen()
        if self._server is not None and self._process is None and not self._said and self._server.is_over:
            self._start()
        _, *codes = self._said.split(b"\n")[:-1] or [b""]
        return int(codes[0]) if codes else _KILLED if self._is_gone else None

    def _listen(self) -> None:
        """Take in what the supervisor has said: its process id, and then the command's exit code."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.status_fd, 64):
                self._said += chunk
            self._is_gone = True
        if self._said:
            self._theirs.close()

    def end(self) -> None:
        """Have the supervisor end all that the command started, and wait for it."""
        self._lifeline.close()
        self._listen()
        if self._server is not None and self._process is None and not self._said:
            self._server.close()  # it imports torch, and hears of nothing before it is done
            self._theirs.close()
        until = time.monotonic() + _END_S
        while not self._is_gone:
            if not select.select([self.status_fd], [], [], max(0.0, until - time.monotonic()))[0]:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                break
            self._listen()
        if self._process is not None:
            self._process.wait()
        self._ours.close()


def open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends are closed with whom they belong to. Returns what is read from and what is written to."""
    read_fd, write_fd = os.pipe()
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd


# A command's standard input

_READS_A_PROGRAM = ("-", "/dev/stdin")
"""Words by which an interpreter or a shell takes its program from standard input, as ``python - <<EOF`` does."""

_ENDS_OF_INPUT = b"\x04" * 256
"""The byte that a terminal reads as the end of its input (termios(3), VEOF)."""


def open_program(words: Sequence[str], held: ExitStack) -> int | None:
    """Open the program that was piped in, if a command reads one, to be closed with `held`; None without one."""
    piped = _piped() if set(words) & set(_READS_A_PROGRAM) else None
    if piped is None:
        return None
    program = os.memfd_create("stdin")
    held.callback(os.close, program)
    os.write(program, piped)
    os.lseek(program, 0, os.SEEK_SET)
    return program


def open_input(words: Sequence[str], held: ExitStack) -> int:
    """Open the standard input of one run of a command, to be closed with `held`.

    Scripts ask it for the terminal's size (``stty size``), so it is one; a question that they ask there finds the end
    of the input. A program that was piped in is given to every run anew.
    """
    if (program := open_program(words, held)) is not None:
        return program
    try:
        keyboard, terminal = pty.openpty()
    except OSError:  # none exist left, or none at all, as in some containers
        nothing = os.open(os.devnull, os.O_RDONLY)
        held.callback(os.close, nothing)
        return nothing
    held.callback(os.close, terminal)
    held.callback(os.close, keyboard)
    columns, lines = shutil.get_terminal_size()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    os.write(keyboard, _ENDS_OF_INPUT)
    return terminal


@cache
def _piped() -> bytes | None:
    """Read all that was piped into this program; None if a terminal or nothing is there."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    return sys.stdin.buffer.read()
