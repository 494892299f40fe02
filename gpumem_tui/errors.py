"""Errors that a user causes, faults of the program in one line, and the exit codes of both. Standard library only."""

from __future__ import annotations

import os

EXIT_BAD_INPUT = 2
"""The exit codes that the command line promises; 0 is success, and a program under `run` keeps its own."""
EXIT_NOTHING_FITS = 3
EXIT_FAILED = 4
"""The device or a trial."""
EXIT_NOT_BY_MEMORY = 5
"""A batch fits, and no larger one was out of memory: the data has no more samples, or the next one fails otherwise."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

_PACKAGE = os.path.join(os.path.dirname(__file__), "")


class UserError(Exception):
    """An error that a user can cause: one line, as the command line prints it. `exit_code`: of the command line."""

    exit_code = EXIT_BAD_INPUT


class OptionError(UserError):
    """An invalid option: one line that names it, what is wrong with it and how to fix it."""


class RunError(UserError):
    """Something could not be run, traced or measured: one line that gives the reason and what to do."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def named(error: BaseException) -> str:
    """Return the name of an error's type; for one that only fake tensors raise, that of a real GPU's error."""
    kinds = type(error).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith("torch._subclasses")).__name__


def in_one_line(error: BaseException) -> str:
    """Return an error's own words without line breaks, with CUDA's name in place of the simulated GPU's."""
    return " ".join(str(error).split()).replace("simgpu:0", "cuda:0")


def own_error(error: BaseException) -> str:
    """Name an unexpected error as one of this program (or of a plug-in of its) in one line, with its file and line.

    >>> try:
    ...     [][0]
    ... except IndexError as error:
    ...     print(own_error(error).partition(" (")[0])
    an error of gpumem-tui itself: IndexError: list index out of range
    """
    places: list[tuple[str, int]] = []
    trace = error.__traceback__
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    ours = [place for place in places if place[0].startswith(_PACKAGE)]
    found = dict.fromkeys([*places[-1:], *ours[-1:]])
    where = ", from ".join(f"{_short(file)}:{line}" for file, line in found)
    words = f": {said}" if (said := in_one_line(error)) else ""
    return f"an error of gpumem-tui itself: {named(error)}{words} ({where})"


def _short(file: str) -> str:
    """Shorten a path to what is below the package, or to the file's name elsewhere."""
    return file[len(_PACKAGE) :] if file.startswith(_PACKAGE) else os.path.basename(file)
