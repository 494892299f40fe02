"""Properties of every shape and recipe."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_model, models
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.predict import at_moment, by_moment, max_batch_size, predict, terms, usable_bytes
from gpumem_tui.formula.recipe import (
    ATTENTIONS,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    SHARDINGS,
    Precision,
    Recipe,
    Sharding,
)
from gpumem_tui.formula.rows import Moment
from gpumem_tui.formula.techniques import STAGES
from gpumem_tui.memory import GIB

SHAPES = st.sampled_from(list(models().values()))
TRANSFORMERS = st.sampled_from([shape for shape in models().values() if shape.record.has_attention])
RECIPES = st.builds(
    Recipe,
    precision=st.sampled_from(PRECISIONS),
    optimizer=st.sampled_from(OPTIMIZERS),
    recompute=st.sampled_from(RECOMPUTES),
    attention=st.sampled_from(ATTENTIONS),
    sharding=st.sampled_from(SHARDINGS),
    gpus=st.integers(1, 64),
)
BATCHES = st.integers(0, 10_000)


def peak_bytes(shape: ModelShape, recipe: Recipe, batch_size: int = 2) -> int:
    return predict(shape, recipe, batch_size).peak_bytes


@given(SHAPES, RECIPES, BATCHES)
def test_every_moment_grows_with_the_batch_and_the_highest_decides(
    shape: ModelShape, recipe: Recipe, batch_size: int
) -> None:
    moments = by_moment(shape, recipe)
    predicted = predict(shape, recipe, batch_size)
    assert all(one.at(batch_size).sample_bytes > 0 for one in moments.values())
    assert predicted.needed_bytes == max(one.needed_bytes(batch_size) for one in moments.values())
    assert predicted.peak_bytes == predicted.fixed_bytes + batch_size * predicted.activation_bytes_per_sample
    assert predicted.cache_bytes >= 0


@given(SHAPES, RECIPES, BATCHES)
def test_rows_buckets_and_peak_agree(shape: ModelShape, recipe: Recipe, batch_size: int) -> None:
    predicted = predict(shape, recipe, batch_size)
    assert predicted.breakdown.total_bytes == predicted.peak_bytes == sum(row.size_bytes for row in predicted.rows)
    assert all(row.size_bytes >= 0 and row.source for row in predicted.rows)


@given(SHAPES, RECIPES, BATCHES)
def test_every_expression_is_the_arithmetic_of_its_row(shape: ModelShape, recipe: Recipe, batch_size: int) -> None:
    for row in predict(shape, recipe, batch_size).rows:
        product, _, gpus = row.expression.replace(",", "").partition(" / ")
        value = prod(int(factor) for factor in product.split(" · "))
        assert row.size_bytes == -(-value // int(gpus or 1))


@given(SHAPES, RECIPES, st.integers(1, 200) | st.none(), st.sampled_from([0.0, 0.05, 0.1, 0.5]))
def test_max_batch_fits_and_one_more_does_not(
    shape: ModelShape, recipe: Recipe, gib: int | None, headroom: float
) -> None:
    total_bytes = (gib or 1000) * GIB
    largest = max_batch_size(shape, recipe, total_bytes, headroom)
    capacity_bytes = usable_bytes(total_bytes, headroom)
    assert largest == 0 or predict(shape, recipe, largest).needed_bytes <= capacity_bytes
    assert predict(shape, recipe, largest + 1).needed_bytes > capacity_bytes


@given(TRANSFORMERS, RECIPES, st.integers(1, 8))
def test_grows_with_every_dimension(shape: ModelShape, recipe: Recipe, more: int) -> None:
    before = peak_bytes(shape, recipe)
    assert peak_bytes(replace(shape, layers=shape.layers + more), recipe) > before
    assert peak_bytes(replace(shape, ffn=shape.ffn + more), recipe) > before
    wider = replace(shape, hidden=shape.hidden + more * shape.heads)
    assert peak_bytes(wider, recipe) > before
    if shape.classes:
        assert peak_bytes(replace(shape, classes=shape.classes + more), recipe) > before
    if shape.seq_len:
        assert peak_bytes(replace(shape, seq_len=shape.seq_len + more), recipe) > before


@given(SHAPES, RECIPES)
def test_more_stages_save_more_but_for_what_gpus_exchange(shape: ModelShape, recipe: Recipe) -> None:
    def held_bytes(sharding: Sharding) -> int:
        rows = terms(shape, replace(recipe, sharding=sharding), 2)
        kept = [row for row in rows if not row.name.startswith(("gathered", "gradients being"))]
        return max(sum(row.size_bytes for row in at_moment(kept, moment)) for moment in Moment)

    peaks = [held_bytes(sharding) for sharding in ("none", *STAGES)]
    assert peaks == sorted(peaks, reverse=True)
    alone = peak_bytes(shape, replace(recipe, sharding="none", gpus=1))
    assert peaks[0] == alone


@given(TRANSFORMERS, RECIPES)
def test_fused_attention_never_costs_memory(shape: ModelShape, recipe: Recipe) -> None:
    unfused = replace(recipe, attention="math")
    for attention in ATTENTIONS:
        assert peak_bytes(shape, replace(recipe, attention=attention)) <= peak_bytes(shape, unfused)


@given(SHAPES, RECIPES)
def test_pure_16_bit_needs_at_most_what_fp32_does(shape: ModelShape, recipe: Recipe) -> None:
    fp32, bf16 = (peak_bytes(shape, replace(recipe, precision=precision)) for precision in ("fp32", "bf16"))
    assert bf16 < fp32


@pytest.mark.parametrize(
    ("name", "precision", "batch_size", "reserved_gib"),
    [
        ("gpt2", "bf16", 24, 21.86),
        ("gpt2", "bf16", 36, 32.65),
        ("gpt2", "bf16", 60, 42.74),
        ("gpt2", "fp32", 24, 25.25),
        ("gpt2", "fp32", 48, 40.78),
        ("gpt2", "amp-bf16", 48, 44.96),
        ("gpt2", "amp-bf16", 90, 66.61),
        ("gpt2-medium", "bf16", 64, 60.59),
        ("tinyllama-1.1b", "bf16", 95, 136.56),
        ("tinyllama-1.1b", "bf16", 100, 119.21),
    ],
)
def test_recomputed_a_block_of_logits_is_in_pieces_up_to_some_batch(
    name: str, precision: Precision, batch_size: int, reserved_gib: float
) -> None:
    """Traced, on a GPU that is just large enough: a larger batch may take less."""
    needed_bytes = predict(find_model(name), Recipe(precision, recompute="full"), batch_size).needed_bytes
    assert needed_bytes / GIB == pytest.approx(reserved_gib, rel=0.08)
