"""Runs a command, in our terminal or in one of its own, and notes how it and the processes that it started ended."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpumem_tui.probe.files import Files, WireError, check_directory, start_ticks, write_document
from gpumem_tui.probe.wire import Exit, encode_document
from gpumem_tui.watch.ends import Witness
from gpumem_tui.watch.hosts import find

_HANDED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGWINCH, signal.SIGCONT,
)  # fmt: skip
_FROM_KERNEL = 0x80
"""``SI_KERNEL``: sent by the terminal, which has sent it to the command too (man 2 sigaction)."""
_LOOK_S = 1.0
_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` (man 2 prctl)."""


class ProcessEnds:
    """Notes how a command's process, and those below it that publish, end. For one thread at a time.

    Args:
        pid: the command's process, our child.
        directory: where probes publish.

    Raises:
        OSError, WireError: there is no such process, or no /proc.
    """

    def __init__(self, pid: int, directory: Path) -> None:
        self._directory = directory
        self._pid = pid
        self._own = Files(directory, pid, start_ticks(pid))
        self._followed = {self._own: Witness(pid, self._own.start_ticks)}
        self._pids = {pid}

    @property
    def pids(self) -> frozenset[int]:
        """Return the pids of the command's process and of those below it that publish or did."""
        return frozenset(self._pids)

    def look(self) -> None:
        """Follow the processes that have begun to publish, and note those that have ended."""
        for files, witness in list(self._followed.items()):
            if files == self._own:
                witness.look()
            elif witness.has_ended():
                self._write(files, witness.ended())
                witness.close()
                del self._followed[files]
            else:
                witness.look()
        for files in self._publishing() - set(self._followed):
            with suppress(OSError, WireError):
                if start_ticks(files.pid) == files.start_ticks and is_below(files.pid, self._pid):
                    self._followed[files] = Witness(files.pid, files.start_ticks)
                    self._pids.add(files.pid)

    def reap(self, *, others: bool = False) -> Exit | None:
        """Return how the command itself ended; None while it runs.

        Args:
            others: also wait for all other children: as the first process of a container we are given orphans.

        Raises:
            ChildProcessError: somebody else has asked for it before.
        """
        while True:
            pid, status, used = os.wait4(-1 if others else self._pid, os.WNOHANG)
            if not pid:
                return None
            if pid == self._pid:
                ended = self._followed[self._own].ended(status, used.ru_maxrss * 1024)
                self._write(self._own, ended)
                return ended

    def _publishing(self) -> set[Files]:
        found = set()
        with suppress(OSError):
            for name in os.listdir(self._directory):
                with suppress(WireError):
                    found.add(Files.of_ring(self._directory / name))
        return found

    def _write(self, files: Files, ended: Exit) -> None:
        """Write how a process ended, if it has published."""
        with suppress(OSError, WireError):
            check_directory(self._directory, (os.getuid(),))
            if files.ring.exists():
                write_document(files.exit, encode_document(ended))


class RunningCommand:
    """A command that runs as our child, with what it starts."""

    _process: subprocess.Popen[bytes]
    _deaths: ProcessEnds

    @property
    def pid(self) -> int:
        """Return the pid of the command's own process."""
        return self._process.pid

    @property
    def pids(self) -> frozenset[int]:
        """Return the pids of the command's process and of those below it that publish or did."""
        return self._deaths.pids


class Supervised(RunningCommand):
    """A command that runs as a child, in the same session, process group and terminal.

    Args:
        command: its words; `environment` as the child is to have it.
        directory: where probes publish.
        tick: called about once a second, and when a signal has come.

    Raises:
        OSError, WireError: it cannot be started, or there is no /proc.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._tick = tick
        self._signals = {*_HANDED_ON, signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else there would be nothing to wait for
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        bind = bound_to_us()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            bind()

        try:
            self._process = subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=prepare)
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        self._deaths = ProcessEnds(self._process.pid, directory)

    def wait(self) -> Exit:
        """Hand signals on until the command has ended; return how it did."""
        while True:
            info = signal.sigtimedwait(self._signals, _LOOK_S)
            if info is not None and info.si_signo in _HANDED_ON and info.si_code != _FROM_KERNEL:
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, info.si_signo)
            ended = self._deaths.reap(others=True)
            self._deaths.look()
            if ended is not None:
                self._process.returncode = 0  # it has been waited for
                return ended
            self._tick()


def is_below(pid: int, root: int) -> bool:
    """Return whether a process is another, or was started by it or by one that it started; False once it is gone."""
    while pid > 1 and pid != root:
        host = find(pid)
        pid = 0 if host is None else host.parent_pid
    return pid == root


def bound_to_us() -> Callable[[], None]:
    """Make a call for the child, before it becomes the command, by which it ends with the thread that started it."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return bind


def exit_code(ended: Exit) -> int:
    """Return what a shell would say: the exit code, or 128 and the number of the signal."""
    return 128 + ended.signal if ended.signal is not None else ended.exit_code or 0


def leave_as(ended: Exit) -> int:
    """End as a command did: its exit code, or by the signal that ended it, with no core file of our own."""
    if ended.signal is None:
        return exit_code(ended)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if ended.signal != signal.SIGKILL:
        signal.signal(ended.signal, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended.signal})
    os.kill(os.getpid(), ended.signal)
    return exit_code(ended)  # it was one that does not end us


# In a terminal of its own

_READ_S = 0.1
_DEATHS_S = 1.0
_CHUNK_BYTES = 1 << 16
_DRAIN_S = 0.5
"""How long output is still read after the command has ended: what it started may hold its terminal open."""


class TerminalCommand(RunningCommand):
    """Runs a command as the leader of a session of its own. Start it in a thread that lives as long as it may.

    Args:
        command: its words; `environment` as it is to have it.
        size: columns and rows of its terminal.
        directory: where probes publish.

    Raises:
        OSError, WireError: it cannot be started, or there is no /proc.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int], directory: Path
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(*size)
        bind = bound_to_us()

        def prepare() -> None:
            bind()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        own = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        try:
            self._process = subprocess.Popen(
                command, env=own, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=prepare
            )
            self._deaths = ProcessEnds(self._process.pid, directory)
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)
        self._ended = threading.Event()
        self._exit: Exit | None = None

    @property
    def ended(self) -> Exit | None:
        """The way in which it ended; None while it runs."""
        return self._exit

    def follow(self, output: Callable[[bytes], None]) -> Exit:
        """Read until it has ended; return how it did.

        Args:
            output: called with what it prints.
        """
        looked_s = time.monotonic()
        is_open = True
        while self._exit is None:
            is_open = is_open and self._read(_READ_S, output)
            if not is_open:
                time.sleep(_READ_S)
            if time.monotonic() - looked_s >= _DEATHS_S:
                self._deaths.look()
                looked_s = time.monotonic()
            self._exit = self._deaths.reap()
        self._process.returncode = 0  # it has been waited for
        until_s = time.monotonic() + _DRAIN_S
        while is_open and time.monotonic() < until_s and select.select([self._ours], [], [], 0)[0]:
            is_open = self._read(0, output)
        self._deaths.look()
        self._ended.set()
        return self._exit

    def send(self, typed: bytes) -> None:
        """Type into its terminal; control characters mean there what they mean at a terminal (0x03 is Ctrl-C)."""
        with suppress(OSError):
            os.write(self._ours, typed)

    def resize(self, columns: int, rows: int) -> None:
        """Set its terminal's size, which it learns by SIGWINCH."""
        size = struct.pack("HHHH", max(1, rows), max(1, columns), 0, 0)
        with suppress(OSError):
            fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def terminate(self) -> None:
        """Ask it and its process group to end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its process group at once (SIGKILL)."""
        self._signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `follow` is done; False if it is not in time."""
        return self._ended.wait(timeout_s)

    def _signal(self, number: signal.Signals) -> None:
        if self._exit is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _read(self, timeout_s: float, output: Callable[[bytes], None]) -> bool:
        """Read what there is; False once the other end is closed."""
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return True
        try:
            chunk = os.read(self._ours, _CHUNK_BYTES)
        except OSError:  # so Linux reports the closed other end
            return False
        output(chunk)
        return bool(chunk)
