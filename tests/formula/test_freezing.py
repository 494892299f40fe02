"""Frozen layers in closed form: counts, bytes and arithmetic against what can be written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model, models
from gpumem_tui.formula.checks import fault
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import max_batch_size, terms
from gpumem_tui.formula.recipe import ALL_BUT_HEAD, SHARDINGS, Recipe, Sharding
from gpumem_tui.formula.roofline import update_seconds
from gpumem_tui.formula.weights import block_count, kept_bytes, trained_parameters
from gpumem_tui.memory import Bucket
from tests.formula.flops import training_flops

GPT2_BLOCK = 12 * 768**2 + 13 * 768


def frozen(what: str, **recipe: object) -> Recipe:
    return replace(Recipe("bf16", freeze=what), **recipe)  # type: ignore[arg-type]


def rows(model: str, recipe: Recipe) -> dict[str, int]:
    return {row.name: row.size_bytes for row in terms(find_model(model), recipe, 4)}


def test_the_first_blocks_and_a_head_that_is_the_embedding_are_not_trained() -> None:
    gpt2 = find_model("gpt2")

    assert trained_parameters(gpt2, frozen("8")) == 4 * GPT2_BLOCK + 2 * 768
    assert trained_parameters(gpt2, frozen("12")) == 2 * 768


def test_a_head_of_its_own_is_trained_with_the_last_blocks() -> None:
    llama = find_model("llama-2-7b")
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096

    assert trained_parameters(llama, frozen("30")) == 2 * block + 4096 + 32_000 * 4096
    assert trained_parameters(llama, frozen(ALL_BUT_HEAD)) == 32_000 * 4096


def test_a_classifier_that_is_trained_alone() -> None:
    assert trained_parameters(find_model("resnet-50"), frozen(ALL_BUT_HEAD)) == 2048 * 1000 + 1000
    assert trained_parameters(find_model("vit-b-16"), frozen(ALL_BUT_HEAD)) == 768 * 1000 + 1000


def test_the_last_stage_of_a_resnet() -> None:
    # torchvision's resnet-18: layer4 has 8,393,728 parameters, fc 513,000
    assert trained_parameters(find_model("resnet-18"), frozen("6")) == 8_393_728 + 513_000


def test_experts_of_the_later_blocks_are_trained() -> None:
    mixtral = find_model("mixtral-8x7b")
    half = replace(mixtral, layers=16)
    outside = count_parameters(replace(mixtral, layers=0))

    assert trained_parameters(mixtral, frozen("16")) == count_parameters(half) - outside + 4096 + 32_000 * 4096


@pytest.mark.parametrize("name", models())
def test_what_is_frozen_and_what_is_trained_are_the_whole_network(name: str) -> None:
    shape, half = find_model(name), frozen(str(block_count(find_model(name)) // 2))

    assert kept_bytes(shape, half) == 2 * count_parameters(shape)
    assert 0 < trained_parameters(shape, half) < count_parameters(shape)


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_more_is_frozen_the_larger_the_batch(name: str, recompute: str) -> None:
    shape = find_model(name)
    blocks = block_count(shape)
    steps = [frozen("none", recompute=recompute)]
    steps += [frozen(str(count), recompute=recompute) for count in (1, blocks // 2, blocks)]
    fits = [max_batch_size(shape, recipe, 400 * 1024**3, beside_bytes=0) for recipe in steps]

    assert fits == sorted(fits)


def test_gradients_and_state_are_of_what_is_trained() -> None:
    found, trained = rows("gpt2", frozen("8")), 4 * GPT2_BLOCK + 2 * 768

    assert found["gradients"] == found["scratch of the update"] == found["trained parameters"] == 2 * trained
    assert found["optimizer state"] == 4 * trained
    assert found["frozen parameters"] == 2 * (count_parameters(find_model("gpt2")) - trained)
    assert "gradient of the output head" not in found
    assert "gradients of the tied embedding" not in found


def test_only_the_blocks_above_keep_activations() -> None:
    whole, half = rows("gpt2", frozen("none")), rows("gpt2", frozen("6"))

    for name in ("attention", "feed-forward", "normalization", "dropout masks", "attention log-sum-exp"):
        assert 2 * half[name] == whole[name]


def test_autocast_copies_only_what_is_trained() -> None:
    found = rows("llama-2-7b", replace(frozen("30"), precision="amp-bf16"))

    assert found["16-bit working copy of the parameters"] == 2 * trained_parameters(
        find_model("llama-2-7b"), frozen("30")
    )


@pytest.mark.parametrize("sharding", [name for name in SHARDINGS if name != "none"])
def test_sharding_divides_gradients_and_state_of_what_is_trained(sharding: Sharding) -> None:
    shape = find_model("llama-2-7b")
    whole = Recipe("amp-bf16", sharding=sharding, gpus=8)
    some = replace(whole, freeze="16")
    share = trained_parameters(shape, some) / count_parameters(shape)

    def summed(recipe: Recipe, bucket: Bucket) -> int:
        found = (row for row in terms(shape, recipe, 1) if row.bucket is bucket and row.name != _HEAD)
        return sum(row.size_bytes for row in found)

    for bucket in (Bucket.GRADIENTS, Bucket.OPTIMIZER):
        assert summed(some, bucket) == pytest.approx(share * summed(whole, bucket), rel=1e-6)
    assert summed(some, Bucket.PARAMETERS) == pytest.approx(summed(whole, Bucket.PARAMETERS), rel=1e-6)


_HEAD = "gradient of the output head"


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "qwen3-30b-a3b", "vit-b-16", "resnet-50", "mlp"])
def test_backward_ends_before_the_frozen_blocks(name: str) -> None:
    shape = find_model(name)
    blocks = block_count(shape)
    flops = [flops_of(name, frozen(what)) for what in ("none", "1", str(blocks // 2), str(blocks))]
    forward = flops_of(name, Recipe()) // 3

    assert flops == sorted(flops, reverse=True)
    assert forward <= flops[-1] <= 1.5 * forward, "forward, and of the head what backward makes"
    assert flops[0] == pytest.approx(3 * forward)


def flops_of(name: str, recipe: Recipe) -> int:
    """The work of one sample; forward is a third of a step in which all is trained."""
    flops = training_flops(find_model(name), recipe)
    assert isinstance(flops, int)
    return flops


def test_the_update_moves_what_is_trained() -> None:
    shape, gpu = find_model("resnet-50"), find_gpu("a100-80gb")
    alone, whole = (update_seconds(shape, frozen(what), gpu) for what in (ALL_BUT_HEAD, "none"))

    assert isinstance(alone, float)
    assert isinstance(whole, float)
    assert alone / whole == pytest.approx(2_049_000 / count_parameters(shape))


@pytest.mark.parametrize(
    ("model", "recipe", "says"),
    [
        ("gpt2", frozen("13"), "takes none, all-but-head or how many of the 12 blocks of gpt2"),
        ("gpt2", frozen("0"), "takes none, all-but-head or how many"),
        ("resnet-18", frozen("lots"), "takes none, all-but-head or how many of the 8 blocks of resnet-18"),
        ("gpt2", frozen(ALL_BUT_HEAD), "the head of gpt2 shares its weight with the embedding; freeze the first 12"),
        ("gpt2", frozen("2", pipeline_parallel=2, gpus=2), "frozen layers are counted without pipeline parallel"),
    ],
)
def test_what_cannot_be_frozen_is_said(model: str, recipe: Recipe, says: str) -> None:
    found = fault(find_model(model), recipe)

    assert found is not None
    assert found[0] == "--freeze"
    assert found[1].startswith(says)
