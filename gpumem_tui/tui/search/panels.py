"""The panels that are lines of text: header, workload, ledger table and verdict."""

from __future__ import annotations

from textual.widgets import Static

from gpumem_tui.memory import Unknown, Value
from gpumem_tui.tui.kit.figures import MUTED, Row, compact_bytes, header_line, percent, signed
from gpumem_tui.tui.kit.lines import assembled
from gpumem_tui.tui.kit.textual_internals import forget_height
from gpumem_tui.tui.search.ledger import LedgerLine, LedgerView, ledger_view
from gpumem_tui.tui.search.state import SearchState, Stage
from gpumem_tui.tui.search.verdict import Tone, VerdictView, verdict_view
from gpumem_tui.tui.search.workload import device_words, strategy_lines, workload_lines, workload_summary

_KEY_WIDTH = 10
_TITLE_WIDTH = 16
_WIDTHS = (8, 8, 10)
_ERROR_WIDTH = 9
_SHARE_WIDTH = 7
_OPTION_WIDTH = 32
_TONE_COLOURS: dict[Tone, str] = {
    "calm": "$secondary",
    "busy": "$primary",
    "good": "$success",
    "warning": "$warning",
    "bad": "$error",
}


class LinesPanel(Static):
    """Lines of styled text, drawn again only when they change."""

    _lines: list[Row] | None = None

    def show_lines(self, lines: list[Row]) -> None:
        """Replace the text."""
        if lines != self._lines:
            self._lines = lines
            forget_height(self)
            self.update(assembled(lines))


class WorkloadPanel(LinesPanel):
    """What is trained and how it is searched."""

    BORDER_TITLE = "Workload"

    def show(self, state: SearchState) -> None:
        """Render a state."""
        self.show_lines([*map(_pair, workload_lines(state.config)), [], *map(_pair, strategy_lines(state))])


class WorkloadLine(LinesPanel):
    """The same in one line, for narrow terminals."""

    def show(self, state: SearchState) -> None:
        """Render a state."""
        self.show_lines([[(workload_summary(state.config), "")]])


class LedgerTable(LinesPanel):
    """Formula | Traced | Simulated or Measured | error. `title` says of which batch size."""

    title = ""

    def show(self, state: SearchState) -> None:
        """Render a state."""
        view = ledger_view(state)
        trial = f" · trial {view.trial}" if view.trial is not None else ""
        self.title = f"Ledger at batch {view.batch_size:,}{trial}"
        self.show_lines(_table(view))


class VerdictPanel(LinesPanel):
    """What the search says of itself; a short form drops the details."""

    def show(self, state: SearchState, notice: str, elapsed_s: int, *, short: bool) -> None:
        """Render a state, `elapsed_s` seconds after the search began."""
        view = verdict_view(state, notice, short=short)
        for tone in _TONE_COLOURS:
            self.set_class(tone == view.tone, f"-{tone}")
        lines: list[Row] = [
            [(f" {view.badge} ", f"bold $background on {_TONE_COLOURS[view.tone]}"), (f" {view.headline}", "bold")]
        ]
        if state.busy:
            lines[0].append((f" · {elapsed_s} s", MUTED))
        lines += [[(line, "")] for line in (view.reach, view.room) if line]
        if not short:
            lines += [[(line, MUTED)] for line in view.details]
        self.show_lines([*lines, *_advice(view, short=short)])


class ReasonPanel(LinesPanel):
    """All that the shown trial said, if it did not fit; when nothing fits, the remedies take the room."""

    def show(self, state: SearchState) -> None:
        """Render a state."""
        shown = state.shown
        said = shown.result.detail if shown is not None and state.stage is not Stage.NOTHING_FITS else ""
        self.set_class(bool(said), "-said")
        self.show_lines([[(f"trial {shown.number} said: ", MUTED), (said, "")]] if shown is not None and said else [])


def _pair(pair: tuple[str, str]) -> Row:
    name, value = pair
    return [(f"{name:<{_KEY_WIDTH}}", MUTED), (value, "")] if name else [(value, "")]


def _table(view: LedgerView) -> list[Row]:
    heads = ("Formula", "Traced", view.tried_title)
    head = f"{'GiB':<{_TITLE_WIDTH}}" + "".join(f"{h:>{w}}" for h, w in zip(heads, _WIDTHS, strict=True))
    lines: list[Row] = [[(caption, "$warning")] for caption in view.captions]
    lines.append([(f"{head}{view.error_title:>{_ERROR_WIDTH + _SHARE_WIDTH}}", f"bold {MUTED}")])
    lines += [_row(row) for row in view.rows]
    lines += [[(note, MUTED)] for note in view.notes]
    return lines


def _row(row: LedgerLine) -> Row:
    weight = "bold" if row.is_sum else ""
    spans: Row = [(f"{row.title:<{_TITLE_WIDTH}}", weight)]
    for value, width in zip((row.formula, row.traced, row.tried), _WIDTHS, strict=True):
        beyond = isinstance(value, int) and value < 0
        spans.append((f"{compact_bytes(value):>{width}}", "bold $error" if beyond else _style(value, weight)))
    spans.append((f"{signed(row.error):>{_ERROR_WIDTH}}", _style(row.error, weight)))
    share = "" if isinstance(row.error, Unknown) else percent(row.error_share)
    spans.append((f"{share:>{_SHARE_WIDTH}}", MUTED))
    return spans


def _style(value: Value, weight: str) -> str:
    if isinstance(value, Unknown) or value == 0:
        return MUTED
    return weight


def _advice(view: VerdictView, *, short: bool) -> list[Row]:
    """What to type and what it buys side by side, in columns but for several changes together."""
    width = max((len(one.option) for one in view.advice if len(one.option) <= _OPTION_WIDTH), default=0)
    lines: list[Row] = []
    for one in view.advice:
        lines.append([(f"{one.option:<{width}}", "bold"), (f"  {one.buys}", "")])
        if not short:
            lines.append([(f"  cost: {one.cost}", MUTED)])
    return lines


def header_row(state: SearchState, time: str, width: int) -> Row:
    """The GPU, why it was taken, and the version of torch that runs."""
    name, reason = device_words(state.config)
    facts = [(reason, MUTED)] if reason else []
    if state.predicted is not None:
        facts.append((f"torch {state.predicted.ready.torch_version}", MUTED))
    return header_line((name, "bold"), facts, [(time, MUTED)], width)
