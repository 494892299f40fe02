"""Prices, and techniques as changes of a setup."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import by_moment, max_batch_size, predict, terms
from gpumem_tui.formula.recipe import EXTRAS, Extra, Recipe, Setup, Sharding
from gpumem_tui.formula.techniques import (
    Price,
    Technique,
    changes,
    selective_recompute_percent,
    sharded,
    smaller_sample,
    why_not,
)
from gpumem_tui.memory import GIB, Bucket
from tests.formula.test_formula_properties import RECIPES, SHAPES

PRICES = st.builds(
    Price,
    *[st.integers(0, 2)] * 5,
    st.sampled_from([0.0, 2.5, 33.0]),
    st.integers(0, 3),
)


def by_key(setup: Setup) -> dict[str, Technique]:
    return {change.key: change for change in changes(setup) if isinstance(change, Technique)}


class TestPrice:
    def test_the_first_field_that_differs_decides(self) -> None:
        order = [
            Price(changes=9),
            Price(slower_percent=99),
            Price(risk=9),
            Price(frozen=9),
            Price(offloads=9),
            Price(retuned=9),
            Price(times_halved=9),
            Price(gpus=9),
        ]
        assert order == sorted(order)

    @given(PRICES, PRICES, PRICES)
    def test_a_larger_set_is_never_cheaper_and_adding_keeps_the_order(self, a: Price, b: Price, more: Price) -> None:
        assert a <= a + more
        assert (a <= b) == (a + more <= b + more)

    @pytest.mark.parametrize(("name", "percent"), [("megatron-175b", 2.7), ("gpt2", 13.3)])
    def test_selective_recompute_by_the_paper(self, name: str, percent: float) -> None:
        assert selective_recompute_percent(find_model(name)) == pytest.approx(percent, abs=0.05)


@given(SHAPES, RECIPES)
def test_a_change_changes_what_it_says_and_nothing_else(shape: ModelShape, recipe: Recipe) -> None:
    setup = Setup(shape, recipe)
    for change in by_key(setup).values():
        new = change.applied(setup)
        assert new != setup
        assert (new.shape != shape) == (change.axis == "sample")
        assert (new.recipe != recipe) == bool(change.recipe)
        assert new.extras == (frozenset() if change.extra is None else {change.extra})
        assert change.price.changes == 1


def test_sharding_takes_the_gpus_there_are_and_then_more() -> None:
    found = by_key(Setup(find_model("gpt2"), Recipe(gpus=4)))
    assert found["zero3"].option == "--sharding zero3 --gpus 4"
    assert found["zero3"].price.gpus == 0
    assert found["more-gpus"].option == "--sharding zero3 --gpus 8"
    assert found["more-gpus"].price.gpus == 4


def test_one_gpu_is_joined_by_a_servers() -> None:
    found = by_key(Setup(find_model("gpt2"), Recipe()))
    assert {key: found[key].price.gpus for key in ("zero1", "zero2", "zero3")} == dict.fromkeys(
        ("zero1", "zero2", "zero3"), 7
    )
    assert "more-gpus" not in found


def test_zero3_costs_time_the_others_do_not() -> None:
    assert sharded("zero3", 8, 0).price > sharded("zero2", 8, 0).price == sharded("zero1", 8, 0).price


def test_samples_halve_again_and_again() -> None:
    found = smaller_sample(find_model("llama-3-8b"), 3)
    assert isinstance(found, Technique)
    assert (found.name, found.option) == ("an eighth of the sequence", "--seq-len 256")


def test_a_sample_that_cannot_halve_says_why() -> None:
    reasons = [smaller_sample(find_model(name), 4) for name in ("mlp", "resnet-50")]
    assert not any(isinstance(found, Technique) for found in reasons)


def test_a_gpu_without_bfloat16() -> None:
    setup = Setup(find_model("gpt2"), Recipe())
    mixed = next(change for change in changes(setup, find_gpu("t4-16gb")) if change.key == "mixed-precision")
    assert isinstance(mixed, Technique)
    assert mixed.option == "--precision amp-fp16"
    assert "loss scaling" in mixed.cost


class TestExtras:
    @given(SHAPES, RECIPES, st.sampled_from(EXTRAS))
    def test_none_costs_fixed_memory(self, shape: ModelShape, recipe: Recipe, extra: Extra) -> None:
        plain, with_extra = (predict(shape, recipe, 1, extras) for extras in (frozenset(), frozenset({extra})))
        one, other = by_moment(shape, recipe, frozenset({extra})), by_moment(shape, recipe)
        assert all(one[moment].fixed_bytes <= other[moment].fixed_bytes for moment in one)
        assert any("Formula only" in line for line in with_extra.assumptions)
        if why_not(extra, shape, recipe) is not None:
            assert with_extra.peak_bytes == plain.peak_bytes

    def test_a_chunked_loss_counts_one_piece_of_each_sequence(self) -> None:
        shape = find_model("gpt2")
        rows = {row.name: row.size_bytes for row in predict(shape, Recipe(), 3, frozenset({"chunked-loss"})).rows}
        assert rows["output head: logits"] == 3 * 128 * 50_257 * 4
        assert rows["output head: gradient of its input"] == 3 * 1024 * 768 * 4

    @pytest.mark.parametrize("sharding", ["zero3", "fsdp2", "deepspeed-zero3"])
    def test_a_share_of_the_weights_leaves_the_gpu_and_what_is_gathered_stays(self, sharding: Sharding) -> None:
        shape, recipe = find_model("llama-3.2-1b"), Recipe("amp-bf16", sharding=sharding, gpus=4)
        there, gone = (
            {row.name: row.size_bytes for row in predict(shape, recipe, 1, extras).rows}
            for extras in (frozenset[Extra](), frozenset[Extra]({"offload-parameters"}))
        )
        each = 2 if sharding == "deepspeed-zero3" else 4
        assert there["parameters"] == -(-each * count_parameters(shape) // 4)
        assert gone["parameters"] == 0
        assert gone.get("gathered parameters") == there.get("gathered parameters")

    def test_the_optimizers_state_leaves_the_gpu(self) -> None:
        rows = terms(find_model("gpt2"), Recipe(), 3, frozenset({"offload-optimizer"}))
        buckets = {row.bucket for row in rows if row.size_bytes}
        assert Bucket.OPTIMIZER not in buckets
        assert Bucket.GRADIENTS in buckets

    def test_offloaded_activations_leave_full_recompute_two_inputs(self) -> None:
        shape = find_model("gpt2")
        rows = {
            row.name: row.size_bytes
            for row in predict(shape, Recipe(recompute="full"), 3, frozenset({"offload-activations"})).rows
        }
        assert rows["inputs of the blocks"] == 2 * 1024 * 3 * 768 * 4

    def test_they_raise_the_largest_batch(self) -> None:
        shape, recipe = find_model("gpt2"), Recipe("amp-bf16")
        plain = max_batch_size(shape, recipe, 24 * GIB)
        assert max_batch_size(shape, recipe, 24 * GIB, extras=frozenset({"chunked-loss"})) > plain
