"""LoRA and QLoRA in closed form: counts and bytes against arithmetic written out, and against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ShapeError
from gpumem_tui.formula.checks import check_adapters
from gpumem_tui.formula.predict import terms
from gpumem_tui.formula.recipe import BaseQuantization, Recipe
from gpumem_tui.formula.records import QUANTIZATION_RECORDS
from gpumem_tui.formula.weights import kept_bytes, trained_parameters, weights

LLAMA_7B_LINEAR = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
LLAMA_7B_OTHERS = 2 * 32_000 * 4096 + 65 * 4096


def lora(targets: str = "all-linear", rank: int = 8, quantized: BaseQuantization = "none") -> Recipe:
    return Recipe("bf16", adapter="lora", lora_rank=rank, lora_targets=targets, base_quantization=quantized)


def rows(model: str, recipe: Recipe) -> dict[str, int]:
    return {row.name: row.size_bytes for row in terms(find_model(model), recipe, 1)}


def kept_by_blocks(model: str, recipe: Recipe) -> int:
    found = rows(model, recipe)
    return found["attention"] + found["feed-forward"] + found["adapters' values"]


def test_the_adapters_of_llama_2_7b_are_counted_as_by_peft() -> None:
    llama = find_model("llama-2-7b")

    # q and v: 2 · 32 layers · 8 · (4096 + 4096), the 4,194,304 that peft prints for this model
    assert trained_parameters(llama, lora("q_proj,v_proj")) == 4_194_304
    # all-linear at rank 8: 32 · 8 · (4 · 8192 + 3 · (4096 + 11008))
    assert trained_parameters(llama, lora()) == 32 * 8 * (4 * 8192 + 3 * 15_104) == 19_988_480


def test_rank_and_grouped_keys_decide_the_count() -> None:
    # Llama-3.2-3B, rank 32 at q and v: 9,175,040 trainable (peft, method_comparison/MetaMathQA)
    assert trained_parameters(find_model("llama-3.2-3b"), lora("q_proj,v_proj", 32)) == 9_175_040


@pytest.mark.parametrize(("quantized", "bits"), [("nf4", 4.5), ("nf4-dq", 4.127), ("int8", 8.01), ("fp8", 8.0)])
def test_quantized_bytes_have_their_constants(quantized: BaseQuantization, bits: float) -> None:
    frozen = kept_bytes(find_model("llama-2-7b"), lora(quantized=quantized)) - 2 * 19_988_480 - 2 * LLAMA_7B_OTHERS

    assert 8 * frozen / LLAMA_7B_LINEAR == pytest.approx(bits, rel=1e-3)


def test_a_block_that_is_not_full_has_a_scale_too() -> None:
    assert QUANTIZATION_RECORDS["nf4"].matrix_bytes(5, 13) == 33 + 2 * 4
    assert QUANTIZATION_RECORDS["nf4-dq"].matrix_bytes(5, 13) == 33 + 2 + 4 + 4


def test_gradients_and_state_are_of_the_adapters_only() -> None:
    found = rows("llama-2-7b", lora("q_proj,v_proj"))

    assert found["gradients"] == found["scratch of the update"] == found["adapters"] == 2 * 4_194_304
    assert found["optimizer state"] == 2 * 2 * 4_194_304
    assert found["frozen parameters"] == 2 * (LLAMA_7B_LINEAR + LLAMA_7B_OTHERS)
    assert "gradient of the output head" not in found


def test_one_matrix_at_a_time_is_unpacked() -> None:
    assert rows("llama-2-7b", lora(quantized="nf4"))["dequantized matrix"] == 2 * 4096 * 11008
    assert "dequantized matrix" not in rows("llama-2-7b", lora())


def test_fewer_targets_keep_fewer_inputs() -> None:
    llama = find_model("llama-2-7b")
    everywhere, somewhere = (kept_by_blocks(llama.name, lora(at)) for at in ("all-linear", "q_proj"))
    inner = 2 * 32 * 2048 * 8 * 6
    unkept = 2 * 32 * 2048 * (4096 + 11008)

    assert everywhere - somewhere == inner + unkept


def test_zero3_shards_the_packed_weights_and_gathers_two_blocks() -> None:
    llama, recipe = find_model("llama-2-70b"), lora(quantized="nf4-dq")
    two = Recipe("bf16", sharding="zero3", gpus=2, adapter="lora", base_quantization="nf4-dq")
    found = rows("llama-2-70b", two)
    matrix = QUANTIZATION_RECORDS["nf4-dq"].matrix_bytes
    attention = 2 * matrix(8192, 8192) + 2 * matrix(1024, 8192)
    adapters = 2 * 8 * (2 * 16_384 + 2 * 9_216 + 3 * (8192 + 28_672))
    block = attention + 2 * matrix(28_672, 8192) + matrix(8192, 28_672) + adapters + 2 * 2 * 8192

    assert found["gathered parameters"] == 2 * block + 2 * (2 * 32_000 * 8192 + 8192)
    assert found["quantized parameters"] == -(-80 * (block - adapters - 4 * 8192) // 2)
    assert kept_bytes(llama, recipe) == 80 * block + 2 * (2 * 32_000 * 8192 + 8192)


def test_full_training_is_as_it_was() -> None:
    gpt2 = find_model("gpt2")

    assert trained_parameters(gpt2, Recipe()) == gpt2.published_parameters
    assert not weights(gpt2, Recipe()).frozen


@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [
        ("resnet-50", lora(), "--adapter: resnet-50 is no language model"),
        ("gpt2", lora("q_proj"), "--lora-targets: gpt2 has no q_proj: write all-linear, or some of qkv,proj,fc1,fc2"),
        ("gpt2", Recipe(base_quantization="nf4"), "--base-quantization: weights that are trained cannot be quantized"),
        ("gpt2", Recipe(lora_rank=16), "--lora-rank: all weights are trained, without adapters; add --adapter lora"),
        ("gpt2", Recipe(lora_targets="qkv"), "--lora-targets: all weights are trained, without adapters"),
        ("gpt2", replace(lora(), freeze="2"), "--freeze: adapters freeze every weight already; take --adapter none"),
        ("gpt2", lora(rank=0), "--lora-rank: must be at least 1"),
    ],
)
def test_what_cannot_be_is_said(model: str, recipe: Recipe, message: str) -> None:
    with pytest.raises(ShapeError) as refused:
        check_adapters(find_model(model), recipe)

    assert str(refused.value).startswith(message)
