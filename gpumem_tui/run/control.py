"""Children that run steps, and who steers them: start one for a request, pause it, resume it, end it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED
from gpumem_tui.run.children import CannotStart, Child, CommandChild, ForkedChild
from gpumem_tui.run.events import ChildEvent, Failed, Request, TraceRequest, TrialRequest
from gpumem_tui.workload.command import Command

_TRACED_ACCUMULATION = 2
"""Micro-batches that a trace accumulates at most."""


@dataclass(frozen=True)
class Terms:
    """What a child runs under, whatever its request is.

    Attributes:
        python: the interpreter; a command brings its own.
        gpu_uuids: the only GPUs that a child on a real GPU may see.
        timeout_s: a child silent for longer than this hangs.
        target_batch: samples wanted per optimizer step over all GPUs; None for none.
    """

    python: str
    gpu_uuids: tuple[str, ...] = ()
    timeout_s: float = 300.0
    target_batch: int | None = None


class Steered(Protocol):
    """What runs and can be held."""

    def pause(self) -> None:
        """Stop after the step that is running."""

    def resume(self) -> None:
        """Go on after a pause."""

    def end(self) -> None:
        """End it, if it still runs."""


class Cancelled(Exception):
    """The user ended the search."""


class Unusable(Exception):
    """The search cannot start: torch, the workload or the device is not what was promised; one clear line."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.detail)
        self.kind = failure.kind

    @property
    def exit_code(self) -> int:
        """Return the exit code: the user's options or files are wrong, or a device or a trace fails."""
        return EXIT_BAD_INPUT if self.kind in ("workload", "python", "torch") else EXIT_FAILED


class Control:
    """Pauses, resumes and cancels a running search; safe to use from another thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._child: Steered | None = None
        self._lock = threading.Lock()
        self._paused = False

    @property
    def paused(self) -> bool:
        """Return True between `pause` and `resume`."""
        return self._paused

    @property
    def cancelled(self) -> bool:
        """Return True after `cancel`."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the search now; the running trial is killed."""
        self._cancelled.set()

    def pause(self) -> None:
        """Hold the search after the step that is running."""
        with self._lock:
            self._paused = True
            if self._child is not None:
                self._child.pause()

    def resume(self) -> None:
        """Go on after a pause."""
        with self._lock:
            self._paused = False
            if self._child is not None:
                self._child.resume()

    def check(self) -> None:
        """Raise Cancelled if the user ended the search."""
        if self._cancelled.is_set():
            raise Cancelled

    @contextmanager
    def within(self, limit_s: float | None) -> Iterator[None]:
        """Cancel what runs within the context after so many seconds; None for never."""
        timer = None if limit_s is None else threading.Timer(limit_s, self.cancel)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    @contextmanager
    def running(self, child: Steered) -> Iterator[None]:
        """Commands go to `child` within the context; it is ended after it, whatever happens."""
        with self._lock:
            self._child = child
            if self._paused:
                child.pause()
        try:
            yield
        finally:
            with self._lock:
                self._child = None
            child.end()


def converse(request: Request, terms: Terms, control: Control) -> Iterator[ChildEvent]:
    """Start a child for a request and yield what it reports; it is ended when the caller is done.

    Raises:
        Unusable: there is no such interpreter, or no process can be started.
        ChildDied: it hung, crashed, was killed, or spoke nonsense.
        Cancelled: the user ended the search.
    """
    control.check()
    real = isinstance(request, TrialRequest) and not request.simulated
    uuids = terms.gpu_uuids if real else ()
    child: Child
    command = request.workload.command
    with ExitStack() as held:
        try:
            if command is None:
                child = ForkedChild(request, terms.python, uuids[0] if uuids else None)
            else:
                words = held.enter_context(_written(command, request, terms))
                child = CommandChild(request, words, uuids)
        except CannotStart as error:
            raise Unusable(Failed("python", str(error))) from error
        except OSError as error:
            raise Unusable(Failed("workload", f"{error.filename}: cannot be written: {error.strerror}")) from error
        with control.running(child):
            yield from child.events(control.check, terms.timeout_s, lambda: control.paused)


def _written(command: Command, request: Request, terms: Terms) -> AbstractContextManager[tuple[str, ...]]:
    """Return what writes the command line for the requested batch size.

    A trace accumulates twice at most: a third micro-batch holds what the second held.
    """
    size = request.batch_size or 1
    accumulation = command.accumulation(size, terms.target_batch, request.workload.recipe.pass_micro_batches)
    if isinstance(request, TraceRequest):
        accumulation = min(accumulation, _TRACED_ACCUMULATION)
    return command.written(size, accumulation)
