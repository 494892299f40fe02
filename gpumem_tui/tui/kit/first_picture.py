"""The first picture: what `monitor --once` prints, there before Textual is imported, until that draws over it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType

from gpumem_tui.ascii import as_drawn
from gpumem_tui.monitor.probes import NOTHING_SAID
from gpumem_tui.monitor.report import table
from gpumem_tui.monitor.snapshot import Snapshot, Source
from gpumem_tui.monitor.users import only_of, viewer

ALTERNATE = "\x1b[?1049h"
"""Sequences to draw on a screen of its own (xterm's control sequences, private mode 1049)."""
_ENTER, _LEAVE = f"{ALTERNATE}\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
_PATIENCE_S = 0.12
"""How long the picture is waited for: a driver that takes longer answers while Textual is imported."""
_ENDS = (signal.SIGTERM, signal.SIGHUP)

_handlers: dict[signal.Signals, object] = {}
"""The handlers of signals that stood before; empty unless the picture is there."""


@contextmanager
def first_picture(source: Source, *, mine: bool) -> Iterator[None]:
    """Show the GPUs as soon as they are read, and take the picture away if nobody has taken over at the end.

    Args:
        source: started.
        mine: list only the viewer's processes.
    """
    snapshot = source.wait(None, _PATIENCE_S)
    if snapshot is None or not snapshot.gpus:
        yield
        return
    _write("".join((_ENTER, *_lines(snapshot, mine=mine))))
    _handlers.update({number: signal.signal(number, _end) for number in _ENDS})
    try:
        yield
    finally:
        if taken_over():
            _write(_LEAVE)


def taken_over() -> bool:
    """Leave the picture to the caller to draw over, or to take away; return False if missing."""
    was_there = bool(_handlers)
    for number, handler in _handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    _handlers.clear()
    return was_there


def _lines(snapshot: Snapshot, *, mine: bool) -> Iterator[str]:
    columns, lines = shutil.get_terminal_size()
    shown = only_of(viewer(), snapshot, NOTHING_SAID)[0] if mine else snapshot
    for line in islice(table(shown, (), columns), lines - 1):
        yield f"{as_drawn(line)}\r\n"


def _end(number: int, _frame: FrameType | None) -> None:
    _write(_LEAVE)
    os._exit(128 + number)


def _write(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
