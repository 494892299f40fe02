"""Recommendations are confirmed by a trace, as far as traces reach."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB, Unknown
from gpumem_tui.plan.answers import TracedAnswer, answer, largest_batch, traced_answer, usable_as_traced
from gpumem_tui.plan.combination import Combination, Effect, Recommended
from gpumem_tui.plan.command import CommandPlan
from gpumem_tui.plan.judgement import multiples
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import all_techniques, command_answer, plan_answer, recommended
from gpumem_tui.plan.report import plan_markdown
from gpumem_tui.plan.techniques import (
    cheapest_combination,
    compiled_or_eager,
    likely_combinations,
    techniques,
)
from gpumem_tui.search.prediction import BatchSizes
from tests.plan.commands import base_predicted, changed, command_config
from tests.plan.plans import GPT2, LLAMA, TRACED, traced_of, with_figures
from tests.plan.printing import command_plan_json, plan_json

NO_TIME = Unknown("no time is left")
NOW = traced_answer(LLAMA, traced_of(LLAMA))
LIKELY = likely_combinations(LLAMA)


def _by_formula() -> Combination:
    found = cheapest_combination(LLAMA)
    assert isinstance(found, Combination)
    return found


def _compiled() -> Combination:
    found = compiled_or_eager(LLAMA, NOW)
    assert isinstance(found, Combination)
    return found


BEST, COMPILED = _by_formula(), _compiled()


def chosen(found: Recommended) -> Plan | Unknown:
    return found.combination if isinstance(found.combination, Unknown) else found.combination.plan


def answered(fits: Callable[[Plan], bool], asked: list[Plan]) -> Callable[[Plan], TracedAnswer | Unknown]:
    """Traces by which these plans fit, of any size."""
    small = traced_answer(replace(LLAMA, batch_size=1), TRACED)

    def known(plan: Plan) -> TracedAnswer:
        asked.append(plan)
        fit = "fits" if fits(plan) else "does not fit"
        return with_figures(replace(small, plan=plan), fit=fit, max_batch_size=plan.batch_size)

    return known


def test_the_cheapest_that_a_trace_confirms_is_recommended() -> None:
    assert not NOW.fits
    assert BEST.plan in [one.plan for one in LIKELY[:-1]]
    all_but_compiled = answered(lambda plan: not plan.recipe.compile, [])
    assert chosen(recommended(LLAMA, NOW, all_but_compiled)) == LIKELY[0].plan
    asked: list[Plan] = []
    found = recommended(LLAMA, NOW, answered(lambda plan: plan == LIKELY[-1].plan, asked))
    assert chosen(found) == LIKELY[-1].plan
    assert isinstance(found.traced, TracedAnswer)
    assert asked[0] == BEST.plan
    assert set(asked) == {COMPILED.plan, *(one.plan for one in LIKELY)}
    assert asked[-1] == COMPILED.plan, "it takes longest"


def test_compiling_is_recommended_where_its_trace_fits_and_nothing_is_cheaper() -> None:
    assert chosen(recommended(LLAMA, NOW, answered(lambda plan: True, []))) == COMPILED.plan
    assert chosen(recommended(LLAMA, NOW, answered(lambda plan: plan.recipe.compile, []))) == COMPILED.plan
    untraced = recommended(LLAMA, NOW, lambda plan: NO_TIME)
    assert chosen(untraced) == BEST.plan, "no formula states that it fits"


class TestCompiledOrEager:
    """The effect of `torch.compile` is among the techniques, by trace."""

    COMPILED = replace(GPT2, recipe=replace(GPT2.recipe, compile=True))
    NOW = traced_answer(GPT2, TRACED)

    def judged(self, plan: Plan, now: TracedAnswer | Unknown, then: TracedAnswer | Unknown) -> Effect | str:
        def known(asked: Plan) -> TracedAnswer | Unknown:
            assert asked == (GPT2 if plan.recipe.compile else self.COMPILED)
            return then

        found = all_techniques(plan, now, known)
        key = "eager" if plan.recipe.compile else "compile"
        helping = [one for one in found.helping if one.change.key == key]
        useless = [f"{one.name}: {one.reason}" for one in found.not_applicable if one.key == key]
        assert len(helping) + len(useless) == 1
        return helping[0] if helping else useless[0]

    def test_what_it_saves_is_the_difference_of_the_traces(self) -> None:
        then = with_figures(self.NOW, peak_allocated_bytes=self.NOW.peak_allocated_bytes - MIB, max_batch_size=9_999)
        found = self.judged(GPT2, self.NOW, then)
        assert isinstance(found, Effect)
        assert (found.saved_bytes, found.largest, found.by) == (MIB, 9_999, "traced")
        assert (found.change.option, found.plan) == ("--compile", self.COMPILED)
        assert all_techniques(GPT2, self.NOW, lambda _: then).helping[0] == found, "the largest batch comes first"

    def test_it_may_be_eager_pytorch_that_takes_less(self) -> None:
        now = with_figures(self.NOW, plan=self.COMPILED, max_batch_size=1)
        found = self.judged(self.COMPILED, now, self.NOW)
        assert isinstance(found, Effect)
        assert (found.change.option, found.plan) == ("without --compile", GPT2)

    def test_what_does_not_help_or_is_not_known_says_why(self) -> None:
        more = with_figures(self.NOW, peak_allocated_bytes=self.NOW.peak_allocated_bytes + MIB)
        said = "compiled by torch.compile: --compile"
        assert self.judged(GPT2, self.NOW, more) == f"{said} takes 1.0 MiB more here, traced"
        assert self.judged(GPT2, self.NOW, self.NOW) == f"{said} saves nothing here"
        now = with_figures(self.NOW, plan=self.COMPILED, max_batch_size=Unknown("traced at its own size alone"))
        assert (
            self.judged(self.COMPILED, now, more)
            == "eager PyTorch, not compiled: without --compile takes 1.0 MiB more here, traced"
        )
        assert self.judged(GPT2, self.NOW, NO_TIME) == f"{said}, by trace alone: no time is left"
        assert self.judged(GPT2, Unknown("not traced"), self.NOW) == f"{said}, by trace alone: not traced"

    def test_what_takes_long_to_compile_is_not_traced_beside(self) -> None:
        deep = replace(GPT2, shape=find_model("gpt2-xl"))
        assert "48 layers take long to compile" in str(self.judged(deep, self.NOW, NO_TIME))
        eager = compiled_or_eager(replace(deep, recipe=replace(deep.recipe, compile=True)), self.NOW)
        assert isinstance(eager, Combination)

    def test_an_estimate_is_no_trace_of_it(self) -> None:
        unsure = replace(TRACED, done=replace(TRACED.done, is_estimate=True))
        then = with_figures(replace(self.NOW, traced=unsure), peak_allocated_bytes=MIB)
        assert "cannot be followed" in str(self.judged(GPT2, self.NOW, then))
        assert "cannot be followed" in str(self.judged(self.COMPILED, replace(then, plan=self.COMPILED), self.NOW))

    def test_what_may_fit_is_not_made_certain_by_leaving_the_compiler_out(self) -> None:
        unsure = replace(TRACED, done=replace(TRACED.done, is_estimate=True))
        now = with_figures(replace(self.NOW, traced=unsure, plan=self.COMPILED), fit="may fit")
        asked: list[Plan] = []
        found = recommended(self.COMPILED, now, answered(lambda plan: not plan.recipe.compile, asked))
        assert GPT2 not in asked
        assert isinstance(found.combination, Unknown) or found.combination.plan != GPT2


def test_without_time_the_formula_s_choice_is_said_to_be_untraced() -> None:
    assert chosen(recommended(LLAMA, NOW, lambda plan: NO_TIME)) == BEST.plan
    text = plan_markdown(LLAMA, traced_of(LLAMA), lambda plan: NO_TIME)
    assert "By formula, not traced, the cheapest combination that fits" in text
    assert "There is no trace of it: no time is left." in text


def test_what_a_trace_rejects_is_not_recommended() -> None:
    rejects = answered(lambda plan: False, [])
    assert isinstance(recommended(LLAMA, NOW, rejects).combination, Unknown)
    assert "nothing does by trace" in plan_markdown(LLAMA, traced_of(LLAMA), rejects)

    def first_alone(plan: Plan) -> TracedAnswer | Unknown:
        return rejects(plan) if plan == BEST.plan else NO_TIME

    assert chosen(recommended(LLAMA, NOW, first_alone)) == LIKELY[-1].plan


def test_json_and_markdown_say_what_the_trace_says() -> None:
    known = answered(lambda plan: plan == LIKELY[-1].plan, [])
    body = plan_json(LLAMA, traced_of(LLAMA), trace_of=known)
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


class TestOnePlanOneVerdict:
    """Sentences on a traced plan agree with its trace."""

    def test_techniques_are_judged_from_the_traced_largest_batch(self) -> None:
        fewer, more = largest_batch(GPT2) // 2, 2 * largest_batch(GPT2)
        for largest in (0, fewer, more):
            same = replace(GPT2, batch_size=max(1, largest))
            within = usable_as_traced(same, largest)
            assert largest_batch(same, within) == largest
            rows = {row.change.key: row.known_largest or 0 for row in techniques(same, largest).helping}
            assert rows["full-recompute"] > largest or largest == 0
            assert rows.get("gradient-accumulation", largest) == largest

    def test_the_multiple_is_of_the_traced_largest_batch(self) -> None:
        assert "By the trace at most 205 a GPU fit; 200 is the largest" in multiples(GPT2, 205).text

    def test_the_first_line_is_the_traces_answer(self) -> None:
        now, traced = answer(GPT2), traced_answer(GPT2, TRACED)
        said = plan_answer(now, traced, recommended(GPT2, traced))
        assert said.startswith("Batch 8 fits on NVIDIA A100 80 GB: ")
        sizes = traced.traced.sizes
        assert isinstance(sizes, BatchSizes)
        largest = f"safe batch {sizes.safe:,}, {sizes.expected:,} expected, {sizes.at_most:,} at most"
        assert f"; {largest}, {traced.max_batch_size:,} keeps 10 % free." in said
        assert "To change" not in said

    def test_what_does_not_fit_says_what_to_change(self) -> None:
        large = replace(GPT2, batch_size=4096)
        said = plan_answer(answer(large), Unknown("not traced"), recommended(large, Unknown("not traced")))
        assert said.startswith("Batch 4,096 does not fit by formula on ")
        assert re.search(r"To change: \d+ passes of \d+\.", said)


def test_a_command_that_no_run_makes_fit_has_what_does_by_formula() -> None:
    config = command_config("python", "train.py", gpu="rtx-4090-24gb")
    plan = CommandPlan(config, 12, base_predicted(config), (changed(config, "sgd", 12, optimizer=900),))
    said = command_answer(plan, plan.answer())
    assert "None of the changes that were run makes it fit; by formula this does: optimizer in host memory" in said
    larger = CommandPlan(config, 13, base_predicted(config), (changed(config, "checkpointing", 13, activations=1),))
    assert "To change: checkpointed blocks" in command_answer(larger, larger.answer())
    assert command_plan_json(larger)["answer"] == command_answer(larger, larger.answer())


def test_the_passes_of_a_wanted_batch_are_in_the_first_line() -> None:
    assert (
        "32 passes make a global batch of 256 (262,144 tokens)."
        in plan_json(replace(GPT2, target_batch=256), TRACED)["answer"]
    )


def test_what_nothing_makes_fit_is_said_to_fit_with_less_of_it_trained() -> None:
    mixtral = replace(LLAMA, shape=find_model("mixtral-8x7b"), gpu=find_gpu("h100-80gb"), recipe=Recipe("bf16"))
    nothing = Recommended(Unknown("of what fits by formula, nothing does by trace"), Unknown("traced"))
    said = plan_answer(answer(mixtral), NO_TIME, nothing)
    assert "nothing does by trace; by formula QLoRA would, which trains less of it." in said
