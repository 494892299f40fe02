"""The two predictions that a measurement is compared with: the closed form and the traced step. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.causes import Note, causes_in
from gpumem_tui.formula.predict import DEFAULT_HEADROOM, FormulaPrediction, max_batch_size, predict, usable_bytes
from gpumem_tui.formula.recipe import NO_EXTRAS, Extras
from gpumem_tui.ledger import Ledger
from gpumem_tui.memory import Bucket, Range, Unknown
from gpumem_tui.run.events import Ready, TraceDone
from gpumem_tui.search.strategy import Sizes
from gpumem_tui.simulator.allocator.assumptions import Assumption
from gpumem_tui.simulator.allocator.ends import Ends
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.replay import UNLIMITED_BYTES, AffineTrace, NotAffine, Replay
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.sized import sized
from gpumem_tui.simulator.allocator.timeline import Held
from gpumem_tui.snapshots.recording import RecordedRun, record
from gpumem_tui.step import FROZEN_32
from gpumem_tui.workload.spec import WorkloadSpec


@dataclass(frozen=True)
class Formula:
    """The closed form for one workload and GPU.

    Attributes:
        total_bytes: the memory that `headroom` is a share of: the device's, or a user's cap.
        extras: techniques that only the closed form knows.
        beside_bytes: what of `total_bytes` the allocator cannot have.
    """

    workload: WorkloadSpec
    total_bytes: int
    headroom: float = DEFAULT_HEADROOM
    extras: Extras = NO_EXTRAS
    beside_bytes: int = 0

    @cached_property
    def max_batch_size(self) -> int | Unknown:
        """Find the largest batch size by the closed form, or say why it is missing."""
        shape = self.workload.shape
        if shape is None:
            return Unknown(_no_formula(self.workload))
        recipe, beside_bytes = self.workload.recipe, self.beside_bytes
        return max_batch_size(shape, recipe, self.total_bytes, self.headroom, self.extras, beside_bytes=beside_bytes)

    def at(self, batch_size: int) -> FormulaPrediction | Unknown:
        """Return the closed form's rows at a batch size, or why they are missing."""
        shape = self.workload.shape
        if shape is None:
            return Unknown(_no_formula(self.workload))
        return predict(shape, self.workload.recipe, batch_size, self.extras)

    def usable_bytes(self, headroom: float | None = None) -> int:
        """Return what the allocator can take, with that share of the memory left free; None for the formula's."""
        free = self.headroom if headroom is None else headroom
        return max(0, usable_bytes(self.total_bytes, free) - self.beside_bytes)


def _no_formula(workload: WorkloadSpec) -> str:
    if workload.hugging_face is not None:
        return workload.hugging_face.no_formula
    return "no formula for a command" if workload.command is not None else "no formula for a workload file"


Fit = Literal["fits", "may fit", "may not fit", "does not fit"]
"""Fits with the high end of the device total, with the least of it only, or not even with that; of a trace
that is an estimate, such as a compiled program's that was traced as eager, no more than that it may or may not.

This alone decides, for every verb: what is left of the device is 0 or more at both ends, at one, or at none."""


_TRIALS_LESS, _TRIALS_MORE = 0.02, 0.01
"""Shares of what is traced by which compiled programs may reserve less and more. The compiler times kernels on the GPU
while it compiles, and what that leaves in the cache is not traced. Six programs on an H200 (torch 2.11) reserved 1.8 %
less to 0.6 % more than traced, three of them within 0.1 %."""


def _with_trials(reserved: Range, most_bytes: int) -> Range:
    """Return a range of reserved bytes with what a compiler's trials may change, as far as there is room."""
    high_bytes = min(round(reserved.high_bytes * (1 + _TRIALS_MORE)), most_bytes)
    return Range(round(reserved.low_bytes * (1 - _TRIALS_LESS)), max(reserved.high_bytes, high_bytes))


_COMPARED_AT = 1024
"""The batch size, in multiples, by which two traces of a step are separated: at few samples segments take equal
amounts."""


@dataclass(frozen=True)
class BatchSizes:
    """The three batch sizes of every verdict; 0 for none.

    Attributes:
        safe: the largest that fits with every unknown at its most: the first line, `y` and exit codes go by it.
        expected: the largest that fits as expected, which is what runs on the simulated GPU.
        at_most: the largest that fits with every unknown at its least.
    """

    safe: int
    expected: int
    at_most: int


@dataclass(frozen=True)
class KnownUnknown:
    """A part of the device total with only a known range, and where that is from."""

    name: str
    size: Range
    source: str


@dataclass(frozen=True)
class Traced:
    """The traced step for one workload and GPU, at any batch size.

    Attributes:
        ready: what the tracing child said of itself; the simulator's assumptions.
        done: the trace, and what was noticed while it was made.
        allowed_bytes: a user's cap on reserved bytes, None for none.
        fewest: the step with the other end of what is assumed of rows, where that takes less; None where nothing is
            assumed, or nothing changes.
        no_fewest: why the other end is not known; empty where it is, or nothing is assumed.
        finder: of this very trace, where it is shared with other GPUs'; what it found for one spares work on the next.
    """

    ready: Ready
    done: TraceDone
    gpu: Gpu
    allowed_bytes: int | None = None
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    fewest: Traced | None = field(default=None, repr=False)
    no_fewest: str = ""
    finder: BatchFinder | None = field(default=None, repr=False, compare=False)
    _runs: dict[int, Replay] = field(default_factory=dict, repr=False, compare=False)
    _under: dict[AllocatorSettings, Traced] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def settled_at(self) -> int | None:
        """The batch size that a command settles at by itself as memory runs out; None where it does not."""
        return None if self.done.ran_out is None else self.done.ran_out.settled

    @property
    def trace(self) -> AffineTrace:
        """Return the run at every batch size."""
        return self.done.trace

    @property
    def capacity_bytes(self) -> int:
        """Return what the allocator can take: CUDA's total less the context, as expected."""
        return self.gpu.cuda_total_bytes - self.ready.context_bytes

    def on(self, gpu: Gpu, ready: Ready | None = None) -> Traced:
        """Return the same trace on the whole of another GPU, with the context that `ready` has there."""
        fewest, done = None if self.fewest is None else self.fewest.on(gpu, ready), self.done
        if done.ran_out is not None and gpu != self.gpu:
            done = replace(done, ran_out=replace(done.ran_out, survived=False))
        return replace(self, done=done, ready=ready or self.ready, gpu=gpu, allowed_bytes=None, fewest=fewest, _runs={})

    def under(self, settings: AllocatorSettings) -> Traced:
        """Return the same trace on this GPU under other settings of the allocator; kept, with what it works out."""
        if settings not in self._under:
            fewest = None if self.fewest is None else self.fewest.under(settings)
            self._under[settings] = replace(self, settings=settings, fewest=fewest, finder=None, _runs={})
        return self._under[settings]

    def with_trace(self, trace: AffineTrace) -> Traced:
        """Return another trace on the same GPU."""
        return replace(self, done=replace(self.done, trace=trace), fewest=None, finder=None, _runs={})

    def beside(self, other: Traced) -> Traced:
        """Return the one of two traces of a step that takes more, at what ever end, with the other as its fewest."""
        size = self.done.only_at or _COMPARED_AT * self.done.batch_multiple
        own_bytes, other_bytes = self.reserved_bytes(size), other.reserved_bytes(size)
        if own_bytes == other_bytes:
            return self
        return replace(self, fewest=other) if own_bytes > other_bytes else replace(other, fewest=self)

    def reserved_bytes(self, batch_size: int) -> int:
        """Return the highest reserved bytes where there is no limit."""
        return self._finder.peaks(batch_size)[1]

    def without_fewest(self, reason: str) -> Traced:
        """Return the trace, whose other end has only a reason for being unknown."""
        return replace(self, no_fewest=reason)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Return what is assumed of rows, where that changes what the step takes, the largest first."""
        if self.fewest is None and not self.no_fewest:
            return ()
        return tuple(sorted(self.done.assumptions, key=lambda one: -one.rows))

    def at(self, batch_size: int) -> Replay:
        """Replay the step at a batch size on this device, or on the smallest that holds it; kept for later.

        Raises:
            ValueError: only one batch size was traced, and it is another.
        """
        self._check(batch_size)
        if batch_size not in self._runs:
            found = self._finder.run(batch_size, self.capacity_bytes, self.allowed_bytes)
            as_ran = self._reserved_as_ran(batch_size)
            self._runs[batch_size] = replace(found, fits=True, peak_reserved_bytes=as_ran) if as_ran else found
        return self._runs[batch_size]

    def _reserved_as_ran(self, batch_size: int) -> int:
        """Return what a command reserved that settled at a batch on this device; 0 where a replay has it.

        It went on there until its steps were made. A replay does not have what it tried before, and so other pieces in
        the cache, for which there may be no room.
        """
        ran_out = self.done.ran_out
        if ran_out is None or not ran_out.survived or self._ends.is_certain(batch_size):
            return 0
        return ran_out.reserved_bytes

    def recorded(self, batch_size: int) -> RecordedRun:
        """Replay the run at a batch size on this device, event by event, up to where memory runs out if it does.

        Raises:
            ValueError: only one batch size was traced, and it is another.
        """
        self._check(batch_size)
        return record(self.trace.at(batch_size), self.capacity_bytes, self.settings, self.allowed_bytes)

    def fit(self, batch_size: int, free_bytes: int = 0) -> Fit:
        """Return whether the step fits on this device and leaves so much free, as far as known."""
        if not free_bytes and self._reserved_as_ran(batch_size):
            return "fits"
        if self.done.is_estimate:
            low_bytes, allowed = self.capacity_range.low_bytes - free_bytes, self.allowed_bytes
            allowed = None if allowed is None else allowed - free_bytes
            return "may fit" if self._finder.fits(batch_size, low_bytes, allowed) else "may not fit"
        if self._ends.is_certain(batch_size, -free_bytes):
            return "fits"
        if self._ends.is_possible(batch_size, -free_bytes):
            return "may fit"
        if self.fewest is not None:
            return "does not fit" if self.fewest.fit(batch_size, free_bytes) == "does not fit" else "may fit"
        return "may not fit" if self.no_fewest else "does not fit"

    @property
    def _ends(self) -> Ends:
        capacity = self.capacity_range + Range(0, self.done.unsure_bytes)
        return Ends(self._finder, capacity, self.capacity_bytes, self.allowed_bytes)

    def fits(self, batch_size: int) -> bool:
        """Return whether the step fits on this device at the high end of its range."""
        return self.fit(batch_size) == "fits"

    def fits_leaving(self, batch_size: int, free_bytes: int) -> bool:
        """Return whether the step fits so and leaves so much free; by an estimate, which never is certain, may fit."""
        self._check(batch_size)
        return self.fit(batch_size, free_bytes) == ("may fit" if self.done.is_estimate else "fits")

    @property
    def capacity_range(self) -> Range:
        """Return what the allocator can take at least and at most."""
        return self.gpu.cuda_total_range - self._context

    @property
    def _context(self) -> Range:
        return self.ready.context_range or Range(self.ready.context_bytes, self.ready.context_bytes)

    def _check(self, batch_size: int) -> None:
        if self.done.only_at not in (0, batch_size):
            raise ValueError(f"traced at batch size {self.done.only_at} only, not at {batch_size}")

    def notes(self, batch_size: int) -> tuple[Note, ...]:
        """Return what else is to be known of the trace, each cause with its bytes at a batch size."""
        if not causes_in(self.done.notes):
            return self.done.notes
        run = self.at(batch_size)
        return tuple(sized(self.done.notes, run.timeline, run.peak_event))

    def steps_left(self, batch_size: int) -> int | None:
        """Return after how many steps memory that grows fills the device, at the least; None where it does not grow."""
        grows_bytes = sum(one.size_bytes for one in causes_in(self.notes(batch_size), "leak"))
        if not grows_bytes:
            return None
        steps = self.trace.at_none.steps + max(0, self.free_range(batch_size).low_bytes) // grows_bytes
        shown = int(10 ** max(0, len(str(steps)) - 3))  # three digits are exact enough
        return steps // shown * shown

    def parts(self, batch_size: int) -> list[tuple[Bucket, str, int]]:
        """Return the bytes at the peak of each named part, and of the rest of its bucket, the largest first."""
        if not any(site.part for site in self.trace.at_none.site_table):
            return []
        sizes: Counter[tuple[Bucket, str]] = Counter()
        for held in self.held_at_peak(batch_size):
            sizes[held.bucket, held.site.part] += held.size_bytes
        with_parts = {bucket for bucket, part in sizes if part}
        named = ((bucket, part or "the rest", size) for (bucket, part), size in sizes.most_common())
        return [one for one in named if one[0] in with_parts]

    def frozen_saving_bytes(self, batch_size: int) -> int:
        """Return what frozen parameters of 32 bits would take less in 16 bits."""
        return sum(size for _, part, size in self.parts(batch_size) if part == FROZEN_32) // 2

    def held_at_peak(self, batch_size: int) -> list[Held]:
        """Return what is live at the peak, by bucket and place in the program, the largest first."""
        run = self.at(batch_size)
        return run.timeline.held_after(run.peak_event)

    def device_used_bytes(self, batch_size: int) -> int:
        """Return what the device holds for this process at the peak, as expected: reserved and context."""
        self._check(batch_size)
        _, reserved = self._finder.peaks_within(batch_size, self.capacity_bytes, self.allowed_bytes)
        return (self._reserved_as_ran(batch_size) or reserved) + self.ready.context_bytes

    def ledger(self, batch_size: int) -> Ledger[None]:
        """Return the rows of the device at the peak, which sum to its total; what the step lacks is negative `free`."""
        replay = self.at(batch_size)
        return Ledger.of_step(
            replay.breakdown,
            allocated_bytes=replay.peak_allocated_bytes,
            reserved_bytes=replay.peak_reserved_bytes,
            used_bytes=self.device_used_bytes(batch_size),
            cuda_total_bytes=self.gpu.cuda_total_bytes,
            total_bytes=self.gpu.total_bytes,
        )

    def momentary_peaks(self, batch_size: int) -> tuple[int, int] | None:
        """Return allocated and reserved bytes at a peak that only trials of a benchmark make, where there is room.

        None where nothing is tried, and where that takes no more than a later moment.
        """
        self._check(batch_size)
        found = self._finder.momentary(batch_size, self.capacity_bytes, self.allowed_bytes)
        run = self.at(batch_size)
        settled = run.peak_allocated_bytes, run.peak_reserved_bytes
        return None if found is None or (found[0] <= settled[0] and found[1] <= settled[1]) else found

    def reserved_range_at(self, batch_size: int) -> Range:
        """Return the reserved bytes with every unknown at its least and at its most, where the step may fit."""
        if as_ran := self._reserved_as_ran(batch_size):
            return Range(as_ran, as_ran)
        capacity = self.capacity_range + Range(0, self.done.unsure_bytes)
        found = self._finder.reserved_range(batch_size, self.capacity_bytes, capacity, self.allowed_bytes)
        if self.done.is_compiled:
            found = _with_trials(found, max(found.high_bytes, capacity.low_bytes))
        low_bytes = max(0, found.low_bytes - self.done.unsure_bytes)
        if self.fewest is not None:
            low_bytes = min(low_bytes, self.fewest.reserved_range_at(batch_size).low_bytes)
        return replace(found, low_bytes=low_bytes)

    def missing_bytes(self, batch_size: int, free_bytes: int = 0) -> int:
        """Return how much more a device must have for the step to fit and leave so much free; 0 for nothing."""
        self._check(batch_size)
        if not free_bytes and self._reserved_as_ran(batch_size):
            return 0
        return self._ends.missing_bytes(batch_size, free_bytes)

    def least_missing_bytes(self, batch_size: int) -> int:
        """Return how much more a device must have so that the step may fit; 0 where it may."""
        if self._reserved_as_ran(batch_size):
            return 0
        own_bytes = self._ends.least_missing_bytes(batch_size)
        return own_bytes if self.fewest is None else min(own_bytes, self.fewest.least_missing_bytes(batch_size))

    def device_used_range(self, batch_size: int) -> Range:
        """Return `device_used_bytes` with every unknown at its least and at its most.

        Where the step does not fit with one of them, that end is what a device would have to have for it. Where it
        does, no end is beyond the device: with a larger context the allocator keeps less in its cache.
        """
        self._check(batch_size)
        total, expected = self.gpu.cuda_total_range, self.device_used_bytes(batch_size)
        if least_missing := self.least_missing_bytes(batch_size):
            low, high = self._with(least_missing, high=True), self._with(self.missing_bytes(batch_size), high=False)
            return Range.of((low, max(low, high), expected))
        found = self.reserved_range_at(batch_size) + self._context
        if missing := self.missing_bytes(batch_size):
            low = min(found.low_bytes, expected, total.high_bytes)
            return Range(low, max(self._with(missing, high=False), expected))
        most = max(total.low_bytes, min(found.high_bytes, expected))
        return Range(min(found.low_bytes, most), min(found.high_bytes, most))

    def _with(self, missing_bytes: int, *, high: bool) -> int:
        """Return what a device has at its high or its low end with so much more, or with a cap so much higher."""
        total, context = self.gpu.cuda_total_range, self._context
        room, beside = (total.high_bytes, context.low_bytes) if high else (total.low_bytes, context.high_bytes)
        room -= beside
        return (room if self.allowed_bytes is None else min(room, self.allowed_bytes)) + missing_bytes + beside

    def free_range(self, batch_size: int) -> Range:
        """Return what is left of the device, or of a cap, at the peak, with every unknown at its most and its least.

        Below 0 it is the memory that is missing: a device with so much more holds the step, one with a segment less
        does not. `fit` goes by the same two ends.
        """
        self._check(batch_size)
        missing, least_missing = self.missing_bytes(batch_size), self.least_missing_bytes(batch_size)
        if least_missing:
            return Range(min(-missing, -least_missing), -least_missing)
        found = self.gpu.cuda_total_range - self.device_used_range(batch_size)
        if (allowed := self.allowed_bytes) is not None:
            reserved = self.reserved_range_at(batch_size)
            low, high = allowed - reserved.high_bytes, allowed - reserved.low_bytes
            found = Range(min(found.low_bytes, low), min(found.high_bytes, high))
        low = -missing if missing else max(0, found.low_bytes)
        return Range(low, max(low, 0, found.high_bytes))

    def unknowns(self, batch_size: int) -> tuple[KnownUnknown, ...]:
        """Return what makes the device total a range, and what it leaves a step."""
        found = []
        context, total = self._context, self.gpu.cuda_total_range
        if nccl := self.ready.nccl:
            found.append(KnownUnknown("NCCL", nccl.between, nccl.source))
            context = context.without(nccl.between)
        if not context.is_exact:
            found.append(KnownUnknown(f"{self.gpu.runtime} context", context, self.ready.context_source))
        if not total.is_exact:
            found.append(KnownUnknown("CUDA's total", total, "less what the driver keeps, by driver"))
        if self.done.unsure_bytes:
            padding = Range(0, self.done.unsure_bytes)
            found.append(KnownUnknown("padded products", padding, "a GPU decides by a benchmark whether they are"))
        no_limit = Range(UNLIMITED_BYTES, UNLIMITED_BYTES)
        reserved = self._finder.reserved_range(batch_size, UNLIMITED_BYTES, no_limit)
        if self.done.is_compiled:
            wider = _with_trials(reserved, UNLIMITED_BYTES)
            more = Range(0, wider.high_bytes - wider.low_bytes - (reserved.high_bytes - reserved.low_bytes))
            found.append(KnownUnknown("compiler's trials", more, "leave cached blocks of their own"))
        if not reserved.is_exact:
            library = "MIOpen" if self.gpu.arch else "cuDNN"
            more = Range(0, reserved.high_bytes - reserved.low_bytes)
            found.append(KnownUnknown(f"{library} workspaces", more, f"depend on the algorithms that {library} picks"))
        if self.fewest is not None:
            less = max(0, self.reserved_bytes(batch_size) - self.fewest.reserved_bytes(batch_size))
            source = "; ".join(one.words for one in self.assumptions)
            found.append(KnownUnknown("rows kept", Range(0, less), source))
        return tuple(found)

    @property
    def grows(self) -> bool:
        """Return False if not one allocation depends on the batch size."""
        return bool(self.done.only_at) or any(self.trace.slopes)

    @cached_property
    def max_batch_size(self) -> int | Unknown:
        """Find the safe batch size, the largest that fits with every unknown at its most, or say why it is missing."""
        return self._largest(self._ends.is_certain)

    def max_batch_size_leaving(self, free_bytes: int) -> int | Unknown:
        """Find the largest batch size that fits and leaves so much free, with every unknown at its most."""
        return self._largest(lambda size: self._ends.is_certain(size, -free_bytes))

    @cached_property
    def expected_batch_size(self) -> int | Unknown:
        """Find the largest batch size that fits as expected, which the simulated GPU is; or say why it is missing."""
        return self._largest(self._ends.is_expected, self.max_batch_size)

    @cached_property
    def may_fit_batch_size(self) -> int | Unknown:
        """Find the largest batch size that fits with every unknown at its least, or say why it is missing."""
        own = self._largest(self._ends.is_possible, self.expected_batch_size)
        other = own if self.fewest is None else self.fewest.may_fit_batch_size
        return own if isinstance(own, Unknown) or isinstance(other, Unknown) else max(own, other)

    @property
    def sizes(self) -> BatchSizes | Unknown:
        """Return the three batch sizes of the verdict, or why they are not known."""
        if isinstance(safe := self.max_batch_size, Unknown):
            return safe
        if isinstance(expected := self.expected_batch_size, Unknown):
            return expected
        if isinstance(at_most := self.may_fit_batch_size, Unknown):
            return at_most
        return BatchSizes(safe, expected, at_most)

    def too_large_below(self, batch_size: int) -> tuple[int, ...]:
        """Return which of the eight sizes just below one do not fit as expected: pieces of the cache differ by size."""
        if self.done.only_at:
            return ()
        below = range(max(1, batch_size - 8), batch_size)
        return tuple(one for one in below if not self._finder.fits(one, self.capacity_bytes, self.allowed_bytes))

    @cached_property
    def _finder(self) -> BatchFinder:
        return self.finder or BatchFinder(self.trace, self.settings)

    def _largest(self, fits: Callable[[int], bool], known: int | Unknown = 0) -> int | Unknown:
        if self.done.only_at:
            return Unknown(self.done.not_affine)
        if isinstance(known, Unknown):
            return known
        try:
            return Sizes(self.done.batch_multiple).at_most(self._finder.largest_where(fits, known))
        except NotAffine as error:
            return Unknown(str(error))


@dataclass(frozen=True)
class Prediction:
    """The formula's and the trace's figures for one workload on one device."""

    formula: Formula
    traced: Traced | Unknown

    @cached_property
    def with_headroom(self) -> int | Unknown:
        """Find the traced largest batch that leaves the formula's headroom free, or say why it is missing."""
        if isinstance(self.traced, Unknown):
            return self.traced
        free_bytes = self.formula.total_bytes - usable_bytes(self.formula.total_bytes, self.formula.headroom)
        return self.traced.max_batch_size_leaving(free_bytes)

    @property
    def best_max_batch_size(self) -> int | None:
        """Return the size to start a search from: traced if there is one, as expected, else by formula."""
        if isinstance(self.traced, Traced) and isinstance(self.traced.expected_batch_size, int):
            return self.traced.expected_batch_size
        formula = self.formula.max_batch_size
        return formula if isinstance(formula, int) else None
