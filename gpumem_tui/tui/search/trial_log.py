"""The log of trials: a line each, and a cursor that chooses which one the ledger table shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import DataTable

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.search.report import OUTCOME_WORDS
from gpumem_tui.search.runner import TrialFinished
from gpumem_tui.search.words import compared, peak_error, proves_something, shortfall
from gpumem_tui.tui.kit.figures import ABSENT, percent, signed
from gpumem_tui.tui.kit.glyphs import OUTCOME_SYMBOLS
from gpumem_tui.tui.search.state import SearchState


@dataclass(frozen=True)
class _Column:
    """A column `width` cells wide, there from `needs` cells of log upward."""

    title: str
    width: int
    needs: int = 0
    justify: Literal["left", "right"] = "right"


_OFF = "off by"
"""By how much the compared prediction is off; headed by its name."""
_ERROR = "error"
_COLUMNS = (
    _Column("#", 3),
    _Column("batch", 8),
    _Column("  outcome", 17, justify="left"),
    _Column("allocated", 11),
    _Column("reserved", 11, needs=76),
    _Column("device", 11),
    _Column(_OFF, 9, needs=76),
    _Column(_ERROR, 8, needs=90),
    _Column("secs", 6),
)
_SAID = "  what it said"
_SAID_NEEDS = 110
_CHOOSE = "Look at another trial of the log"


class TrialLog(DataTable[Text]):
    """Follows the search until the user moves the cursor; `TrialLog.Chosen` shows which trial to show."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "cursor_up", "trials", key_display="↑↓", tooltip=_CHOOSE),
        Binding("down", "cursor_down", "next trial", show=False, key_display="↑↓", tooltip=_CHOOSE),
    ]

    @dataclass
    class Chosen(Message):
        """The user moved the cursor to trial `number`."""

        number: int

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0)
        self._shape: tuple[_Column, ...] = ()
        self._against = ""
        self._numbers: list[int] = []
        self._state: SearchState | None = None

    def show(self, state: SearchState) -> None:
        """Render a state: only new trials are added."""
        self._state = state
        with self.prevent(DataTable.RowHighlighted):
            self._shape_columns(state)
        if not self._shape:
            return  # no size yet, so no columns
        numbers = [trial.number for trial in state.trials]
        chosen_from = self.row_count > 1
        with self.prevent(DataTable.RowHighlighted):
            if numbers[: len(self._numbers)] != self._numbers:
                self.clear()
                self._numbers = []
            for trial in state.trials[len(self._numbers) :]:
                texts = _texts(state, trial)
                self.add_row(*(_cell(texts[column.title], column) for column in self._shape), key=str(trial.number))
            self._numbers = numbers
            if state.shown is not None:
                self.move_cursor(row=numbers.index(state.shown.number))
        if chosen_from is not (self.row_count > 1):
            self.refresh_bindings()

    def on_resize(self) -> None:
        """Choose the columns that fit."""
        if self._state is not None:
            self.show(self._state)

    def _shape_columns(self, state: SearchState) -> None:
        """Lay out as many columns as fit, of fixed widths: so a number that grows does not move the others."""
        width = self.scrollable_content_region.width
        if not width:
            return
        shape = _fitting(width, has_error=proves_something(state.config, state.traced))
        against = compared(state.config, state.traced)
        if (shape, against) != (self._shape, self._against):
            self._shape, self._against = shape, against
            self.clear(columns=True)
            self._numbers = []
            for column in shape:
                title = against if column.title == _OFF else column.title
                self.add_column(Text(title, justify=column.justify), width=column.width)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """There is nothing to choose from among fewer than two trials."""
        if action in ("cursor_up", "cursor_down"):
            return self.row_count > 1
        return super().check_action(action, parameters)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Report the trial that the cursor was moved to by hand."""
        event.stop()
        if event.row_key is not None and event.row_key.value is not None:  # no row: Textual types that otherwise
            self.post_message(self.Chosen(int(event.row_key.value)))


def _fitting(width: int, *, has_error: bool) -> tuple[_Column, ...]:
    columns = tuple(one for one in _COLUMNS if one.needs <= width and (has_error or one.title not in (_OFF, _ERROR)))
    left = width - sum(column.width for column in columns)
    return (*columns, _Column(_SAID, left, justify="left")) if width >= _SAID_NEEDS else columns


def _texts(state: SearchState, trial: TrialFinished) -> dict[str, str]:
    """Return the cells of a trial by column title."""
    result = trial.result
    error = peak_error(state.config, state.formula, state.traced, result)
    share = None if isinstance(error, Unknown) else error / result.peak_allocated_bytes
    return {
        "#": str(trial.number),
        "batch": f"{result.batch_size:,}",
        "  outcome": f"  {OUTCOME_SYMBOLS[result.outcome]} {OUTCOME_WORDS[result.outcome]}",
        "allocated": _figure(result.peak_allocated_bytes),
        "reserved": _figure(result.peak_reserved_bytes),
        "device": _figure(result.device_used_bytes),
        _OFF: signed(error),
        _ERROR: percent(share) if share is not None else "",
        "secs": f"{result.seconds:.1f}",
        _SAID: f"  {shortfall(result, state.config.limit_bytes)}",
    }


def _cell(text: str, column: _Column) -> Text:
    cell = Text(text, justify=column.justify)
    cell.truncate(column.width, overflow="ellipsis")
    return cell


def _figure(size_bytes: int) -> str:
    """Return a figure; a dash for a trial that died before it reported, as none ever takes 0 bytes."""
    return format_bytes(size_bytes) if size_bytes else ABSENT
