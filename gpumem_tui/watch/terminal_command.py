"""A command in a terminal of its own: its output is read here, and what is typed is sent to it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpumem_tui.probe.documents import Exit
from gpumem_tui.watch.supervising import ProcessEnds, bound_to_us

_LOOK_S = 0.1
_DEATHS_S = 1.0
_CHUNK_BYTES = 1 << 16
_DRAIN_S = 0.5
"""How long output is still read after the command has ended: what it started may hold its terminal open."""


class TerminalCommand:
    """Runs a command as the leader of a session of its own. Start it in a thread that lives as long as it may.

    Args:
        command: its words; `environment` as it is to have it.
        size: columns and rows of its terminal.
        directory: where probes publish.

    Raises:
        OSError, WireError: it cannot be started, or there is no /proc.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int], directory: Path
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(*size)
        bind = bound_to_us()

        def prepare() -> None:
            bind()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        own = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        try:
            self._process = subprocess.Popen(
                command, env=own, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=prepare
            )
            self._deaths = ProcessEnds(self._process.pid, directory)
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)
        self._ended = threading.Event()
        self._exit: Exit | None = None

    @property
    def pid(self) -> int:
        """The command's process."""
        return self._process.pid

    @property
    def pids(self) -> frozenset[int]:
        """The command's process, and those below it that publish or did."""
        return self._deaths.pids

    @property
    def ended(self) -> Exit | None:
        """How it ended; None while it runs."""
        return self._exit

    def follow(self, output: Callable[[bytes], None]) -> Exit:
        """Read until it has ended; how it did.

        Args:
            output: called with what it prints.
        """
        looked_s = time.monotonic()
        is_open = True
        while self._exit is None:
            is_open = is_open and self._read(_LOOK_S, output)
            if not is_open:
                time.sleep(_LOOK_S)
            if time.monotonic() - looked_s >= _DEATHS_S:
                self._deaths.look()
                looked_s = time.monotonic()
            self._exit = self._deaths.reap()
        self._process.returncode = 0  # it has been waited for
        until_s = time.monotonic() + _DRAIN_S
        while is_open and time.monotonic() < until_s and select.select([self._ours], [], [], 0)[0]:
            is_open = self._read(0, output)
        self._deaths.look()
        self._ended.set()
        return self._exit

    def send(self, typed: bytes) -> None:
        """Type into its terminal; control characters mean there what they mean at a terminal (0x03 is Ctrl-C)."""
        with suppress(OSError):
            os.write(self._ours, typed)

    def resize(self, columns: int, rows: int) -> None:
        """Set its terminal's size, which it learns by SIGWINCH."""
        size = struct.pack("HHHH", max(1, rows), max(1, columns), 0, 0)
        with suppress(OSError):
            fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def terminate(self) -> None:
        """Ask it and its process group to end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its process group at once (SIGKILL)."""
        self._signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `follow` is done; False if it is not in time."""
        return self._ended.wait(timeout_s)

    def _signal(self, number: signal.Signals) -> None:
        if self._exit is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _read(self, timeout_s: float, output: Callable[[bytes], None]) -> bool:
        """Read what there is; False once the other end is closed."""
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return True
        try:
            chunk = os.read(self._ours, _CHUNK_BYTES)
        except OSError:  # so Linux reports the closed other end
            return False
        output(chunk)
        return bool(chunk)
