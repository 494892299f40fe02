"""A search for a viewer on another machine: requests on stdin, events on stdout, a JSON object a line.

It ends, and with it every process that it has started, when stdin does or when the viewer gives no sign of life for
some minutes: nothing stays on a host whose viewer was killed or whose connection was cut.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import msgspec

from gpumem_tui import __version__
from gpumem_tui.errors import EXIT_FAILED, OptionError, own_error
from gpumem_tui.options.configuration import Options, check_searchable, configure
from gpumem_tui.remote.ssh import PATIENCE_S
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import Failed
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.runner import search
from gpumem_tui.search.wire import Configured, NotSearchable, Reply, encode_reply

_END_S = 5.0
"""For an orderly end; then the process ends all the same, and what it started with it."""


def serve() -> int:
    """Answer until the viewer leaves; the exit code."""
    sys.stdout.flush()
    out_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed is no event
    requests = _Requests(sys.stdin.fileno())
    config: SearchConfig | None = None
    with suppress(BrokenPipeError):
        while (request := requests.next()) is not None:
            control, words = request
            if words["action"] == "configure":
                reply = _configured(words)
                config = reply.config if isinstance(reply, Configured) else None
                _write(out_fd, reply)
            elif config is not None:
                try:
                    for event in search(config, control):
                        _write(out_fd, event)
                except Unusable as error:
                    _write(out_fd, Failed(error.kind, str(error)))
    return 0


class _Requests:
    """The requests on stdin, read by a thread: pause, resume and cancel act at once, the rest waits for its turn."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: SimpleQueue[tuple[Control, dict[str, Any]] | None] = SimpleQueue()
        self._control = Control()
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def next(self) -> tuple[Control, dict[str, Any]] | None:
        """Return the next request and what steers it; None once the viewer has left."""
        return self._waiting.get()

    def _read(self) -> None:
        rest = b""
        while select.select([self._fd], [], [], PATIENCE_S)[0] and (data := os.read(self._fd, 1 << 16)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    self._take(json.loads(line))
                except ValueError:
                    continue
                except Exception as error:  # noqa: BLE001  the viewer shows what this prints; the search goes on
                    print(f"gpumem-tui: {own_error(error)}", file=sys.stderr, flush=True)
        self._control.cancel()
        self._waiting.put(None)
        time.sleep(_END_S)
        os._exit(EXIT_FAILED)

    def _take(self, words: dict[str, Any]) -> None:
        match words.get("action"):
            case "configure" | "search":
                self._control = Control()
                self._waiting.put((self._control, words))
            case "pause":
                self._control.pause()
            case "resume":
                self._control.resume()
            case "cancel":
                self._control.cancel()


def _configured(words: dict[str, Any]) -> Configured | NotSearchable:
    if words.get("version") != __version__:
        return NotSearchable(
            f"its gpumem-tui is {__version__}, the one here {words.get('version')}: install the same on both"
        )
    try:
        directory = os.path.expanduser(words["directory"] or "~")
        os.chdir(directory)
        config = configure(msgspec.convert(words["options"], Options))
        check_searchable(config)
    except OSError as error:
        return NotSearchable(f"--remote-directory {words['directory'] or '~'}: {error.strerror}")
    except OptionError as error:
        return NotSearchable(str(error))
    except msgspec.ValidationError as error:
        return NotSearchable(f"the options cannot be read: {error}")
    return Configured(config, os.getcwd())


def _write(fd: int, reply: Reply) -> None:
    data = memoryview(encode_reply(reply))
    while data:
        data = data[os.write(fd, data) :]
