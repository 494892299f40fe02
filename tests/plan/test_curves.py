"""Curves: each point is the answer of the plan that is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, Bucket
from gpumem_tui.plan.answers import answer, headroom_of, largest_by_gpu
from gpumem_tui.plan.curves import (
    Curve,
    activations_by_recompute,
    batch_by_gpu,
    batch_by_model,
    batch_by_sample_size,
    curves,
    memory_over_step,
)
from gpumem_tui.plan.plan import Plan
from tests.plan.plans import GPT2, LLAMA_ON_FOUR, TRACED, plans

LLAMA = Plan(find_model("llama-3.2-1b"), Recipe("amp-bf16", attention="math"), find_gpu("a100-80gb"))


def line(curve: Curve | None, index: int = 0) -> dict[float, float]:
    assert curve is not None
    return dict(curve.series[index].points)


@given(plans())
def test_points_rise_along_x_and_the_plan_stands_among_them(plan: Plan) -> None:
    largest = answer(plan).max_batch_size
    for curve in curves(plan):
        for series in curve.series:
            xs = [x for x, _ in series.points]
            assert xs == sorted(set(xs))
            assert not series.names or len(series.names) == len(xs)
        if curve.y_label == "largest batch":
            assert curve.x_here is not None
            assert line(curve)[curve.x_here] == largest


def test_doubling_the_sequence_more_than_halves_the_batch() -> None:
    found = line(batch_by_sample_size(LLAMA))
    assert found[2048] > 2 * found[4096] > 4 * found[8192]


def test_a_model_with_positions_ends_where_they_do() -> None:
    assert max(line(batch_by_sample_size(GPT2))) == 1024


def test_images_have_a_side_instead_of_a_sequence() -> None:
    found = batch_by_sample_size(replace(GPT2, shape=find_model("vit-b-16")))
    assert found is not None
    assert found.x_label == "image side"
    assert all(side % 16 == 0 for side in line(found))


def test_larger_models_leave_room_for_fewer_samples() -> None:
    found = batch_by_model(LLAMA)
    assert found is not None
    sizes = [largest for _, largest in found.series[0].points]
    assert found.series[0].names[0] == "smollm2-135m"
    assert sizes[0] > sizes[-1] == 0
    assert found.x_here == pytest.approx(1.2358, abs=1e-4)


def test_an_mlp_grows_in_width() -> None:
    found = batch_by_model(replace(GPT2, shape=find_model("mlp")))
    assert found is not None
    assert found.series[0].names[1].startswith("hidden ")


def test_more_memory_never_holds_less() -> None:
    by_gpu = line(batch_by_gpu(GPT2))
    for gib, largest in by_gpu.items():
        # One of two GPUs of equal size may have the larger context, or the driver's larger reserve.
        assert all(more >= largest for other, more in by_gpu.items() if other > 1.1 * gib)
    assert by_gpu[80] == answer(GPT2).max_batch_size


class TestActivations:
    def test_recompute_strategies_in_the_documents_order(self) -> None:
        found = activations_by_recompute(LLAMA)
        assert found is not None
        assert [series.name for series in found.series] == ["none", "selective", "full"]
        none, selective, full = (line(found, index)[8192] for index in range(3))
        assert none > 2 * selective
        assert selective > 1.5 * full

    def test_unfused_scores_grow_with_the_square(self) -> None:
        found = line(activations_by_recompute(LLAMA))
        assert found[65_536] > 3.5 * found[32_768]
        fused = line(activations_by_recompute(replace(LLAMA, recipe=Recipe("amp-bf16"))))
        assert fused[65_536] == pytest.approx(2 * fused[32_768], rel=0.01)

    def test_networks_without_samples_of_a_size_have_none(self) -> None:
        assert activations_by_recompute(replace(GPT2, shape=find_model("mlp"))) is None


class TestOverStep:
    def test_the_schematic_follows_the_documents_order(self) -> None:
        curve = memory_over_step(GPT2)
        parts = {series.name: [y for _, y in series.points] for series in curve.series}
        half = len(curve.marks) // 2
        assert [mark.label for mark in curve.marks[:half]] == [
            "batch 1", "forward 1", "backward 1", "blocks 1", "backward ends 1", "optimizer 1",
        ]  # fmt: skip
        assert parts["activations"][1] > parts["activations"][3] > parts["activations"][4] > 0
        assert parts["gradients"][2] == 0
        assert 0 < parts["gradients"][3] < parts["gradients"][4] == parts["gradients"][5]
        assert parts["optimizer state"][: half - 1] == [0] * (half - 1)
        assert len(set(parts["optimizer state"][half - 1 :])) == 1
        assert parts["optimizer state"][half] > 0
        assert "schematic" in curve.note

    def test_the_schematic_has_the_formulas_sizes(self) -> None:
        parts = {series.name: max(y for _, y in series.points) for series in memory_over_step(GPT2).series}
        for bucket, size_bytes in answer(GPT2).breakdown.buckets.items():
            assert parts.get(bucket.title, 0) == size_bytes / GIB

    def test_a_trace_is_drawn_with_its_phases(self) -> None:
        curve = memory_over_step(GPT2, TRACED)
        assert [mark.label for mark in curve.marks] == [
            f"{phase} {step}" for step in (1, 2) for phase in ("batch", "forward", "backward", "optimizer")
        ]
        assert "traced" in curve.note
        assert curve.stacked
        parts = {series.name: dict(series.points) for series in curve.series}
        backward, later = curve.marks[2].x, curve.marks[6].x
        assert max(parts["activations"].values()) == 8 * 100 / 1024
        assert parts["optimizer state"][min(x for x in parts["optimizer state"] if x >= backward)] == 0
        assert parts["optimizer state"][min(x for x in parts["optimizer state"] if x >= later)] == 800 / 1024

    def test_its_highest_moment_is_the_trace_s_peak(self) -> None:
        curve = memory_over_step(GPT2, TRACED)
        totals = [sum(ys) for ys in zip(*([y for _, y in series.points] for series in curve.series), strict=True)]
        breakdown = TRACED.at(GPT2.batch_size).breakdown
        peak_bytes = breakdown.total_bytes - breakdown[Bucket.OTHER]
        assert max(totals) == pytest.approx(peak_bytes / GIB, rel=1e-3)


def test_nothing_fits_is_drawn_as_zero() -> None:
    assert set(line(batch_by_sample_size(LLAMA_ON_FOUR)).values()) == {0}


def test_a_trace_has_a_line_of_its_own_over_the_gpus() -> None:
    plan = replace(GPT2, recipe=Recipe("amp-bf16"))
    by_formula, by_trace = (line(batch_by_gpu(plan, largest_by_gpu(plan, TRACED)), index) for index in (0, 1))
    assert by_trace[plan.gpu.total_bytes / GIB] == TRACED.max_batch_size_leaving(headroom_of(plan))
    assert by_trace.keys() < by_formula.keys(), "Turing takes another attention kernel than was traced"
    assert len(batch_by_gpu(plan).series) == 1
