"""The gradient noise scale, on gradients whose noise is known."""

from __future__ import annotations

import random
from itertools import product

import pytest

from gpumem_tui.formula.noise_scale import MeasuredNorm, NoiseScaleError, noise_scale


def expected(batch_size: int, gradient: float, noise: float) -> MeasuredNorm:
    """|G|² + tr(Σ)/B, the norm that a batch has in expectation."""
    return MeasuredNorm(batch_size, (gradient**2 + noise / batch_size) ** 0.5)


@pytest.mark.parametrize(("gradient", "noise", "small", "big"), product([0.5, 2.0], [1.0, 300.0], [1, 8], [16, 4096]))
def test_expected_norms_give_the_noise_back(gradient: float, noise: float, small: int, big: int) -> None:
    found = noise_scale([expected(big, gradient, noise), expected(small, gradient, noise)])
    assert found.squared_gradient == pytest.approx(gradient**2)
    assert found.noise == pytest.approx(noise)
    assert found.batch_size == pytest.approx(noise / gradient**2)


def test_gradients_that_were_drawn() -> None:
    """A thousand parameters, a true gradient of norm √10, an example's noise of variance 0.4 each: 400/10."""
    drawn, norms = random.Random(0), []
    for batch_size in (8, 64):
        for _ in range(60):
            deviation = (0.4 / batch_size) ** 0.5
            squared = sum((0.1 + drawn.gauss(0, deviation)) ** 2 for _ in range(1000))
            norms.append(MeasuredNorm(batch_size, squared**0.5))
    assert noise_scale(norms).batch_size == pytest.approx(40, rel=0.05)


def test_at_the_noise_scale_twice_the_steps_and_twice_the_examples() -> None:
    found = noise_scale([expected(8, 1.0, 100.0), expected(64, 1.0, 100.0)])
    assert found.steps(100) == pytest.approx(2)
    assert found.examples(100) == pytest.approx(2)
    assert found.rate_factor(100, 10**9) == pytest.approx(2)


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        ([], "at 0 batch sizes"),
        ([MeasuredNorm(8, 2.0), MeasuredNorm(8, 2.1)], "at 1 batch sizes"),
        ([MeasuredNorm(8, 2.0), MeasuredNorm(64, 2.0)], "no noise is left"),
        ([MeasuredNorm(8, 2.0), MeasuredNorm(64, 0.5)], "noise alone"),
    ],
)
def test_norms_that_tell_nothing(norms: list[MeasuredNorm], said: str) -> None:
    with pytest.raises(NoiseScaleError, match=said):
        noise_scale(norms)


@pytest.mark.parametrize(("batch_size", "norm"), [(0, 1.0), (8, 0.0), (8, float("inf"))])
def test_norms_that_cannot_be(batch_size: int, norm: float) -> None:
    with pytest.raises(NoiseScaleError, match="above 0"):
        MeasuredNorm(batch_size, norm)
