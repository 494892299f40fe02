"""The first picture: what `monitor --once` prints, there before Textual is imported, until that draws over it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FrameType

from gpumem_tui.ascii import is_ascii_only, to_ascii
from gpumem_tui.monitor.probes import NOTHING_SAID
from gpumem_tui.monitor.report import table
from gpumem_tui.monitor.snapshot import Snapshot, Source
from gpumem_tui.monitor.users import only_of, viewer

ALTERNATE = "\x1b[?1049h"
"""Sequences to draw on a screen of its own (xterm's control sequences, private mode 1049)."""
_ENTER, _LEAVE = f"{ALTERNATE}\x1b[H\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""The cursor stays where the shell had it until it is sent home."""
_CLEAR_LINE, _CLEAR_REST = "\x1b[K", "\x1b[J"
"""For a terminal without a second screen, on which the shell's lines still are."""
_PATIENCE_S = 0.12
"""How long the picture is waited for: a driver that takes longer answers while Textual is imported."""
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
"""An interrupt as well: in the middle of an import it may be any error (Python's `__set_name__`)."""

_handlers: dict[signal.Signals, object] = {}
"""The handlers of signals that stood before; empty unless the picture answers them."""
_there = False


@contextmanager
def first_picture(source: Source, *, mine: bool, ascii_only: bool = False) -> Iterator[None]:
    """Show the GPUs as soon as they are read, and take the picture away if nobody has taken over at the end.

    Args:
        source: started.
        mine: list only the viewer's processes.
        ascii_only: draw with ASCII characters also where the locale has others.
    """
    global _there
    snapshot = source.wait(None, _PATIENCE_S)
    if snapshot is None or not snapshot.gpus:
        yield
        return
    draw = partial(_draw, snapshot, mine=mine, ascii_only=ascii_only or is_ascii_only())
    _handlers.update({number: signal.signal(number, _end) for number in _ENDS})
    _handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, partial(_pause, draw))
    _there = True
    try:
        draw()
        yield
    finally:
        leave_signals()
        if taken_over():
            _write(_LEAVE)


def leave_signals() -> None:
    """Leave signals to the caller, who answers them from now on."""
    for number, handler in _handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    _handlers.clear()


def taken_over() -> bool:
    """Leave the picture to the caller to draw over, or to take away; return False if missing."""
    global _there
    was_there, _there = _there, False
    return was_there


def _draw(snapshot: Snapshot, *, mine: bool, ascii_only: bool) -> None:
    columns, lines = shutil.get_terminal_size()
    shown = only_of(viewer(), snapshot, NOTHING_SAID)[0] if mine else snapshot
    drawn = islice(table(shown, (), columns), lines - 1)
    text = "".join(f"{_CLEAR_LINE}{to_ascii(line) if ascii_only else line}\r\n" for line in drawn)
    _write(f"{_ENTER}{text}{_CLEAR_REST}")


def _end(number: int, _frame: FrameType | None) -> None:
    _write(_LEAVE)
    os._exit(128 + number)


def _pause(draw: Callable[[], None], _number: int, _frame: FrameType | None) -> None:
    """Give the terminal back while the process is stopped."""
    _write(_LEAVE)
    os.kill(os.getpid(), signal.SIGSTOP)
    draw()


def _write(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
