"""Decisions: accumulation, the largest batch, and what would make it larger."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.accumulation import accumulation, tokens_per_global_batch
from gpumem_tui.formula.predict import by_moment, max_batch_size, predict
from gpumem_tui.formula.recipe import Recipe, Setup
from gpumem_tui.formula.remedies import Remedy, remedies
from gpumem_tui.memory import GIB


def test_accumulation_that_divides() -> None:
    plan = accumulation(256, 4, 8)
    assert (plan.steps, plan.global_batch_size, plan.exact) == (8, 256, True)


def test_accumulation_that_does_not_divide_rounds_up_and_says_the_batch() -> None:
    plan = accumulation(250, 4, 8)
    assert (plan.steps, plan.global_batch_size, plan.exact) == (8, 256, False)


def test_one_pass_larger_than_the_target() -> None:
    assert accumulation(16, 32, 2).global_batch_size == 64


def test_tokens_of_a_global_batch() -> None:
    assert tokens_per_global_batch(find_model("gpt2"), accumulation(250, 4, 8)) == 256 * 1024


@pytest.mark.parametrize("numbers", [(0, 4, 8), (256, 0, 8), (256, 4, 0)])
def test_accumulation_refuses_numbers_below_one(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        accumulation(*numbers)


def test_max_batch_follows_the_closed_form() -> None:
    shape = find_model("gpt2")
    usable = int(0.9 * 24 * GIB)
    moments = by_moment(shape, Recipe()).values()
    expected = min((usable - one.fixed_bytes) // one.sample_bytes for one in moments)
    assert max_batch_size(shape, Recipe(), 24 * GIB) == expected > 0
    assert (
        predict(shape, Recipe(), expected).needed_bytes <= usable < predict(shape, Recipe(), expected + 1).needed_bytes
    )


def test_zero3_makes_room_where_one_gpu_has_none() -> None:
    shape = find_model("llama-3-8b")
    assert max_batch_size(shape, Recipe("amp-bf16"), 80 * GIB) == 0
    assert max_batch_size(shape, Recipe("amp-bf16", sharding="zero3", gpus=8), 80 * GIB) > 0


@pytest.mark.parametrize("headroom", [-0.1, 1.0, 1.5])
def test_headroom_must_be_a_share(headroom: float) -> None:
    with pytest.raises(ValueError, match="headroom"):
        max_batch_size(find_model("gpt2"), Recipe(), 24 * GIB, headroom)


def by_option(found: list[Remedy]) -> Mapping[str, Remedy]:
    return {remedy.technique.option: remedy for remedy in found}


def test_remedies_for_the_plain_fp32_recipe() -> None:
    shape = find_model("gpt2")
    recipe = Recipe(attention="math")
    found = remedies(Setup(shape, recipe), 24 * GIB)
    assert set(by_option(found)) == {
        "--precision amp-bf16",
        "--precision bf16",
        "--recompute selective",
        "--recompute full",
        "--attention efficient",
        "--optimizer sgd-momentum",
        "--optimizer adafactor",
        "--optimizer adamw-8bit",
        "--seq-len 512",
        "--sharding zero3 --gpus 8",
    }
    sizes = [remedy.max_batch_size for remedy in found]
    assert sizes == sorted(sizes, reverse=True)
    fitting = max_batch_size(shape, recipe, 24 * GIB)
    assert all(size >= fitting for size in sizes)
    assert all(remedy.technique.cost and remedy.technique.source for remedy in found)


def test_remedies_are_computed_on_the_changed_recipe() -> None:
    shape = find_model("gpt2")
    before = predict(shape, Recipe(), 1).peak_bytes
    for remedy in remedies(Setup(shape, Recipe()), 24 * GIB):
        after = predict(remedy.setup.shape, remedy.setup.recipe, 1).peak_bytes
        assert remedy.saved_bytes == before - after
        assert remedy.max_batch_size == max_batch_size(remedy.setup.shape, remedy.setup.recipe, 24 * GIB)


@pytest.mark.parametrize("gpu", ["t4-16gb", "v100-16gb"])
def test_a_gpu_without_bfloat16_is_not_told_to_use_it(gpu: str) -> None:
    options = by_option(remedies(Setup(find_model("gpt2"), Recipe()), 15 * GIB, gpu=find_gpu(gpu)))
    assert "--precision amp-fp16" in options
    assert not any("bf16" in option for option in options)


def test_what_is_already_done_or_saves_nothing_is_not_offered() -> None:
    done = Recipe("bf16", "sgd", "full", "auto", "zero3", 8)
    assert set(by_option(remedies(Setup(find_model("gpt2"), done), 24 * GIB))) == {"--seq-len 512"}


def test_selective_recompute_is_no_remedy_under_fused_attention() -> None:
    options = by_option(remedies(Setup(find_model("gpt2"), Recipe("amp-bf16")), 24 * GIB))
    assert "--recompute selective" not in options
    assert "--recompute full" in options


def test_images_are_halved_rather_than_sequences() -> None:
    assert "--image-size 112" in by_option(remedies(Setup(find_model("resnet-50"), Recipe()), 24 * GIB))
    resnet = remedies(Setup(find_model("resnet-50"), Recipe()), GIB)
    assert not any("--attention" in option for option in by_option(resnet))


def test_zero3_keeps_the_gpus_there_are() -> None:
    options = by_option(
        remedies(Setup(find_model("llama-3-8b"), Recipe("amp-bf16", sharding="zero1", gpus=16)), 80 * GIB)
    )
    assert "--sharding zero3 --gpus 16" in options
