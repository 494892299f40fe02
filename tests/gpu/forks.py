"""Work in a child process that shares this one's imports, not its CUDA: torch takes seconds to import, forking none."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Write = Callable[[bytes], None]
"""Leaves the work's result. The last one written is, so a partial one may be left early."""


class ForkFailed(Exception):
    """The child ended without a result; one line shows how."""


@dataclass(frozen=True)
class Fork:
    """A child at work. Use it only while this process has not touched CUDA: a driver does not survive a fork."""

    pid: int
    result: Path

    @classmethod
    def start(cls, work: Callable[[Write], None]) -> Fork:
        """Run `work` in a child, which ends with it. Its output goes where this process prints."""
        handle, name = tempfile.mkstemp(prefix="gpumem-fork-")
        os.close(handle)
        result = Path(name)
        pid = os.fork()
        if pid:
            return cls(pid, result)
        code = 1
        try:
            os.setsid()
            work(lambda body: _replace(result, body))
            code = 0
        except Exception as error:  # noqa: BLE001  this process ends here; the parent gives the reason
            _reason(result).write_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
        finally:
            os._exit(code)

    def wait(self, timeout_s: float) -> bytes:
        """The result, however the child ended after writing it.

        Raises:
            ForkFailed: it left none: it raised, crashed, was killed, or ran beyond `timeout_s` and is killed now.
        """
        try:
            ended = _wait(self.pid, timeout_s)
        except KeyboardInterrupt:
            os.killpg(self.pid, signal.SIGKILL)
            raise
        if ended is None:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        body, reason = self.result.read_bytes(), _reason(self.result)
        raised = reason.read_text() if reason.exists() else ""
        self.result.unlink()
        reason.unlink(missing_ok=True)
        if body:
            return body
        if ended is None:
            raise ForkFailed(f"still running after {timeout_s:.0f} s: killed")
        if raised:
            raise ForkFailed(raised)
        code = os.waitstatus_to_exitcode(ended)
        raise ForkFailed(f"exited with code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}")


def _reason(result: Path) -> Path:
    return result.with_suffix(".reason")


def _replace(path: Path, body: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(body)
    partial.replace(path)


def _wait(pid: int, timeout_s: float) -> int | None:
    """The child's wait status, None if it is still running when the time is up."""
    until = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > until:
            return None
        time.sleep(0.02)
