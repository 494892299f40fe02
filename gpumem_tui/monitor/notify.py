"""Alerts that begin, told to a user who does not look, by a command of theirs.

The command gets one JSON object on its standard input. It runs in a thread, one at a time, and is killed when it takes
too long: whoever tells never waits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from msgspec import Struct

from gpumem_tui.errors import own_error
from gpumem_tui.monitor.alerts import Alert, Key, Severity
from gpumem_tui.report.objects import SCHEMA
from gpumem_tui.settings import Notify
from gpumem_tui.text import printable

_AGAIN_S = 300.0
"""An alert that comes and goes is sent once in this time."""
_MINUTE_S = 60.0
_MOST_WAITING = 100
_LAST_BYTES = 2048
"""Bytes at the end of a command's stderr in which its last line is looked for."""
_LOOK_S = 0.1
_LAST_S = 1.0
"""How long a command that still runs at the program's end may continue."""


class Told(Struct, frozen=True):
    """An alert that began, and the host that it began on."""

    host: str
    alert: Alert

    def body(self, left_out: int) -> dict[str, object]:
        """Return it as JSON, with how many before it were not told as there were too many."""
        alert = self.alert.as_json()
        return {"schema": SCHEMA, "event": "alert", "host": self.host, **alert, "left_out": left_out}


class Notifier:
    """Tells of each alert once when it begins, not more often than the user wants.

    Args:
        wanted: as the settings have it.
        clock: seconds that only grow.

    Attributes:
        problem: one line on why the last command failed; empty once one has done its work.
    """

    def __init__(self, wanted: Notify, clock: Callable[[], float] = time.monotonic) -> None:
        self.problem = ""
        self.wanted = wanted
        self._clock = clock
        order = list(Severity)
        self._enough = set(order[order.index(Severity(wanted.severity)) :])
        self._known: dict[str, set[Key]] = {}
        self._told_s: dict[tuple[str, Key], float] = {}
        self._lately: deque[float] = deque()
        self._left_out = 0
        self._waiting: deque[tuple[Told, int]] = deque()
        self._news = threading.Condition()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_wanted(self) -> bool:
        """Return whether alerts are sent to anybody."""
        return bool(self.wanted.argv)

    def update(self, host: str, alerts: Iterable[Alert]) -> None:
        """Tell of those of a host's alerts that were not there before. Never waits."""
        if not self.is_wanted:
            return
        now = {alert.key: alert for alert in alerts if alert.severity in self._enough}
        begun, self._known[host] = now.keys() - self._known.get(host, set()), set(now)
        for key in sorted(begun, key=lambda key: key[2].value):
            self._tell(Told(host, now[key]))

    def close(self) -> None:
        """Tell no more; a command that still runs has a moment to end."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_S)
        if (process := self._process) is not None:
            _kill(process)

    def _tell(self, told: Told) -> None:
        now_s, key = self._clock(), (told.host, told.alert.key)
        if now_s - self._told_s.get(key, -_AGAIN_S) < _AGAIN_S:
            return
        while self._lately and now_s - self._lately[0] >= _MINUTE_S:
            self._lately.popleft()
        if len(self._lately) >= self.wanted.most_a_minute or len(self._waiting) >= _MOST_WAITING:
            self._left_out += 1
            return
        self._told_s = {each: at_s for each, at_s in self._told_s.items() if now_s - at_s < _AGAIN_S} | {key: now_s}
        self._lately.append(now_s)
        left_out, self._left_out = self._left_out, 0
        with self._news:
            self._waiting.append((told, left_out))
            self._news.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
            self._thread.start()

    # ---- in its thread

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed and not self._waiting:
                    return
                told, left_out = self._waiting.popleft()
            try:
                self.problem = run_command(self.wanted, told.body(left_out), self._started)
            except Exception as error:  # noqa: BLE001  named on the screen; the next may be told
                self.problem = f"notify: {own_error(error)}"
            self._process = None

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process


def run_command(
    wanted: Notify, body: Mapping[str, object], started: Callable[[subprocess.Popen[bytes]], object] = lambda _: None
) -> str:
    """Run the user's command with a JSON object on its standard input; return why it failed, empty if it did not.

    It has a session of its own, with which it ends. Its input is a file, and of its complaints the end is kept, so that
    nothing waits for what it leaves behind.
    """
    name = os.path.basename(wanted.argv[0])
    try:
        with tempfile.TemporaryFile() as said:
            said.write(json.dumps(body).encode() + b"\n")
            said.seek(0)
            process = subprocess.Popen(
                wanted.argv, stdin=said, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
            )
    except (OSError, ValueError) as error:  # of the file too, where a disk is full
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return printable(f"notify: {name} cannot be run: {reason}")
    with process:
        started(process)
        complaint = _complaint(process, wanted.timeout_s)
        if complaint is None:
            _kill(process)
            process.wait()
            return printable(f"notify: {name} was killed after {wanted.timeout_s:g} s")
    if process.returncode == 0:
        return ""
    code = process.returncode
    ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return printable(f"notify: {name} {ended}{f': {complaint}' if complaint else ''}")


def _complaint(process: subprocess.Popen[bytes], timeout_s: float) -> str | None:
    """Wait for a process's end; return the last line that it wrote to stderr, None if it takes too long."""
    assert process.stderr is not None
    deadline_s, written = time.monotonic() + timeout_s, b""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if select.select([process.stderr], [], [], min(left_s, _LOOK_S))[0]:
            chunk = os.read(process.stderr.fileno(), _LAST_BYTES)
            written = (written + chunk)[-_LAST_BYTES:]
            if chunk:
                continue
            with suppress(subprocess.TimeoutExpired):
                process.wait(left_s)
        if process.poll() is not None:  # what it has started may hold its stderr still
            lines = written.decode(errors="replace").splitlines()
            return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
