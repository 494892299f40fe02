"""The controls as lines: one a control, and beside the one in question what is wrong with it."""

from __future__ import annotations

from gpumem_tui.plan.controls import Control, Number, controls, remarks
from gpumem_tui.plan.state import PlanState
from gpumem_tui.tui.kit.figures import MUTED, Row, fit
from gpumem_tui.tui.kit.rows import ListRow, heading, paragraph, row

LABEL_WIDTH = 12
_CARET = "▏"


def control_rows(
    state: PlanState, width: int, height: int, *, selected: str = "", typed: str | None = None
) -> list[ListRow]:
    """All controls of a draft; with groups where the height allows it.

    Args:
        selected: the key of the control that the arrow keys change.
        typed: the digits typed into it so far; None if none are being typed.
    """
    listed = controls(state.draft)
    groups = list(dict.fromkeys(control.group for control in listed))
    roomy = height >= len(listed) + 2 * len(groups)
    said = {} if state.now.problem is not None else dict(remarks(state.plan))
    lines: list[ListRow] = []
    group = ""
    for control in listed:
        if roomy and control.group != group:
            lines += [row()] if lines else []
            lines.append(heading(control.group))
        group = control.group
        here = control.key == selected
        lines.append(_line(state, control, width, here=here, typed=typed if here else None))
        problem = state.problem
        if problem is not None and problem.control == control.key:
            lines += paragraph(f"! {problem.message}", width, "$text-error", indent=1)
        elif control.key in said:
            lines += paragraph(said[control.key], width, "$text-warning", indent=2)
    chosen = next((control for control in listed if control.key == selected), None)
    if roomy and chosen is not None and height >= len(lines) + 4:
        lines += [row(), *paragraph(chosen.hint, width)]
    return lines


def _line(state: PlanState, control: Control, width: int, *, here: bool, typed: str | None) -> ListRow:
    """Name and value; arrows around the one that the arrow keys change."""
    room = width - LABEL_WIDTH - 4
    value = control.text(state.draft) if typed is None else f"{typed}{_CARET}"
    changed = control.key in state.draft.changes
    style = _style(state, control, changed=changed)
    left, right = ("← ", " →") if here else ("  ", "  ")
    spans: Row = [
        (fit(control.label, LABEL_WIDTH), "bold" if here else MUTED),
        (left, MUTED),
        (fit(value + (" *" if changed and typed is None else ""), room), f"bold {style}".strip() if here else style),
        (right, MUTED),
    ]
    return row(*spans, key=control.key)


def _style(state: PlanState, control: Control, *, changed: bool) -> str:
    """In trouble, or not what it is by itself."""
    if state.problem is not None and state.problem.control == control.key:
        return "$text-error"
    if changed:
        return "$text-accent"
    if isinstance(control, Number) and control.get(state.draft) is None:
        return MUTED
    return ""
