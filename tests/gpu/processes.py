"""Programs that a session starts: each with a time limit, and none is left when the session ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_running: set[subprocess.Popen[bytes]] = set()
_lock = threading.Lock()


_GRACE_S = 2.0
"""For a program to end what it has started, wherever that is, before it is killed."""


class Limit:
    """How long something may take, counted from now."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """How many seconds are left; never less than a tenth."""
        return max(0.1, self._end_s - time.monotonic())


class TimeIsUp(Exception):
    """A program was killed at its limit; the message shows which."""


@dataclass(frozen=True)
class Ended:
    """How a program ended, and all it wrote."""

    code: int
    output: str
    errors: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Its last word: of stderr, else of stdout, else its exit code."""
        for text in (self.errors, self.output):
            if lines := [line.strip() for line in text.splitlines() if line.strip(" |")]:
                return lines[-1][:400]
        return f"exit code {self.code}"


class Started:
    """A program at work in a process group of its own; what it writes goes to two files."""

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None):
        self._log = log
        self._began_s = time.monotonic()
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err, _lock:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True
            )
            _running.add(self._process)
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self, limit_s: float) -> Ended:
        """Wait for its end.

        Raises:
            TimeIsUp: it ran longer, and is killed with all that it started.
        """
        try:
            code = self._process.wait(max(0.1, limit_s))
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise TimeIsUp(f"{self._log.name}: no end within {limit_s:.0f} s; {self._ended(-9).last_line}") from error
        self._forget()
        return self._ended(code)

    def kill(self) -> None:
        """End it with its process group."""
        _end([self._process])
        self._process.wait()
        self._forget()

    def _forget(self) -> None:
        with _lock:
            _running.discard(self._process)

    def _ended(self, code: int) -> Ended:
        output, errors = (self._log.with_suffix(end).read_text(errors="replace") for end in (".out", ".err"))
        return Ended(code, output, errors, time.monotonic() - self._began_s)


def run(
    words: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """Run a program to its end; `log` with .out and .err keeps what it wrote.

    Raises:
        TimeIsUp: as of `Started.wait`.
        OSError: there is no such program, or no room for what it writes.
    """
    return Started(words, log, env, cwd).wait(limit_s)


def kill_all() -> None:
    """End what still runs of all that was started here."""
    with _lock:
        found = list(_running)
    _end(found)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    end_s = time.monotonic() + _GRACE_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end_s - time.monotonic()))
    for process in processes:
        _signal(process, signal.SIGKILL)  # what is left of the group, its leader or not


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
