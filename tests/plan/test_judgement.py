"""Advice with the documents' own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model, models
from gpumem_tui.formula.recipe import PRECISIONS, Recipe
from gpumem_tui.plan.judgement import (
    batch_norm,
    busy_share,
    critical_batch,
    judgements,
    learning_rate,
    precision,
    rate_factors,
    saturating_batch,
    scaling,
    throughput,
)
from gpumem_tui.plan.measured import MeasuredRate, rate_of, rates_for
from gpumem_tui.plan.plan import Plan
from gpumem_tui.trial.events import TrialDone
from gpumem_tui.workload.spec import WorkloadSpec
from tests.plan.plans import GPT2

A100 = find_gpu("a100-80gb")
RESNET = Plan(find_model("resnet-50"), Recipe(), A100, batch_size=32)


def _rate(batch_size: int, samples_per_s: float) -> MeasuredRate:
    return MeasuredRate(GPT2.shape, GPT2.recipe, GPT2.gpu, batch_size, samples_per_s)


class TestThroughput:
    def test_rises_until_saturated_then_stays_flat(self) -> None:
        shares = [y for _, y in throughput(replace(GPT2, batch_size=1)).series[0].points]
        assert shares == sorted(shares)
        assert shares[0] < shares[-1] == shares[-2] == 100

    @pytest.mark.parametrize("name", models())
    def test_the_saturating_batch_is_the_first_that_is_busy(self, name: str) -> None:
        shape = find_model(name)
        batch = saturating_batch(shape, A100)
        assert busy_share(shape, A100, batch) == 1
        assert batch == 1 or busy_share(shape, A100, batch - 1) < 1

    @pytest.mark.parametrize(
        ("gpu", "multiprocessors"),
        [("t4-16gb", 40), ("v100-16gb", 80), ("a100-80gb", 108), ("rtx-3090-24gb", 82), ("rtx-4090-24gb", 128),
         ("l40s-48gb", 142), ("h100-80gb", 132), ("h200-141gb", 132), ("b200-180gb", 148)],
    )  # fmt: skip
    def test_each_gpu_has_its_own_multiprocessors(self, gpu: str, multiprocessors: int) -> None:
        plan = replace(GPT2, gpu=find_gpu(gpu), batch_size=1)
        assert f"for each of {multiprocessors} multiprocessors;" in throughput(plan).note
        tiles = plan.shape.seq_len * plan.shape.hidden / 128**2
        assert saturating_batch(plan.shape, plan.gpu) == -int(-multiprocessors // tiles)

    def test_those_that_are_not_known_are_called_assumed(self) -> None:
        unheard_of = replace(A100, name="0", title="NVIDIA Z900", multiprocessors=None)
        note = throughput(replace(GPT2, gpu=unheard_of)).note
        assert "108 multiprocessors (an A100's: those of NVIDIA Z900 are not known)" in note

    def test_the_model_is_called_one(self) -> None:
        assert "not measured" in throughput(GPT2).note

    def test_measured_points_take_its_place(self) -> None:
        rates = (_rate(4, 60.0), _rate(8, 96.0), _rate(16, 98.0))
        curve = throughput(GPT2, rates)
        assert curve.series[0].points == ((4.0, 60.0), (8.0, 96.0), (16.0, 98.0))
        assert (curve.y_label, curve.series[0].name) == ("samples/s", "measured")
        assert "model" not in curve.note
        text = judgements(GPT2, rates)[0].text
        assert text.startswith(
            "Measured by the search: 98 samples/s at most, at micro-batch 16; micro-batch 8 already gives 96. "
        )

    def test_only_the_same_step_on_the_same_gpu_is_measured(self) -> None:
        rates = [_rate(8, 90.0), _rate(4, 60.0), _rate(8, 95.0)]
        assert rates_for(replace(GPT2, batch_size=3), rates) == (rates[1], rates[2])
        assert rates_for(replace(GPT2, recipe=Recipe("bf16")), rates) == ()
        assert rates_for(replace(GPT2, gpu=find_gpu("h100-80gb")), rates) == ()
        assert rates_for(replace(GPT2, extras=frozenset({"chunked-loss"})), rates) == ()

    def test_a_trial_is_timed_without_its_first_step(self) -> None:
        trial = TrialDone(8, "fit", 0, 0, 0, {}, "", 9.0, 4, step_seconds=(5.0, 0.1, 0.3, 0.2))
        workload = WorkloadSpec(GPT2.recipe, GPT2.shape)
        assert rate_of(workload, GPT2.gpu, trial) == _rate(8, 8 / 0.2)
        assert rate_of(workload, GPT2.gpu, replace(trial, step_seconds=(5.0,))) is None
        assert rate_of(workload, GPT2.gpu, replace(trial, outcome="oom")) is None
        assert rate_of(WorkloadSpec(GPT2.recipe, file="train.py"), GPT2.gpu, trial) is None

    def test_accumulation_steps_cost_passes(self) -> None:
        found = judgements(replace(GPT2, batch_size=4, target_batch=32))[0]
        assert "8 accumulation steps cost 8 passes" in found.text


class TestCriticalBatch:
    def test_the_documents_table(self) -> None:
        table = critical_batch(GPT2).table
        assert table is not None
        assert [row[:2] for row in table.rows] == [
            ("CIFAR-10", "256"), ("ImageNet", "2,048"), ("some language models", "65,536"),
        ]  # fmt: skip

    @pytest.mark.parametrize(("target", "above"), [(256, 0), (257, 1), (4096, 2), (65_537, 3)])
    def test_says_where_the_plan_stands(self, target: int, above: int) -> None:
        table = critical_batch(replace(GPT2, batch_size=1, target_batch=target)).table
        assert table is not None
        assert [row[2] for row in table.rows].count("above") == above

    def test_one_sample_is_one(self) -> None:
        assert "The plan's 1 sample is within" in critical_batch(replace(GPT2, batch_size=1, target_batch=None)).text


class TestLearningRate:
    def test_root_two_to_two_for_a_doubling(self) -> None:
        assert rate_factors(256, 512) == pytest.approx((2**0.5, 2.0))

    def test_halving_is_the_inverse(self) -> None:
        assert rate_factors(512, 256) == pytest.approx((0.5, 2**-0.5))

    def test_imagenet_in_an_hour(self) -> None:
        found = learning_rate(replace(GPT2, batch_size=32, target_batch=8192))
        assert "5.66 to 32.00" in found.text
        assert "Warm up" in found.text
        assert "LARS" in found.text

    def test_small_batches_need_neither(self) -> None:
        text = learning_rate(GPT2).text
        assert "Warm up" not in text
        assert "LARS" not in text


class TestBatchNorm:
    @pytest.mark.parametrize(("batch_size", "warning"), [(15, True), (16, False)])
    def test_warns_below_16(self, batch_size: int, warning: bool) -> None:
        assert batch_norm(replace(RESNET, batch_size=batch_size)).warning == warning

    def test_looks_at_the_micro_batch_not_the_global_one(self) -> None:
        found = batch_norm(replace(RESNET, batch_size=8, target_batch=256))
        assert found.warning
        assert "accumulation does not help" in found.text

    def test_a_transformer_has_none(self) -> None:
        assert not batch_norm(replace(GPT2, batch_size=1)).warning


class TestPrecision:
    def test_the_documents_figures(self) -> None:
        table = precision(GPT2).table
        assert table is not None
        formats = {row[0]: row for row in table.rows}
        assert formats["fp16"] == ("fp16", "65,504", "6e-8", "10", "needed")
        assert formats["bf16"][3] == "7"
        assert formats["fp32"][3] == "23"

    @pytest.mark.parametrize("name", PRECISIONS)
    def test_every_precision_has_advice(self, name: str) -> None:
        recipe = replace(GPT2.recipe, precision=name)  # type: ignore[arg-type]
        assert precision(replace(GPT2, recipe=recipe)).text

    def test_bfloat16_on_a_gpu_without_it_is_a_warning(self) -> None:
        plan = replace(GPT2, recipe=Recipe("amp-bf16"), gpu=find_gpu("t4-16gb"))
        assert precision(plan).warning
        assert "take amp-fp16" in precision(plan).text


def test_scaling_over_gpus() -> None:
    table = scaling(replace(GPT2, batch_size=4)).table
    assert table is not None
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["2"] == ("90 to 97.5 %", "1.8 to 1.95×", "8")
    assert rows["8"] == ("90 to 95 %", "7.2 to 7.6×", "32")
    assert rows["64"][0] == "80 to 90 %"


def test_every_judgement_names_its_source() -> None:
    found = judgements(RESNET)
    assert len({judgement.key for judgement in found}) == len(found) == 6
    assert all(judgement.source and judgement.text.endswith(".") for judgement in found)
