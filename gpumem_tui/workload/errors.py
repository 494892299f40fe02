"""Errors of user code in one line: what, and where in the user's own files."""

from __future__ import annotations

import os
import traceback

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.step.sites import is_own

_INSTALLED = "/lib/python"

_TWO_DEVICES = "Expected all tensors to be on the same device"


def one_line(error: BaseException) -> str:
    """Return the error's own words without their line breaks."""
    return in_one_line(error) or named(error)


def typed(error: BaseException) -> str:
    """Return type and message of an error."""
    return f"{named(error)}: {one_line(error)}" if str(error).strip() else named(error)


def located(error: BaseException) -> str:
    """Return type, message and place of an error, and what to do where that is plain."""
    return f"{typed(error)} ({where(error)}){_remedy(error)}"


def _remedy(error: BaseException) -> str:
    """Return what to do where the program does not use the device that it is given."""
    return "; put model and batch on the `device` that is given" if _TWO_DEVICES in str(error) else ""


def where(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame that is the program's own, and no installed library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename) and _INSTALLED not in frame.filename]
    if not frames:
        return "at an unknown place"
    frame = (own or frames)[-1]
    return f"{os.path.relpath(frame.filename)}:{frame.lineno}"
