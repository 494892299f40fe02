"""Advice with the documents' own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import PRECISIONS, Recipe
from gpumem_tui.plan.judgement import batch_norm, judgements, precision
from gpumem_tui.plan.plan import Plan
from tests.plan.plans import GPT2

A100 = find_gpu("a100-80gb")
RESNET = Plan(find_model("resnet-50"), Recipe(), A100, batch_size=32)


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


def test_every_judgement_names_its_source() -> None:
    found = judgements(RESNET)
    assert len({judgement.key for judgement in found}) == len(found) == 8
    assert all(judgement.source and judgement.text.endswith(".") for judgement in found)
