"""Parameter counts, against the numbers that authors and reference implementations publish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_model, models
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parameters import count_parameters, textbook_parameters

PUBLISHED = [
    ("gpt2", 124_439_808),
    ("llama-2-7b", 6_738_415_616),
    ("llama-3-8b", 8_030_261_248),
    ("llama-3.2-1b", 1_235_814_400),
    ("mistral-7b", 7_241_732_096),
    ("qwen2.5-7b", 7_615_616_512),
    ("bert-base", 109_483_778),
    ("bert-large", 335_143_938),
    ("vit-b-16", 86_567_656),
    ("vit-l-16", 304_326_632),
    ("resnet-18", 11_689_512),
    ("resnet-50", 25_557_032),
    ("resnet-101", 44_549_160),
]
COUNTED = [shape for shape in models().values() if shape.published_parameters is not None]


@pytest.mark.parametrize(("name", "published"), PUBLISHED)
def test_count_is_the_published_one(name: str, published: int) -> None:
    assert count_parameters(find_model(name)) == published


@pytest.mark.parametrize("shape", COUNTED, ids=lambda shape: shape.name)
def test_count_agrees_with_the_catalog(shape: ModelShape) -> None:
    assert count_parameters(shape) == shape.published_parameters


def test_textbook_form_leaves_out_only_the_learned_positions() -> None:
    gpt2 = find_model("gpt2")
    positions = gpt2.max_seq_len * gpt2.hidden
    assert textbook_parameters(12, 768, 50257) == 123_653_376
    assert count_parameters(gpt2) == 123_653_376 + positions


def test_untied_head_adds_one_embedding() -> None:
    tied = find_model("gpt2")
    untied = replace(tied, tied_head=False)
    assert count_parameters(untied) - count_parameters(tied) == tied.vocab * tied.hidden


def test_mlp_counts_weights_and_biases() -> None:
    shape = ModelShape("three", "mlp", layers=3, inputs=4, hidden=5, classes=2)
    assert count_parameters(shape) == (4 * 5 + 5) + (5 * 5 + 5) + (5 * 2 + 2)


def test_one_linear_layer_goes_straight_to_the_classes() -> None:
    shape = ModelShape("one", "mlp", layers=1, inputs=4, hidden=5, classes=2)
    assert count_parameters(shape) == 4 * 2 + 2


def test_image_size_changes_a_vit_but_not_a_resnet() -> None:
    vit, resnet = find_model("vit-b-16"), find_model("resnet-50")
    larger = vit.overridden(image_size=384)
    assert count_parameters(larger) - count_parameters(vit) == (24**2 - 14**2) * vit.hidden
    assert count_parameters(resnet.overridden(image_size=384)) == count_parameters(resnet)
