"""The cheapest combination that fits, as far as traces tell: the formula chooses what is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import (
    Combination,
    cheapest_but_as_it_is,
    cheapest_combination,
    likely_combinations,
    unchanged,
)

Known = Callable[[Plan], TracedAnswer | Unknown]
"""What a trace says of a plan, or why there is none."""


@dataclass(frozen=True)
class Recommended:
    """What to do to make a plan fit.

    Attributes:
        combination: the cheapest; or why there is none.
        traced: what a trace says of it, which is that it fits; or why none does: then it fits by formula alone.
        formula_only: by formula a cheaper one, which no trace can confirm; None for none.
    """

    combination: Combination | Unknown
    traced: TracedAnswer | Unknown
    formula_only: Combination | None = None

    @property
    def traceable(self) -> Combination | Unknown:
        """The cheapest that a trace can confirm; or why there is none."""
        found = self.combination
        return Unknown("only the formula knows it") if isinstance(found, Combination) and found.formula_only else found


def untraced(_plan: Plan) -> Unknown:
    """Return what is known where nothing but the plan itself is traced."""
    return Unknown("not traced")


def recommended(plan: Plan, now: TracedAnswer | Unknown, known: Known = untraced) -> Recommended:
    """Return the cheapest that a trace confirms, of those that the formula finds likely.

    The formula's choice is asked for first, then dearer ones, if it does not fit, and the cheaper ones last, which do
    not fit by formula: what is known may be limited by time.

    Args:
        now: what a trace says of the plan as it is; or why there is none.
        known: asked for one plan after the other, as long as its answer may change what is recommended.
    """
    if isinstance(now, TracedAnswer) and now.fits:
        return Recommended(unchanged(plan), now)
    best = cheapest_combination(plan) if isinstance(now, Unknown) else cheapest_but_as_it_is(plan)
    if isinstance(best, Combination) and best.plan == plan:
        return Recommended(best, now)
    only = best if isinstance(best, Combination) and best.formula_only else None
    first = best if only is None else cheapest_combination(plan, traceable=True)
    candidates = list(likely_combinations(plan))
    if isinstance(first, Combination) and first.plan != plan:
        others = [one for one in candidates if one.plan != first.plan]
        candidates = [first, *sorted(others, key=lambda one: one.price < first.price)]
    found, left = _confirmed(candidates, known)
    if found is not None:
        combination, traced = found
        cheaper = only if only is not None and only.price < combination.price else None
        return Recommended(combination, traced, cheaper)
    if left:
        combination, why = left[0]
        return Recommended(combination, why, only)
    if only is not None or not candidates:
        return Recommended(best, Unknown("no trace can confirm it"))
    return Recommended(Unknown("of what fits by formula, nothing does by trace"), Unknown("traced"))


def _confirmed(
    candidates: list[Combination], known: Known
) -> tuple[tuple[Combination, TracedAnswer] | None, list[tuple[Combination, Unknown]]]:
    """Return the cheapest that a trace says to fit, and those that it says nothing of, in their order."""
    found: tuple[Combination, TracedAnswer] | None = None
    left = []
    for one in candidates:
        if found is not None and not one.price < found[0].price:
            continue
        answer = known(one.plan)
        if isinstance(answer, Unknown):
            left.append((one, answer))
        elif answer.fits:
            found = one, answer
    return found, left
