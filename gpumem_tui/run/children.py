"""Whoever owns a process that runs a step: starts it, hears its events, holds it, ends it and all that it started.

It is a command that runs under a supervisor, and those of its processes that import torch report by themselves.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpumem_tui.launchers import alone, bypass
from gpumem_tui.run.events import (
    ChildEvent,
    Ended,
    EventError,
    Failed,
    Joined,
    Output,
    Ready,
    Request,
    Sample,
    TraceDone,
    TrialDone,
    TrialRequest,
    decode_event,
    encode,
)
from gpumem_tui.run.session import CONCLUDE_SIGNAL, REQUEST_FILE, SOCKET_FILE, STACK_FILE, STACK_SIGNAL
from gpumem_tui.run.stand_ins import environment, keep_followed
from gpumem_tui.run.supervised import SupervisedCommand, open_input
from gpumem_tui.text import OutputLines

_POLL_S = 0.1
_EXIT_S = 5.0
"""A command that has made its steps, or failed, has so long to end by itself."""

_CONCLUDE_S = 30.0
"""A command that is asked for the steps that it has made has so long to report them."""

_ANSWER_S = 2.0
_FOLDER = "gpumem-tui.trial-"
"""How the names of runs' folders begin: not as folders do that probes publish in, which root's viewers look into."""

_NOT_FOUND, _NOT_RUNNABLE = 127, 126
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_INSTALLED = re.compile(r"^<|/lib/python[\d.]+/|-packages/|/gpumem_tui/")


def side_effects(steps: int, *, then_on_gpu: bool = False) -> str:
    """Return what following a command for so many steps does to the user's machine.

    Args:
        then_on_gpu: it is traced first, then runs on a GPU of this machine.

    >>> side_effects(3).partition(",")[0]
    'your script really runs for 3 steps'
    """
    again = ", then on the GPU" if then_on_gpu else ""
    return (
        f"your script really runs for {steps:,} step{'' if steps == 1 else 's'}, without computing values (a loss "
        f"prints as 0){again}; files it writes are kept. W&B, Comet, Neptune, ClearML and Hugging Face telemetry "
        "are off"
    )


class ChildDied(Exception):
    """The child ended, or was ended, without finishing its work; one line shows how."""


class CannotStart(Exception):
    """There is no such interpreter, it cannot be run, or the system has no room for another process; one line."""


def _cannot_start(error: OSError) -> CannotStart:
    """Say why no process starts: e.g. too many open files, or a full folder for temporary ones."""
    where = "" if error.filename is None else f" ({error.filename})"
    return CannotStart(f"no process can be started: {error.strerror}{where}")


class _Lines:
    """A stream of events whose lines arrive in pieces."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def events(self, chunk: bytes) -> Iterator[ChildEvent]:
        """Yield the events whose lines end with these bytes."""
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._rest, lines[0]))
            self._rest = []
        self._rest.append(rest)
        for line in lines:
            try:
                yield decode_event(line)
            except EventError as error:
                raise ChildDied(f"the trial process sent garbage: {error}") from error


@dataclass
class _Member:
    """A process of a command."""

    pid: int = 0
    ranks: int = 1
    steps: int = -1
    ooms: int = 0
    lines: _Lines = field(default_factory=_Lines)

    def take(self, event: ChildEvent) -> None:
        if isinstance(event, Joined):
            self.pid, self.ranks = event.pid, event.ranks
        else:
            self.steps = max(self.steps, getattr(event, "step", getattr(event, "steps", -1)))
        if isinstance(event, Sample):
            self.ooms = event.progress.ooms


class Child:
    """A command that runs for one request, from its start until `end`.

    Args:
        request: what to do.
        words: the command for the request's batch size. `cwd`: where it runs.
        gpu_uuids: the only GPUs the command may see; empty hides all of them.

    Raises:
        CannotStart: a Python in the command ignores what follows it, or no process can be started at all.
    """

    def __init__(self, request: Request, words: tuple[str, ...], cwd: str, gpu_uuids: tuple[str, ...]) -> None:
        self._over_at = math.inf
        """When the last moment is for it to say anything."""

        bypassed = bypass(words)
        if bypassed:
            raise CannotStart(f"-- COMMAND: {bypassed} keeps the command from being followed; leave it out")
        self._simulated = not isinstance(request, TrialRequest) or request.simulated
        self._noun, self._is_users = request.workload.noun, request.workload.command is not None
        with ExitStack() as ours:  # of a command that cannot be started, nothing stays open
            try:
                _remove_left_over()
                self._directory = Path(tempfile.mkdtemp(prefix=_FOLDER))
                ours.callback(shutil.rmtree, self._directory, ignore_errors=True)
                stdin_fd = open_input(words, ours)
                (self._directory / REQUEST_FILE).write_bytes(encode(request))
                self._listener = ours.enter_context(socket.socket(socket.AF_UNIX))
                self._listener.bind(str(self._directory / SOCKET_FILE))
                self._listener.listen(128)
                self._listener.setblocking(False)
                variables = environment(self._directory, gpu_uuids, simulated=self._simulated)
                self._supervised = SupervisedCommand(
                    list(map(keep_followed, words)),
                    cwd,
                    variables if self._is_users else alone(variables),
                    stdin_fd,
                    may_fork=self._simulated,
                )
            except OSError as error:
                raise _cannot_start(error) from error
            ours.callback(self._reap)
            self._held = ours.pop_all()
            """Ends it and frees what is open here, the last first. Its lifeline is closed with this process, too."""

        self._name = Path(words[0]).name
        self._interpreter = "" if request.workload.is_users_command else words[0]
        self._cwd = cwd
        self._output = OutputLines()
        self._members: dict[socket.socket, _Member] = {}
        self._outcomes: list[TrialDone | TraceDone] = []
        self._without_steps: list[TrialDone | TraceDone] = []
        """Results of processes that ended without an optimizer step: those that infer, or prepare data for others."""

        self._failure: Failed | None = None
        self._is_ready = False
        self._paused = False

    @property
    def pid(self) -> int:
        """Return the supervisor's process id."""
        return self._supervised.pid

    # Its reports

    def events(
        self, wait: Callable[[], None], timeout_s: float, held: Callable[[], bool] = lambda: False
    ) -> Iterator[ChildEvent]:
        """Yield every event until its outcome has come and it has ended.

        Args:
            wait: called several times a second; may raise to stop waiting.
            timeout_s: without progress for this long, it hangs.
            held: whether silence is expected now, because the user paused it.

        Raises:
            ChildDied: it hung, crashed, was killed, or spoke nonsense.
        """
        heard, progress = time.monotonic(), self._advance()
        code: int | None = None
        with selectors.DefaultSelector() as selector:
            self._listen(selector)
            while True:
                wait()
                ready = selector.select(_POLL_S if code is None else 0)
                for key, _ in ready:
                    yield from key.data(selector, key.fileobj)
                if time.monotonic() > self._over_at or (code is not None and not ready):
                    break  # in the second case what it started may live on, and hold its pipe open
                code = self._supervised.code()
                if held() or self._advance() != progress:
                    heard, progress = time.monotonic(), self._advance()
                elif self._over_at == math.inf and time.monotonic() - heard > timeout_s:
                    self._give_up(timeout_s)
                    if self._over_at == math.inf:
                        break
        yield from self._conclusion(code)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        selector.register(self._supervised.stdout_fd, selectors.EVENT_READ, self._read_output)
        selector.register(self._supervised.status_fd, selectors.EVENT_READ, self._read_status)

    def _read_status(self, selector: selectors.BaseSelector, status_fd: int) -> Iterator[ChildEvent]:
        if self._supervised.code() is not None:
            selector.unregister(status_fd)
        yield from ()

    def _read_output(self, selector: selectors.BaseSelector, stdout_fd: int) -> Iterator[ChildEvent]:
        chunk = os.read(stdout_fd, 1 << 16)
        if not chunk:
            selector.unregister(stdout_fd)
        yield from map(Output, self._output.split(chunk))

    def _accept(self, selector: selectors.BaseSelector, listener: socket.socket) -> Iterator[ChildEvent]:
        connection, _ = listener.accept()
        self._members[connection] = _Member()
        selector.register(connection, selectors.EVENT_READ, self._read)
        if self._paused:
            _send(connection, b"pause\n")
        yield from ()

    def _read(self, selector: selectors.BaseSelector, connection: socket.socket) -> Iterator[ChildEvent]:
        member = self._members[connection]
        try:
            chunk = connection.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk:
            selector.unregister(connection)
            connection.close()
            return
        for event in member.lines.events(chunk):
            member.take(event)
            if self._is_for_the_viewer(event):
                yield event

    def _is_for_the_viewer(self, event: ChildEvent) -> bool:
        """Take in how a rank fares. True for what is passed on: that it is ready, and progress."""
        match event:
            case Ready():  # torchrun itself is ready before its ranks are
                was_ready, self._is_ready = self._is_ready, True
                return not was_ready or event.nccl is not None or event.libraries is not None
            case TrialDone() | TraceDone():
                is_provisional = not event.steps and self._over_at == math.inf and not _is_oom(event)
                (self._without_steps if is_provisional else self._outcomes).append(event)
            case Failed():
                self._failure = self._failure or event
            case Joined() | Ended():
                pass
            case _:
                return True
        if self._over_at == math.inf and self._is_concluded():
            self._over_at = time.monotonic() + _EXIT_S
        return False

    def _is_concluded(self) -> bool:
        """Return whether all ranks have reported, or one that it does not fit."""
        if self._failure or any(map(_is_oom, self._outcomes)):
            return True
        ranks = 1 if self._simulated else max((member.ranks for member in self._members.values()), default=1)
        return len(self._outcomes) >= ranks

    def _advance(self) -> tuple[int, int]:
        """Return what changes as it continues: its steps, and how often it ran out of memory and tried less."""
        return self._progress(), max((member.ooms for member in self._members.values()), default=0)

    def _progress(self) -> int:
        return max((member.steps for member in self._members.values()), default=-1)

    def _give_up(self, timeout_s: float) -> None:
        """Say that no step was made in time, and at which source line it is, as far as it answers.

        A process that trains is asked for the steps that it has made.
        """
        place = self._place()
        at = f"; it is at {place}" if place else ""
        steps = max(self._progress(), 0)
        which = "no optimizer step" if steps < 1 else f"no optimizer step after number {steps}"
        self._failure = Failed("workload", f"{which} within {timeout_s:g} s{at}; --timeout waits longer")
        training = [member.pid for member in self._members.values() if member.steps >= 0]
        for pid in training:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, CONCLUDE_SIGNAL)
                self._over_at = time.monotonic() + _CONCLUDE_S

    def _place(self) -> str:
        """Ask for ``file:line`` in the user's code that a Python process is at, of one that has torch if any has."""
        files = {int(path.name.removeprefix(STACK_FILE)): path for path in self._directory.glob(f"{STACK_FILE}*")}
        for pid in files:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, STACK_SIGNAL)
        ranked = sorted(files, key=lambda pid: (pid in {member.pid for member in self._members.values()}, pid))
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            for pid in reversed(ranked):
                stack = _FRAME.findall(files[pid].read_text(errors="replace"))
                frames = [(path, line) for path, line in stack if not _INSTALLED.search(path)] or stack
                if frames:
                    path, line = frames[0]
                    return f"{os.path.relpath(path, self._cwd)}:{line}"
            time.sleep(_POLL_S)
        return ""

    def _conclusion(self, code: int | None) -> Iterator[ChildEvent]:
        """Yield its last output and the outcome of the rank that decides: out of memory first, else the fullest."""
        yield from map(Output, self._output.rest())
        outcomes = self._outcomes
        if not outcomes and not self._failure and code == 0:
            outcomes = self._without_steps
        worst = max(outcomes, key=_how_full, default=None)
        if worst is not None and self._simulated and len(outcomes) > 1:
            does = "train" if outcomes is self._outcomes else "use the GPU"
            more = f"{len(outcomes)} processes of the command {does}, and this is the fullest of them"
            worst = replace(worst, notes=(*worst.notes, f"{more}: where they are ranks, give --gpus"))
        yield worst or self._failed_after(self._progress()) or self._without_outcome(code)

    def _failed_after(self, steps: int) -> Failed | None:
        """Return why it failed, with how many steps it had made."""
        failure = self._failure
        if failure is None or steps < 1 or failure.kind != "workload" or "optimizer step" in failure.detail:
            return failure
        return replace(failure, detail=f"{failure.detail} ({_after(steps)})")

    def _without_outcome(self, code: int | None) -> Failed:
        """Say how the command ended that has reported no outcome.

        Raises:
            ChildDied: one of this program's was killed, which the next one need not be.
        """
        last = f": {self._output.last}" if self._output.last else ""
        how = f"exit code {code}" if code is not None and code < 128 else f"killed by signal {(code or 128) - 128}"
        if code is not None and code > 128 and not self._is_users:
            raise ChildDied(f"killed by signal {code - 128}{' (host memory full?)' if code == 137 else ''}{last}")
        if not self._members and self._interpreter and not self._followed:
            remedy = "give --python the interpreter that you train in"
            return Failed("python", f"{self._interpreter}: is no Python with torch ({how}{last}); {remedy}")
        if code == _NOT_FOUND and not self._members:
            return Failed("workload", f"{self._output.last or f'{self._name}: not found'}; check the command")
        if code == _NOT_RUNNABLE and not self._members:
            return Failed("workload", f"{self._output.last}; check the command")
        if code == 137:
            how += ", perhaps as host memory was full"
        if not self._members:
            return Failed("workload", f"{self._noun} ended ({how}) without importing torch{self._unfollowed()}{last}")
        steps = self._progress()
        when = _after(steps) if steps > 0 else "before its first optimizer step"
        if code == 0:
            last = ", and put nothing on the GPU"
        return Failed("workload", f"{self._noun} ended ({how}) {when}{last}")

    @property
    def _followed(self) -> bool:
        """Whether a Python was followed: every one that is leaves a file here."""
        return any(self._directory.glob(f"{STACK_FILE}*"))

    def _unfollowed(self) -> str:
        """Say why none of its processes may have been followed."""
        said = ", as far as can be seen: no Python in it was followed; where it replaces PYTHONPATH, write "
        return "" if self._followed else f"{said}PYTHONPATH=…:$PYTHONPATH"

    # Requests to it

    def pause(self) -> None:
        """Stop after the step that is running; processes that come later, too."""
        self._paused = True
        self._tell(b"pause\n")

    def resume(self) -> None:
        """Continue after a pause."""
        self._paused = False
        self._tell(b"resume\n")

    def end(self) -> None:
        """Kill it and everything it started, if it still runs, and free what it held here."""
        self._held.close()

    def _tell(self, line: bytes) -> None:
        for connection in list(self._members):
            _send(connection, line)

    def _reap(self) -> None:
        """Have the supervisor end all that the command started, and wait for it."""
        self._supervised.end()
        for connection in self._members:
            connection.close()


def _remove_left_over() -> None:
    """Remove the folders of runs whose viewer was killed together with the supervisor: nobody is at their socket.

    One of another type that finds somebody there is refused by another error, and not heard of there.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect(str(folder / SOCKET_FILE))
            except ConnectionRefusedError:
                shutil.rmtree(folder, ignore_errors=True)


def _send(connection: socket.socket, line: bytes) -> None:
    with suppress(OSError):
        connection.sendall(line)


def _after(steps: int) -> str:
    return f"after {steps:,} optimizer step{'' if steps == 1 else 's'}"


def _is_oom(outcome: TrialDone | TraceDone) -> bool:
    return isinstance(outcome, TrialDone) and outcome.outcome == "oom"


def _how_full(outcome: TrialDone | TraceDone) -> tuple[bool, int]:
    if isinstance(outcome, TrialDone):
        return outcome.outcome == "oom", outcome.device_used_bytes
    return False, 0
