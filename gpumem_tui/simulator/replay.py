"""Answers for any batch size and any GPU from two traces, without running the step again and without torch.

A training step asks the allocator for sizes that are affine in the batch size: a + c·b. Two traces of one program give
every a and c; a third, at another size, checks them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket
from gpumem_tui.simulator.allocator import CachingAllocator, OutOfMemory
from gpumem_tui.simulator.blocks import Block
from gpumem_tui.simulator.settings import AllocatorSettings
from gpumem_tui.simulator.timeline import Mark, Phase, Site, Timeline, rounded

_UNLIMITED = 1 << 60


class NotAffine(ValueError):
    """The traces differ in more than sizes that grow evenly with the batch."""


def _same_program(one: Timeline, other: Timeline) -> bool:
    return (one.events, one.buckets, one.marks) == (other.events, other.buckets, other.marks)


@dataclass(frozen=True)
class PhasePeak:
    """The highest allocated bytes within one phase of one step, and the reserved bytes at its end."""

    step: int
    phase: Phase
    peak_allocated_bytes: int
    reserved_bytes: int
    breakdown: Breakdown


@dataclass(frozen=True)
class Replay:
    """What the allocator does with a timeline.

    Attributes:
        fits: False if the device ran out of memory; the figures are then those reached until then.
        breakdown: the buckets at the moment of the highest allocated bytes; they sum to `peak_allocated_bytes`.
    """

    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    breakdown: Breakdown
    peak_event: int
    phases: tuple[PhasePeak, ...]


@dataclass(frozen=True)
class AffineTrace:
    """A training run at every batch size: allocation i takes ``constants[i] + slopes[i] · b`` bytes.

    `exact_from` is the smallest batch size that was checked; below it, sizes may differ (a dimension of 1 is special).
    """

    events: tuple[int, ...]
    constants: tuple[int, ...]
    slopes: tuple[int, ...]
    buckets: tuple[int, ...]
    marks: tuple[Mark, ...]
    exact_from: int = 1
    sites: tuple[int, ...] = ()
    site_table: tuple[Site, ...] = ()

    @classmethod
    def fit(cls, first: tuple[int, Timeline], second: tuple[int, Timeline]) -> AffineTrace:
        """The affine form through two (batch size, timeline) pairs of different batch sizes.

        Raises:
            NotAffine: the two runs made different allocations, or a size does not grow by whole bytes a sample.
        """
        (b1, t1), (b2, t2) = sorted((first, second), key=lambda pair: pair[0])
        if not _same_program(t1, t2):
            raise NotAffine(
                f"the step allocates differently at batch sizes {b1} and {b2} "
                f"({len(t1.events)} and {len(t2.events)} events)"
            )
        slopes = []
        for size1, size2 in zip(t1.sizes, t2.sizes, strict=True):
            slope, rest = divmod(size2 - size1, b2 - b1)
            if rest:
                raise NotAffine(f"an allocation of {size1} bytes at batch size {b1} takes {size2} at {b2}")
            slopes.append(slope)
        constants = tuple(size - slope * b1 for size, slope in zip(t1.sizes, slopes, strict=True))
        return cls(
            t1.events, constants, tuple(slopes), t1.buckets, t1.marks, b1, sites=t2.sites, site_table=t2.site_table
        )

    def at(self, batch_size: int) -> Timeline:
        """The timeline at a batch size.

        Raises:
            NotAffine: an allocation that shrinks with the batch would have less than no bytes.
        """
        sizes = tuple(a + c * batch_size for a, c in zip(self.constants, self.slopes, strict=True))
        if min(sizes, default=0) < 0:
            raise NotAffine(
                f"an allocation that shrinks with the batch would have less than none at batch size {batch_size}"
            )
        return Timeline(self.events, sizes, self.buckets, self.marks, self.sites, self.site_table)

    def check(self, batch_size: int, traced: Timeline) -> None:
        """Compare with a run that was not used for the fit.

        Raises:
            NotAffine: any event or size differs.
        """
        foretold = self.at(batch_size)
        if foretold.sizes != traced.sizes or not _same_program(foretold, traced):
            raise NotAffine(f"the step at batch size {batch_size} is not what smaller ones foretell")


def replay(
    timeline: Timeline,
    capacity_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
    allowed_bytes: int | None = None,
) -> Replay:
    """Run a timeline through the caching allocator of a device with `capacity_bytes` (None: without limit)."""
    allocator = CachingAllocator(
        _UNLIMITED if capacity_bytes is None else capacity_bytes,
        settings or AllocatorSettings(),
        allowed_bytes,
    )
    stats, malloc, free = allocator.stats, allocator.malloc, allocator.free
    blocks: dict[int, Block] = {}
    sizes = timeline.sizes
    starts = [mark.event for mark in timeline.marks] + [len(timeline.events)]
    phases: list[tuple[Mark, int, int, int]] = []
    peak_bytes, peak_event = 0, -1
    fits = True
    position = 0
    for index, start in enumerate(starts):
        phase_peak, phase_event = stats.allocated_bytes, position - 1
        try:
            for position in range(position, start):  # noqa: B020  continues where the last phase ended
                number = timeline.events[position]
                if number < 0:
                    free(blocks.pop(-number))
                    continue
                blocks[number] = malloc(sizes[number - 1])
                if stats.allocated_bytes > phase_peak:
                    phase_peak, phase_event = stats.allocated_bytes, position
        except OutOfMemory:
            fits = False
        position = start
        if phase_peak > peak_bytes:
            peak_bytes, peak_event = phase_peak, phase_event
        if index:
            phases.append((timeline.marks[index - 1], phase_peak, phase_event, stats.reserved_bytes))
        if not fits:
            break
    at = _breakdowns(timeline, {peak_event: peak_bytes, **{event: peak for _, peak, event, _ in phases}})
    return Replay(
        fits=fits,
        peak_allocated_bytes=stats.peak_allocated_bytes,
        peak_reserved_bytes=stats.peak_reserved_bytes,
        breakdown=at[peak_event],
        peak_event=peak_event,
        phases=tuple(
            PhasePeak(mark.step, mark.phase, peak, reserved, at[event]) for mark, peak, event, reserved in phases
        ),
    )


def _breakdowns(timeline: Timeline, allocated_at: dict[int, int]) -> dict[int, Breakdown]:
    """The buckets after each of the given events, in one pass; slack of unsplit blocks goes to `OTHER`."""
    totals = [0] * len(ALLOCATED_BUCKETS)
    other = ALLOCATED_BUCKETS.index(Bucket.OTHER)
    found = {}
    position = 0
    for event in sorted(allocated_at):
        for number in timeline.events[position : event + 1]:
            index = abs(number) - 1
            size = rounded(timeline.sizes[index])
            totals[timeline.buckets[index]] += size if number > 0 else -size
        position = max(position, event + 1)
        with_slack = list(totals)
        with_slack[other] += max(0, allocated_at[event] - sum(totals))
        found[event] = Breakdown(dict(zip(ALLOCATED_BUCKETS, with_slack, strict=True)))
    return found


@dataclass(frozen=True)
class BatchFinder:
    """Finds largest batch sizes from one trace, for any number of devices.

    What a batch size takes without limit is kept: it settles most questions on the next device too.
    """

    trace: AffineTrace
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    _peaks: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)

    def fits(self, batch_size: int, capacity_bytes: int, allowed_bytes: int | None = None) -> bool:
        """Whether the whole run fits in `capacity_bytes`, and a memory fraction's `allowed_bytes`."""
        if batch_size not in self._peaks:
            self._peaks[batch_size] = _peaks(self.trace.at(batch_size), self.settings)
        allocated, reserved = self._peaks[batch_size]
        limit = capacity_bytes if allowed_bytes is None else min(capacity_bytes, allowed_bytes)
        if reserved <= limit and not self.settings.garbage_collection_threshold:
            return True
        # Between the two, cached segments are given back on the way, and only a replay on this device can tell.
        return (
            allocated <= limit and replay(self.trace.at(batch_size), capacity_bytes, self.settings, allowed_bytes).fits
        )

    def largest(self, capacity_bytes: int, allowed_bytes: int | None = None) -> int:
        """The largest batch size that fits; 0 if not even one sample does.

        Raises:
            NotAffine: memory does not grow with the batch.
        """
        if not self.fits(1, capacity_bytes, allowed_bytes):
            return 0
        if not any(self.trace.slopes):
            raise NotAffine("no allocation grows with the batch size")
        low, high = 1, 2
        while self.fits(high, capacity_bytes, allowed_bytes):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, capacity_bytes, allowed_bytes) else (low, middle)
        return low


def _peaks(timeline: Timeline, settings: AllocatorSettings) -> tuple[int, int]:
    """The allocated and the reserved peak on a device without limit."""
    allocator = CachingAllocator(_UNLIMITED, settings)
    blocks: dict[int, Block] = {}
    for number in timeline.events:
        if number > 0:
            blocks[number] = allocator.malloc(timeline.sizes[number - 1])
        else:
            allocator.free(blocks.pop(-number))
    return allocator.stats.peak_allocated_bytes, allocator.stats.peak_reserved_bytes


def largest_batch(
    trace: AffineTrace,
    capacity_bytes: int,
    settings: AllocatorSettings | None = None,
    allowed_bytes: int | None = None,
) -> int:
    """The largest batch size of one trace on one device; see `BatchFinder`."""
    return BatchFinder(trace, settings or AllocatorSettings()).largest(capacity_bytes, allowed_bytes)
