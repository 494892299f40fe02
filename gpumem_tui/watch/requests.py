"""Asking a probe for a closer look, and waiting for its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpumem_tui.probe.files import Folder, WireError
from gpumem_tui.probe.wire import (
    HEADER_BYTES,
    MAX_REQUEST_BYTES,
    RING_BYTES,
    LookAnswer,
    ViewerRequest,
    decode_request,
    encode_document,
)
from gpumem_tui.watch import hosts
from gpumem_tui.watch.documents import Header, decode_header, read_document
from gpumem_tui.watch.records import ProbedProcess

WAITING = "waiting for a step to end, where the next is recorded from"
RECORDING = "recording a step"
_POLL_S = 0.1


class NoAnswer(Exception):
    """The look was not made; one line gives the reason."""


def request_look(process: ProbedProcess) -> int:
    """Ask for a deep look at the next step; returns the number that the answer will bear, and none before it bore.

    Raises:
        NoAnswer: the request cannot be written, or its folder is not to be trusted any more.
    """
    path = process.files.control
    try:
        with Folder(path.parent, (process.uid,)) as folder:
            number = max(_last_number(folder, path.name), _answered(process), _header(process).looking) + 1
            folder.replace(path.name, encode_document(ViewerRequest(number, "look")))
    except WireError as error:
        raise NoAnswer(str(error)) from error
    except OSError as error:
        raise NoAnswer(f"{path.parent} cannot be written: {error.strerror}") from error
    return number


def await_look(
    process: ProbedProcess,
    number: int,
    timeout_s: float,
    proc: Path = hosts.PROC,
    wait: Callable[[], None] = lambda: time.sleep(_POLL_S),
    say: Callable[[str], None] = lambda _: None,
) -> LookAnswer:
    """Wait for the answer to a request.

    Args:
        wait: called between two tries; may raise to give up.
        say: called with how far it is, before each wait.

    Raises:
        NoAnswer: the process ended, no step finished in time, or the answer cannot be read.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            look = read_document(LookAnswer, process.files, process.uid)
        except WireError as error:
            raise NoAnswer(str(error)) from error
        if look is not None and look.request >= number:
            return look
        if _has_ended(process, proc):
            raise NoAnswer(f"{process.title} has ended")
        header = _header(process)
        if header.switched_off:
            raise NoAnswer(
                f"the probe of {process.title} switched itself off, and tries again each minute: {header.switched_off}"
            )
        say(RECORDING if header.looking == number else WAITING)
        wait()
    raise NoAnswer(f"no step of {process.title} finished within {timeout_s:g} s; it may evaluate, load data or hang")


def await_kept(process: ProbedProcess, look: LookAnswer, timeout_s: float, proc: Path = hosts.PROC) -> LookAnswer:
    """Wait until the answer also shows what every step leaves behind, two steps later; return it as it is if not."""
    deadline = time.monotonic() + timeout_s
    while look.devices and look.kept is None and "kept" not in look.unavailable and time.monotonic() < deadline:
        has_ended = _has_ended(process, proc)
        with suppress(WireError):
            newest = read_document(LookAnswer, process.files, process.uid)
            look = newest if newest is not None and newest.request == look.request else look
        if has_ended:
            break
        time.sleep(_POLL_S)
    return look


def _has_ended(process: ProbedProcess, proc: Path) -> bool:
    return process.pid is None or not (proc / str(process.pid)).exists()


def _header(process: ProbedProcess) -> Header:
    """Return what the ring's header states now; of one that cannot be read, that nothing is being done."""
    with suppress(OSError, WireError):
        directory, name = process.files.directory, process.files.ring.name
        with Folder(directory, (process.uid,)) as folder, folder.opened(name, RING_BYTES) as ring:
            return decode_header(ring.read(HEADER_BYTES))
    return Header(process.process, 0, 0, "")


def _answered(process: ProbedProcess) -> int:
    """Return the number of the answer that is there; 0 if none can be read."""
    with suppress(WireError):
        look = read_document(LookAnswer, process.files, process.uid)
        return 0 if look is None else look.request
    return 0


def _last_number(folder: Folder, name: str) -> int:
    """Return the number of the last request; 0 if none can be read."""
    try:
        return decode_request(folder.read(name, MAX_REQUEST_BYTES)).number
    except (FileNotFoundError, WireError):
        return 0
