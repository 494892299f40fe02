"""Values and jobs that threads hand to each other: the newest of what one makes, and calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.snapshot import Snapshot

T = TypeVar("T")


class LatestValue(Generic[T]):
    """The newest value that a thread made, kept until the next one comes; each is another object.

    Attributes:
        value: the newest; None before the first.
    """

    def __init__(self) -> None:
        self.value: T | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._subscribers: tuple[Callable[[], None], ...] = ()

    def put(self, value: T) -> None:
        """Replace the value, wake the threads that wait, and call the subscribers."""
        with self._changed:
            self.value = value
            self._changed.notify_all()
        for tell in self._subscribers:
            tell()

    def end(self) -> None:
        """Wake all threads that wait, as no value follows any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for tell in self._subscribers:
            tell()

    def wait(self, after: T | None, timeout_s: float) -> T | None:
        """Return the first value that is not `after`; None if none comes in time, or none ever again."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.value is not after, timeout_s)
            return None if self.value is after else self.value

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Call `tell` after each new value and at the end, in the thread that made the value and waits meanwhile."""
        self._subscribers = (*self._subscribers, tell)

    def unsubscribe(self, tell: Callable[[], None]) -> None:
        """Stop calling `tell`; a call that is under way continues."""
        self._subscribers = tuple(each for each in self._subscribers if each is not tell)


class LatestSnapshot:
    """The part of `snapshot.Source` that hands the newest snapshot to other threads: a base class for sources.

    Args:
        newest: the values that snapshots are of; by default the snapshots themselves. Others override `latest`.
    """

    def __init__(self, newest: LatestValue[Any] | None = None) -> None:
        self._newest: LatestValue[Any] = newest or LatestValue()

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot, None before the first."""
        found: Snapshot | None = self._newest.value
        return found

    def wait(self, after: Snapshot | None, timeout_s: float) -> Snapshot | None:
        """Return the first snapshot that is not `after`; None if none comes in time, or none ever again."""
        deadline_s, value = monotonic() + timeout_s, self._newest.value
        while (latest := self.latest()) is after and (left_s := deadline_s - monotonic()) > 0:
            if (value := self._newest.wait(value, left_s)) is None:
                break
        return None if latest is after else latest

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Call `tell` after each new snapshot and at the end, from another thread; it must not wait."""
        self._newest.subscribe(tell)

    def unsubscribe(self, tell: Callable[[], None]) -> None:
        """Stop calling `tell`."""
        self._newest.unsubscribe(tell)


Job = Callable[[], "Job | None"]
"""Something to do; returns what is left of it, to be done after the jobs that wait."""


class Crew:
    """Threads that do jobs one after the other: one, and more only while jobs take long.

    Threads that call a driver at the same time wait for the interpreter at each return. They are daemons: a job that
    hangs does not keep the program from its end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        self._changes = threading.Lock()
        self._add()

    def do(self, job: Callable[[], None]) -> None:
        """Have a job done, which raises nothing."""
        self._jobs.put(job)

    @property
    def is_behind(self) -> bool:
        """Return whether jobs wait."""
        return not self._jobs.empty()

    def reinforce(self) -> None:
        """Add a thread if jobs wait and all threads are at work: to be called again and again while it is behind."""
        if self.is_behind and not self._idle:
            self._add()

    def end(self) -> None:
        """Do no more jobs. Returns at once."""
        self._jobs.put(None)

    def _add(self) -> None:
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changes:
                if self._idle and not self.is_behind:
                    return  # the others were slow, and are no more
                self._idle += 1
            job = self._jobs.get()
            with self._changes:
                self._idle -= 1
            if job is None:
                self._jobs.put(None)  # for the other threads
                return
            job()


class Worker:
    """Does one job each time it is asked: a job that hangs blocks nothing.

    Args:
        job: what to do.
        tell: called after each job.
        crew: does it.

    Attributes:
        asked_at: when the job that runs was asked for (`time.monotonic`); None while none exists.
        error: one line on the unexpected error that ended the last job; empty if it ended well.
    """

    def __init__(self, job: Job, tell: Callable[[], None], crew: Crew) -> None:
        self.asked_at: float | None = None
        self.error = ""
        self._job = job
        self._tell = tell
        self._crew = crew

    def ask(self) -> None:
        """Begin the job, unless the last one still runs."""
        if self.asked_at is None:
            self.asked_at = monotonic()
            self._crew.do(partial(self._do, self._job))

    def busy_s(self) -> float:
        """Return for how many seconds the job has been running; 0 while none exists."""
        asked_at = self.asked_at
        return 0.0 if asked_at is None else monotonic() - asked_at

    @property
    def is_idle(self) -> bool:
        """Return whether no job runs."""
        return self.asked_at is None

    def _do(self, job: Job) -> None:
        try:
            left = job()
        except Exception as error:  # noqa: BLE001  named on the screen; the next job may go well
            self.error = own_error(error)
        else:
            if left is not None:
                self._crew.do(partial(self._do, left))
                return
            self.error = ""
        self.asked_at = None
        self._tell()
