"""Errors of user code in one line: what, and where in the user's own files."""

from __future__ import annotations

import os
import traceback

_NOT_THE_PROGRAM = (
    "/torch/",
    "/lib/python",
    "/gpumem_tui/simulator/",
    "/gpumem_tui/search/",
    "/gpumem_tui/workload/run.py",
    "/gpumem_tui/workload/phases.py",
)


def one_line(error: BaseException) -> str:
    """The error's own words without their line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def typed(error: BaseException) -> str:
    """Type and message of an error."""
    return f"{type(error).__name__}: {one_line(error)}" if str(error).strip() else type(error).__name__


def located(error: BaseException) -> str:
    """Type, message and place of an error."""
    return f"{typed(error)} ({where(error)})"


def where(error: BaseException) -> str:
    """``file:line`` of the innermost frame that is the program's own: not torch's, the library's or the machinery's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THE_PROGRAM)]
    if not frames:
        return "at an unknown place"
    frame = (own or frames)[-1]
    return f"{os.path.relpath(frame.filename)}:{frame.lineno}"
