"""The largest batch that fits on a device, what batches take there, and what a device would have to have for one.

By replays of one trace, whose figures are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpumem_tui.memory import Range
from gpumem_tui.simulator.allocator.caching import SEGMENT_GRANULE_BYTES, SMALL_REQUEST_BYTES, CachingAllocator
from gpumem_tui.simulator.allocator.replay import AffineTrace, NotAffine, Replay, replay
from gpumem_tui.simulator.allocator.rules import CONVOLUTIONS, Level
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Timeline


@dataclass(frozen=True)
class BatchFinder:
    """Finds largest batch sizes from one trace, for any number of devices.

    The unlimited need of a batch size is kept: it settles most questions on the next device too.
    """

    trace: AffineTrace
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    _peaks: dict[tuple[int, Level], tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)
    _latest: dict[int, Replay] = field(default_factory=dict, repr=False, compare=False)
    """By batch size the last run without limit."""

    _live: dict[tuple[int, Level], int] = field(default_factory=dict, repr=False, compare=False)
    _needed: dict[tuple[int, Level], list[int]] = field(default_factory=dict, repr=False, compare=False)
    """By batch size and level the capacities that were found to hold it, where a segment less does not."""

    _outcomes: dict[tuple[int, Level, int, int | None], tuple[bool, int, int]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def peaks(self, batch_size: int, *, level: Level = "expected") -> tuple[int, int]:
        """Return the highest (allocated, reserved) bytes where there is no limit."""
        key = batch_size, self._kept_as(level)
        if key not in self._peaks:
            unlimited = replay(self._timeline(batch_size, level=level), settings=self.settings)
            self._peaks[key] = unlimited.peak_allocated_bytes, unlimited.peak_reserved_bytes
            if key[1] == "expected":
                self._latest.clear()
                self._latest[batch_size] = unlimited
        return self._peaks[key]

    def run(self, batch_size: int, capacity_bytes: int, allowed_bytes: int | None = None) -> Replay:
        """Return the run on a device, or where it does not fit there on the smallest larger one that holds it."""
        limit = self._limit(capacity_bytes, allowed_bytes)
        if not self.fits(batch_size, capacity_bytes, allowed_bytes):
            return self._within(batch_size, self.needed_bytes(batch_size, limit), None, level="expected")
        if self.peaks(batch_size)[1] > limit or self.settings.garbage_collection_threshold:
            return self._within(batch_size, capacity_bytes, allowed_bytes, level="expected")
        latest = self._latest.get(batch_size)
        return latest or replay(self._timeline(batch_size, level="expected"), settings=self.settings)

    def needed_bytes(self, batch_size: int, above_bytes: int = 0, *, level: Level = "expected") -> int:
        """Return the least above `above_bytes`, which do not hold the run, that a device would have to give for it.

        Found by replays in which the allocator gives its cache back and tries again where memory is short. A whole
        number of segments' granules; one less does not hold the run.
        """
        known = self._needed.setdefault((batch_size, self._kept_as(level)), [])
        if found := min((size for size in known if size > above_bytes), default=0):
            return found
        _, reserved = self.peaks(batch_size, level=level)
        low = max(above_bytes, self._live_bytes(batch_size, level=level) - 1) // SEGMENT_GRANULE_BYTES
        high = max(low + 1, -(-reserved // SEGMENT_GRANULE_BYTES))
        middle = low
        while high - low > 1:
            ran = self._within(batch_size, middle * SEGMENT_GRANULE_BYTES, None, level=level)
            if ran.fits:  # so it does with less, down to what was reserved
                high = max(low + 1, -(-ran.peak_reserved_bytes // SEGMENT_GRANULE_BYTES))
            else:  # so it does with more, up to what was refused
                low = max(middle, ((ran.least_refused_bytes or 0) - 1) // SEGMENT_GRANULE_BYTES)
            middle = (low + high) // 2
        known.append(high * SEGMENT_GRANULE_BYTES)
        return known[-1]

    def fits(
        self, batch_size: int, capacity_bytes: int, allowed_bytes: int | None = None, *, level: Level = "expected"
    ) -> bool:
        """Return whether the whole run fits in `capacity_bytes`, and a memory fraction's `allowed_bytes`."""
        limit = self._limit(capacity_bytes, allowed_bytes)
        if self._live_bytes(batch_size, level=level) > limit:
            return False  # at any outcome of the allocator, so no replay is needed
        allocated, reserved = self.peaks(batch_size, level=level)
        if reserved <= limit and not self.settings.garbage_collection_threshold:
            return True
        # Between the two, cached segments are given back on the way, and only a replay on this device can tell.
        return allocated <= limit and self._outcome(batch_size, capacity_bytes, allowed_bytes, level=level)[0]

    def peaks_within(
        self, batch_size: int, capacity_bytes: int, allowed_bytes: int | None = None, *, level: Level = "expected"
    ) -> tuple[int, int]:
        """Return the highest (allocated, reserved) bytes on a device, or on the smallest larger one that holds it."""
        limit = self._limit(capacity_bytes, allowed_bytes)
        if not self.fits(batch_size, capacity_bytes, allowed_bytes, level=level):
            capacity_bytes, allowed_bytes = self.needed_bytes(batch_size, limit, level=level), None
        elif self.peaks(batch_size, level=level)[1] <= limit and not self.settings.garbage_collection_threshold:
            return self.peaks(batch_size, level=level)
        _, allocated, reserved = self._outcome(batch_size, capacity_bytes, allowed_bytes, level=level)
        return allocated, reserved

    def reserved_range(
        self, batch_size: int, expected_bytes: int, capacity: Range, allowed_bytes: int | None = None
    ) -> Range:
        """Return the highest reserved bytes with the least and the most of what has only a known range.

        Workspaces also change which cached block serves whom: with the most of them as much may lie idle as without,
        and the largest that was not measured may find no cached block that serves it and take a segment of its own, as
        far as there is room.

        Args:
            expected_bytes: what the device is expected to give, within `capacity`.
        """
        _, least = self.peaks_within(batch_size, capacity.high_bytes, allowed_bytes, level="least")
        allocated, reserved = self.peaks_within(batch_size, expected_bytes, allowed_bytes)
        most_allocated, most = self.peaks_within(batch_size, capacity.low_bytes, allowed_bytes, level="most")
        if self.trace.is_open:
            computed = [size for _, size in self.trace.at(batch_size).computed if size.rule != CONVOLUTIONS["measured"]]
            larger = [size.bytes_at("most") for size in computed if size.bytes_at("most") > size.size_bytes]
            own_bytes = self._own_segment_bytes(max(larger)) if larger else 0
            room = max(most, self._limit(capacity.low_bytes, allowed_bytes))
            most = min(max(most, most_allocated + reserved - allocated, reserved + own_bytes), room)
        return Range.of((least, reserved, most))

    def momentary(
        self, batch_size: int, capacity_bytes: int, allowed_bytes: int | None = None
    ) -> tuple[int, int] | None:
        """Return the highest (allocated, reserved) bytes with what is tried as far as there is room.

        None where nothing is tried, and where the run does not fit without it.
        """
        timeline = self._timeline(batch_size, level="expected")
        tried = timeline.at_level("momentary")
        if tried is timeline:
            return None
        found = replay(tried, capacity_bytes, self.settings, allowed_bytes)
        return (found.peak_allocated_bytes, found.peak_reserved_bytes) if found.fits else None

    @staticmethod
    def _limit(capacity_bytes: int, allowed_bytes: int | None) -> int:
        return capacity_bytes if allowed_bytes is None else min(capacity_bytes, allowed_bytes)

    def _own_segment_bytes(self, largest_bytes: int) -> int:
        """Return the most that the driver is asked for, to serve a request of at most so many bytes."""
        allocator = CachingAllocator(0, self.settings)
        size = allocator.round_size(largest_bytes)
        least = 0 if size <= SMALL_REQUEST_BYTES else self.settings.large_segment_bytes
        return max(allocator.segment_size(size), least)

    def _outcome(
        self, batch_size: int, capacity_bytes: int, allowed_bytes: int | None, *, level: Level
    ) -> tuple[bool, int, int]:
        """Return whether the run fits, and the highest (allocated, reserved) bytes until then; kept for later."""
        key = batch_size, self._kept_as(level), capacity_bytes, allowed_bytes
        if key not in self._outcomes:
            found = self._within(batch_size, capacity_bytes, allowed_bytes, level=level)
            self._outcomes[key] = found.fits, found.peak_allocated_bytes, found.peak_reserved_bytes
        return self._outcomes[key]

    def _within(self, batch_size: int, capacity_bytes: int, allowed_bytes: int | None, *, level: Level) -> Replay:
        timeline = self._timeline(batch_size, level=level)
        return replay(timeline, capacity_bytes, self.settings, allowed_bytes)

    def largest(self, capacity_bytes: int, allowed_bytes: int | None = None, *, level: Level = "expected") -> int:
        """Return the largest batch size that fits; 0 if not even one sample does.

        Raises:
            NotAffine: memory does not grow with the batch.
        """
        return self.largest_where(lambda size: self.fits(size, capacity_bytes, allowed_bytes, level=level))

    def largest_where(self, fits: Callable[[int], bool], known: int = 0) -> int:
        """Return the largest batch size of which something holds that larger ones lack; 0 if of none.

        Args:
            known: a size of which it holds; 0 for none.

        Raises:
            NotAffine: memory does not grow with the batch.
        """
        if not known and not fits(1):
            return 0
        if not any(self.trace.slopes):
            raise NotAffine("no allocation grows with the batch size")
        low, high = max(1, known), max(1, known) + 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _live_bytes(self, batch_size: int, *, level: Level) -> int:
        """Return the most that is live at once, and remember it."""
        key = batch_size, self._kept_as(level)
        if key not in self._live:
            self._live[key] = self._timeline(batch_size, level=level).most_live_bytes()
        return self._live[key]

    def _kept_as(self, level: Level) -> Level:
        return level if self.trace.is_open else "expected"

    def _timeline(self, batch_size: int, *, level: Level) -> Timeline:
        timeline = self.trace.at(batch_size)
        return timeline if level == "expected" else timeline.at_level(level)
