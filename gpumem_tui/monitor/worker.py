"""A thread for calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic


class Worker:
    """Does one job each time it is asked, in a daemon thread: a job that hangs blocks nothing, not even the exit.

    Args:
        name: the thread's.
        job: what to do. An error in it ends the thread, and the worker counts as busy from then on.
        tell: called after each job.
    """

    def __init__(self, name: str, job: Callable[[], None], tell: Callable[[], None]) -> None:
        self._job = job
        self._tell = tell
        self._asked = threading.Event()
        self._ended = False
        self.asked_at: float | None = None
        """When the job that runs was asked for (`time.monotonic`); None while there is none."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def ask(self) -> None:
        """Begin the job, unless the last one still runs."""
        if self.asked_at is None:
            self.asked_at = monotonic()
            self._asked.set()

    def busy_s(self) -> float:
        """For how long the job has been running; 0 while there is none."""
        asked_at = self.asked_at
        return 0.0 if asked_at is None else monotonic() - asked_at

    @property
    def is_idle(self) -> bool:
        """No job runs."""
        return self.asked_at is None

    def end(self) -> None:
        """No more jobs. Returns at once."""
        self._ended = True
        self._asked.set()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._ended:
                return
            self._job()
            self.asked_at = None
            self._tell()
