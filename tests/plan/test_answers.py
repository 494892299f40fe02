"""The result of a plan, by formula and by trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, MIB, Bucket, Unknown
from gpumem_tui.plan.answers import answer, kernel_plans, largest_by_gpu, traced_answer
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.profile import beside_allocator_bytes
from tests.plan.plans import GPT2, TRACED, plans
from tests.search.traces import CONTEXT_BYTES


def test_the_documents_accumulation_example() -> None:
    plan = replace(GPT2, recipe=Recipe(gpus=8), batch_size=4, target_batch=256)
    steps = answer(plan).accumulation
    assert (steps.steps, steps.global_batch_size, steps.exact) == (8, 256, True)
    assert answer(plan).global_batch_tokens == 256 * 1024


def test_without_a_target_the_global_batch_is_one_pass() -> None:
    now = answer(replace(GPT2, recipe=Recipe(gpus=4)))
    assert (now.accumulation.steps, now.accumulation.global_batch_size) == (1, 32)


def test_a_pass_has_all_micro_batches_of_a_pipeline() -> None:
    """Megatron-LM's own: global batch = micro-batch × data parallel × micro-batches."""
    recipe = Recipe("amp-bf16", gpus=64, tensor_parallel=8, pipeline_parallel=4, micro_batches=16, sharding="zero1")
    now = answer(replace(GPT2, shape=find_model("llama-3-8b"), recipe=recipe, batch_size=1))
    assert (now.accumulation.steps, now.accumulation.global_batch_size) == (1, 1 * 2 * 16)
    twice = answer(replace(now.plan, target_batch=64))
    assert (twice.accumulation.steps, twice.global_batch_tokens) == (2, 64 * 2048)
    assert answer(replace(now.plan, recipe=replace(recipe, micro_batches=0))).accumulation.global_batch_size == 2 * 4


def test_a_network_without_a_sequence_has_no_tokens() -> None:
    assert answer(replace(GPT2, shape=find_model("resnet-50"))).global_batch_tokens == 0


def test_what_fits_says_what_is_left() -> None:
    now = answer(GPT2)
    assert now.fits
    assert now.obstacle is None
    usable_bytes = int(0.9 * GPT2.gpu.total_bytes) - beside_allocator_bytes(GPT2.gpu)
    assert now.spare_bytes == usable_bytes - now.prediction.needed_bytes > 0


def test_what_does_not_fit_says_what_is_missing_and_why() -> None:
    now = answer(replace(GPT2, batch_size=64))
    assert 40 <= now.max_batch_size <= 45  # traced with the same headroom: 45
    assert not now.fits
    assert now.spare_bytes < 0
    assert now.obstacle == (
        "batch size 64 does not fit: activations and temporary together need 86.66 GiB "
        "of the NVIDIA A100 80 GB's usable 70.48 GiB"
    )


def test_what_takes_exactly_what_there_is_fits() -> None:
    now = answer(GPT2)
    needed_bytes = now.prediction.needed_bytes
    assert replace(now, usable_bytes=needed_bytes).fits
    assert not replace(now, usable_bytes=needed_bytes - 1).fits


def test_eight_billion_parameters_in_fp32_exceed_80_gib_before_the_first_sample() -> None:
    now = answer(Plan(find_model("llama-3-8b"), Recipe(), find_gpu("a100-80gb")))
    assert now.max_batch_size == 0
    scratch_bytes = now.breakdown[Bucket.TEMPORARY]
    assert (now.prediction.fixed_bytes - scratch_bytes) / GIB == pytest.approx(119.7, abs=0.1)


@given(plans())
def test_fits_is_the_same_as_not_above_the_largest_batch(plan: Plan) -> None:
    now = answer(plan)
    assert now.fits == (plan.batch_size <= now.max_batch_size)
    assert now.fits == (now.obstacle is None)
    assert now.accumulation.global_batch_size >= (plan.target_batch or 0)


class TestTraced:
    def test_batch_headroom_and_target_need_no_other_trace(self) -> None:
        found = traced_answer(replace(GPT2, batch_size=3, headroom=0.5), TRACED)
        assert found.breakdown[Bucket.ACTIVATIONS] == 300 * MIB
        assert found.peak_allocated_bytes == found.breakdown.total_bytes
        assert found.device_used_bytes == found.peak_reserved_bytes + CONTEXT_BYTES
        assert found.fits

    def test_the_gpus_memory_decides_from_the_same_trace(self) -> None:
        large, small = (traced_answer(replace(GPT2, gpu=find_gpu(name)), TRACED) for name in ("a100-80gb", "a100-40gb"))
        assert isinstance(large.max_batch_size, int)
        assert isinstance(small.max_batch_size, int)
        assert large.max_batch_size > small.max_batch_size > 0
        assert small.total_bytes == find_gpu("a100-40gb").cuda_total_bytes

    def test_the_largest_batch_fits_and_one_more_does_not(self) -> None:
        largest = traced_answer(GPT2, TRACED).max_batch_size
        assert isinstance(largest, int)
        assert traced_answer(replace(GPT2, batch_size=largest), TRACED).fits
        beyond = traced_answer(replace(GPT2, batch_size=largest + 1), TRACED)
        assert not beyond.fits
        assert beyond.fit == "fits"
        assert not beyond.keeps_headroom

    def test_without_headroom_the_largest_batch_is_what_runs(self) -> None:
        whole = traced_answer(replace(GPT2, headroom=0.0), TRACED)
        assert whole.max_batch_size == whole.full_batch_size
        assert isinstance(whole.max_batch_size, int)
        beyond = traced_answer(replace(GPT2, headroom=0.0, batch_size=whole.max_batch_size + 1), TRACED)
        assert beyond.fit != "fits"
        assert beyond.spare_bytes < 0

    def test_a_finder_of_the_trace_answers_alike(self) -> None:
        finder = BatchFinder(TRACED.trace)
        for name in ("a100-80gb", "a100-40gb", "h100-80gb"):
            plan = replace(GPT2, gpu=find_gpu(name))
            assert traced_answer(plan, TRACED, finder).worked_out() == traced_answer(plan, TRACED).worked_out()

    def test_a_step_that_does_not_grow_has_no_largest_batch(self) -> None:
        constant = replace(TRACED.trace, slopes=(0,) * len(TRACED.trace.slopes))
        found = traced_answer(GPT2, TRACED.with_trace(constant), BatchFinder(constant))
        assert isinstance(found.max_batch_size, Unknown)
        assert "grows" in found.max_batch_size.reason


def test_gpus_whose_attention_takes_another_kernel_are_answered_by_a_trace_of_one_of_them() -> None:
    plan = replace(GPT2, recipe=Recipe("amp-bf16"))
    traced, asked = TRACED, list[Plan]()

    def trace_of(there: Plan) -> Traced:
        asked.append(there)
        return replace(traced, ready=replace(traced.ready, profile=f"torch 2.13 {there.gpu.sm}"))

    rows = largest_by_gpu(plan, traced, trace_of)
    assert asked == list(kernel_plans(plan))
    assert 1 <= len(asked) <= 3
    assert all(isinstance(row.traced, int) for row in rows)
    without = {row.gpu.name: row.traced for row in largest_by_gpu(plan, traced)}
    assert {one.gpu.name for one in asked} <= {name for name, found in without.items() if isinstance(found, Unknown)}
    why = without[asked[0].gpu.name]
    assert isinstance(why, Unknown)
    assert "another kernel" in why.reason


def test_every_gpu_is_of_the_class_of_the_plan_or_of_one_that_is_asked_for() -> None:
    for precision in ("fp32", "bf16", "amp-fp16"):
        plan = replace(GPT2, recipe=Recipe(precision))
        assert len(kernel_plans(plan)) == 1, "before compute capability 8.0, and from it on"
    assert not kernel_plans(replace(GPT2, recipe=Recipe(attention="math")))
