"""The user's own ssh as a process: the last that it says, its end."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable

from gpumem_tui.text import shortened

_KEPT_LINES = 20
_LONGEST_LINE = 4096
_CHUNK = 1 << 16
_POLL_S = 0.5
_END_S = 1.0


class StderrTail:
    """The last lines of a process's stderr, bounded whatever it writes."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""

    def take(self, data: bytes) -> bool:
        """Add what was read; False at the end."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LONGEST_LINE:]
        lines += [] if data else [self._rest]
        said = (shortened(line[:_LONGEST_LINE].decode("utf-8", "replace").strip(), 300) for line in lines)
        self.lines.extend(line for line in said if line)
        return bool(data)

    def take_rest(
        self,
        selector: selectors.BaseSelector,
        fd: int,
        process: subprocess.Popen[bytes],
        take: Callable[[bytes], bool] | None = None,
    ) -> None:
        """What `fd` still holds once stdout has ended. It need not end: with ControlPersist ssh's master keeps it.

        Args:
            take: in the place of `take`.
        """
        take = take or self.take
        until_s = time.monotonic() + _END_S
        while fd in selector.get_map() and time.monotonic() < until_s:
            ready = {key.fd for key, _ in selector.select(_POLL_S)}
            if fd in ready:
                if not take(os.read(fd, _CHUNK)):
                    return
            elif process.poll() is not None:
                return


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Of a process that has closed its output; None if it goes on all the same."""
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return None


def end_process(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """End ssh; what runs on the host ends when it writes next, or by what it reads."""
    if process.poll() is None:
        process.terminate()
    if patience_s:
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
