"""How large a batch helps, in multiples, and the rate that goes with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.answers import largest_batch
from gpumem_tui.plan.goals import Goals
from gpumem_tui.plan.judgement import (
    critical_batch,
    kaplan_critical_tokens,
    learning_rate,
    multiples,
    rate_factors,
    reference,
    rounded_batch,
)
from gpumem_tui.plan.plan import Plan
from tests.plan.plans import GPT2

RESNET = Plan(find_model("resnet-50"), Recipe(), find_gpu("a100-80gb"), batch_size=32)


class TestCriticalBatch:
    def test_of_language_models_is_in_tokens_and_grows_as_the_loss_falls(self) -> None:
        """Kaplan et al. 2020: about 1 to 2 million tokens at the losses of the largest models of that paper."""
        assert 1e6 < kaplan_critical_tokens(3.0) < 2e6
        table = critical_batch(replace(GPT2, target_batch=1024)).table  # 1,048,576 tokens
        assert table is not None
        assert [row[2] for row in table.rows] == ["above", "above", "within", "within", "within"]

    @pytest.mark.parametrize(("target", "above"), [(256, 0), (257, 1), (4096, 2)])
    def test_of_images_is_in_samples(self, target: int, above: int) -> None:
        table = critical_batch(replace(RESNET, batch_size=1, target_batch=target)).table
        assert table is not None
        assert [row[2] for row in table.rows].count("above") == above


class TestMultiples:
    def test_the_largest_batch_in_the_wanted_multiple(self) -> None:
        largest = largest_batch(GPT2)
        assert rounded_batch(GPT2, largest) == largest // 8 * 8
        assert rounded_batch(replace(GPT2, goals=Goals(batch_multiple=5)), largest) == largest // 5 * 5
        assert rounded_batch(GPT2, 7) == 7
        assert f"{largest // 8 * 8} is the largest multiple of 8" in multiples(GPT2).text


class TestLearningRate:
    def test_root_two_to_two_for_a_doubling(self) -> None:
        assert rate_factors(256, 512) == pytest.approx((2**0.5, 2.0))

    def test_halving_is_the_inverse(self) -> None:
        assert rate_factors(512, 256) == pytest.approx((0.5, 2**-0.5))

    def test_imagenet_in_an_hour(self) -> None:
        found = learning_rate(replace(RESNET, target_batch=8192))
        assert "5.66 to 32.00" in found.text
        assert "Warm up" in found.text
        assert "LARS" in found.text

    def test_is_not_scaled_beyond_what_is_known_to_hold(self) -> None:
        found = learning_rate(replace(RESNET, target_batch=65_536))
        assert "5.66 to 32.00" in found.text
        assert "No further than for 8,192" in found.text

    def test_a_language_models_reference_is_gpt_3s_of_its_size(self) -> None:
        found = reference(GPT2)
        assert found is not None
        assert found.batch_size * GPT2.shape.seq_len == pytest.approx(0.5e6)
        assert found.learning_rate == 6.0e-4

    def test_small_batches_need_no_warm_up(self) -> None:
        text = learning_rate(GPT2).text
        assert "Warm up" not in text
        assert "LARS" not in text


@pytest.mark.parametrize(
    ("goals", "has_tokens", "said"),
    [
        (Goals(tokens=0), True, "--tokens: give 1 to"),
        (Goals(tokens=5), False, "--tokens: this network has no tokens"),
        (Goals(price=-1), True, "--price: give the price"),
        (Goals(batch_multiple=0), True, "--batch-multiple: give"),
        (Goals(prices=(("a100_40gb", 1.0),)), True, "prices. in the settings: write a100-40gb for a100_40gb"),
        (Goals(prices=(("a100-41gb", 1.0),)), True, "prices. in the settings: unknown GPU .* did you mean a100-40gb"),
    ],
)
def test_goals_that_cannot_be(goals: Goals, has_tokens: bool, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        goals.check(has_tokens=has_tokens)
