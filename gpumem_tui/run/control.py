"""Children that run steps, and who steers them: start one for a request, pause it, resume it, end it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED
from gpumem_tui.host_memory import left_bytes
from gpumem_tui.memory import GIB
from gpumem_tui.run.children import CannotStart, Child, ChildDied
from gpumem_tui.run.events import ChildEvent, Failed, Request, TraceRequest, TrialRequest
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.line import line_of

_TRACED_ACCUMULATION = {True: 16, False: 2}
"""Micro-batches that a trace accumulates at most."""

_SPARE_HOST_BYTES = 4 * GIB
"""Host memory that must be available for a second process: ten times the need of most programs that keep no data in
memory."""


@dataclass(frozen=True)
class Terms:
    """The terms that a child runs under, regardless of its request.

    Attributes:
        python: the interpreter; a user's command brings its own.
        gpu_uuids: the only GPUs that a child on a real GPU may see.
        timeout_s: a child silent for longer than this hangs.
        target_batch: samples wanted per optimizer step over all GPUs; None for none.
        passes: of an optimizer step, as a command's line states them; 0 for as many as reach `target_batch`.
    """

    python: str
    gpu_uuids: tuple[str, ...] = ()
    timeout_s: float = 300.0
    target_batch: int | None = None
    passes: int = 0


class Steered(Protocol):
    """A run that can be held and ended."""

    def pause(self) -> None:
        """Stop after the step that is running."""

    def resume(self) -> None:
        """Continue after a pause."""

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
        return EXIT_BAD_INPUT if self.kind in ("workload", "options", "python", "torch") else EXIT_FAILED


class Control:
    """Pauses, resumes and cancels a running search; safe to use from another thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._children: list[Steered] = []
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
            for child in self._children:
                child.pause()

    def resume(self) -> None:
        """Continue after a pause."""
        with self._lock:
            self._paused = False
            for child in self._children:
                child.resume()

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
        """Commands go to `child` within the context; it is ended after it, in every case."""
        with self._lock:
            self._children.append(child)
            if self._paused:
                child.pause()
        try:
            yield
        finally:
            with self._lock:
                self._children.remove(child)
            child.end()


def converse(
    request: Request, terms: Terms, control: Control, check: Callable[[], None] | None = None
) -> Iterator[ChildEvent]:
    """Start a child for a request and yield what it reports; it is ended when the caller is done.

    Args:
        check: called several times a second; raises `Cancelled` to end it. By default that is left to `control`.

    Raises:
        Unusable: there is no such interpreter, or no process can be started.
        ChildDied: it hung, crashed, was killed, or spoke nonsense.
        Cancelled: the user ended the search.
    """
    check = check or control.check
    check()
    real = isinstance(request, TrialRequest) and not request.simulated
    uuids = terms.gpu_uuids if real else ()
    try:
        command = line_of(request.workload, terms.python)
    except OSError as error:
        raise Unusable(Failed("python", f"no process can be started here: {error.strerror}")) from error
    with ExitStack() as held:
        try:
            words = held.enter_context(_written(command, request, terms))
            child = Child(request, words, command.cwd, uuids)
        except CannotStart as error:
            raise Unusable(Failed("python", str(error))) from error
        except OSError as error:
            raise Unusable(Failed("workload", f"{error.filename}: cannot be written: {error.strerror}")) from error
        with control.running(child):
            yield from child.events(check, terms.timeout_s, lambda: control.paused)


class _Ahead:
    """A conversation that begins now, in a thread of its own, and is listened to later."""

    def __init__(self, request: Request, terms: Terms, control: Control) -> None:
        self.request = request
        self.began_s = time.monotonic()
        self._told: SimpleQueue[ChildEvent | BaseException | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._converse, args=(terms, control), daemon=True)
        self._thread.start()

    def _converse(self, terms: Terms, control: Control) -> None:
        def check() -> None:
            control.check()
            if self._closed.is_set():
                raise Cancelled

        try:
            for event in converse(self.request, terms, control, check):
                self._told.put(event)
            self._told.put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is listened to
            self._told.put(error)

    def events(self) -> Iterator[ChildEvent]:
        """Yield what `converse` yields, from its beginning, and raise what it raises."""
        while (told := self._told.get()) is not None:
            if isinstance(told, BaseException):
                raise told
            yield told

    def wait(self) -> None:
        """Wait for its end: what it has made in the file system, it may take away."""
        self._thread.join()

    def close(self) -> None:
        """End the child."""
        self._closed.set()
        self.wait()


class SideBySide:
    """Conversations one after the other; the next one starts early where there is room. `close` ends it."""

    def __init__(self, terms: Terms, control: Control) -> None:
        self._terms, self._control = terms, control
        self._ahead: _Ahead | None = None
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """The wall time since the child was started that is listened to."""
        return time.monotonic() - self._began_s

    def converse(self, request: Request, following: Request | None = None) -> Iterator[ChildEvent]:
        """Yield what a child reports, as `converse` does; what goes wrong next to another one is done again, alone.

        Args:
            following: what is probably asked for next. Only runs on simulated GPUs continue next to another.
        """
        begun, self._ahead = self._ahead, None
        if begun is not None and begun.request != request:
            begun.close()
            begun = None
        self._began_s = time.monotonic() if begun is None else begun.began_s
        if following is not None and following != request and _may_be_beside(following) and has_room_for_two():
            self._ahead = _Ahead(following, self._terms, self._control)
        is_beside = begun is not None or self._ahead is not None
        try:
            for event in converse(request, self._terms, self._control) if begun is None else begun.events():
                if is_beside and isinstance(event, Failed) and event.kind != "memory":  # a device's, not the host's
                    break
                yield event
            else:
                return
        except (ChildDied, Unusable):
            if not is_beside:
                raise
        finally:
            if begun is not None:
                begun.close()
        if self._ahead is not None:
            self._ahead.wait()
        self._began_s = time.monotonic()
        yield from converse(request, self._terms, self._control)

    def close(self) -> None:
        """End what has begun."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None


def _may_be_beside(request: Request) -> bool:
    return isinstance(request, TraceRequest) or request.simulated


def has_room_for_two() -> bool:
    """Return whether a process finds a processor of its own, and host memory, next to another one."""
    return len(os.sched_getaffinity(0)) > 1 and (left_bytes() or 0) >= _SPARE_HOST_BYTES


def _written(command: Command, request: Request, terms: Terms) -> AbstractContextManager[tuple[str, ...]]:
    """Return what writes the command line for the requested batch size.

    A trace accumulates as far as costs little: a third micro-batch holds what the second held, and is answered from
    memory where no ranks exchange anything, but transformers' Trainer takes the data of all of a step with it.
    """
    size = request.batch_size or 1
    accumulation = terms.passes or command.accumulation(
        size, terms.target_batch, request.workload.recipe.pass_micro_batches
    )
    if isinstance(request, TraceRequest):
        accumulation = min(accumulation, _TRACED_ACCUMULATION[request.workload.recipe.gpus == 1])
    return command.written(size, accumulation)
