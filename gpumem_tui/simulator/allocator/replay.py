"""Answers for any batch size and any GPU from two traces, without running the step again and without torch.

A training step asks the allocator for sizes that are affine in the batch size: a + c·b. Two traces of one program give
every a and c; a third, at another size, checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, repeat, starmap
from math import prod
from operator import itemgetter

from gpumem_tui.memory import Breakdown, Bucket
from gpumem_tui.simulator.allocator.blocks import Block
from gpumem_tui.simulator.allocator.caching import MIN_BLOCK_BYTES, CachingAllocator, OutOfMemory
from gpumem_tui.simulator.allocator.rules import Computed
from gpumem_tui.simulator.allocator.rules import sizes as sizes_by_rule
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import BucketPeak, Mark, Timeline
from gpumem_tui.step import Phase, RunStage, Site, stage_of

UNLIMITED_BYTES = 1 << 70

TRACED_BATCH_SIZES, CHECKED_BATCH_SIZE = (2, 3), 5
"""A step is traced at two sizes for the form through them, and at a third one to check it."""

COMPILED_BATCH_SIZES = (16, 24)
"""The two of what is compiled: at few rows a compiler cuts sums otherwise than at many, and it goes by alignment."""


class NotAffine(ValueError):
    """The traces differ in more than sizes that grow evenly with the batch.

    Attributes:
        sizes: two batch sizes from which on they may.
    """

    def __init__(self, reason: str, sizes: tuple[int, int] = TRACED_BATCH_SIZES) -> None:
        super().__init__(reason)
        self.sizes = sizes

    @classmethod
    def in_parts(cls, rows: int) -> NotAffine:
        """Make the error of a step that cuts its batch into parts of so many rows (see `DeviceMode`)."""
        reason = f"the step works on {rows} samples at a time: its memory is no straight line in the batch size"
        return cls(reason, (2 * rows + 1, 4 * rows + 1))


def _is_same_program(run: Timeline, other: Timeline) -> bool:
    """Return whether two runs differ in nothing but their sizes, places, and the order of simultaneous releases."""

    def rest(of: Timeline) -> tuple[object, ...]:
        rules = [(number, computed.rule, computed.position) for number, computed in of.computed]
        return of.buckets, of.marks, of.emptied, of.streams, of.completions, of.folds, rules

    return rest(run) == rest(other) and run.follows(other)


def _in_blocks(size_bytes: int) -> int:
    """Return of how many of the smallest blocks an allocation is: within one, the allocator sees no difference."""
    return -(-size_bytes // MIN_BLOCK_BYTES)


@dataclass(frozen=True)
class PhasePeak:
    """The highest allocated bytes within one phase of one step, and the reserved bytes at its end.

    Attributes:
        event: after which these bytes are allocated.
    """

    step: int
    phase: Phase
    stage: RunStage
    peak_allocated_bytes: int
    reserved_bytes: int
    breakdown: Breakdown
    event: int = field(compare=False)


@dataclass(frozen=True)
class Replay:
    """The outcome of a timeline in the allocator.

    Attributes:
        fits: False if the device ran out of memory; the figures are then those reached until then.
        peak_event: the number of the event after which most bytes are allocated; -1 if missing.
    """

    timeline: Timeline = field(compare=False, repr=False)
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_event: int
    _spans: tuple[tuple[Mark, int, int, int], ...]
    """By phase: its mark, its peak, the event of the peak, and the reserved bytes at its end."""

    least_refused_bytes: int | None = None
    """See `CachingAllocator`: with any capacity below it and not below the peak, the same happens."""

    @cached_property
    def breakdown(self) -> Breakdown:
        """The buckets at the moment of the highest allocated bytes; they sum to `peak_allocated_bytes`."""
        return self.timeline.breakdown_after(self.peak_event, self.peak_allocated_bytes)

    @cached_property
    def bucket_peaks(self) -> Mapping[Bucket, BucketPeak]:
        """The most that each bucket holds at any moment of the steps, see `Timeline.bucket_peaks`.

        `OTHER` has the slack of blocks, which exists at the peaks of phases: the most of it is that of one of them.
        """
        found = self.timeline.bucket_peaks()
        at = self.timeline.breakdowns_after({event: peak for _, peak, event, _ in self._spans})
        of_steps = [BucketPeak(at[event][Bucket.OTHER], mark) for mark, _, event, _ in self._spans if mark.step]
        known = [found[Bucket.OTHER]] if Bucket.OTHER in found else []
        most = max((*known, *of_steps), key=lambda one: one.size_bytes, default=None)
        return {**found, Bucket.OTHER: most} if most is not None and most.size_bytes else found

    @cached_property
    def phases(self) -> tuple[PhasePeak, ...]:
        """Every phase of every step, in order; those that were left out, too, as they are like what stays."""
        found = self._peaks_of(zip(self._stages, self._spans, strict=True))
        for first, behind, times in reversed(self.timeline.folds):
            found[behind:behind] = found[first:behind] * times
        return tuple(found)

    @cached_property
    def stages(self) -> tuple[PhasePeak, ...]:
        """The highest phase of each stage of the run, in the order in which the stages come."""
        highest: dict[RunStage, tuple[Mark, int, int, int]] = {}
        for stage, span in zip(self._stages, self._spans, strict=True):
            if span[1] > highest.get(stage, (None, -1))[1]:
                highest[stage] = span
        return tuple(self._peaks_of(highest.items()))

    def _peaks_of(self, spans: Iterable[tuple[RunStage, tuple[Mark, int, int, int]]]) -> list[PhasePeak]:
        known = list(spans)
        at = self.timeline.breakdowns_after({event: peak for _, (_, peak, event, _) in known})
        return [
            PhasePeak(mark.step, mark.phase, stage, peak, reserved, at[event], event)
            for stage, (mark, peak, event, reserved) in known
        ]

    @cached_property
    def _stages(self) -> list[RunStage]:
        """By phase: the stage of the run; a run that trains on what it generates has rollouts and references."""
        marks = [mark for mark, _, _, _ in self._spans]
        found = [mark.stage or stage_of(mark.step, mark.phase) for mark in marks]
        generating = {mark.step for mark in marks if mark.stage is RunStage.GENERATE}
        trains = any(mark.phase is Phase.BACKWARD for mark in marks)
        names: dict[RunStage, RunStage] = {} if RunStage.TRAIN in found else {RunStage.WARM_UP: RunStage.TRAIN}
        if trains and generating and (len(generating) > 1 or RunStage.REFERENCE in found):
            names |= {RunStage.GENERATE: RunStage.ROLLOUT, RunStage.EVALUATE: RunStage.REFERENCE}
        return [stage if mark.stage is RunStage.EVALUATE else names.get(stage, stage)
                for stage, mark in zip(found, marks, strict=True)]  # fmt: skip

    @property
    def peak_moment(self) -> tuple[Mark, Site] | None:
        """The phase in which the peak is, and what allocates then; None for a run without phases or allocations."""
        begun = [mark for mark, _, _, _ in self._spans if mark.event <= self.peak_event]
        if not begun:
            return None
        number = self.timeline.events[self.peak_event]
        sites = self.timeline.sites
        return begun[-1], self.timeline.site_table[sites[number - 1]] if sites else Site()


@dataclass(frozen=True)
class AffineTrace:
    """A training run at every batch size: allocation i takes ``at_none.sizes[i] + slopes[i] · b`` bytes.

    Attributes:
        at_none: the run as it would be at no sample, so that its sizes may be less than no bytes.
        rule_slopes: of each allocation in `at_none.computed` what its rule's arguments grow by a sample.
        apart: runs at sizes for which this does not hold, as they were traced, by batch size. A batch of one sample
            is such a size where its tensors need no copy that larger ones need.
    """

    at_none: Timeline
    slopes: tuple[int, ...]
    rule_slopes: tuple[tuple[int, ...], ...] = ()
    apart: tuple[tuple[int, Timeline], ...] = ()

    @classmethod
    def fit(cls, first: tuple[int, Timeline], second: tuple[int, Timeline], *, nearly: bool = False) -> AffineTrace:
        """Work out the affine form through two (batch size, timeline) pairs of different batch sizes.

        Args:
            nearly: whether growing by less than a whole byte a sample is left out.

        Raises:
            NotAffine: the two runs made different allocations, or one that takes other blocks shrinks, or grows by no
                whole bytes a sample.
        """
        (b1, t1), (b2, t2) = sorted((first, second), key=lambda pair: pair[0])
        if not _is_same_program(t1, t2):
            raise NotAffine(
                f"the step allocates differently at batch sizes {b1} and {b2} "
                f"({len(t1.events)} and {len(t2.events)} events)",
                (b1, b2),
            )
        by_rule = {number - 1 for number, _ in t1.computed}
        slopes, constants = [], []
        for index, (size1, size2) in enumerate(zip(t1.sizes, t2.sizes, strict=True)):
            if index in by_rule:
                size1 = size2 = 0
            slope, rest = divmod(size2 - size1, b2 - b1)
            if (rest or slope < 0) and _in_blocks(size1) == _in_blocks(size2):
                slope, rest = 0, 0  # as a compiled sum's parts, one for so many samples
            if rest and not nearly:
                raise NotAffine(f"an allocation of {size1} bytes at batch size {b1} takes {size2} at {b2}", (b1, b2))
            if slope < 0:
                shrinks = f"an allocation shrinks as the batch grows: {size1:,} bytes at {b1}, {size2:,} at {b2}"
                raise NotAffine(shrinks, (b1, b2))
            slopes.append(slope)
            constants.append(size1 - slope * b1)
        computed, rule_slopes = [], []
        for (number, at1), (_, at2) in zip(t1.computed, t2.computed, strict=True):
            steps = tuple((y - x) // (b2 - b1) for x, y in zip(at1.arguments, at2.arguments, strict=True))
            start = tuple(x - step * b1 for x, step in zip(at1.arguments, steps, strict=True))
            computed.append((number, replace(at1, arguments=start)))
            rule_slopes.append(steps)
        at_none = replace(t2, sizes=tuple(constants), computed=tuple(computed))
        return cls(at_none, tuple(slopes), tuple(rule_slopes))

    @classmethod
    def constant(cls, timeline: Timeline) -> AffineTrace:
        """Make a trace of one run, which holds at any batch size."""
        rule_slopes = tuple((0,) * len(size.arguments) for _, size in timeline.computed)
        return cls(timeline, (0,) * len(timeline.sizes), rule_slopes)

    def at(self, batch_size: int) -> Timeline:
        """Work out the timeline at a batch size.

        Raises:
            NotAffine: an allocation that does not grow evenly with the batch would have less than no bytes.
        """
        for size, traced in self.apart:
            if size == batch_size:
                return traced
        sizes = [a + c * batch_size for a, c in zip(self.at_none.sizes, self.slopes, strict=True)]
        if min(sizes, default=0) < 0:
            raise NotAffine(
                f"an allocation that does not grow evenly would have less than none at batch size {batch_size}"
            )
        computed = []
        for (rule, start, steps), places in self._computed_together.items():
            arguments = tuple(a + c * batch_size for a, c in zip(start, steps, strict=True))
            by_rule = sizes_by_rule(rule, arguments)
            for index, position in places:
                sizes[index] = by_rule[position]
                computed.append((index + 1, Computed(rule, position, arguments)))
        return replace(self.at_none, sizes=tuple(sizes), computed=tuple(sorted(computed, key=itemgetter(0))))

    @cached_property
    def _computed_together(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]]:
        """By rule, arguments and their growth: the index of each allocation, and which of the rule's sizes it takes."""
        found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
        for (number, start), steps in zip(self.at_none.computed, self.rule_slopes, strict=True):
            found.setdefault((start.rule, start.arguments, steps), []).append((number - 1, start.position))
        return found

    @cached_property
    def is_open(self) -> bool:
        """Return whether a size has only a known range: `at` has what is expected, `Timeline.at_level` the rest."""
        return any(size.is_open for _, size in self.at_none.computed)

    def holds(self, batch_size: int, traced: Timeline) -> bool:
        """Return whether a run that was not used for the fit is as predicted: every event, and every size in blocks."""
        predicted = self.at(batch_size)
        if not _is_same_program(predicted, traced):
            return False
        return all(
            _in_blocks(size) == _in_blocks(other) for size, other in zip(predicted.sizes, traced.sizes, strict=True)
        )

    def check(self, batch_size: int, traced: Timeline) -> None:
        """Compare with a run that was not used for the fit.

        Raises:
            NotAffine: any event or size differs.
        """
        if not self.holds(batch_size, traced):
            others = "larger" if batch_size == 1 else "smaller"
            raise NotAffine(f"the step at batch size {batch_size} is not what {others} ones predict")


def replay(
    timeline: Timeline,
    capacity_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
    allowed_bytes: int | None = None,
) -> Replay:
    """Run a timeline through the caching allocator of a device with `capacity_bytes` (None: without limit).

    A request tried for a moment gets as much as there is room for.
    """
    allocator = CachingAllocator(
        UNLIMITED_BYTES if capacity_bytes is None else capacity_bytes,
        settings or AllocatorSettings(),
        allowed_bytes,
        detailed=False,
    )
    stats = allocator.stats
    requests = RequestsOnStreams(allocator, timeline) if timeline.streams or timeline.completions else allocator
    malloc, free = requests.malloc, requests.free
    sizes = iter(timeline.sizes)  # allocations are numbered as they are made
    blocks: list[Block | None] = [None]  # by allocation; None for a buffer of no size and one that was released
    tried = {number for number, size in timeline.computed if size.is_tried}
    starts = [0, *(mark.event for mark in timeline.marks), _end(timeline)]
    interruptions = interruptions_of(timeline)
    spans: list[tuple[Mark, int, int, int]] = []
    peak_bytes, peak_event = 0, -1
    fits = True
    for index, (start, end) in enumerate(pairwise(starts)):
        phase_peak, phase_event = stats.allocated_bytes, start - 1
        while True:
            until = min(end, interruptions[-1][0]) if interruptions else end
            try:
                for event, number in enumerate(timeline.events[start:until], start):
                    if number < 0:
                        block = blocks[-number]
                        if block is not None:
                            free(block)
                            blocks[-number] = None
                        continue
                    size = next(sizes)
                    if not size:
                        blocks.append(None)
                        continue
                    blocks.append(_as_much(malloc, size) if len(blocks) in tried else malloc(size))
                    if stats.allocated_bytes > phase_peak:
                        phase_peak, phase_event = stats.allocated_bytes, event
            except OutOfMemory:
                fits = False
                break
            if not interruptions or interruptions[-1][0] > end:
                break
            start, completed = interruptions.pop()
            interrupt(allocator, completed)
        if phase_peak > peak_bytes:
            peak_bytes, peak_event = phase_peak, phase_event
        if index:
            spans.append((timeline.marks[index - 1], phase_peak, phase_event, stats.reserved_bytes))
        if not fits:
            break
    return Replay(
        timeline=timeline,
        fits=fits,
        peak_allocated_bytes=stats.peak_allocated_bytes,
        peak_reserved_bytes=stats.peak_reserved_bytes,
        peak_event=peak_event,
        _spans=tuple(spans),
        least_refused_bytes=allocator.least_refused_bytes,
    )


def _as_much(malloc: Callable[[int], Block], size_bytes: int) -> Block | None:
    """Take so many bytes, or half as many as often as that does not fit.

    aten/src/ATen/native/cudnn/Conv_v8.cpp, `generate_and_filter_plans`.
    """
    while size_bytes:
        try:
            return malloc(size_bytes)
        except OutOfMemory:
            size_bytes //= 2
    return None


def _end(timeline: Timeline) -> int:
    """Return where a replay may stop: what the last phase releases after its last allocation changes no figure."""
    end = len(timeline.events)
    last_phase = timeline.marks[-1].event if timeline.marks else 0
    while end > last_phase and timeline.events[end - 1] < 0:
        end -= 1
    return end


# A timeline's requests beyond those on one stream

_EMPTY_CACHE = 0
"""Among the numbers of allocations, which count from 1."""


def interruptions_of(timeline: Timeline) -> list[tuple[int, int]]:
    """Return what happens between events, the last first: before which event, and what (see `interrupt`)."""
    return sorted([*((event, _EMPTY_CACHE) for event in timeline.emptied), *timeline.completions], reverse=True)


def interrupt(allocator: CachingAllocator, number: int) -> None:
    """Complete the release of an allocation, or empty the cache."""
    if number == _EMPTY_CACHE:
        allocator.empty_cache()
    else:
        allocator.complete_free(number)


class RequestsOnStreams:
    """A timeline as requests to an allocator, on each allocation's stream, numbered as they are made.

    Apart, since most programs know one stream only, and their replays are to be fast.
    """

    def __init__(self, allocator: CachingAllocator, timeline: Timeline) -> None:
        self._allocator = allocator
        streams = timeline.streams or repeat(0)
        self._requests = (
            (number, stream)
            for number, (size, stream) in enumerate(zip(timeline.sizes, streams, strict=False), 1)
            if size
        )
        self._in_use = {number for _, number in timeline.completions}
        self._numbers: dict[Block, int] = {}

    def malloc(self, size_bytes: int) -> Block:
        """Take a block for the next allocation, on its stream."""
        number, stream = next(self._requests)
        block = self._allocator.malloc(size_bytes, stream)
        if number in self._in_use:
            self._numbers[block] = number
        return block

    def free(self, block: Block) -> None:
        """Release a block, once other streams are done with it."""
        number = self._numbers.pop(block, 0)
        if number:
            self._allocator.request_free(block, number)
        else:
            self._allocator.free(block)


# Traces at any sequence length. A training step's requests are a polynomial in the length: a straight line, or of the
# second degree where attention writes its scores. Through as many lengths as its degree asks for, it gives whole bytes
# at every other length; where the step does otherwise (in kernels that round their sizes up) it is near. Whoever needs
# to be sure traces at the answer.


@dataclass(frozen=True)
class TraceByLength:
    """A training run at every sequence length, and at every batch size that its traces answer for."""

    lengths: tuple[int, ...]
    traces: tuple[AffineTrace, ...]

    @classmethod
    def fit(cls, traces: Mapping[int, AffineTrace]) -> TraceByLength:
        """Work out the form through two or three traces, by sequence length.

        Raises:
            ValueError: fewer or more.
            NotAffine: the runs made different allocations.
        """
        lengths = tuple(sorted(traces))
        if len(lengths) not in (2, 3):
            raise ValueError(f"two or three lengths give the form, not {len(lengths)}")
        first = traces[lengths[0]]
        for length in lengths[1:]:
            if not _are_same_programs(first, traces[length]):
                raise NotAffine(f"the step allocates differently at sequence lengths {lengths[0]} and {length}")
        return cls(lengths, tuple(traces[length] for length in lengths))

    def at(self, length: int) -> AffineTrace:
        """Work out the trace at a sequence length."""
        shares = [
            (prod(length - other for other in self.lengths if other != one),
             prod(one - other for other in self.lengths if other != one))
            for one in self.lengths
        ]  # fmt: skip
        whole = prod(below for _, below in shares)
        return _extended(self.traces, [above * (whole // below) for above, below in shares], whole)


def _extended(traces: Sequence[AffineTrace], weights: Sequence[int], whole: int) -> AffineTrace:
    """Return the sum of the traces by their weights, each over `whole` (Lagrange's polynomials)."""
    known: dict[tuple[int, ...], int] = {}  # every layer has the same sizes

    def polynomials(values: Sequence[Sequence[int]]) -> tuple[int, ...]:
        together = list(zip(*values, strict=True))
        for same in set(together) - known.keys():
            is_constant = same.count(same[0]) == len(same)
            known[same] = same[0] if is_constant else -(-sum(map(int.__mul__, weights, same)) // whole)
        return tuple(map(known.__getitem__, together))

    computed = []
    for of_one in zip(*(trace.at_none.computed for trace in traces), strict=True):
        number, first = of_one[0]
        computed.append((number, replace(first, arguments=polynomials([at.arguments for _, at in of_one]))))
    apart = []
    for runs in zip(*(trace.apart for trace in traces), strict=True):
        size = runs[0][0]
        apart.append((size, _extended([AffineTrace.constant(run) for _, run in runs], weights, whole).at(size)))
    sizes = polynomials([trace.at_none.sizes for trace in traces])
    return AffineTrace(
        replace(traces[0].at_none, sizes=sizes, computed=tuple(computed)),
        polynomials([trace.slopes for trace in traces]),
        tuple(map(polynomials, zip(*(trace.rule_slopes for trace in traces), strict=True))),
        tuple(apart),
    )


def _are_same_programs(trace: AffineTrace, other: AffineTrace) -> bool:
    """Return whether `_is_same_program` holds of the traces, and of the runs that each has apart."""
    sizes = [[size for size, _ in one.apart] for one in (trace, other)]
    runs = ([one.at_none, *(run for _, run in one.apart)] for one in (trace, other))
    return sizes[0] == sizes[1] and all(starmap(_is_same_program, zip(*runs, strict=True)))
