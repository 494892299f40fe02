"""The gradient noise scale from gradient norms at two batch sizes (McCandlish et al. 2018, arXiv:1812.06162).

A gradient over B examples has the expected squared norm |G|² + tr(Σ)/B: the true gradient's and the noise's. Two batch
sizes give both (appendix A.1), and their ratio tr(Σ)/|G|² is the simple noise scale: the batch size beyond which more
examples a step buy little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gpumem_tui.errors import OptionError


class NoiseScaleError(OptionError, ValueError):
    """Norms that no gradient noise can have made: one line that says why, and what to measure."""


@dataclass(frozen=True, slots=True)
class MeasuredNorm:
    """The norm of the whole gradient, averaged over so many examples (or tokens: the answer is in the same unit).

    Raises:
        NoiseScaleError: a batch or a norm that is not positive.
    """

    batch_size: int
    norm: float

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 < self.norm < float("inf"):
            raise NoiseScaleError(f"a batch of {self.batch_size} with a norm of {self.norm:g}: both must be above 0")


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The gradient noise scale that two batch sizes tell.

    Attributes:
        squared_gradient: |G|², of the true gradient.
        noise: tr(Σ), the variance of one example's gradient, summed over the parameters.
    """

    squared_gradient: float
    noise: float

    @property
    def batch_size(self) -> float:
        """tr(Σ)/|G|², an estimate of the critical batch size."""
        return self.noise / self.squared_gradient

    def steps(self, batch_size: float) -> float:
        """Return steps to the same loss, of those that the largest batches need: 1 + B_noise/B (equation 2.7)."""
        return 1 + self.batch_size / batch_size

    def examples(self, batch_size: float) -> float:
        """Return examples to the same loss, of those that the smallest batches need: 1 + B/B_noise (equation 2.7)."""
        return 1 + batch_size / self.batch_size

    def rate_factor(self, reference_batch: float, batch_size: float) -> float:
        """Return what to multiply a learning rate with between two batches.

        Ε(B) = ε_max/(1 + B_noise/B) (equation 2.6).
        """
        return self.steps(reference_batch) / self.steps(batch_size)


def noise_scale(measured: Sequence[MeasuredNorm]) -> NoiseScale:
    """Return from norms at exactly two batch sizes; several of one batch size are averaged as squares.

    One pair is very noisy: the paper averages over many steps.

    Raises:
        NoiseScaleError: fewer or more than two batch sizes, or norms that leave no true gradient or no noise.
    """
    sizes = sorted({one.batch_size for one in measured})
    if len(sizes) != 2:
        raise NoiseScaleError(f"norms at {len(sizes)} batch sizes: give them at two, such as 8=2.1 64=1.3")
    small, big = sizes
    squared_small, squared_big = (fmean(one.norm**2 for one in measured if one.batch_size == size) for size in sizes)
    gradient = (big * squared_big - small * squared_small) / (big - small)
    noise = (squared_small - squared_big) / (1 / small - 1 / big)
    if noise <= 0:
        raise NoiseScaleError(
            f"the norm at {big} is not below that at {small}: no noise is left; measure at the same weights, over more "
            "steps"
        )
    if gradient <= 0:
        raise NoiseScaleError(
            f"from {small} to {big} the squared norm falls as if there were noise alone: the noise scale is far above "
            f"{big}; measure with a larger batch, over more steps"
        )
    return NoiseScale(gradient, noise)
