"""Starting a training command under the probe, with no change to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from gpumem_tui.probe.files import SITE_DIRECTORY, default_directory
from gpumem_tui.python_options import bypass
from gpumem_tui.watch.publishing import why_unusable
from gpumem_tui.watch.supervising import Supervised
from gpumem_tui.watch.terminal_command import TerminalCommand

_T = TypeVar("_T")


class CannotRun(Exception):
    """The command cannot be started; one line. `code` is what a shell would exit with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def environment(before: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python that starts carries the probe. Launchers hand it on to their ranks."""
    path = [str(SITE_DIRECTORY), before.get("PYTHONPATH", "")]
    return {**before, "PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}


def warnings(command: Sequence[str], directory: Path) -> list[str]:
    """Why the probe may not get in, or not be heard, one line each.

    Args:
        directory: where the probe is to publish.
    """
    found = []
    if bypassed := bypass(command):
        found.append(f"{bypassed} keeps the probe out: remove it to watch")
    if reason := why_unusable(directory):
        found.append(f"nothing will be published: {reason}; set GPUMEM_TUI_DIR to another folder")
    return found


def start(command: Sequence[str], tick: Callable[[], None] = lambda: None) -> Supervised:
    """Start the command as our child: its output, input and terminal are its own.

    Args:
        tick: called about once a second while it runs.

    Raises:
        CannotRun: there is no such command, or it may not be run.
    """
    return _started(command, lambda: Supervised(command, environment(os.environ), default_directory(), tick))


def start_in_terminal(command: Sequence[str]) -> TerminalCommand:
    """Start the command in a terminal of its own, of the size of ours.

    Raises:
        CannotRun: as `start`.
    """
    columns, lines = shutil.get_terminal_size()
    where = default_directory()
    return _started(command, lambda: TerminalCommand(command, environment(os.environ), (columns, lines), where))


def _started(command: Sequence[str], begin: Callable[[], _T]) -> _T:
    if shutil.which(command[0]) is None and os.sep not in command[0]:
        raise CannotRun(f"there is no command {command[0]} in PATH", 127)
    try:
        return begin()
    except FileNotFoundError as error:
        raise CannotRun(f"{command[0]}: {error.strerror}", 127) from error
    except OSError as error:
        raise CannotRun(f"{command[0]} cannot be run: {error.strerror}", 126) from error
