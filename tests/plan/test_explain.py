"""Every row, decision, technique and judgement has a help text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.predict import terms
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.explain import DECISIONS, explanations
from gpumem_tui.plan.judgement import judgements
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import techniques
from tests.plan.plans import GPT2, LLAMA_ON_FOUR, plans


@given(plans())
def test_nothing_is_left_unexplained(plan: Plan) -> None:
    found, judged = explanations(plan), techniques(plan)
    keys = list({row.name: None for row in terms(plan.shape, plan.recipe, plan.batch_size, plan.extras)})
    keys += [entry.change.key for entry in judged.helping] + [entry.key for entry in judged.not_applicable]
    keys.append("eager" if plan.recipe.compile else "compile")
    keys += [advice.key for advice in judgements(plan)]
    assert len(set(keys)) == len(keys), "a key names one thing"
    textbook = {"textbook-parameters", "textbook-activations"}
    assert set(keys) | (set(DECISIONS) - textbook) <= found.keys() <= set(keys) | set(DECISIONS)
    for explanation in found.values():
        assert explanation.formula
        assert explanation.numbers
        assert explanation.source


def test_a_row_has_its_arithmetic() -> None:
    found = explanations(GPT2)["parameters"]
    assert found.numbers == "124,439,808 · 4 = 0.46 GiB"
    assert found.formula == "N · w"


def test_a_row_of_one_block_is_explained_as_the_row_it_is() -> None:
    plan = replace(GPT2, recipe=Recipe(recompute="full"))
    assert (
        explanations(plan)["attention, one block while recomputed"].formula == explanations(GPT2)["attention"].formula
    )


def test_the_documents_0_9_rule() -> None:
    plan = Plan(find_model("gpt2"), Recipe(), find_gpu("a100-80gb"))
    assert explanations(plan)["usable"].numbers == "80.00 GiB · 0.9 − 1.52 GiB = 70.48 GiB"


def test_the_documents_accumulation_example() -> None:
    plan = replace(GPT2, recipe=Recipe(gpus=8), batch_size=4, target_batch=256)
    assert explanations(plan)["accumulation"].numbers == "256 / (4 · 8) = 8"
    rounded = explanations(replace(plan, target_batch=250))["accumulation"].numbers
    assert rounded == "250 / (4 · 8) = 8, rounded up: 256 samples instead"


def test_the_textbook_s_parameter_count() -> None:
    found = explanations(GPT2)["textbook-parameters"]
    assert found.numbers.endswith("= 123,653,376")
    assert "124,439,808" in found.limits


def test_the_textbook_s_activations_at_gpt3_scale() -> None:
    """2.8 GiB a layer without recompute and a thirtieth of that with full recompute, for one sequence."""
    found = explanations(Plan(find_model("megatron-175b"), Recipe(), find_gpu("a100-80gb")))["textbook-activations"]
    assert found.formula.startswith("L·S·b·h·(34 + 5·a·S/h)")
    assert found.numbers == "recompute none: 256.50 GiB; recompute selective: 76.50 GiB; recompute full: 7.17 GiB"
    assert "without the logits" in found.limits


def test_the_missing_logits_are_told_where_they_are_counted() -> None:
    assert "not in the textbook form" in explanations(GPT2)["output head: logits"].limits


def test_a_technique_tells_before_and_after_and_the_cost() -> None:
    found = explanations(GPT2)["full-recompute"]
    assert " → " in found.numbers
    assert "30 to 40 % more time" in found.limits
    assert "cannot be traced" in explanations(GPT2)["chunked-loss"].limits


def test_what_is_not_applicable_is_explained_too() -> None:
    assert explanations(LLAMA_ON_FOUR)["fused-attention"].numbers.startswith("not here: PyTorch's own choice")


def test_an_unknown_key() -> None:
    with pytest.raises(KeyError):
        explanations(GPT2)["astrology"]
