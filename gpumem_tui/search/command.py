"""One run of a user's command, from the side that asked for it: start it, follow it, end all that it started."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpumem_tui.command.link import REQUEST_FILE, SOCKET_FILE
from gpumem_tui.command.session import STACK_FILE, STACK_SIGNAL
from gpumem_tui.output_lines import OutputLines
from gpumem_tui.python_options import bypass
from gpumem_tui.search.process import CannotStart, ChildDied, no_room, open_pipe
from gpumem_tui.search.stdin import CommandInput
from gpumem_tui.trial.events import (
    ChildEvent,
    Ended,
    Failed,
    Joined,
    Output,
    Ready,
    Request,
    TraceDone,
    TrialDone,
    TrialRequest,
    decode_event,
    encode,
)

_PACKAGE = Path(__file__).parent.parent
_SUPERVISOR = _PACKAGE / "command" / "supervise.py"
_SITE = _PACKAGE / "command" / "site"
_POLL_S = 0.1
_EXIT_S = 5.0
"""A program that has made its steps, or failed, has so long to end by itself."""

_ANSWER_S = 2.0
_NOT_FOUND, _NOT_RUNNABLE = 127, 126
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_INSTALLED = re.compile(r"^<|/lib/python[\d.]+/|-packages/|/gpumem_tui/")

SWITCHED_OFF: Mapping[str, str] = {
    "WANDB_MODE": "disabled",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "",
}
"""What loggers and hubs read to send nothing (their documentation); an empty value only removes what is set."""

_IN_ORDER = {"PYTHONHASHSEED": "0", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""So that two runs allocate in the same order: sets as they are hashed, weights as transformers loads them."""

SIDE_EFFECTS = (
    "the command runs as it is until its steps are made: what it writes until then is written; "
    "W&B, Comet, Neptune, ClearML and Hugging Face telemetry are switched off"
)


class CommandProcess:
    """A command that runs for one request.

    Args:
        request: what to do; its workload is a command.
        words: the command for the request's batch size.
        gpu_uuids: the only GPUs the command may see; empty hides all of them.

    Raises:
        CannotStart: a Python in the command ignores what follows it, or no process can be started at all.
    """

    def __init__(self, request: Request, words: tuple[str, ...], gpu_uuids: tuple[str, ...]) -> None:
        command = request.workload.command
        assert command is not None
        bypassed = bypass(words)
        if bypassed:
            raise CannotStart(f"-- COMMAND: {bypassed} keeps the command from being followed; leave it out")
        with ExitStack() as ours, ExitStack() as theirs:  # of a command that cannot be started, nothing stays
            try:
                self._directory = Path(tempfile.mkdtemp(prefix="gpumem-tui-trial-"))
                ours.callback(shutil.rmtree, self._directory, ignore_errors=True)
                self._input = CommandInput(words)
                ours.callback(self._input.close)
                (self._directory / REQUEST_FILE).write_bytes(encode(request))
                self._listener = ours.enter_context(socket.socket(socket.AF_UNIX))
                self._listener.bind(str(self._directory / SOCKET_FILE))
                self._listener.listen(128)
                self._listener.setblocking(False)
                lifeline_fd, held_fd = open_pipe(theirs, ours)
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_SUPERVISOR), str(lifeline_fd), *words],
                    stdin=self._input.fd,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lifeline_fd,),
                    env=self._environment(request, gpu_uuids),
                    cwd=command.cwd,
                    start_new_session=True,
                )
            except OSError as error:
                raise CannotStart(no_room(error)) from error
            ours.pop_all()
        self._lifeline = os.fdopen(held_fd, "wb", buffering=0)  # closed with this process, however that ends
        assert self._process.stdout is not None
        self._simulated = not isinstance(request, TrialRequest) or request.simulated
        self._name = Path(words[0]).name
        self._cwd = command.cwd
        self._output = OutputLines()
        self._members: dict[socket.socket, _Member] = {}
        self._paused = False

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    def _environment(self, request: Request, gpu_uuids: tuple[str, ...]) -> dict[str, str]:
        path = [str(_SITE), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **{name: value for name, value in SWITCHED_OFF.items() if value},
            "GPUMEM_TUI_TRIAL": str(self._directory),
            "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
            "PYTHONUNBUFFERED": "1",
            **{name: os.environ.get(name, value) for name, value in _IN_ORDER.items()},
            "CUDA_VISIBLE_DEVICES": ",".join(gpu_uuids),
        }
        for name, value in SWITCHED_OFF.items():
            if not value:
                environment.pop(name, None)
        return environment

    def events(
        self, wait: Callable[[], None], timeout_s: float, held: Callable[[], bool] = lambda: False
    ) -> Iterator[ChildEvent]:
        """Every event until the command's outcome is known and it has ended.

        Args:
            wait: called several times a second; may raise to stop waiting.
            timeout_s: a command that makes no optimizer step for so long is given up.
            held: whether silence is expected now, because the user paused it.

        Raises:
            ChildDied: a process of it was killed, or spoke nonsense.
        """
        outcomes: list[TrialDone | TraceDone] = []
        failure: Failed | None = None
        end_by: float | None = None
        heard = time.monotonic()
        stepped = -1
        ready = False
        with selectors.DefaultSelector() as selector:
            stdout = self._process.stdout
            assert stdout is not None
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(stdout, selectors.EVENT_READ)
            code: int | None = None
            while True:
                wait()
                found = selector.select(_POLL_S if code is None else 0)
                for key, _ in found:
                    if key.fileobj is stdout:
                        chunk = os.read(stdout.fileno(), 1 << 16)
                        if not chunk:
                            selector.unregister(stdout)
                        for line in self._output.split(chunk):
                            yield Output(line)
                        continue
                    if key.fileobj is self._listener:
                        self._accept(selector)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    for event in self._received(key.fileobj, selector):
                        if isinstance(event, Ready):
                            if not ready:
                                ready = True
                                yield event
                        elif isinstance(event, TrialDone | TraceDone):
                            outcomes.append(event)
                        elif isinstance(event, Failed):
                            failure = failure or event
                        elif not isinstance(event, Joined | Ended):
                            yield event
                if end_by is None and self._is_concluded(outcomes, failure):
                    end_by = time.monotonic() + _EXIT_S
                if code is not None and not found:
                    break
                code = self._process.poll()
                if end_by is not None and time.monotonic() > end_by:
                    break
                steps = max((member.steps for member in self._members.values()), default=-1)
                if held() or steps != stepped:
                    stepped, heard = steps, time.monotonic()
                elif end_by is None and time.monotonic() - heard > timeout_s:
                    failure = Failed("workload", self._stuck(timeout_s))
                    break
        for line in self._output.rest():
            yield Output(line)
        yield _worst(outcomes) or failure or self._without_outcome(code)

    def _is_concluded(self, outcomes: list[TrialDone | TraceDone], failure: Failed | None) -> bool:
        """All ranks have reported, or one that it does not fit."""
        if failure is not None or any(isinstance(one, TrialDone) and one.outcome == "oom" for one in outcomes):
            return True
        ranks = 1 if self._simulated else max((member.ranks for member in self._members.values()), default=1)
        return len(outcomes) >= ranks

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        self._members[connection] = _Member()
        selector.register(connection, selectors.EVENT_READ)
        if self._paused:
            _send(connection, b"pause\n")

    def _received(self, connection: socket.socket, selector: selectors.BaseSelector) -> Iterator[ChildEvent]:
        member = self._members[connection]
        try:
            chunk = connection.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk:
            selector.unregister(connection)
            connection.close()
            return
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join((*member.rest, lines[0]))
            member.rest = []
        member.rest.append(rest)
        for line in lines:
            try:
                event = decode_event(line)
            except ValueError as error:
                raise ChildDied(str(error)) from error
            member.take(event)
            yield event

    def _stuck(self, timeout_s: float) -> str:
        """No step was made in time: the source line that the program is at, as far as it answers."""
        place = self._place()
        at = f"; it is at {place}" if place else ""
        steps = max((member.steps for member in self._members.values()), default=0)
        which = "no optimizer step" if steps < 1 else f"no optimizer step after number {steps}"
        return f"{which} within {timeout_s:g} s{at}; --timeout waits longer"

    def _place(self) -> str:
        """``file:line`` in the user's code that a Python process is at, of one that has imported torch if any has."""
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

    def _without_outcome(self, code: int | None) -> Failed:
        """The command ended without reporting an outcome."""
        last = f": {self._output.last}" if self._output.last else ""
        if code == _NOT_FOUND and not self._members:
            return Failed("workload", f"{self._output.last or f'{self._name}: not found'}; check the command")
        if code == _NOT_RUNNABLE and not self._members:
            return Failed("workload", f"{self._output.last}; check the command")
        how = f"exit code {code}" if code is not None and code < 128 else f"killed by signal {(code or 128) - 128}"
        if code == 137:
            how += ", perhaps as host memory was full"
        if not self._members:
            return Failed("workload", f"the command ended ({how}) without importing torch{last}")
        return Failed("workload", f"the command ended ({how}) before its first optimizer step{last}")

    def pause(self) -> None:
        """Stop after the step that is running."""
        self._paused = True
        self._tell(b"pause\n")

    def resume(self) -> None:
        """Go on after a pause."""
        self._paused = False
        self._tell(b"resume\n")

    def end(self) -> None:
        """Kill the command and everything it started, if it still runs, and free what it held here."""
        self._lifeline.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for connection in self._members:
            connection.close()
        self._listener.close()
        self._input.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _tell(self, word: bytes) -> None:
        for connection in list(self._members):
            _send(connection, word)


@dataclass
class _Member:
    """One process of the command."""

    pid: int = 0
    ranks: int = 1
    steps: int = -1
    rest: list[bytes] = field(default_factory=list)

    def take(self, event: ChildEvent) -> None:
        if isinstance(event, Joined):
            self.pid, self.ranks = event.pid, event.ranks
        else:
            self.steps = max(self.steps, getattr(event, "step", getattr(event, "steps", -1)))


def _send(connection: socket.socket, word: bytes) -> None:
    with suppress(OSError):
        connection.sendall(word)


def _worst(outcomes: list[TrialDone | TraceDone]) -> TrialDone | TraceDone | None:
    """Of several ranks the one that decides: out of memory first, else the one that holds most."""
    if not outcomes:
        return None
    return max(
        outcomes,
        key=lambda one: (one.outcome == "oom", one.device_used_bytes) if isinstance(one, TrialDone) else (False, 0),
    )
