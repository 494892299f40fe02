"""Errors of a user's program in one line: what, and where in the user's own files. Standard library only."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def is_users(path: str) -> bool:
    """Whether a file is the user's own: not Python's, no installed library's and not ours."""
    return not path.startswith(("<", _PACKAGE, *_INSTALLED)) and not path.startswith(os.path.dirname(sys.executable))


def place(error: BaseException) -> str:
    """``file:line`` of the innermost frame that is the user's, else of the innermost one; empty without frames."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    found = ([frame for frame in frames if is_users(frame.filename)] or frames)[-1]
    return f"{os.path.relpath(found.filename)}:{found.lineno}"


def described(error: BaseException) -> str:
    """What went wrong, where, and what to do about it where that is plain, in one line."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{os.path.relpath(error.filename)}:{error.lineno}: syntax error: {error.msg}"
    words = " ".join(str(error).split())
    said = f"{type(error).__name__}: {words}" if words else type(error).__name__
    where = place(error)
    at = f"{where}: " if where else ""
    if isinstance(error, EOFError):
        return f"{at}the command asks for input, and there is nobody to answer: give it as an option ({said})"
    if isinstance(error, ModuleNotFoundError):
        return f"{at}{said}; install it for {sys.executable}"
    return f"{at}{said}"
