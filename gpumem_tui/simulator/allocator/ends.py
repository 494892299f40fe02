"""Whether a run fits on a device known between two ends, and by how much it does not: by replays there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumem_tui.memory import Range
from gpumem_tui.simulator.allocator.caching import SEGMENT_GRANULE_BYTES
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.rules import Level


@dataclass(frozen=True)
class Ends:
    """A device as far as known, and a trace.

    More memory or smaller workspaces can leave other pieces of segments, with which a run fits no longer. So a run that
    fits for certain does so at three points: with the least room and the largest workspaces, with the least room as
    expected, and as expected. One that may fit does at one of three: these, or the most room and the least workspaces.

    Attributes:
        capacity: what the device gives the allocator, at least and at most; `expected_bytes`: as expected.
        allowed_bytes: a memory fraction's limit; None for none.
    """

    finder: BatchFinder
    capacity: Range
    expected_bytes: int
    allowed_bytes: int | None = None

    @property
    def _certain(self) -> tuple[tuple[int, Level], ...]:
        low_bytes = self.capacity.low_bytes
        return (low_bytes, "most"), (low_bytes, "expected"), (self.expected_bytes, "expected")

    @property
    def _possible(self) -> tuple[tuple[int, Level], ...]:
        return (self.capacity.high_bytes, "least"), (self.expected_bytes, "expected"), (self.capacity.low_bytes, "most")

    def is_certain(self, batch_size: int, more_bytes: int = 0) -> bool:
        """Return whether the run fits for certain on a device with so much more; negative for less."""
        return all(self._at(batch_size, self._certain, more_bytes))

    def is_possible(self, batch_size: int, more_bytes: int = 0) -> bool:
        """Return whether the run may fit on a device with so much more."""
        return any(self._at(batch_size, self._possible, more_bytes))

    def is_expected(self, batch_size: int) -> bool:
        """Return whether the run fits as expected, as on the simulated GPU."""
        return self.finder.fits(batch_size, self.expected_bytes, self.allowed_bytes)

    def _at(self, batch_size: int, points: tuple[tuple[int, Level], ...], more_bytes: int) -> Iterator[bool]:
        allowed = None if self.allowed_bytes is None else self.allowed_bytes + more_bytes
        return (self.finder.fits(batch_size, room + more_bytes, allowed, level=level) for room, level in points)

    def missing_bytes(self, batch_size: int, free_bytes: int = 0) -> int:
        """Return how much more a device must have for the run to fit for certain and leave so much free; 0 for nothing.

        With a segment's granule less it does not.
        """
        more_bytes = -free_bytes
        while not self.is_certain(batch_size, more_bytes):
            more_bytes = max(more_bytes + 1, self._needed(batch_size, self._certain, more_bytes)[-1])
        return more_bytes + free_bytes

    def least_missing_bytes(self, batch_size: int) -> int:
        """Return how much more a device must have so that the run may fit; 0 where it may.

        With a segment's granule less it does not.
        """
        if self.is_possible(batch_size):
            return 0
        low, high = 0, self._needed(batch_size, self._possible, 0)[0]
        while self.is_possible(batch_size, high - SEGMENT_GRANULE_BYTES):  # at another point, though not with more
            high -= SEGMENT_GRANULE_BYTES
            while high - low > SEGMENT_GRANULE_BYTES:
                middle = low + max(1, (high - low) // SEGMENT_GRANULE_BYTES // 2) * SEGMENT_GRANULE_BYTES
                low, high = (low, middle) if self.is_possible(batch_size, middle) else (middle, high)
        return high

    def _needed(self, batch_size: int, points: tuple[tuple[int, Level], ...], more_bytes: int) -> list[int]:
        """Return by how much more than a device has the run fits at each point where it does not, the least first."""
        found = []
        for (room, level), fits in zip(points, self._at(batch_size, points, more_bytes), strict=True):
            if not fits:
                limit = room if self.allowed_bytes is None else min(room, self.allowed_bytes)
                found.append(self.finder.needed_bytes(batch_size, limit + more_bytes, level=level) - limit)
        return sorted(found)
