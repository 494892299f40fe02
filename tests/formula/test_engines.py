"""What engines with a mixed precision of their own keep, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.predict import FormulaPrediction, predict
from gpumem_tui.formula.recipe import Recipe, Sharding
from gpumem_tui.memory import GIB, Bucket

LLAMA = find_model("llama-3-8b")
WEIGHTS = 8_030_261_248
"""As the authors publish it."""
MIXED = Recipe("amp-bf16", gpus=8, recompute="full")
OUTSIDE = 2 * 128_256 * 4096 + 4096
"""The embedding, the head and the last normalization."""
BLOCK = (WEIGHTS - OUTSIDE) // 32


def fixed(sharding: Sharding, recipe: Recipe = MIXED) -> FormulaPrediction:
    return predict(LLAMA, replace(recipe, sharding=sharding), 0)


def row_bytes(prediction: FormulaPrediction, name: str) -> int:
    return next(row.size_bytes for row in prediction.rows if row.name == name)


def test_fsdp2_keeps_fp32_shards_and_gathers_in_16_bits() -> None:
    prediction = fixed("fsdp2")
    assert prediction.breakdown[Bucket.PARAMETERS] == 4 * WEIGHTS // 8
    assert prediction.breakdown[Bucket.GRADIENTS] == 4 * WEIGHTS // 8
    assert prediction.breakdown[Bucket.OPTIMIZER] == 8 * WEIGHTS // 8
    assert row_bytes(prediction, "gathered parameters") == 2 * (OUTSIDE + 2 * BLOCK)
    assert prediction.fixed_bytes / GIB == pytest.approx(17, abs=1)


def test_fsdp2_under_autocast_also_keeps_a_whole_16_bit_copy() -> None:
    autocast, own = fixed("zero3"), fixed("fsdp2")
    assert row_bytes(autocast, "16-bit working copy of the parameters") == 2 * WEIGHTS
    assert autocast.fixed_bytes - own.fixed_bytes == 2 * WEIGHTS + 2 * (OUTSIDE + 2 * BLOCK)


@pytest.mark.parametrize(
    ("sharding", "whole", "shared"),
    # Whole on a GPU, and shared by 8, in bytes a weight: 16-bit weights and gradients, fp32 masters and two moments,
    # fp32 gradients as they are needed.
    [("deepspeed-zero1", 2 + 2, 4 + 8 + 4), ("deepspeed-zero2", 2, 2 + 4 + 8 + 4)],
)
def test_deepspeed_keeps_16_bit_weights_and_fp32_masters(sharding: Sharding, whole: int, shared: int) -> None:
    bucket = 500_000_000 * 2
    assert fixed(sharding).fixed_bytes == WEIGHTS * whole + WEIGHTS * shared // 8 + bucket


def test_deepspeed_zero3_shares_everything_but_what_it_gathers_and_updates_at_once() -> None:
    shared = WEIGHTS * (2 + 2 + 4 + 8) // 8
    assert fixed("deepspeed-zero3").fixed_bytes == shared + 4 * 10**9 + 2 * 500_000_000 + 2 * 10**9


def test_deepspeed_masters_are_there_in_pure_bf16_and_fp32_too() -> None:
    for precision in ("bf16", "fp32"):
        prediction = fixed("deepspeed-zero1", replace(MIXED, precision=precision))
        assert row_bytes(prediction, "fp32 master weights") == 4 * WEIGHTS // 8
        assert row_bytes(prediction, "optimizer state") == 8 * WEIGHTS // 8


def test_without_mixed_precision_fsdp2_is_zero3() -> None:
    for precision in ("bf16", "fp32"):
        recipe = replace(MIXED, precision=precision)
        assert fixed("fsdp2", recipe).rows == fixed("zero3", recipe).rows


def test_what_runs_in_16_bits_keeps_the_activations_of_pure_bf16() -> None:
    recipe = replace(MIXED, recompute="none")
    pure = predict(LLAMA, replace(recipe, precision="bf16"), 4)
    for sharding in ("fsdp2", "deepspeed-zero2"):
        one = predict(LLAMA, replace(recipe, sharding=sharding), 4)
        assert one.activation_bytes_per_sample == pure.activation_bytes_per_sample
