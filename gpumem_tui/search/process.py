"""One trial's child process, from the parent's side: start it, read its events, pause it, end it. Never orphan it."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from gpumem_tui.search import interpreters
from gpumem_tui.text import shortened
from gpumem_tui.trial.events import ChildEvent, EventError, Request, TrialRequest, decode_event, encode

_POLL_S = 0.1
_LONGEST_LAST_LINE = 200


class ChildDied(Exception):
    """The child ended, or was ended, without finishing its work; one line says how."""


class CannotStart(Exception):
    """There is no such interpreter, it cannot be run, or the system has no room for another process; one line."""


def open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with whom they belong to: what is read from, what is written to."""
    read_fd, write_fd = os.pipe()
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd


def _cannot_start(python: str, error: OSError) -> CannotStart:
    if error.filename == python:
        return CannotStart(
            f"--python {python}: cannot be run ({error.strerror}); give the path of a Python that has torch"
        )
    return CannotStart(no_room(error))


def no_room(error: OSError) -> str:
    """Why the system does not start another process, e.g. too many open files, or a full folder for temporary ones."""
    where = "" if error.filename is None else f" ({error.filename})"
    return f"no process can be started: {error.strerror}{where}"


class ChildProcess:
    """A fresh process that does one request, forked by an interpreter that has torch imported.

    Args:
        request: what to do.
        python: the interpreter; the user's training environment may be another than the viewer's.
        gpu_uuid: the only GPU the child may see; None hides all of them.

    Raises:
        CannotStart: `python` is not a program that runs here, or no process can be started at all.
    """

    def __init__(self, request: Request, python: str, gpu_uuid: str | None) -> None:
        simulated = not isinstance(request, TrialRequest) or request.simulated
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "" if simulated or gpu_uuid is None else gpu_uuid}
        with ExitStack() as ours, ExitStack() as theirs:  # of a child that cannot be started, nothing stays open
            try:
                commands_fd, writing_fd = open_pipe(theirs, ours)
                read_fd, write_fd = open_pipe(ours, theirs)
                lifeline_fd, held_fd = open_pipe(theirs, ours)
                self._server = interpreters.borrow(python, simulated=simulated)
                ours.callback(self._server.close)
                self._server.fork((commands_fd, write_fd, lifeline_fd), environment)
            except OSError as error:
                raise _cannot_start(python, error) from error
            ours.pop_all()
        self._commands = os.fdopen(writing_fd, "wb", buffering=0)
        self._lifeline = os.fdopen(held_fd, "wb", buffering=0)  # closed with this process, however that ends
        self._pipe = os.fdopen(read_fd, "rb", buffering=0)
        self._command(encode(request))

    @property
    def pid(self) -> int:
        """The child's process id; until torch is imported, the interpreter's."""
        return self._server.pid

    def events(
        self, wait: Callable[[], None], timeout_s: float, held: Callable[[], bool] = lambda: False
    ) -> Iterator[ChildEvent]:
        """Every event until the child is done.

        Args:
            wait: called several times a second; may raise to stop waiting.
            timeout_s: without a sign of life for this long, the child hangs.
            held: whether silence is expected now, because the user paused it.

        Raises:
            ChildDied: it hung, crashed, was killed, or spoke nonsense.
        """
        rest = b""
        heard = time.monotonic()
        ended = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while True:
                wait()
                if not selector.select(0 if ended else _POLL_S):
                    if ended:
                        break  # what it started may live on and hold the pipe open
                    ended = self._server.code() is not None
                    if held():
                        heard = time.monotonic()
                    elif time.monotonic() - heard > timeout_s:
                        raise ChildDied(f"no sign of life for {timeout_s:.0f} s: the trial hangs")
                    continue
                chunk = self._pipe.read(1 << 20)
                heard = time.monotonic()
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield self._decoded(line)
        code = self._exit_code(wait, timeout_s)
        if code != 0 or rest:
            raise ChildDied(self._how_it_ended(code))

    def pause(self) -> None:
        """Stop after the step that is running."""
        self._command(b"pause\n")

    def resume(self) -> None:
        """Go on after a pause."""
        self._command(b"resume\n")

    def end(self) -> None:
        """Kill the child and everything it started, if it still runs, and free what it held here."""
        interpreters.give_back(self._server)
        for file in (self._commands, self._lifeline, self._pipe):
            file.close()

    def _command(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # the child is gone; `events` says how
            self._commands.write(line)

    def _decoded(self, line: bytes) -> ChildEvent:
        try:
            return decode_event(line)
        except EventError as error:
            raise ChildDied(f"the trial process sent garbage: {error}") from error

    def _exit_code(self, wait: Callable[[], None], timeout_s: float) -> int:
        """How it ended, soon after its last word; user code that closes every file can silence it and run on."""
        deadline = time.monotonic() + timeout_s
        while (code := self._server.code(_POLL_S)) is None:
            wait()
            if time.monotonic() > deadline:
                raise ChildDied(f"closed its pipe and ran on for {timeout_s:.0f} s: the trial hangs")
        return code

    def _how_it_ended(self, code: int) -> str:
        """How the child died, with the last line it printed."""
        printed = self._server.last_line()
        last = f": {shortened(printed, _LONGEST_LAST_LINE)}" if printed else ""
        if code >= 0:
            return f"exited with code {code}{last}"
        name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else f"signal {-code}"
        hint = " (host memory full?)" if -code == signal.SIGKILL else ""
        return f"killed by {name}{hint}{last}"
