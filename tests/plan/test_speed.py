"""How fast a plan is by a roofline, or why that is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import GpuPrice, find_gpu, find_model, gpus, list_prices, models
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import largest_by_gpu
from gpumem_tui.plan.goals import Goals
from gpumem_tui.plan.judgement import busy, cost, scaling
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.speed import Cost, busy_share, by_cost, cost_of, price_of, rate, run, saturating_batch, throughput
from tests.formula.flops import training_flops
from tests.plan.plans import GPT2

A100, T4 = find_gpu("a100-80gb"), find_gpu("t4-16gb")
AMP = replace(GPT2, recipe=Recipe("amp-bf16"))


class TestRate:
    @pytest.mark.parametrize(
        ("gpu", "precision", "images_per_s"),
        [("a100-80gb", "amp-fp16", 2470), ("a100-80gb", "fp32", 938), ("v100-16gb", "amp-fp16", 1200),
         ("v100-16gb", "fp32", 367)],
    )  # fmt: skip
    def test_resnet_50_as_nvidia_measured_it(self, gpu: str, precision: str, images_per_s: float) -> None:
        """NVIDIA/DeepLearningExamples, ResNet-50 v1.5 for PyTorch, one GPU of a DGX A100 or DGX-1, batch 256."""
        recipe = Recipe(precision, "sgd-momentum")  # type: ignore[arg-type]
        found = rate(Plan(find_model("resnet-50"), recipe, find_gpu(gpu), 256))
        assert not isinstance(found, Unknown)
        assert 0.95 * found.least < images_per_s < 1.05 * found.most

    def test_what_is_not_known_says_why(self) -> None:
        emulated = rate(replace(AMP, gpu=T4))
        assert isinstance(emulated, Unknown)
        assert "bfloat16 by emulation" in emulated.reason
        unheard_of = rate(replace(AMP, gpu=replace(A100, title="NVIDIA Z900", speed=None)))
        assert isinstance(unheard_of, Unknown)
        assert "NVIDIA Z900 is not in the catalog" in unheard_of.reason
        offloaded = rate(replace(AMP, extras=frozenset({"offload-optimizer"})))
        assert isinstance(offloaded, Unknown)
        assert "bus" in offloaded.reason

    def test_recompute_costs_a_forward(self) -> None:
        plain, again = rate(AMP), rate(replace(AMP, recipe=Recipe("amp-bf16", recompute="full")))
        assert not isinstance(plain, Unknown)
        assert not isinstance(again, Unknown)
        assert 1.15 < plain.most / again.most < 4 / 3

    def test_frozen_weights_cost_backward_one_product_instead_of_two(self) -> None:
        shape = find_model("llama-3-8b")
        every, adapters = (training_flops(shape, Recipe("bf16", adapter=adapter)) for adapter in ("none", "lora"))
        assert isinstance(every, int)
        assert isinstance(adapters, int)
        assert adapters / every == pytest.approx(2 / 3, rel=0.05), "4 N instead of 6 N, with attention's core as before"

    def test_active_experts_are_computed_and_all_are_read(self) -> None:
        mixtral = find_model("mixtral-8x7b")
        flops = training_flops(mixtral, Recipe("bf16"))
        assert isinstance(flops, int)
        assert flops / (6 * 12.9e9 * mixtral.seq_len) == pytest.approx(1, rel=0.1)

    def test_the_update_is_paid_once_a_step(self) -> None:
        one, many = rate(replace(AMP, batch_size=1)), rate(replace(AMP, batch_size=1, target_batch=64))
        assert not isinstance(one, Unknown)
        assert not isinstance(many, Unknown)
        assert one.most < many.most


class TestThroughput:
    @pytest.mark.parametrize("name", models())
    def test_the_saturating_batch_is_the_first_that_is_busy(self, name: str) -> None:
        plan = Plan(find_model(name), Recipe(), A100)
        batch = saturating_batch(plan)
        assert busy_share(plan, batch) >= 0.95
        assert batch == 1 or busy_share(plan, batch - 1) < 0.95

    def test_each_model_has_its_own_curve(self) -> None:
        found = {
            name: saturating_batch(Plan(find_model(name), Recipe(), A100)) for name in ("gpt2", "mlp", "resnet-50")
        }
        assert len(set(found.values())) == 3, found

    def test_rises_and_flattens(self) -> None:
        curve = throughput(replace(AMP, batch_size=1))
        assert [series.name for series in curve.series] == ["at 30 %", "at 46 %"]
        for series in curve.series:
            rates = [y for _, y in series.points]
            assert rates == sorted(rates)
            assert rates[-1] < 1.1 * rates[-2]
        assert "not measured" in curve.note
        assert "312 TFLOP/s" in curve.note

    def test_is_relative_where_no_rate_is_known(self) -> None:
        curve = throughput(replace(AMP, gpu=replace(A100, speed=None)))
        assert curve.y_label == "% of the highest"
        assert "not in the catalog" in curve.note

    def test_the_batch_that_is_busy_is_named_once(self) -> None:
        batch = saturating_batch(GPT2)
        assert f", {batch} at least 95 %." in busy(replace(GPT2, batch_size=batch + 1)).text
        here = busy(replace(GPT2, batch_size=batch)).text
        assert here.count(f"micro-batch {batch} gives") == 1
        assert "at least 95 %" not in here

    def test_accumulation_steps_cost_passes(self) -> None:
        assert "8 accumulation steps cost 8 passes" in busy(replace(GPT2, batch_size=4, target_batch=32)).text


class TestCost:
    def test_hours_and_cost_by_hand(self) -> None:
        found, speed = run(replace(AMP, goals=Goals(tokens=10**9, price=2.5))), rate(AMP)
        assert not isinstance(found, Unknown)
        assert not isinstance(speed, Unknown)
        hours = [10**9 / (samples_per_s * AMP.shape.seq_len) / 3600 for samples_per_s in (speed.most, speed.least)]
        assert found.hours == pytest.approx(hours)
        assert found.cost == pytest.approx([2.5 * one for one in hours])

    def test_more_gpus_take_less_time_and_no_less_money(self) -> None:
        one = run(replace(AMP, goals=Goals(tokens=10**9, price=1)))
        eight = run(replace(AMP, recipe=Recipe("amp-bf16", gpus=8), goals=Goals(tokens=10**9, price=1)))
        assert not isinstance(one, Unknown)
        assert not isinstance(eight, Unknown)
        assert eight.link is not None
        assert eight.link.name == "NVLink"
        assert one.hours[0] / 8 <= eight.hours[0] < one.hours[0] / 7
        assert one.cost is not None
        assert eight.cost is not None
        assert eight.cost[1] >= one.cost[1]

    def test_says_what_is_missing(self) -> None:
        assert "--tokens" in cost(GPT2).text
        unpriced = replace(GPT2, gpu=find_gpu("a40-48gb"), goals=Goals(tokens=10**9))
        assert "--price" in cost(unpriced).text


class TestCuts:
    """A network that is cut over GPUs is one copy of it on all of them."""

    def plan(self, **cuts: int) -> Plan:
        gpus = 8
        recipe = Recipe("bf16", gpus=gpus, recompute="full", **cuts)  # type: ignore[arg-type]
        return Plan(find_model("llama-3-70b"), recipe, find_gpu("h100-80gb"), 1, target_batch=8)

    def hours(self, plan: Plan) -> float:
        found = run(replace(plan, goals=Goals(tokens=10**9)))
        assert not isinstance(found, Unknown)
        return found.hours[0]

    def test_tensor_parallel_sends_what_lies_between_the_blocks(self) -> None:
        plain, cut = self.hours(self.plan()), self.hours(self.plan(tensor_parallel=8))
        assert plain < cut < 2 * plain

    def test_a_slower_link_costs_more(self) -> None:
        cut = self.plan(tensor_parallel=8)
        assert self.hours(replace(cut, gpu=find_gpu("h100-nvl-94gb"))) > 1.5 * self.hours(cut)

    def test_a_pipeline_waits_less_with_more_micro_batches(self) -> None:
        few = self.hours(self.plan(pipeline_parallel=8, micro_batches=8))
        many = self.hours(self.plan(pipeline_parallel=8, micro_batches=64))
        assert few / many == pytest.approx((1 + 7 / 8) / (1 + 7 / 64), rel=0.05)

    def test_a_pass_has_the_samples_of_each_copy(self) -> None:
        table = scaling(self.plan(tensor_parallel=4)).table
        assert table is not None
        assert [(row[0], row[4]) for row in table.rows][:2] == [("8", "2"), ("8", "2")]


class TestScaling:
    def test_a_faster_link_keeps_more(self) -> None:
        table = scaling(replace(AMP, batch_size=1)).table
        assert table is not None
        kept = {(row[0], row[1].split(",")[0]): float(row[2].split(" ")[0]) for row in table.rows}
        assert kept["8", "NVLink"] > kept["8", "PCIe"]
        assert kept["8", "PCIe"] > kept["64", "nodes"] or kept["64", "nodes"] > kept["16", "nodes"] - 5

    def test_cards_without_nvlink_have_no_row_of_it_and_bridges_join_two(self) -> None:
        ada = scaling(replace(AMP, gpu=find_gpu("rtx-4090-24gb"))).table
        ampere = scaling(replace(AMP, gpu=find_gpu("rtx-3090-24gb"))).table
        assert ada is not None
        assert ampere is not None
        assert not [row for row in ada.rows if "NVLink" in row[1]]
        assert [row[0] for row in ampere.rows if "NVLink" in row[1]] == ["2"]

    def test_unknown_where_the_rate_is(self) -> None:
        assert scaling(replace(AMP, gpu=T4)).text.startswith("Not known: ")


class TestPrices:
    def test_a_million_tokens_by_hand(self) -> None:
        found = cost_of(replace(AMP, goals=Goals(price=3.6)), AMP.gpu)
        speed = rate(AMP)
        assert isinstance(found, Cost)
        assert not isinstance(speed, Unknown)
        tokens_per_s = speed.most * AMP.shape.seq_len
        assert found.per_million[0] == pytest.approx(1e6 / tokens_per_s / 3600 * 3.6)
        assert found.price.words == "3.6 USD"

    def test_what_is_typed_comes_before_the_settings_and_those_before_the_list(self) -> None:
        listed, paid = price_of(AMP), replace(AMP, goals=Goals(prices=((AMP.gpu.name, 1.0),)))
        assert listed is not None
        assert "list price of 20" in listed.source
        assert listed.currency == "USD"
        assert price_of(paid) == GpuPrice(1.0, "your price", "USD")
        both = replace(paid, goals=replace(paid.goals, price=0.5))
        assert price_of(both) == GpuPrice(0.5, "your price", "USD")
        assert price_of(both, T4) == list_prices()[T4.name]

    def test_the_cheapest_is_first_and_what_does_not_fit_is_left_out(self) -> None:
        plan = replace(GPT2, batch_size=16)
        costs = by_cost(plan, largest_by_gpu(plan, None))
        assert {row.gpu.name for row, _ in costs} < set(list_prices())
        assert all(row.largest >= 16 for row, _ in costs)
        assert [sum(cost.per_million) for _, cost in costs] == sorted(sum(cost.per_million) for _, cost in costs)

    def test_every_list_price_is_of_a_gpu_of_the_catalog(self) -> None:
        assert set(list_prices()) <= set(gpus())
