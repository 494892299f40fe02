"""What is recommended is what a trace confirms, as far as traces reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import TracedAnswer, traced_answer
from gpumem_tui.plan.export import plan_json
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import recommended
from gpumem_tui.plan.report import plan_markdown
from gpumem_tui.plan.techniques import Combination, cheapest_combination, likely_combinations
from tests.plan.plans import LLAMA, TRACED, traced_of, with_figures

NO_TIME = Unknown("no time is left")
NOW = traced_answer(LLAMA, traced_of(LLAMA))
LIKELY = likely_combinations(LLAMA)


def _by_formula() -> Combination:
    found = cheapest_combination(LLAMA)
    assert isinstance(found, Combination)
    return found


BEST = _by_formula()


def answered(fits: Callable[[Plan], bool], asked: list[Plan]) -> Callable[[Plan], TracedAnswer | Unknown]:
    """Traces by which these plans fit, whatever they take."""
    small = traced_answer(replace(LLAMA, batch_size=1), TRACED)

    def known(plan: Plan) -> TracedAnswer:
        asked.append(plan)
        fit = "fits" if fits(plan) else "does not fit"
        return with_figures(replace(small, plan=plan), fit=fit, max_batch_size=plan.batch_size)

    return known


def test_the_cheapest_that_a_trace_confirms_is_recommended() -> None:
    assert not NOW.fits
    assert BEST.plan in [one.plan for one in LIKELY[:-1]]
    assert recommended(LLAMA, NOW, answered(lambda plan: True, [])).combination == LIKELY[0]
    asked: list[Plan] = []
    found = recommended(LLAMA, NOW, answered(lambda plan: plan == LIKELY[-1].plan, asked))
    assert found.combination == LIKELY[-1]
    assert isinstance(found.traced, TracedAnswer)
    assert asked[0] == BEST.plan
    assert set(asked) == {one.plan for one in LIKELY}


def test_without_time_the_formula_s_choice_is_said_to_be_untraced() -> None:
    assert recommended(LLAMA, NOW, lambda plan: NO_TIME).combination == BEST
    text = plan_markdown(LLAMA, traced_of(LLAMA), lambda plan: NO_TIME)
    assert "By formula, not traced, the cheapest combination that fits" in text
    assert "There is no trace of it: no time is left." in text


def test_what_a_trace_rejects_is_not_recommended() -> None:
    rejects = answered(lambda plan: False, [])
    assert isinstance(recommended(LLAMA, NOW, rejects).combination, Unknown)
    assert "nothing does by trace" in plan_markdown(LLAMA, traced_of(LLAMA), rejects)

    def first_alone(plan: Plan) -> TracedAnswer | Unknown:
        return rejects(plan) if plan == BEST.plan else NO_TIME

    assert recommended(LLAMA, NOW, first_alone).combination == LIKELY[-1]


def test_json_and_markdown_say_what_the_trace_says() -> None:
    known = answered(lambda plan: plan == LIKELY[-1].plan, [])
    body = plan_json(LLAMA, traced_of(LLAMA), known=known)
    assert body["combination"]["techniques"] == [change.name for change in LIKELY[-1].changes]
    assert body["combination"]["traced"]["fits"] is True
    assert body["traceable_combination"] == body["combination"]
    names = " + ".join(change.name for change in LIKELY[-1].changes)
    assert f"By trace, the cheapest combination that fits: **{names}**" in plan_markdown(LLAMA, traced_of(LLAMA), known)


def test_what_fits_by_trace_is_recommended_as_it_is() -> None:
    small = replace(LLAMA, recipe=replace(LLAMA.recipe, sharding="none", gpus=1), target_batch=None)
    body = plan_json(small, TRACED)
    assert (body["fits"], body["verdict_by"], body["formula"]["fits"]) == (True, "trace", False)
    assert body["spare_bytes"] > 0 > body["formula"]["spare_bytes"]
    assert body["combination"]["techniques"] == []
