"""The Plan screen's state: what the controls say, the last plan that was whole, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.control import Choice, Number, PlanError, by_digit
from gpumem_tui.plan.controls import control_of, plan_of
from gpumem_tui.plan.plan import Draft, Plan, draft_of

_REMEMBERED = 500
"""Changes that can be undone."""


@dataclass(frozen=True)
class Problem:
    """Why the controls describe no plan: the key of the control to change, and one line."""

    control: str
    message: str


@dataclass(frozen=True)
class Setting:
    """The values of the controls, and the last plan that they, or the ones before, described.

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
        """The values that the controls show."""
        return self.now.draft

    @property
    def problem(self) -> Problem | None:
        """The explanation to show next to a control whose value cannot be used."""
        return self.now.problem or self.refused


def opened(plan: Plan) -> PlanState:
    """Return a plan without a history. One that the controls could not make is shown with what to change."""
    return PlanState(_set(draft_of(plan), plan))


def entered(state: PlanState, key: str, value: int | None) -> PlanState:
    """Type a number. An impossible value stays in the control, explained, and the last good plan stays too."""
    control = control_of(state.draft, key)
    if not isinstance(control, Number):
        raise TypeError(f"{key} takes no number")
    return _changed(state, control.put(state.draft, value), by=key)


def typed(state: PlanState, key: str, value: int | None, *, first: bool) -> PlanState:
    """Type a digit more or less; a number is one step of the history from its `first` digit to its last."""
    return entered(paused(state) if first else state, key, value)


def given_up(state: PlanState, key: str) -> PlanState:
    """Restore the number that was there before typing."""
    return undone(state) if state.by == key else state


def chosen(state: PlanState, key: str, value: str) -> PlanState:
    """Pick a named value."""
    return _changed(state, _choice(state, key).put(state.draft, value), by=key)


def chosen_by_digit(state: PlanState, key: str, digit: int) -> PlanState:
    """Pick the named value at that place, the first by 1; refused without one."""
    found = by_digit([option.value for option in _choice(state, key).options(state.draft)], digit)
    if isinstance(found, Unknown):
        return replace(state, refused=Problem(key, found.reason))
    return chosen(paused(state), key, found)


def _choice(state: PlanState, key: str) -> Choice:
    control = control_of(state.draft, key)
    if isinstance(control, Number):
        raise TypeError(f"{key} takes a number")
    return control


def nudged(state: PlanState, key: str, way: int, *, jump: bool = False) -> PlanState:
    """Set the control's next value, down (`way` −1) or up (+1); refused where that would break a plan that is whole."""
    draft = control_of(state.draft, key).stepped(state.draft, way, jump=jump)
    after = _changed(state, draft, by=key)
    if state.now.problem is None and after.now.problem is not None:
        return replace(state, refused=after.now.problem)
    return after


def replaced(state: PlanState, plan: Plan) -> PlanState:
    """Take another plan, such as one with a technique; what does not go together is explained."""
    return _changed(state, draft_of(plan), by="")


def paused(state: PlanState) -> PlanState:
    """Note that the user went elsewhere: the next change is a step of its own, and a refusal has been read."""
    return replace(state, by="", refused=None)


def undone(state: PlanState) -> PlanState:
    """Go back by one step; the same state without one."""
    if not state.past:
        return paused(state)
    return PlanState(state.past[-1], state.past[:-1], (state.now, *state.future))


def redone(state: PlanState) -> PlanState:
    """Go forward again by one step; the same state without one."""
    if not state.future:
        return paused(state)
    return PlanState(state.future[0], (*state.past, state.now), state.future[1:])


def _changed(state: PlanState, draft: Draft, *, by: str) -> PlanState:
    if draft == state.draft:
        return replace(state, refused=None)
    past = state.past if by and by == state.by else (*state.past, state.now)[-_REMEMBERED:]
    return PlanState(_set(draft, state.plan), past, by=by)


def _set(draft: Draft, last: Plan) -> Setting:
    """Return the plan that a draft describes, or the last one with what is wrong."""
    try:
        return Setting(draft, plan_of(draft))
    except PlanError as error:
        return Setting(draft, last, Problem(error.control, str(error)))
