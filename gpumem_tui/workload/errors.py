"""Errors of a user's program in one line: what, and where in the user's own files. Standard library only."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.workload.extensions import of_cuda

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OF_PYTHON = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\]")
"""In the path of a library's file, wherever it is: of this environment, of the one below it, or of the user alone."""

_NETWORKS = os.path.join(_PACKAGE, "workload", "models", "")
_MOST_CHARACTERS = 300
TWO_DEVICES = "Expected all tensors to be on the same device"
_OTHER_DEVICE = re.compile(
    r"(?:not linked with support for|from the '|without|cannot get|storage device not recognized:|not compiled with|"
    r"object on an?) ?(mps|xpu|hpu|npu|mtia|xla|ipu)\b",
    re.IGNORECASE,
)
"""Errors of torch for devices other than CUDA's: tensors are made or moved there, or its module is called."""


def is_users(path: str) -> bool:
    """Return whether a file is the user's own: not Python's, no installed library's and not ours."""
    others = ("<", _PACKAGE, *_OF_PYTHON, os.path.dirname(sys.executable))
    return not path.startswith(others) and not LIBRARIES.search(path)


def _place(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame that is the user's, else of the innermost; empty without frames.

    Where a network of the catalog is run, that is the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    users = [frame for frame in frames if is_users(frame.filename)]
    found = (users or [frame for frame in frames if frame.filename.startswith(_NETWORKS)] or frames)[-1]
    return f"{os.path.relpath(found.filename)}:{found.lineno}"


_IN_A_WORKER = re.compile(r"Caught \w+ (in .+)\.\nOriginal Traceback \(most recent call last\):\n((?:.|\n)+)")
"""Torch's errors from a DataLoader's worker or another thread, which have that one's traceback as their text."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in .*(?:\n    .*)*', re.M)


def _in_a_worker(error: BaseException) -> str:
    """Return the last line of an error that a worker had, its place and which worker; empty of any other error."""
    found = _IN_A_WORKER.search(str(error))
    frames = [] if found is None else list(_FRAME.finditer(found[2]))
    if found is None or not frames:
        return ""
    place = ([frame for frame in frames if is_users(frame[1])] or frames)[-1]
    words = " ".join(found[2][frames[-1].end() :].split())
    return f"{os.path.relpath(place[1])}:{place[2]}: {_cut(words)} ({found[1]})"


def one_line(error: BaseException) -> str:
    """Return the error's own words without their line breaks."""
    return in_one_line(error) or named(error)


def typed(error: BaseException) -> str:
    """Return type and message of an error."""
    return f"{named(error)}: {words}" if (words := in_one_line(error)) else named(error)


def located(error: BaseException) -> str:
    """Return type, message and place of an error of a workload, and what to do where that is plain."""
    remedy = "; put model and batch on the `device` that is given" if TWO_DEVICES in str(error) else ""
    return f"{_of_other_device(error) or typed(error)} ({_place(error) or 'at an unknown place'}){remedy}"


def described(error: BaseException) -> str:
    """Say what ended a command, where, and what to do about it where that is plain, in one line."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{os.path.relpath(error.filename)}:{error.lineno}: syntax error: {error.msg}"
    if getattr(error, "says_where", False):  # one of ours
        return str(error)
    if in_a_worker := _in_a_worker(error):
        return in_a_worker
    words = _shortened(error)
    said = f"{named(error)}: {words}" if words else named(error)
    at = f"{where}: " if (where := _place(error)) else ""
    if for_cuda := of_cuda(error):
        return f"{at}{for_cuda}"
    if other := _of_other_device(error):
        return f"{at}{other}"
    if isinstance(error, EOFError):
        return f"{at}the command asks for input, which cannot be answered here: give it as an option ({said})"
    return f"{at}{said}{_because(error)}"


def _of_other_device(error: BaseException) -> str:
    """Say which device is meant where a program asks for one that is none of CUDA's; empty of any other error."""
    found = _OTHER_DEVICE.search(str(error))
    return (
        "" if found is None else f'the device "{found[1].lower()}" is none of CUDA\'s: write device="cuda" to follow it'
    )


def _shortened(error: BaseException) -> str:
    """Return an error's text in one line that can be read at a glance."""
    return _cut(in_one_line(error))


def _cut(words: str) -> str:
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]}..."


def _because(error: BaseException) -> str:
    """Say what an error was raised from, where its own words do not, and what to do about it where that is plain.

    The traceback of another process, as pools of processes have it for a cause, is not said: it has many lines.
    """
    root, seen = error, {id(error)}
    while (cause := root.__cause__) is not None and "RemoteTraceback" not in type(cause).__name__:
        if id(cause) in seen:
            break
        root = cause
        seen.add(id(root))
    words = _shortened(root)
    because = "" if root is error or words in in_one_line(error) else f" ({type(root).__name__}: {words})"
    is_missing = isinstance(root, ModuleNotFoundError) and root.name
    return f"{because}; install it for {sys.executable}" if is_missing else because
