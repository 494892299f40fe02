"""What a user's command has printed: the last lines of it, bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from gpumem_tui.search.command import SIDE_EFFECTS
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import CommandOutput, TraceStarted
from gpumem_tui.search.runner import SearchEvent, TrialStarted

KEPT_LINES = 2000
_LONGEST_LINE = 2000


@dataclass(frozen=True)
class PrintedLine:
    """A line of the command (``output``), of ours over a run of it (``heading``), or said before the first one."""

    text: str
    kind: Literal["output", "heading", "notice"] = "output"


class Printed:
    """The last lines of one search or command; written by the thread that follows it and read by the screen's.

    Args:
        first: what stands above the command's own lines.
    """

    def __init__(self, first: Iterable[PrintedLine] = ()) -> None:
        self._lock = threading.Lock()
        self._lines = deque(first, maxlen=KEPT_LINES)
        self._count = len(self._lines)
        self._unfinished = ""

    @classmethod
    def of(cls, config: SearchConfig) -> Printed:
        """Before a search: the command, and what it does to the user's machine; nothing for another workload."""
        command = config.workload.command
        if command is None:
            return cls()
        return cls((PrintedLine(f"$ {command.text}", "heading"), PrintedLine(SIDE_EFFECTS, "notice")))

    def take(self, event: SearchEvent) -> None:
        """Keep what an event adds to the lines."""
        if isinstance(event, CommandOutput):
            text = event.text
            self.add(text)
        elif isinstance(event, TraceStarted):
            self._keep(PrintedLine(f"tracing batch size {event.batch_size:,}", "heading"))
        elif isinstance(event, TrialStarted):
            self._keep(PrintedLine(f"trial {event.number}: batch {event.batch_size:,}", "heading"))

    def since(self, seen: int) -> tuple[list[PrintedLine], int]:
        """The lines after the first `seen` ones, as far as they are kept, and how many there have been by now."""
        with self._lock:
            new = min(self._count - seen, len(self._lines))
            return list(islice(self._lines, len(self._lines) - new, None)), self._count

    def add(self, text: str) -> None:
        """Keep a line of the command."""
        self._keep(PrintedLine(_cut(text)))

    def show_unfinished(self, text: str) -> None:
        """What stands on the command's line that has not ended yet; empty for nothing."""
        self._unfinished = _cut(text)

    @property
    def unfinished(self) -> str:
        """That text."""
        return self._unfinished

    def _keep(self, line: PrintedLine) -> None:
        with self._lock:
            self._lines.append(line)
            self._count += 1


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
