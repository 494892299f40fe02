"""The formula's largest batch beside the traced one, on small networks: a cheap part of `formula_vs_trace`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import FAMILIES, Experts, ModelShape
from gpumem_tui.formula.recipe import Precision, Recipe
from gpumem_tui.search.prediction import Traced
from tests.published.formula_vs_trace import compared, trace_of

SMALL = {
    "gpt2": replace(find_model("gpt2"), layers=4, seq_len=512),
    "llama": replace(find_model("smollm2-135m"), layers=6, seq_len=512),
    "moe": replace(
        find_model("qwen3-30b-a3b"), layers=3, hidden=512, vocab=5000, seq_len=512, experts=Experts(16, active=4)
    ),
    "bert": replace(find_model("bert-base"), layers=2),
    "vit": replace(find_model("vit-b-32"), layers=6),
    "resnet": find_model("resnet-18"),
    "mlp": find_model("mlp"),
}
QUICK = ("gpt2", "llama", "mlp")
"""Those of the whole suite; the others' traces take longer."""
PLACES = ("rtx-3060-12gb", "a100-40gb", "h100-80gb")


def test_every_family_is_held_against_its_trace() -> None:
    assert SMALL.keys() == FAMILIES.keys()


@pytest.mark.parametrize("precision", ["amp-bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, shape in SMALL.items()],
)
def test_the_formula_is_near_the_trace_and_seldom_above_it(shape: ModelShape, precision: Precision) -> None:
    recipe = Recipe(precision)
    traced = trace_of(shape, recipe)
    assert isinstance(traced, Traced)
    for pair in compared(shape, recipe, traced, PLACES):
        assert pair.traced > 0
        assert 0.85 * pair.traced - 1 <= pair.formula <= 1.05 * pair.traced + 1, pair


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "vit", "resnet", "moe", "gpt2", "llama"])
def test_with_full_recompute_it_is_as_near(name: str) -> None:
    shape, recipe = SMALL[name], Recipe("amp-bf16", recompute="full")
    traced = trace_of(shape, recipe)
    assert isinstance(traced, Traced)
    for pair in compared(shape, recipe, traced, PLACES):
        assert pair.traced > 0
        assert 0.85 * pair.traced - 1 <= pair.formula <= 1.05 * pair.traced + 1, pair
