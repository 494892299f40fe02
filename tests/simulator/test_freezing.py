"""Frozen layers on the simulated GPU: what is held, and what each sample adds, is what the closed form counts."""

from __future__ import annotations

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import ALL_BUT_HEAD, Recipe
from gpumem_tui.formula.weights import kept_bytes, trained_parameters
from gpumem_tui.memory import Bucket
from tests.pairs import slow_beyond
from tests.simulator.simulated_steps import held, most_held, trained
from tests.workload.tiny_shapes import QWEN_MOE

GPT2 = find_model("gpt2").overridden(layers=4, hidden=256, heads=4, vocab=2048, seq_len=128)
LLAMA = find_model("mistral-7b").overridden(layers=4, hidden=256, heads=4, kv_heads=2, vocab=2048, seq_len=128)
BERT = find_model("bert-base").overridden(layers=4, hidden=256, heads=4, vocab=2048, seq_len=128)
VIT = find_model("vit-b-16").overridden(layers=4, hidden=256, heads=4)
RESNET = find_model("resnet-18").overridden(image_size=128)
MLP = find_model("mlp").overridden(hidden=256)
MANY = 1024
"""Samples, so that what does not grow with them (workspaces, which the formula leaves out) is little."""

_BLOCK_BYTES = 512
"""The size to which the allocator rounds up a small request."""


@pytest.mark.parametrize(
    ("shape", "freeze"),
    slow_beyond(3, [(MLP, "2"), (BERT, ALL_BUT_HEAD), (LLAMA, "2"), (VIT, "2"), (RESNET, "3"), (QWEN_MOE, "1")]),
    ids=lambda one: one.name if isinstance(one, ModelShape) else one,
)
def test_weights_gradients_and_state_are_the_formulas(shape: ModelShape, freeze: str) -> None:
    recipe = Recipe("bf16", freeze=freeze)

    timeline = trained(shape, recipe, 2).finish()

    state = 2 * trained_parameters(shape, recipe)
    for bucket, counted in ((Bucket.GRADIENTS, state), (Bucket.OPTIMIZER, 2 * state)):
        size, allocations = held(timeline, bucket)
        assert counted <= size <= counted + allocations * _BLOCK_BYTES
    size, _ = held(timeline, Bucket.PARAMETERS)
    assert size >= kept_bytes(shape, recipe)


@pytest.mark.parametrize(
    ("shape", "recipe"),
    slow_beyond(
        3,
        [
            (VIT, Recipe("amp-bf16", freeze=ALL_BUT_HEAD)),
            (BERT, Recipe("bf16", freeze="4")),
            (LLAMA, Recipe("bf16", freeze=ALL_BUT_HEAD)),
            (GPT2, Recipe("bf16", freeze="2")),
            (LLAMA, Recipe("amp-bf16", freeze="2")),
            (LLAMA, Recipe("bf16", freeze="2", recompute="full")),
            (BERT, Recipe("amp-bf16", freeze="2")),
            (VIT, Recipe("amp-bf16", freeze="2")),
            (RESNET, Recipe("fp32", freeze="2")),
            (RESNET, Recipe("amp-bf16", freeze=ALL_BUT_HEAD)),
        ],
    ),
    ids=lambda one: one.name if isinstance(one, ModelShape) else f"{one.freeze}-{one.precision}-{one.recompute}",
)
def test_the_peak_is_the_formulas(shape: ModelShape, recipe: Recipe) -> None:
    by_trace = most_held(trained(shape, recipe, MANY).finish())

    assert predict(shape, recipe, MANY).peak_bytes == pytest.approx(by_trace, rel=0.05)
