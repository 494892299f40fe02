"""The Plan screen's state: what the controls say, the last plan that was whole, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.control import Number, PlanError
from gpumem_tui.plan.controls import control_of, plan_of
from gpumem_tui.plan.digits import by_digit
from gpumem_tui.plan.draft import Draft, draft_of
from gpumem_tui.plan.plan import Plan

_REMEMBERED = 500
"""Changes that can be undone."""


@dataclass(frozen=True)
class Problem:
    """Why the controls describe no plan: the key of the control to change, and one line."""

    control: str
    message: str


@dataclass(frozen=True)
class Setting:
    """What the controls say, and the last plan that they, or the ones before, described.

    Attributes:
        problem: why `draft` itself is no plan; None if `plan` is it.
    """

    draft: Draft
    plan: Plan
    problem: Problem | None = None


@dataclass(frozen=True)
class PlanState:
    """A setting and its history.

    Attributes:
        by: the control that made `now`; further changes by it are one step of the history. "" for none.
        refused: why the last nudge changed nothing.
    """

    now: Setting
    past: tuple[Setting, ...] = ()
    future: tuple[Setting, ...] = ()
    by: str = ""
    refused: Problem | None = None

    @property
    def plan(self) -> Plan:
        """The plan whose numbers are shown."""
        return self.now.plan

    @property
    def draft(self) -> Draft:
        """What the controls say."""
        return self.now.draft

    @property
    def problem(self) -> Problem | None:
        """What to explain beside a control."""
        return self.now.problem or self.refused


def opened(plan: Plan) -> PlanState:
    """A plan without a history. One that the controls could not make is shown with what to change."""
    draft = draft_of(plan)
    try:
        return PlanState(Setting(draft, plan_of(draft)))
    except PlanError as error:
        return PlanState(Setting(draft, plan, Problem(error.control, str(error))))


def entered(state: PlanState, key: str, value: int | None) -> PlanState:
    """A number was typed. What cannot be stays in the control, explained, and the last good plan stays too."""
    control = control_of(state.draft, key)
    if not isinstance(control, Number):
        raise TypeError(f"{key} takes no number")
    return _changed(state, control.put(state.draft, value), by=key)


def chosen(state: PlanState, key: str, value: str) -> PlanState:
    """A named value was picked."""
    control = control_of(state.draft, key)
    if isinstance(control, Number):
        raise TypeError(f"{key} takes a number")
    return _changed(state, control.put(state.draft, value), by=key)


def chosen_by_digit(state: PlanState, key: str, digit: int) -> PlanState:
    """The named value at that place was picked, the first by 1; refused where there is none."""
    control = control_of(state.draft, key)
    if isinstance(control, Number):
        raise TypeError(f"{key} takes a number")
    found = by_digit([option.value for option in control.options(state.draft)], digit)
    if isinstance(found, Unknown):
        return replace(state, refused=Problem(key, found.reason))
    return chosen(paused(state), key, found)


def nudged(state: PlanState, key: str, way: int, *, jump: bool = False) -> PlanState:
    """The control's next value, down (`way` −1) or up (+1); refused where that would break a plan that is whole."""
    draft = control_of(state.draft, key).stepped(state.draft, way, jump=jump)
    if state.now.problem is None:
        try:
            plan_of(draft)
        except PlanError as error:
            return replace(state, refused=Problem(error.control, str(error)))
    return _changed(state, draft, by=key)


def replaced(state: PlanState, plan: Plan) -> PlanState:
    """Another plan altogether: a technique applied, a saved plan opened. What does not go together is explained."""
    return _changed(state, draft_of(plan), by="")


def paused(state: PlanState) -> PlanState:
    """The user went elsewhere: the next change is a step of its own, and a refusal has been read."""
    return replace(state, by="", refused=None)


def undone(state: PlanState) -> PlanState:
    """Back by one step; the same state if there is none."""
    if not state.past:
        return paused(state)
    return PlanState(state.past[-1], state.past[:-1], (state.now, *state.future))


def redone(state: PlanState) -> PlanState:
    """Forward again by one step; the same state if there is none."""
    if not state.future:
        return paused(state)
    return PlanState(state.future[0], (*state.past, state.now), state.future[1:])


def _changed(state: PlanState, draft: Draft, *, by: str) -> PlanState:
    if draft == state.draft:
        return replace(state, refused=None)
    try:
        now = Setting(draft, plan_of(draft))
    except PlanError as error:
        now = Setting(draft, state.plan, Problem(error.control, str(error)))
    past = state.past if by and by == state.by else (*state.past, state.now)[-_REMEMBERED:]
    return PlanState(now, past, by=by)
