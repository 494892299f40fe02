"""Which batch size to try next: pure functions of the results so far.

Every strategy ends the same way, when a size ran and the next one did not fit (or not even one sample fits), so the
verdict never names a size that was not run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Name = Literal["guided", "ramp", "double", "binary"]
NAMES: tuple[Name, ...] = get_args(Name)

MAX_BATCH_SIZE = 1 << 24
"""No larger size is tried; a step that could not be traced and still fits here does not grow with the batch."""

RAMP_TRIALS = 12
"""A ramp without a given step is cut into about this many sizes up to the predicted largest batch."""

PATIENCE_TRIALS = 7
"""After this many trials a guided search no longer believes the line through its results: reserved bytes move in whole
segments, so two sizes side by side can predict a next one that is only one further on, again and again."""


@dataclass(frozen=True)
class Tried:
    """A batch size that was run; where it fits, `peak_bytes` is the reserved and `allocated_bytes` the other peak.

    `raised`: it failed for another reason than memory.
    """

    batch_size: int
    fits: bool
    peak_bytes: int = 0
    allocated_bytes: int = 0
    raised: bool = False


@dataclass(frozen=True)
class Sizes:
    """The batch sizes that are tried: the multiples of one, or with `doubles` only it, twice it, four times it, ...

    A program may ask that something be divisible by its batch size, or that the batch be divisible by something.
    """

    multiple: int = 1
    doubles: bool = False

    def at_most(self, size: int) -> int:
        """Return the largest that is not above a size; 0 if none is."""
        times = size // self.multiple
        return (1 << times.bit_length() >> 1 if self.doubles else times) * self.multiple

    def after(self, size: int) -> int:
        """Return the smallest that is above a size, which is 0 or more."""
        times = size // self.multiple
        return (1 << times.bit_length() if self.doubles else times + 1) * self.multiple

    def without(self, refused: Collection[int]) -> Sizes:
        """Return twice, four or eight times the multiple, or doubles, whichever first has none of some sizes.

        These sizes themselves if nothing helps: what is refused then is no matter of divisibility.
        """
        coarser = [replace(self, multiple=self.multiple * times) for times in (1, 2, 4, 8)]
        for sizes in (*coarser, replace(self, doubles=True)):
            if all(sizes.at_most(size) != size for size in refused):
                return sizes
        return self

    @property
    def words(self) -> str:
        """Return what they are; "" for every size."""
        if self.doubles:
            return ", ".join(str(self.multiple << power) for power in range(3)) + ", ..."
        return f"multiples of {self.multiple}" if self.multiple > 1 else ""


@dataclass(frozen=True)
class StrategySettings:
    """The facts that a strategy may use besides the results.

    Attributes:
        predicted: largest batch size predicted (traced, else by formula); None if nobody could tell.
        capacity_bytes: what the allocator can reserve, for extrapolation.
        step: a ramp's step; None for one that fits the prediction.
        ceiling: never try a larger size.
        floor: never try a smaller size: a step may need more than one sample (batch normalization does).
        sizes: that are tried at all.
        traced_at: the largest size that ran as the step was traced; 0 for none.
    """

    strategy: Name = "guided"
    predicted: int | None = None
    capacity_bytes: int = 0
    step: int | None = None
    ceiling: int = MAX_BATCH_SIZE
    floor: int = 1
    sizes: Sizes = Sizes()
    traced_at: int = 0


def next_size(tried: Sequence[Tried], settings: StrategySettings) -> int | None:
    """Return the batch size to try next, or None when the search is done."""
    fit, oom = bracket(tried, settings.floor)
    sizes = settings.sizes
    first, last = sizes.after(fit), sizes.at_most(settings.ceiling if oom is None else min(oom - 1, settings.ceiling))
    if first > last:
        return None
    wanted = sizes.at_most(_STRATEGIES[settings.strategy](tried, settings))
    return min(max(wanted, first), last)


def bracket(tried: Sequence[Tried], floor: int = 1) -> tuple[int, int | None]:
    """Return the largest size that fits, and the smallest beyond it that does not.

    One below `floor` where none fits; None without one beyond.
    """
    fit = max((t.batch_size for t in tried if t.fits), default=floor - 1)
    oom = min((t.batch_size for t in tried if not t.fits and t.batch_size > fit), default=None)
    return fit, oom


def _guided(tried: Sequence[Tried], settings: StrategySettings) -> int:
    """Try the prediction and its successor; when it is off, the size that the measured slope predicts."""
    fit, oom = bracket(tried, settings.floor)
    sizes = {t.batch_size for t in tried}
    if settings.predicted is None:
        return _double(tried, settings)
    predicted = settings.sizes.at_most(min(max(settings.floor, settings.predicted), settings.ceiling))
    predicted = predicted or settings.sizes.after(0)
    if predicted not in sizes and (oom is None or predicted < oom):
        return predicted
    if fit == predicted and (following := settings.sizes.after(predicted)) not in sizes:
        return following
    if oom is not None and any(t.raised and t.batch_size == oom for t in tried):
        ran = max(fit, settings.traced_at)
        return math.isqrt(ran * oom) if 0 < ran < oom - 1 else (fit + oom) // 2
    extrapolated = _extrapolate(tried, settings.capacity_bytes)
    if extrapolated is not None and len(tried) < PATIENCE_TRIALS:
        return extrapolated
    if oom is not None:
        return (fit + oom) // 2
    if level(tried) is not None:
        return 2 * fit
    below = max((t.batch_size for t in tried if t.fits and t.batch_size < fit), default=0)
    return fit + 2 * (fit - below)


def level(tried: Sequence[Tried]) -> tuple[int, int] | None:
    """Return the two largest sizes that fit, if they took the same memory to the byte."""
    largest = _two_largest(tried)
    if largest is None or not largest[0].allocated_bytes == largest[1].allocated_bytes > 0:
        return None
    return largest[0].batch_size, largest[1].batch_size


def _two_largest(tried: Sequence[Tried]) -> tuple[Tried, Tried] | None:
    fits = sorted((t for t in tried if t.fits), key=lambda t: t.batch_size)[-2:]
    return (fits[0], fits[1]) if len(fits) == 2 else None


def _extrapolate(tried: Sequence[Tried], capacity_bytes: int) -> int | None:
    """Return where the line through the two largest fitting sizes reaches the capacity."""
    largest = _two_largest(tried)
    if largest is None:
        return None
    low, high = largest
    slope = (high.peak_bytes - low.peak_bytes) / (high.batch_size - low.batch_size)
    if slope <= 0:
        return None
    return high.batch_size + int((capacity_bytes - high.peak_bytes) / slope)


def _ramp(tried: Sequence[Tried], settings: StrategySettings) -> int:
    """Climb from one sample in equal steps; after the first failure, halve the gap it leaves."""
    fit, oom = bracket(tried, settings.floor)
    if oom is not None:
        return (fit + oom) // 2
    step = settings.step or max(1, (settings.predicted or 0) // RAMP_TRIALS)
    return fit + step if fit else 1


def _double(tried: Sequence[Tried], settings: StrategySettings) -> int:
    """Try 1, 2, 4, … until one fails, then halve the gap."""
    fit, oom = bracket(tried, settings.floor)
    return 2 * fit or 1 if oom is None else (fit + oom) // 2


def _binary(tried: Sequence[Tried], settings: StrategySettings) -> int:
    """Halve the range from nothing to twice the prediction (or 64 samples), and twice as far each time all fits."""
    fit, oom = bracket(tried, settings.floor)
    if oom is not None:
        return (fit + oom) // 2
    ceiling = 2 * (settings.predicted or 32)
    while ceiling <= 2 * fit:
        ceiling *= 2
    return (fit + ceiling) // 2


_STRATEGIES = {"guided": _guided, "ramp": _ramp, "double": _double, "binary": _binary}
