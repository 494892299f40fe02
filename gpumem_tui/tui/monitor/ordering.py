"""The list that opens on `o`: a letter chooses the column to sort by, free GPUs first, or the plan of a process."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key

from gpumem_tui.memory import Unknown
from gpumem_tui.tui.kit.dialogs import Dialog
from gpumem_tui.tui.kit.figures import MUTED, Row
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.entries import Entry
from gpumem_tui.tui.monitor.state import MonitorState, SortBy

FREE_FIRST, PLAN = "f", "o"

LETTERS = {
    "g": SortBy.MEMORY, "n": SortBy.GPU, "s": SortBy.SM, "c": SortBy.CPU, "m": SortBy.HOST_MEMORY,
    "t": SortBy.AGE, "u": SortBy.USER, "p": SortBy.PID, "l": SortBy.COMMAND,
}  # fmt: skip
"""The column that a letter chooses; all but n and l as nvitop has them after `o` (its README, "Keybindings")."""

_WIDTH, _COLUMN = 66, 12
"""Cells of a line of words, and of a column's name."""

Choice = tuple[str, str, str]
"""A letter, what it does, and a mark of what is so now."""


class SortedColumn(Protocol):
    """A column to sort by."""

    @property
    def value(self) -> Any:
        """Return its heading."""

    @property
    def descends(self) -> bool:
        """Return whether the largest comes first."""


def column_choices(letters: Mapping[str, SortedColumn], now: SortedColumn, *, reverse: bool) -> Iterator[Choice]:
    """Yield the columns by letter, the one that is sorted by now with a mark."""
    mark = "▾" if now.descends != reverse else "▴"
    for letter, column in letters.items():
        yield letter, column.value, f"{mark} again: the other way round" if column is now else ""


def choices(state: MonitorState, entry: Entry | None) -> Iterator[Choice]:
    """Yield what the letters do."""
    yield from column_choices(LETTERS, state.sort, reverse=state.reverse)
    if len(state.gpus) > 1:
        yield FREE_FIRST, "GPUs by number" if state.free_first else "free GPUs first", ""
    reason = why_no_plan(entry)
    yield PLAN, "plan with its model on its GPU" if not reason else f"no plan: {reason}", ""


def why_no_plan(entry: Entry | None) -> str:
    """Return why there is no plan of the chosen process; empty if there is one."""
    if entry is None:
        return "no process is chosen (up and down choose one)"
    if entry.has_ended:
        return "the process has ended"
    if entry.watched is None:
        return f"pid {entry.process.pid} has no probe, so its model is unknown (a attaches one)"
    expected = entry.watched.expected
    return expected.reason if isinstance(expected, Unknown) else ""


class OrderScreen(Dialog[str | None]):
    """Waits for a letter; the result is the letter, None for none.

    Args:
        offered: the letters and what they do.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", "cancel")]

    def __init__(self, offered: Sequence[Choice]) -> None:
        super().__init__()
        self._offered = offered

    def compose(self) -> ComposeResult:
        """Yield a line a letter."""
        with Vertical(classes="dialog") as box:
            box.border_title = "Sort by"
            box.border_subtitle = "a letter chooses · esc closes"
            yield Lines(id="letters")

    def on_mount(self) -> None:
        """Draw them."""
        rows: list[Row] = []
        for letter, words, mark in self._offered:
            first, *rest = textwrap.wrap(words, _WIDTH)
            rows.append([(letter, "bold $primary"), (f"  {first:<{_COLUMN}}", ""), (mark, MUTED)])
            rows += [[(f"   {line}", "")] for line in rest]
        lines = self.query_one("#letters", Lines)
        lines.styles.height = len(rows)
        lines.show_rows(rows)

    def on_key(self, event: Key) -> None:
        """Close with the letter, if it is one of them."""
        if event.character in {letter for letter, _, _ in self._offered}:
            event.stop()
            self.dismiss(event.character)
