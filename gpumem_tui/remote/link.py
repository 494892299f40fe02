"""A program on a host that answers lines with lines, over ssh; it ends when its stdin does."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import subprocess
import time
from contextlib import suppress
from typing import Any

from gpumem_tui.remote.explain import explained
from gpumem_tui.remote.hosts import RemoteHost
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.remote.ssh_process import StderrTail, end_process, exit_code

ALIVE_S = 15.0
"""How often a line goes there at least: without any for `PATIENCE_S` the program there ends."""
PATIENCE_S = 300.0
KEEP_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""A connection that is cut silently is noticed within a minute (ssh_config(5))."""
_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 28
"""Bytes: a trace has hundreds of thousands of events."""
_END_S = 3.0


class LinkLost(Exception):
    """There is no connection, or none any more; one line says why."""


class Link:
    """One program on one host.

    Args:
        there: what the host's shell is to run.

    Raises:
        LinkLost: ssh cannot be started.
    """

    def __init__(self, host: RemoteHost, options: SshOptions, there: str) -> None:
        self._host, self._options = host, options
        try:
            self._process = subprocess.Popen(
                options.words(host, there, *KEEP_ALIVE), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, bufsize=0, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LinkLost(f"{shlex.split(options.ssh)[0]} cannot be started: {error.strerror}") from error
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out_fd, self._error_fd = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out_fd, selectors.EVENT_READ)
        self._selector.register(self._error_fd, selectors.EVENT_READ)
        self._said = StderrTail()
        self._buffer = bytearray()
        self._searched = 0
        self._sent_s = time.monotonic()
        self._has_ended = False

    @property
    def is_open(self) -> bool:
        """Whether it can still be spoken with, as far as is known."""
        return not self._has_ended and self._process.poll() is None

    def send(self, action: str, **values: Any) -> None:
        """One line; of a connection that is gone, `receive` says why."""
        self._sent_s = time.monotonic()
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps({"action": action, **values}).encode() + b"\n")

    def receive(self, timeout_s: float) -> bytes | None:
        """The next line; None if there is none in time.

        Raises:
            LinkLost: there will be none any more.
        """
        if self._has_ended:
            raise LinkLost("the connection was closed")
        if time.monotonic() - self._sent_s > ALIVE_S:
            self.send("alive")
        line = self._next_line()
        if line is not None:
            return line
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        if self._error_fd in ready and not self._said.take(os.read(self._error_fd, _CHUNK)):
            self._selector.unregister(self._error_fd)
        if self._out_fd in ready:
            data = os.read(self._out_fd, _CHUNK)
            if not data:
                self._lose()
            self._buffer += data
            if len(self._buffer) > _LONGEST_LINE:
                raise LinkLost(f"it prints a line of more than {_LONGEST_LINE >> 20} MiB")
        return self._next_line()

    def end(self) -> None:
        """End it, and with it what it has started there."""
        if self._has_ended:
            return
        self._has_ended = True
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        end_process(self._process, _END_S)
        self._selector.close()

    def _next_line(self) -> bytes | None:
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def _lose(self) -> None:
        self._said.take_rest(self._selector, self._error_fd, self._process)
        problem, _ = explained(exit_code(self._process), self._said.lines, self._host, self._options)
        self.end()
        raise LinkLost(problem)
