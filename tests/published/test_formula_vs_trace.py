"""The formula's largest batch next to the traced one, on small networks: a cheap part of `formula_vs_trace`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import FAMILIES, Experts, ModelShape
from gpumem_tui.formula.recipe import Precision, Recipe, Recompute
from gpumem_tui.search.prediction import Traced
from tests.published.formula_vs_trace import LargestPair, compared, trace_of

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
"""Models of the whole suite; the others' traces take longer."""
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


Asked = tuple[str, Precision, Recompute, str]

WERE_ABOVE: tuple[Asked, ...] = (
    ("qwen3-0.6b", "fp32", "full", "v100-16gb"),
    ("smollm2-360m", "amp-bf16", "full", "rtx-3090-24gb"),
    ("gpt2-large", "amp-bf16", "none", "a100-40gb"),
    ("llama-3.2-3b", "bf16", "full", "a100-40gb"),
    ("qwen2.5-3b", "fp32", "full", "b200-180gb"),
    ("tinyllama-1.1b", "fp32", "full", "b200-180gb"),
    ("mistral-7b", "amp-bf16", "full", "b200-180gb"),
    ("mistral-7b", "fp32", "full", "b200-180gb"),
    ("llama-2-7b", "fp32", "full", "b200-180gb"),
)
"""Pairs of the whole catalog on twelve GPUs, where the formula's largest batch was once above the traced one by over 5
%."""

ABOVE: tuple[tuple[Asked, str], ...] = (
    (("tinyllama-1.1b", "amp-bf16", "none", "a100-40gb"), "3/2!"),
    (("llama-2-13b", "bf16", "full", "h200-141gb"), "9/2*!"),
)
"""Pairs that still are. The first under amp-fp16, too: of its third sample 4.0 GiB lie in free pieces, of the second
0.9 and of the fourth 2.3: how small tensors happen to split the segments of 66 MB that the last step left. The second
leaves a tenth of the card free at 1, 2, 5, 6, 10 and 12 samples, but not at 3, 4, 7, 9 and 11: 131 GB are allocated,
    and how
far the 134 that are left suffice for the free pieces next to them changes with each sample."""


def _pair(name: str, precision: Precision, recompute: Recompute, gpu: str) -> LargestPair:
    shape, recipe = find_model(name), Recipe(precision, recompute=recompute)
    traced = trace_of(shape, recipe)
    assert isinstance(traced, Traced)
    (pair,) = compared(shape, recipe, traced, (gpu,))
    return pair


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(one, id="-".join(one), marks=pytest.mark.slow if place < 3 else pytest.mark.exhaustive)
        for place, one in enumerate(WERE_ABOVE)
    ],
)
def test_it_is_above_the_trace_no_more(asked: Asked) -> None:
    pair = _pair(*asked)
    assert pair.is_close or 0.75 * pair.traced <= pair.formula < pair.traced, pair
    assert not pair.is_unsafe, pair


@pytest.mark.exhaustive
@pytest.mark.parametrize(("asked", "said"), ABOVE)
def test_two_are_above_for_pieces_that_no_form_has(asked: Asked, said: str) -> None:
    assert str(_pair(*asked)) == said
