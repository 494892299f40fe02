"""Finds the end of what fits on a grid by few questions: each one may take a trace, or a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpumem_tui.memory import Unknown

_BETTER_GUESSES = 3
_MOST_ROUNDS = 24


@dataclass(frozen=True)
class Narrowed:
    """How far a search has come. `wanted`: what to run next; `why`: why there is nothing to run for that."""

    settled: bool
    wanted: tuple[int, ...] = ()
    why: str = ""


@dataclass
class EndSearch:
    """The largest value on a grid that fits, by runs: around a guess first, then between what is known.

    Attributes:
        refined: a better guess after some runs; None for none.
        low: the largest that fits, at first one below the least; `high`: the smallest beyond it that does not.
        gap: one below `low` that does not fit all the same; None for none that was found.
    """

    step: int
    most: int
    fits: Callable[[int], bool | Unknown | None]
    refined: Callable[[], int | None] = lambda: None
    low: int = 0
    high: int | None = None
    gap: int | None = None

    def around(self, guess: int) -> Narrowed:
        """Narrow down as far as the runs that there are tell; the next ones that are wanted."""
        values = self._values(max(self.low, min(guess, self.most)))
        for wanted in values:
            found = {value: self._take(value) for value in wanted}
            if self.settled:
                return Narrowed(True)
            if missing := tuple(value for value in wanted if found[value] is None):
                return Narrowed(False, missing)
            if why := next((one for one in found.values() if isinstance(one, Unknown)), None):
                return Narrowed(False, why=why.reason)
        return Narrowed(self.settled, why="it does not settle")

    @property
    def settled(self) -> bool:
        """Nothing lies between what fits and what does not, or all there is fits."""
        return self.low >= self.most or (self.high is not None and self.high - self.low <= self.step)

    def _values(self, guess: int) -> Iterator[tuple[int, ...]]:
        """The guess and the one after it; the same of better guesses; then twice as far as what fits, or between what
        does and what does not."""
        yield self._pair(guess)
        for _ in range(_BETTER_GUESSES):
            better = self.refined()
            yield () if better is None else self._pair(better)
        for _ in range(_MOST_ROUNDS):
            if self.high is None:
                yield (min(self.most, max(self.step, 2 * self.low)),)
            else:
                yield (self.low + (self.high - self.low) // self.step // 2 * self.step,)

    def _pair(self, guess: int) -> tuple[int, ...]:
        """Both sides of the end that is guessed; at least two runs, as the next guess is from their difference."""
        guess = max(guess, self.step) if self.low == 0 and self.high is None else guess
        return tuple(one for one in (guess, guess + self.step) if self._is_open(one))

    def _is_open(self, value: int) -> bool:
        return self.low < value <= self.most and (self.high is None or value < self.high)

    def _take(self, value: int) -> bool | Unknown | None:
        found = self.fits(value)
        if found is True:
            self.low = max(self.low, value)
            if self.high is not None and self.high < self.low:  # what lies in pieces is less at some larger values
                self.high, self.gap = None, self.high
        elif found is False and value > self.low:
            self.high = value if self.high is None else min(self.high, value)
        elif found is False:
            self.gap = value
        return found


def most_of(count: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 to `count` that fits, where no smaller one does not; 0 for none."""
    if count < 1 or not fits(1):
        return 0
    low, high = 1, 2
    while high <= count and fits(high):
        low, high = high, 2 * high
    high = min(high, count + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def most_near(near: int, count: int, fits: Callable[[int], bool]) -> int:
    """As `most_of`, where the answer is probably not far from `near`: each question takes its time."""
    low, high, stride = 0, count + 1, 1
    near = min(max(near, 1), count)
    if fits(near):
        low = near
        while low + stride <= count and fits(low + stride):
            low, stride = low + stride, 2 * stride
        high = min(low + stride, high)
    else:
        high = near
        while high - stride >= 1 and not fits(high - stride):
            high, stride = high - stride, 2 * stride
        low = max(high - stride, low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def first_of(count: int, fits: Callable[[int], bool]) -> int | None:
    """The first of `count` places that fits, where every later one does; None for none."""
    if fits(0):
        return 0
    most = most_of(count - 1, lambda place: not fits(place))
    return most + 1 if most + 1 < count else None
