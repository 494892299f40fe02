"""Techniques are differences of predictions; the cheapest combination fits, and no cheaper one does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given, settings

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.checks import conflict
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import EXTRAS, Recipe, Setup
from gpumem_tui.formula.records import stage_of
from gpumem_tui.formula.techniques import STAGES, Price, Technique, changes, is_advisable, sharded
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.plan.answers import answer, setup_of, usable_of
from gpumem_tui.plan.combination import Combination, Effect
from gpumem_tui.plan.controls import plan_of
from gpumem_tui.plan.plan import Plan, draft_of
from gpumem_tui.plan.techniques import cheapest_combination, techniques
from tests.plan.plans import GPT2, LLAMA_ON_FOUR, plans

FEWER = settings(max_examples=settings().max_examples // 4)
"""For what compares hundreds of sets each time."""


def helping(plan: Plan) -> Mapping[str, Effect]:
    return {technique.change.key: technique for technique in techniques(plan).helping}


def reasons(plan: Plan) -> Mapping[str, str]:
    return {entry.key: entry.reason for entry in techniques(plan).not_applicable}


def combined(plan: Plan, *, traceable: bool = False) -> Combination:
    found = cheapest_combination(plan, traceable=traceable)
    assert isinstance(found, Combination), found
    return found


def names(found: Combination) -> list[str]:
    return [change.key for change in found.changes]


@given(plans())
def test_every_number_is_that_of_the_plan_it_leads_to(plan: Plan) -> None:
    before = answer(plan)
    for technique in techniques(plan).helping:
        after = answer(technique.plan)
        assert technique.saved_bytes == before.peak_bytes - after.peak_bytes
        assert (technique.peak_bytes, technique.fits) == (after.peak_bytes, after.fits)
        assert technique.largest == after.max_batch_size
        assert technique.change.cost
        assert technique.change.source


@FEWER
@given(plans())
@pytest.mark.slow
def test_every_plan_it_leads_to_can_be_entered(plan: Plan) -> None:
    for technique in techniques(plan).helping:
        assert plan_of(draft_of(technique.plan)) == technique.plan
    found = cheapest_combination(plan)
    if isinstance(found, Combination):
        assert plan_of(draft_of(found.plan)) == found.plan


@given(plans())
def test_each_technique_is_listed_once(plan: Plan) -> None:
    judged = techniques(plan)
    keys = [entry.change.key for entry in judged.helping] + [entry.key for entry in judged.not_applicable]
    assert len(keys) == len(set(keys))
    always = {"mixed-precision", "full-recompute", "chunked-loss", "offload-optimizer", "gradient-accumulation"}
    assert always <= set(keys)


def test_what_makes_it_fit_comes_first_then_the_larger_batch_then_the_more_saved() -> None:
    found = techniques(replace(GPT2, batch_size=64)).helping
    order = [(not item.fits, -(item.known_largest or 0), -item.saved_bytes) for item in found]
    assert order == sorted(order)
    assert found[0].fits
    assert not found[-1].fits


def test_where_it_fits_the_larger_batch_comes_first() -> None:
    sizes = [item.known_largest or 0 for item in techniques(GPT2).helping]
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_not_applicable_says_why() -> None:
    done = Plan(find_model("resnet-50"), Recipe("bf16", recompute="full", sharding="zero2", gpus=4), GPT2.gpu)
    found = reasons(done)
    assert found["pure-bf16"] == "the plan is in bf16 already"
    assert found["full-recompute"] == "recompute is full already"
    assert found["selective-recompute"] == "the network has no attention to recompute"
    assert found["fused-attention"] == "the network has no attention"
    assert found["zero1"] == found["zero2"] == "the plan shards by zero2 already"
    assert found["chunked-loss"] == "a classifier's head has no vocabulary to cut"
    assert found["offload-activations"] == "modelled for transformer blocks only"
    assert found["gradient-accumulation"] == "the micro-batch is 1 already"
    assert {"zero3", "more-gpus"} <= helping(done).keys()


def test_what_costs_memory_here_is_not_offered() -> None:
    plain = replace(LLAMA_ON_FOUR, recipe=Recipe(optimizer="sgd"))
    assert "more here" in reasons(plain)["mixed-precision"]
    assert reasons(LLAMA_ON_FOUR)["full-recompute"] == "saves nothing here"  # the update is what is highest


def test_a_gpu_without_bfloat16_mixes_with_fp16() -> None:
    plan = replace(GPT2, gpu=find_gpu("v100-16gb"))
    assert helping(plan)["mixed-precision"].plan.recipe.precision == "amp-fp16"
    assert "no bfloat16" in reasons(plan)["pure-bf16"]


def test_adafactor_is_not_offered_where_fsdp_shards() -> None:
    plan = replace(LLAMA_ON_FOUR, recipe=Recipe("bf16", sharding="zero3", gpus=4))
    assert "does not run on parameters that FSDP shards" in reasons(plan)["adafactor"]
    sharded_by_state = replace(plan, recipe=replace(plan.recipe, sharding="zero1"))
    assert "adafactor" in helping(sharded_by_state)


def test_only_what_a_workload_can_run_is_called_traceable() -> None:
    found = helping(replace(LLAMA_ON_FOUR, recipe=Recipe("amp-bf16", gpus=4)))
    only = {key for key, technique in found.items() if technique.formula_only}
    assert only == found.keys() & set(EXTRAS)


class TestExtras:
    def test_optimizer_in_host_memory_saves_its_whole_state(self) -> None:
        saved = helping(LLAMA_ON_FOUR)["offload-optimizer"].saved_bytes
        assert 8 * 8_030_261_248 < saved <= 12 * 8_030_261_248  # and the update's scratch, 4 bytes a parameter

    def test_activations_in_host_memory_leave_two_blocks(self) -> None:
        plan = replace(GPT2, recipe=Recipe("bf16"))
        blocks = 12 * 1024 * 8 * (34 * 768 + 12 * 4)
        assert helping(plan)["offload-activations"].saved_bytes == blocks * 10 // 12

    def test_a_chunked_loss_keeps_an_eighth_of_the_logits_and_a_gradient(self) -> None:
        plan = replace(GPT2, recipe=Recipe("bf16"))
        logits = 8 * 1024 * 50_257 * (2 + 4 + 4 + 4)
        gradient = 8 * 1024 * 768 * 2
        saved = helping(plan)["chunked-loss"].saved_bytes
        assert 0.97 * (logits * 7 // 8 - gradient) < saved <= logits * 7 // 8 - gradient

    def test_they_are_kept_when_another_technique_is_applied(self) -> None:
        plan = replace(GPT2, extras=frozenset({"chunked-loss"}))
        assert all(technique.plan.extras >= plan.extras for technique in techniques(plan).helping)


class TestBatch:
    def test_accumulation_keeps_the_global_batch_and_spreads_it_evenly(self) -> None:
        plan = replace(GPT2, batch_size=64)
        found = helping(plan)["gradient-accumulation"]
        assert found.change.name == "gradient accumulation: 2 passes of 32"
        assert answer(found.plan).accumulation.global_batch_size == 64
        assert found.fits

    def test_a_smaller_micro_batch_makes_a_smaller_global_batch(self) -> None:
        found = helping(GPT2)["smaller-batch"]
        assert (found.plan.batch_size, found.plan.target_batch) == (4, None)
        assert "a global batch of 4 instead of 8" in found.change.cost

    def test_batch_norm_is_warned_of(self) -> None:
        plan = Plan(find_model("resnet-50"), Recipe(), GPT2.gpu, 16)
        assert "batch norm" in helping(plan)["gradient-accumulation"].change.cost


class TestCheapest:
    def test_llama_3_8b_on_four_cards_of_24_gb(self) -> None:
        """The story of the README. Traced: 23.59 of 23.69 GiB used, `gpumem-tui predict` with these options."""
        found = combined(replace(LLAMA_ON_FOUR, headroom=0.02))
        assert names(found) == ["pure-bf16", "full-recompute", "zero3"]
        assert not found.formula_only
        assert found.by_formula.peak_bytes / GIB == pytest.approx(19.89, abs=0.01)

    def test_with_more_headroom_the_loss_is_chunked_too(self) -> None:
        found = combined(replace(LLAMA_ON_FOUR, headroom=0.08))
        assert names(found) == ["pure-bf16", "full-recompute", "zero3", "chunked-loss"]
        assert found.formula_only

    def test_a_traceable_one_needs_nothing_that_only_the_formula_knows(self) -> None:
        assert not combined(LLAMA_ON_FOUR, traceable=True).formula_only

    def test_a_plan_that_fits_needs_none(self) -> None:
        found = combined(GPT2)
        assert (found.changes, found.plan, found.price, found.smaller_passes) == ((), GPT2, Price(), False)

    def test_more_passes_come_before_anything_that_costs(self) -> None:
        found = combined(replace(GPT2, batch_size=64))
        assert names(found) == []
        assert (found.plan.batch_size, found.passes, found.smaller_passes) == (32, 2, True)

    def test_further_gpus_come_last(self) -> None:
        found = combined(Plan(find_model("llama-3.1-405b"), Recipe(), find_gpu("a100-80gb")))
        assert found.price.gpus > 0
        assert found.plan.recipe.gpus == 1 + found.price.gpus

    def test_what_never_fits_says_so(self) -> None:
        found = cheapest_combination(Plan(find_model("llama-3.1-405b"), Recipe(), find_gpu("gtx-1660-ti-6gb")))
        assert isinstance(found, Unknown)
        assert "1,024 GPUs" in found.reason

    @FEWER
    @given(plans())
    @example(
        plan=Plan(
            find_model("deepseek-v3"),
            Recipe("amp-bf16", sharding="deepspeed-zero1", gpus=7),
            find_gpu("h20-96gb"),
            batch_size=18,
            headroom=0.0,
        )
    )
    def test_it_fits_reaches_the_samples_and_costs_what_it_says(self, plan: Plan) -> None:
        found = cheapest_combination(plan)
        if isinstance(found, Unknown):
            return
        after = answer(found.plan)
        assert after.fits
        assert after == found.by_formula
        assert after.accumulation.global_batch_size >= (plan.target_batch or plan.batch_size * plan.recipe.gpus)
        assert conflict(found.plan.recipe) is None or conflict(plan.recipe) is not None
        priced = sum((change.price for change in found.changes), Price())
        assert priced <= found.price

    @FEWER
    @given(plans())
    def test_no_cheaper_set_fits(self, plan: Plan) -> None:
        """Against a plain search over all sets on the GPUs there are, each predicted as a whole."""
        found = cheapest_combination(plan)
        limit = None if isinstance(found, Unknown) or found.price.gpus else found.price
        usable = usable_of(plan)
        for chosen in every_set(plan):
            price = sum((change.price for change in chosen), Price())
            if limit is not None and price >= limit:
                continue
            setup = setup_of(plan)
            for change in chosen:
                setup = change.applied(setup)
            if conflict(setup.recipe) is None:
                samples = 1 if limit is None else plan.batch_size
                needed_bytes = predict(setup.shape, setup.recipe, samples, setup.extras).needed_bytes
                assert needed_bytes > usable, [change.name for change in chosen]


def every_set(plan: Plan) -> list[tuple[Technique, ...]]:
    """All sets of one change an axis, samples at most halved once, without further GPUs."""
    setup: Setup = setup_of(plan)
    axes: dict[str, list[Technique | None]] = {}
    for change in changes(setup, plan.gpu):
        if isinstance(change, Technique) and change.axis != "sharding" and change.key != "freeze-half":
            axes.setdefault(change.axis, [None]).append(change)
    held = stage_of(plan.recipe)
    if plan.recipe.gpus > 1:
        stages = [sharded(stage, plan.recipe.gpus, 0) for number, stage in enumerate(STAGES, 1) if number > held]
        axes["sharding"] = [None, *stages]
    sets = product(*axes.values())
    chosen = (tuple(change for change in one if change is not None) for one in sets)
    return [
        one
        for one in chosen
        if is_advisable(one, [one for one in axes.get("weights", ()) if one is not None]) and not tunes_adapters(one)
    ]


def tunes_adapters(chosen: tuple[Technique, ...]) -> bool:
    """Whether adapters, of which an optimizer keeps next to nothing, are given another one or a host's memory."""
    axes = {change.axis for change in chosen}
    return "weights" in axes and bool(axes & {"optimizer", "state"})
