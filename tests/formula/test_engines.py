"""The state of engines with a mixed precision of their own, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.predict import at_moment, terms
from gpumem_tui.formula.recipe import SHARDINGS, Recipe, Sharding
from gpumem_tui.formula.rows import FormulaRow, Moment
from gpumem_tui.memory import GIB

LLAMA = find_model("llama-3-8b")
WEIGHTS = 8_030_261_248
"""As the authors publish it."""
MIXED = Recipe("amp-bf16", gpus=8, recompute="full")
OUTSIDE = 2 * 128_256 * 4096 + 4096
"""The embedding, the head and the last normalization."""
BLOCK = (WEIGHTS - OUTSIDE) // 32


def fixed(sharding: Sharding, recipe: Recipe = MIXED) -> tuple[FormulaRow, ...]:
    """Every row of the fixed memory, whenever in a step it is there."""
    return tuple(row for row in terms(LLAMA, replace(recipe, sharding=sharding), 0) if not row.grows_with_batch)


def row_bytes(rows: tuple[FormulaRow, ...], name: str) -> int:
    return next(row.size_bytes for row in rows if row.name == name)


def at(rows: tuple[FormulaRow, ...], moment: Moment) -> int:
    return sum(row.size_bytes for row in at_moment(rows, moment))


def test_fsdp2_keeps_fp32_shards_and_gathers_in_16_bits() -> None:
    rows = fixed("fsdp2")
    assert row_bytes(rows, "parameters") == 4 * WEIGHTS // 8
    assert row_bytes(rows, "gradients") == 4 * WEIGHTS // 8
    assert row_bytes(rows, "optimizer state") == 8 * WEIGHTS // 8
    assert row_bytes(rows, "gathered parameters") == 2 * (OUTSIDE + 2 * BLOCK)
    # The embedding's and the head's gradients in 16 bits, and in fp32 to be summed over the GPUs.
    assert row_bytes(rows, "gradients being reduced, as backward ends") == (2 + 4) * OUTSIDE
    assert row_bytes(rows, "gradients being reduced") == (2 + 4) * BLOCK


def test_the_three_ways_of_zero3_and_of_zero1_differ() -> None:
    """ZeRO-1 and 3 of Llama-3-8B over 8 GPUs, as the network begins to go backward."""
    gib = {name: at(fixed(name), Moment.FIRST_BLOCK) / GIB for name in SHARDINGS}
    assert gib["fsdp2"] < gib["zero3"]
    assert gib["deepspeed-zero1"] < gib["zero1"]
    assert pytest.approx(29.9, abs=0.1) == 4 * WEIGHTS / GIB
    # Autocast's ZeRO-1: weights, gradients and DistributedDataParallel's buffers for these in fp32, an eighth of the
    # moments, a recomputed block's 16-bit weights.
    assert gib["zero1"] == pytest.approx((13 * WEIGHTS + 2 * BLOCK) / GIB, rel=1e-6)
    # DeepSpeed's: weights and gradients in 16 bits, an eighth of masters and moments, and the bucket.
    assert gib["deepspeed-zero1"] == pytest.approx((5.5 * WEIGHTS + 10**9) / GIB, rel=1e-6)


def test_autocast_also_keeps_a_whole_16_bit_copy_of_what_is_multiplied_with() -> None:
    embedding = 128_256 * 4096
    working_copy = row_bytes(fixed("zero3"), "16-bit working copy of the parameters")
    assert working_copy == 2 * (WEIGHTS - embedding)
    assert not any("working copy" in row.name for row in fixed("fsdp2"))


@pytest.mark.parametrize(
    ("sharding", "whole", "shared"),
    # Whole on a GPU, and shared by 8, in bytes a weight: 16-bit weights and gradients, fp32 masters and two moments.
    [("deepspeed-zero1", 2 + 2, 4 + 8), ("deepspeed-zero2", 2, 2 + 4 + 8)],
)
def test_deepspeed_keeps_16_bit_weights_and_fp32_masters(sharding: Sharding, whole: int, shared: int) -> None:
    rows, bucket = fixed(sharding), 500_000_000 * 2
    assert at(rows, Moment.FIRST_BLOCK) == WEIGHTS * whole + WEIGHTS * shared // 8 + bucket
    # As the weights are updated, this GPU's gradients are in fp32, and no others are left.
    assert at(rows, Moment.UPDATE) == WEIGHTS * 2 + WEIGHTS * (4 + 8 + 4) // 8


def test_deepspeed_zero3_shares_everything_but_what_it_gathers_and_updates_at_once() -> None:
    rows, shared = fixed("deepspeed-zero3"), WEIGHTS * (2 + 2 + 4 + 8) // 8
    assert at(rows, Moment.FIRST_BLOCK) == shared + 2 * 500_000_000 + 2 * 10**9
    assert at(rows, Moment.UPDATE) == shared + 4 * 10**9


def test_deepspeed_masters_are_there_in_pure_bf16_and_fp32_too() -> None:
    for precision in ("bf16", "fp32"):
        rows = fixed("deepspeed-zero1", replace(MIXED, precision=precision))
        assert row_bytes(rows, "fp32 master weights") == 4 * WEIGHTS // 8
        assert row_bytes(rows, "optimizer state") == 8 * WEIGHTS // 8


def test_without_mixed_precision_fsdp2_is_zero3() -> None:
    for precision in ("bf16", "fp32"):
        recipe = replace(MIXED, precision=precision)
        assert fixed("fsdp2", recipe) == fixed("zero3", recipe)


def test_what_runs_in_16_bits_keeps_the_activations_of_pure_bf16() -> None:
    recipe = replace(MIXED, recompute="none")
    pure = [row for row in terms(LLAMA, replace(recipe, precision="bf16"), 4) if row.grows_with_batch]
    for sharding in ("fsdp2", "deepspeed-zero2"):
        rows = terms(LLAMA, replace(recipe, sharding=sharding), 4)
        assert [row for row in rows if row.grows_with_batch] == pure
