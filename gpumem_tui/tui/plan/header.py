"""The line above everything: which plan this is, and whether it fits; and the names of the panes."""

from __future__ import annotations

from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.memory import format_count
from gpumem_tui.plan.answers import Answer
from gpumem_tui.plan.tracing import Pending, TraceReady, TraceState
from gpumem_tui.tui.kit.figures import MUTED, Row, Span, span_width
from gpumem_tui.tui.kit.glyphs import PROGRAM
from gpumem_tui.tui.kit.rows import ListRow, row
from gpumem_tui.tui.plan.numbers import PENDING

PANES = {
    "numbers": "n",
    "techniques": "t",
    "curves": "v",
    "gpus": "g",
    "judgement": "j",
    "compare": "c",
}
"""What the right side shows, by the key that shows it."""
_GAP = 2
_FEWEST_LETTERS = 4


def header_row(answer: Answer, traced: TraceState, name: str, time: str, width: int, *, stale: bool = False) -> ListRow:
    """What matters least is dropped where the line is too short.

    Args:
        stale: the controls describe no plan now, and the numbers are those of the last one.
    """
    plan = answer.plan
    gpus = f"{plan.recipe.gpus:,} × " if plan.recipe.gpus > 1 else ""
    left: Row = [(PROGRAM, "bold $primary")]
    verdict = ("! last plan that can be", "bold $text-error") if stale else _verdict(answer, traced)
    right: Row = [verdict, ("  ", ""), (time, MUTED), (" ", "")]
    facts = [plan.shape.name, f"{gpus}{plan.gpu.title}", f"{format_count(count_parameters(plan.shape))} parameters"]
    if name:
        facts.insert(0, name)
    for index, fact in enumerate(facts):
        lead = " · " if index else "  "
        if span_width(left) + len(lead) + len(fact) + span_width(right) + 1 <= width:
            left += [(lead, MUTED), (fact, "bold" if index == 0 else "")]
    return row(*left, (" " * max(1, width - span_width(left) - span_width(right)), ""), *right)


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
    letters = _letters(panes, width)
    places, x = [], 0
    for pane in panes:
        end = x + min(len(pane), letters)
        places.append((pane, x, end))
        x = end + _GAP
    return places


def pane_row(panes: list[str], shown: str, width: int) -> ListRow:
    """The panes' names, the letter that shows each underlined, the one that is shown reversed."""
    letters = _letters(panes, width)
    spans: Row = []
    for pane in panes:
        name, at = pane[:letters], pane.index(PANES[pane])
        style = "bold reverse" if pane == shown else "$primary"
        parts = (name[:at], style), (name[at], f"{style} underline"), (name[at + 1 :], style)
        spans += [span for span in (*parts, (" " * _GAP, "")) if span[0]]
    return ListRow(tuple(spans[:-1]))


def _letters(panes: list[str], width: int) -> int:
    """How many letters of each name there is room for; the one that shows it always is."""
    whole = max(map(len, panes))
    for letters in range(whole, _FEWEST_LETTERS, -1):
        if sum(min(len(pane), letters) + _GAP for pane in panes) - _GAP <= width:
            return letters
    return _FEWEST_LETTERS
