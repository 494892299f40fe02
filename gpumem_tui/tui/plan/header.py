"""How the Plan screen divides a terminal, its first line, and the names of its panes."""

from __future__ import annotations

from textual.events import Click
from textual.message import Message

from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.memory import format_count
from gpumem_tui.plan.answers import Answer
from gpumem_tui.plan.tracing import Pending, TraceReady, TraceState
from gpumem_tui.tui.kit.figures import MUTED, ListRow, Row, Span, header_line, row
from gpumem_tui.tui.kit.row_list import CURSOR, FixedRows
from gpumem_tui.tui.plan.numbers import PENDING

_BESIDE = 160
_ABOVE = (110, 36)
_WITH_STEP = 48


def layout_classes(width: int, height: int) -> dict[str, bool]:
    """The style sheet's classes for a terminal of so many columns and rows.

    ``-wide``: controls, numbers and pane side by side; ``-step``: memory over a step below the numbers too;
    ``-single``: numbers and panes take turns; none of them: the pane below the numbers; ``-tiny``: nothing fits.
    """
    wide = width >= _BESIDE
    return {
        "-wide": wide,
        "-step": wide and height >= _WITH_STEP,
        "-single": not wide and (width < _ABOVE[0] or height < _ABOVE[1]),
    }


PANES = {
    "numbers": "n",
    "techniques": "t",
    "curves": "v",
    "gpus": "p",
    "limits": "l",
    "judgement": "j",
    "compare": "c",
}
"""What the right side shows, by the key that shows it."""
_SHORT = {"techniques": "tech", "judgement": "judge"}
"""Names for a narrow line."""
_GAP = 1
_FEWEST_LETTERS = 3


def header_row(answer: Answer, traced: TraceState, name: str, time: str, width: int, *, stale: bool = False) -> ListRow:
    """What matters least is dropped where the line is too short.

    Args:
        stale: the controls describe no plan now, and the numbers are those of the last one.
    """
    plan = answer.plan
    gpus = f"{plan.recipe.gpus:,} × " if plan.recipe.gpus > 1 else ""
    verdict = ("! last plan that can be", "bold $text-error") if stale else _verdict(answer, traced)
    right: Row = [verdict, ("  ", ""), (time, MUTED), (" ", "")]
    facts = [plan.shape.name, f"{gpus}{plan.gpu.title}", f"{format_count(count_parameters(plan.shape))} parameters"]
    if plan.recipe.has_adapters:
        facts.append(plan.recipe.adapter_words)
    if plan.recipe.has_frozen_layers:
        facts.append(plan.recipe.freeze_words)
    if name:
        facts.insert(0, name)
    subject, *others = facts
    return row(*header_line((subject, "bold"), [(fact, "") for fact in others], right, width))


def _verdict(answer: Answer, traced: TraceState) -> Span:
    """By the trace where there is one: it knows more. As long with a trace on its way as by formula alone."""
    match traced:
        case TraceReady(_, found, _) if found.fit == "may fit":
            return "? may fit", "bold $text-warning"
        case TraceReady(_, found, _) if found.fit == "fits" and not found.keeps_headroom:
            return "! over headroom", "bold $text-warning"
        case TraceReady(_, found, _):
            fits, how = found.fits, ""
        case Pending():
            fits, how = answer.fits, f", tracing {PENDING}"
        case _:
            fits, how = answer.fits, " by formula"
    return (f"✓ fits{how}", "bold $text-success") if fits else (f"✗ too large{how}", "bold $text-error")


def pane_places(panes: list[str], width: int) -> list[tuple[str, int, int]]:
    """Each pane's name with its first cell and the one after its last, as `pane_row` draws them."""
    names = _names(panes, width)
    places, x = [], 0
    for pane in panes:
        end = x + len(names[pane])
        places.append((pane, x, end))
        x = end + _GAP
    return places


def pane_row(panes: list[str], shown: str, width: int) -> ListRow:
    """The panes' names, the letter that shows each underlined, the one that is shown reversed."""
    names = _names(panes, width)
    spans: Row = []
    for pane in panes:
        name, at = names[pane], pane.index(PANES[pane])
        style = "bold reverse" if pane == shown else "$primary"
        parts = (name[:at], style), (name[at], f"{style} underline"), (name[at + 1 :], style)
        spans += [span for span in (*parts, (" " * _GAP, "")) if span[0]]
    return ListRow(tuple(spans[:-1]))


def _names(panes: list[str], width: int) -> dict[str, str]:
    """The names as there is room for: whole, short, or cut; each with the letter that shows its pane."""
    whole, short = {pane: pane for pane in panes}, {pane: _SHORT.get(pane, pane) for pane in panes}
    cut = (
        {pane: name[: max(letters, pane.index(PANES[pane]) + 1)] for pane, name in short.items()}
        for letters in range(max(map(len, short.values())) - 1, _FEWEST_LETTERS, -1)
    )
    fewest = {pane: pane[: max(_FEWEST_LETTERS, pane.index(PANES[pane]) + 1)] for pane in panes}
    fitting = (
        names for names in (whole, short, *cut) if sum(map(len, names.values())) + _GAP * (len(panes) - 1) <= width
    )
    return next(fitting, fewest)


class PaneNames(FixedRows):
    """One line; says which pane is wanted."""

    class Wanted(Message):
        """A name was clicked."""

        def __init__(self, pane: str) -> None:
            super().__init__()
            self.pane = pane

    def __init__(self, *, classes: str) -> None:
        super().__init__()
        self.set_classes(classes)
        self._panes: list[str] = []

    def show_panes(self, panes: list[str], shown: str) -> None:
        """These panes, one of them shown."""
        self._panes = panes
        self.show(lambda width, selected: [pane_row(panes, shown, width)])

    def on_click(self, event: Click) -> None:
        """The pane under the pointer."""
        x = event.x - len(CURSOR)
        for pane, first, after in pane_places(self._panes, self.size.width - len(CURSOR)):
            if first <= x < after:
                self.post_message(self.Wanted(pane))
