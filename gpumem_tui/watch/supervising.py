"""Runs a command, hands it every signal, and notes how it and the processes that it started ended."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpumem_tui.probe.documents import Exit, encode_document
from gpumem_tui.probe.files import Files, WireError, check_directory, start_ticks, write_document
from gpumem_tui.watch.witness import Witness

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
        """The command's process, and those below it that publish or did."""
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
        """How the command itself ended; None while it runs.

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
        """Where a process has published, say how it ended."""
        with suppress(OSError, WireError):
            check_directory(self._directory, (os.getuid(),))
            if files.ring.exists():
                write_document(files.exit, encode_document(ended))


class Supervised:
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

    @property
    def pid(self) -> int:
        """The command's process."""
        return self._process.pid

    @property
    def pids(self) -> frozenset[int]:
        """The command's process, and those below it that publish or did."""
        return self._deaths.pids

    def wait(self) -> Exit:
        """Hand signals on until the command has ended; how it did."""
        while True:
            told = signal.sigtimedwait(self._signals, _LOOK_S)
            if told is not None and told.si_signo in _HANDED_ON and told.si_code != _FROM_KERNEL:
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, told.si_signo)
            ended = self._deaths.reap(others=True)
            self._deaths.look()
            if ended is not None:
                self._process.returncode = 0  # it has been waited for
                return ended
            self._tick()


def is_below(pid: int, root: int) -> bool:
    """Whether a process is another one, or was started by it or by one that it started; False once it is gone."""
    while pid > 1:
        if pid == root:
            return True
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return False
    return False


def bound_to_us() -> Callable[[], None]:
    """A call for the child to make before it becomes the command, so that it ends with the thread that started it."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return bind


def exit_code(ended: Exit) -> int:
    """What a shell would say: the exit code, or 128 and the number of the signal."""
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
