"""The controls, a line each: arrows choose and change, digits type, the wheel turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Click, Key, MouseScrollDown, MouseScrollUp
from textual.message import Message

from gpumem_tui.plan import state as states
from gpumem_tui.plan.control import Choice, Control, Number
from gpumem_tui.plan.controls import control_of, controls, remarks
from gpumem_tui.plan.state import PlanState
from gpumem_tui.tui.kit.figures import MUTED, ListRow, Row, fit, heading, paragraph, row
from gpumem_tui.tui.kit.row_list import CURSOR, RowList

LABEL_WIDTH = 12
_CARET = "▏"


def control_rows(
    state: PlanState, width: int, height: int, *, selected: str = "", typed: str | None = None
) -> list[ListRow]:
    """Return all controls of a draft; with groups where the height allows it.

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
    """Return name and value, with arrows around the one that the arrow keys change."""
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
    """Return the style of a value: in trouble, changed, or as it is by itself."""
    if state.problem is not None and state.problem.control == control.key:
        return "$text-error"
    if changed:
        return "$text-accent"
    if isinstance(control, Number) and control.get(state.draft) is None:
        return MUTED
    return ""


_MOST_DIGITS = 12
_CHANGE = "Change the control by a step; elsewhere: the next pane"
_JUMP = "Jump: half or twice, the next power of two"
_ARROW_WIDTH = 2


class PlanControls(RowList):
    """Shows what the user wants of the control under the cursor; the screen decides what becomes of it."""

    BORDER_TITLE = "Plan"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "nudge(-1)", "change", key_display="←→", tooltip=_CHANGE),
        Binding("right", "nudge(1)", show=False, key_display="←→", tooltip=_CHANGE),
        Binding("shift+left", "nudge(-1,True)", show=False, tooltip=_JUMP),
        Binding("shift+right", "nudge(1,True)", show=False, tooltip=_JUMP),
        Binding("enter", "pick", "pick", tooltip="Pick from a list; in a pane: apply, or explain"),
        Binding("backspace", "erase", show=False, tooltip="Take a digit away"),
        Binding("escape", "abandon", show=False, tooltip="Take the number back that is being typed"),
    ]

    @dataclass
    class Stepped(Message):
        """A control was changed: the step to the next state."""

        step: Callable[[PlanState], PlanState]

    @dataclass
    class Picking(Message):
        """The control's list is to be opened."""

        key: str

    def __init__(self) -> None:
        super().__init__(id="controls")
        self._state: PlanState | None = None
        self._typed: str | None = None

    def show_state(self, state: PlanState) -> None:
        """Draw what a state's controls say."""
        self._state = state
        self.show(self._lines)

    def _lines(self, width: int, selected: str) -> list[ListRow]:
        if self._state is None:
            return []
        height = self.scrollable_content_region.height
        return control_rows(self._state, width, height, selected=selected, typed=self._typed)

    @property
    def _control(self) -> Control | None:
        """The control under the cursor."""
        if self._state is None or self.key not in {control.key for control in controls(self._state.draft)}:
            return None
        return control_of(self._state.draft, self.key)

    # Keys

    def move_to(self, key: str) -> None:
        """Move to another control; what was typed stays as it is."""
        self._typed = None
        super().move_to(key)

    def action_nudge(self, way: int, jump: bool = False) -> None:
        """Ask for a step up or down."""
        self._typed = None
        if self.key:
            self._step(partial(states.nudged, key=self.key, way=way, jump=jump))

    def action_pick(self) -> None:
        """End the typing; for a choice, open its list."""
        if self._typed is not None:
            self.end_typing()
        elif isinstance(self._control, Choice):
            self.post_message(self.Picking(self.key))

    def action_erase(self) -> None:
        """Take the last digit away."""
        control = self._control
        if isinstance(control, Number) and self._state is not None:
            digits = self._typed if self._typed is not None else str(control.get(self._state.draft) or "")
            self._type(digits[:-1])

    def action_abandon(self) -> None:
        """Restore what was there before the typing."""
        if self._typed is not None:
            self.end_typing()
            self._step(partial(states.given_up, key=self.key))

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Leave esc to the screen where no number is being typed."""
        return self._typed is not None if action == "abandon" else True

    def on_key(self, event: Key) -> None:
        """Type a number, or pick a choice by its place."""
        control = self._control
        if control is None or event.character is None or event.character not in "0123456789":
            return
        event.stop()
        event.prevent_default()
        if isinstance(control, Number):
            self._type(((self._typed or "") + event.character)[:_MOST_DIGITS])
        else:
            self._step(partial(states.chosen_by_digit, key=self.key, digit=int(event.character)))

    def on_blur(self) -> None:
        """End the typing where the keys go elsewhere."""
        self.end_typing()
        super().on_blur()

    def _step(self, step: Callable[[PlanState], PlanState]) -> None:
        self.post_message(self.Stepped(step))

    def _type(self, digits: str) -> None:
        first, self._typed = self._typed is None, digits
        self._step(partial(states.typed, key=self.key, value=int(digits) if digits else None, first=first))

    def end_typing(self) -> None:
        """Show the control's value again instead of the digits that were typed."""
        if self._typed is not None:
            self._typed = None
            self.show(self._lines)

    # The mouse

    def on_click(self, event: Click) -> None:
        """Change by a click on an arrow, open a choice's list by one on its value; elsewhere move there."""
        key, x = self.row_at(event), event.get_content_offset_capture(self).x - len(CURSOR)
        if not key:
            return
        if key == self.key and LABEL_WIDTH <= x < LABEL_WIDTH + _ARROW_WIDTH:
            self.action_nudge(-1)
        elif key == self.key and x >= self.size.width - len(CURSOR) - _ARROW_WIDTH:
            self.action_nudge(1)
        elif key == self.key:
            self.action_pick()
        else:
            self.move_to(key)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Turn the control under the pointer."""
        self._turn(event, 1)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Turn the control under the pointer."""
        self._turn(event, -1)

    def _turn(self, event: MouseScrollUp | MouseScrollDown, way: int) -> None:
        event.stop()
        event.prevent_default()
        if key := self.row_at(event):
            self.move_to(key)
            self.action_nudge(way)
