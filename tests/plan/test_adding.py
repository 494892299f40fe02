"""A technique is whole: it changes bytes, a control has it, and the help explains it. Commands know theirs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import EXTRAS, OPTIMIZERS, Recipe
from gpumem_tui.formula.rows import ROW_WORDS
from gpumem_tui.formula.techniques import (
    ALLOCATOR,
    INJECTED,
    MORE_RANKS,
    TYPED,
    Technique,
    catalog_techniques,
    changes,
    injected,
    techniques_of,
)
from gpumem_tui.memory import Bucket
from gpumem_tui.plan.answers import setup_of, with_setup
from gpumem_tui.plan.combination import Effect
from gpumem_tui.plan.control import Choice
from gpumem_tui.plan.controls import control_of, controls
from gpumem_tui.plan.explain import explanations
from gpumem_tui.plan.plan import Plan, draft_of
from gpumem_tui.plan.techniques import COMBINED_AXES, techniques

A100 = find_gpu("a100-80gb")
PLANS = (
    Plan(find_model("gpt2"), Recipe(attention="math"), A100, batch_size=8),
    Plan(find_model("llama-3.2-1b"), Recipe("amp-bf16", gpus=4), A100, batch_size=8),
    Plan(find_model("resnet-50"), Recipe(), A100, batch_size=64),
    Plan(find_model("gpt2-xl"), Recipe(), A100),
    Plan(find_model("gpt2-xl"), Recipe("amp-bf16", sharding="zero3", gpus=4), A100),
)
"""Setups among which each technique helps one at least."""


@cache
def effects(plan: Plan) -> tuple[Effect, ...]:
    return techniques(plan).helping


def helping(key: str) -> list[tuple[Plan, Effect]]:
    return [(plan, effect) for plan in PLANS for effect in effects(plan) if effect.change.key == key]


@pytest.mark.parametrize("key", catalog_techniques())
def test_a_technique_changes_bytes_of_some_setup(key: str) -> None:
    assert any(effect.saved_bytes > 0 for _, effect in helping(key)), f"{key} changes no byte, or nothing offers it"


@pytest.mark.parametrize("key", catalog_techniques())
def test_a_technique_is_a_value_of_its_control(key: str) -> None:
    wanted = catalog_techniques()[key].control.split()
    assert wanted, f"{key} names no control of the Plan"
    moved = False
    for plan, effect in helping(key):
        before, after = draft_of(plan), draft_of(effect.plan)
        for control in controls(after):
            if control.key in wanted:
                moved |= control.text(before) != control.text(after)
    assert moved, f"no control of {key} shows that it was applied"


@pytest.mark.parametrize("key", catalog_techniques())
def test_a_technique_is_explained_with_its_own_words(key: str) -> None:
    technique = catalog_techniques()[key]
    assert technique.arithmetic
    assert technique.caveat
    assert helping(key), f"none of the plans here gains by {key}"
    plan, _ = helping(key)[0]
    assert explanations(plan)[key].formula == technique.arithmetic


@pytest.mark.parametrize("key", catalog_techniques())
def test_a_technique_is_of_an_axis_that_combinations_know(key: str) -> None:
    known = (*COMBINED_AXES, "batch")  # the micro-batch follows
    assert catalog_techniques()[key].axis in known, f"plan/techniques.py combines nothing of the axis of {key}"


@pytest.mark.parametrize("number", range(1, len(EXTRAS) + 1))
def test_extras_together_are_a_value_of_their_control(number: int) -> None:
    """Any of them may be combined, so a control has a value, with words of its own, for every set."""
    for extras in combinations(EXTRAS, number):
        draft = draft_of(replace(PLANS[1], extras=frozenset(extras)))
        for key in {catalog_techniques()[extra].control for extra in extras}:
            control = control_of(draft, key)
            assert isinstance(control, Choice)
            try:
                value = control.get(draft)
            except StopIteration:
                pytest.fail(f"no value of the control {key} represents {', '.join(extras)}")
            (option,) = [option for option in control.options(draft) if option.value == value]
            assert option.note, f"controls.toml has no note for {value} of {key}"


def test_a_technique_that_is_offered_says_what_it_costs() -> None:
    for plan in PLANS:
        for change in changes(setup_of(plan), plan.gpu):
            if isinstance(change, Technique):
                assert "{" not in change.name + change.cost + change.source + change.option, change.key
                assert change.price.changes == 1
                assert with_setup(plan, change.applied(setup_of(plan))) != plan


def test_extras_and_optimizers_that_save_are_techniques() -> None:
    known = catalog_techniques()
    assert {technique.extra for technique in known.values()} == {*EXTRAS, None}
    offered = {effect.change.key for plan in PLANS for effect in effects(plan)}
    assert offered & set(OPTIMIZERS) == known.keys() & set(OPTIMIZERS)


def test_a_command_knows_every_change_that_has_a_table() -> None:
    of_commands = techniques_of("command").keys()
    assert of_commands <= {*INJECTED, *TYPED, ALLOCATOR}
    found = injected(A100, 2)
    assert [change.key for change in found] == list(INJECTED)
    assert all(change.how and change.cost and "{" not in change.name + change.how + change.cost for change in found)


def test_what_a_run_can_change_is_what_a_plan_of_a_command_has() -> None:
    pytest.importorskip("torch")
    from gpumem_tui.run.changes import KEYS

    assert set(KEYS) == set(INJECTED) - {MORE_RANKS}


def test_every_row_has_words_of_its_own() -> None:
    for name, words in ROW_WORDS.items():
        assert words.formula, name
        assert words.bucket in Bucket
