"""The two predictions that a measurement is compared with: the closed form and the traced step. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.extras import NO_EXTRAS, Extras
from gpumem_tui.formula.predict import DEFAULT_HEADROOM, FormulaPrediction, max_batch_size, predict, usable_bytes
from gpumem_tui.memory import Range, Unknown
from gpumem_tui.simulator.finder import BatchFinder, Level
from gpumem_tui.simulator.replay import UNLIMITED_BYTES, AffineTrace, NotAffine, Replay, replay
from gpumem_tui.simulator.settings import AllocatorSettings
from gpumem_tui.simulator.timeline import Held
from gpumem_tui.snapshots.recording import Recording, record
from gpumem_tui.trial.events import Ready, TraceDone
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
        """Largest batch size by the closed form, or why there is none."""
        shape = self.workload.shape
        if shape is None:
            return Unknown(_no_formula(self.workload))
        recipe, beside_bytes = self.workload.recipe, self.beside_bytes
        return max_batch_size(shape, recipe, self.total_bytes, self.headroom, self.extras, beside_bytes=beside_bytes)

    def at(self, batch_size: int) -> FormulaPrediction | Unknown:
        """The closed form's rows at a batch size, or why there are none."""
        shape = self.workload.shape
        if shape is None:
            return Unknown(_no_formula(self.workload))
        return predict(shape, self.workload.recipe, batch_size, self.extras)

    def usable_bytes(self, headroom: float | None = None) -> int:
        """What the allocator can take, with that share of the memory left free; None for the formula's."""
        free = self.headroom if headroom is None else headroom
        return max(0, usable_bytes(self.total_bytes, free) - self.beside_bytes)


def _no_formula(workload: WorkloadSpec) -> str:
    if workload.hugging_face is not None:
        return workload.hugging_face.no_formula
    return "no formula for a command" if workload.command is not None else "no formula for a workload file"


Fit = Literal["fits", "may fit", "does not fit"]
"""Fits with the most that the device total is known to be, with the least of it only, or not even with that."""


@dataclass(frozen=True)
class KnownUnknown:
    """A part of the device total that is known as a range only, and where that is from."""

    name: str
    size: Range
    source: str


@dataclass(frozen=True)
class Traced:
    """The traced step for one workload and GPU, at any batch size.

    Attributes:
        capacity_bytes: what the allocator can take: CUDA's total less the context, as expected.
        total_range, context_range: between what figures these two are known to be; None where they are exact.
        allowed_bytes: a user's cap on reserved bytes, None for none.
        profile, context_bytes: the simulator's assumptions (see `Profile`).
        seconds: how long tracing took.
        assumed: operators whose kernels' scratch is not known and counted as none: (operator, times, why).
        only_at: the one batch size this is about, where memory depends on the batch in ways that no line through
            traces predicts, and `not_affine` says so; 0: it answers for every size.
        changes, is_sharded, parameters, traced_layers: as `TraceDone` has them.
        finder: of this very trace, where it is shared with other GPUs'; what it found for one spares work on the next.
    """

    trace: AffineTrace
    capacity_bytes: int
    allowed_bytes: int | None
    profile: str
    context_bytes: int
    seconds: float
    assumed: tuple[tuple[str, int, str], ...] = ()
    only_at: int = 0
    not_affine: str = ""
    context_source: str = ""
    notes: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    is_sharded: bool = False
    parameters: int = 0
    traced_layers: tuple[int, ...] = ()
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    total_range: Range | None = None
    context_range: Range | None = None
    finder: BatchFinder | None = field(default=None, repr=False, compare=False)
    _runs: dict[int, Replay] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, ready: Ready, done: TraceDone, gpu: Gpu, limit_bytes: int | None, settings: AllocatorSettings
    ) -> Traced:
        """From what a tracing child said."""
        return cls(
            trace=done.trace,
            capacity_bytes=gpu.cuda_total_bytes - ready.context_bytes,
            allowed_bytes=limit_bytes,
            profile=ready.profile,
            context_bytes=ready.context_bytes,
            seconds=done.seconds,
            assumed=done.assumed,
            only_at=done.only_at,
            not_affine=done.not_affine,
            context_source=ready.context_source,
            notes=done.notes,
            changes=done.changes,
            is_sharded=done.is_sharded,
            parameters=done.parameters,
            traced_layers=done.traced_layers,
            settings=settings,
            total_range=gpu.cuda_total_range,
            context_range=ready.context_range,
        )

    def at(self, batch_size: int) -> Replay:
        """The step at a batch size on this device, or without limit where it does not fit; kept for the next time.

        Raises:
            ValueError: only one batch size was traced, and it is another.
        """
        self._check(batch_size)
        if batch_size not in self._runs:
            timeline = self.trace.at(batch_size)
            found = replay(timeline, self.capacity_bytes, self.settings, self.allowed_bytes)
            self._runs[batch_size] = found if found.fits else replay(timeline, settings=self.settings)
        return self._runs[batch_size]

    def recorded(self, batch_size: int) -> Recording:
        """The run at a batch size on this device, event by event, up to where memory runs out if it does.

        Raises:
            ValueError: only one batch size was traced, and it is another.
        """
        self._check(batch_size)
        return record(self.trace.at(batch_size), self.capacity_bytes, self.settings, self.allowed_bytes)

    def fit(self, batch_size: int) -> Fit:
        """Whether the step fits on this device, as far as is known."""
        finder, capacity = self._finder, self.capacity_range
        if finder.fits(batch_size, capacity.low_bytes, self.allowed_bytes, level="needed"):
            return "fits"
        return "may fit" if finder.fits(batch_size, capacity.high_bytes, self.allowed_bytes) else "does not fit"

    def fits(self, batch_size: int) -> bool:
        """Whether the step fits on this device with the most that it is known to take."""
        return self.fit(batch_size) == "fits"

    def fits_leaving(self, batch_size: int, free_bytes: int) -> bool:
        """The same on a device that is smaller by so much: a headroom that stays free."""
        self._check(batch_size)
        allowed = None if self.allowed_bytes is None else self.allowed_bytes - free_bytes
        return self._finder.fits(batch_size, self.capacity_range.low_bytes - free_bytes, allowed, level="needed")

    @property
    def capacity_range(self) -> Range:
        """What the allocator can take at least and at most."""
        return self._total - self._context

    @property
    def _total(self) -> Range:
        total_bytes = self.capacity_bytes + self.context_bytes
        return self.total_range or Range(total_bytes, total_bytes)

    @property
    def _context(self) -> Range:
        return self.context_range or Range(self.context_bytes, self.context_bytes)

    def _check(self, batch_size: int) -> None:
        if self.only_at not in (0, batch_size):
            raise ValueError(f"traced at batch size {self.only_at} only, not at {batch_size}")

    def held_at_peak(self, batch_size: int) -> list[Held]:
        """What is live at the peak, by bucket and place in the program, the largest first."""
        return self.trace.at(batch_size).held_after(self.at(batch_size).peak_event)

    def device_used_bytes(self, batch_size: int) -> int:
        """What the device holds for this process at the peak, as expected: reserved and context."""
        self._check(batch_size)
        _, reserved = self._finder.peaks_within(batch_size, self.capacity_bytes, self.allowed_bytes)
        return reserved + self.context_bytes

    def device_used_range(self, batch_size: int) -> Range:
        """The same with the least and with the most of what is not known."""
        return self._reserved_range(batch_size) + self._context

    def free_range(self, batch_size: int) -> Range:
        """What the device has left at the peak with the most and with the least of what is not known."""
        return self._total - self.device_used_range(batch_size)

    def _reserved_range(self, batch_size: int) -> Range:
        self._check(batch_size)
        return self._finder.reserved_range(batch_size, self.capacity_bytes, self.capacity_range, self.allowed_bytes)

    def unknowns(self, batch_size: int) -> tuple[KnownUnknown, ...]:
        """What makes the device total a range, and what it leaves a step."""
        found = []
        if not self._context.is_exact:
            found.append(KnownUnknown("CUDA context", self._context, self.context_source))
        if not self._total.is_exact:
            found.append(KnownUnknown("CUDA's total", self._total, "less what the driver keeps, by driver"))
        without_limit = Range(UNLIMITED_BYTES, UNLIMITED_BYTES)
        reserved = self._finder.reserved_range(batch_size, UNLIMITED_BYTES, without_limit)
        if not reserved.is_exact:
            more = Range(0, reserved.high_bytes - reserved.low_bytes)
            found.append(KnownUnknown("cuDNN workspaces", more, _WORKSPACES))
        return tuple(found)

    @property
    def grows(self) -> bool:
        """False if not one allocation depends on the batch size."""
        return bool(self.only_at) or any(self.trace.slopes)

    @cached_property
    def max_batch_size(self) -> int | Unknown:
        """Largest batch size that fits by replay with the most that is known to be possible, or why that cannot be
        told."""
        return self._largest(self.capacity_range.low_bytes, "needed")

    def max_batch_size_leaving(self, free_bytes: int) -> int | Unknown:
        """The same on a device that is smaller by so much: a headroom that the formula leaves free, too."""
        allowed = None if self.allowed_bytes is None else self.allowed_bytes - free_bytes
        return self._largest(self.capacity_range.low_bytes - free_bytes, "needed", allowed)

    @cached_property
    def may_fit_batch_size(self) -> int | Unknown:
        """Largest batch size that fits with the least that is known to be possible, or why that cannot be told."""
        return self._largest(self.capacity_range.high_bytes)

    @cached_property
    def expected_batch_size(self) -> int | Unknown:
        """Largest batch size that fits as expected, which the simulated GPU is; or why that cannot be told."""
        return self._largest(self.capacity_bytes)

    def too_large_below(self, batch_size: int, sizes: int = 8) -> tuple[int, ...]:
        """Of so many sizes just below one, those that do not fit as expected: pieces of the cache differ by size."""
        if self.only_at:
            return ()
        below = range(max(1, batch_size - sizes), batch_size)
        return tuple(one for one in below if not self._finder.fits(one, self.capacity_bytes, self.allowed_bytes))

    @cached_property
    def _finder(self) -> BatchFinder:
        return self.finder or BatchFinder(self.trace, self.settings)

    def _largest(self, capacity_bytes: int, level: Level = "least", allowed_bytes: int | None = None) -> int | Unknown:
        if self.only_at:
            return Unknown(self.not_affine)
        try:
            return self._finder.largest(capacity_bytes, allowed_bytes or self.allowed_bytes, level=level)
        except NotAffine as error:
            return Unknown(str(error))


_WORKSPACES = "depend on the algorithms that cuDNN picks"


@dataclass(frozen=True)
class Prediction:
    """Both predictions."""

    formula: Formula
    traced: Traced | Unknown

    @cached_property
    def with_headroom(self) -> int | Unknown:
        """The traced largest batch that leaves the formula's headroom free, or why there is none."""
        if isinstance(self.traced, Unknown):
            return self.traced
        free_bytes = self.formula.total_bytes - usable_bytes(self.formula.total_bytes, self.formula.headroom)
        return self.traced.max_batch_size_leaving(free_bytes)

    @property
    def best_max_batch_size(self) -> int | None:
        """The size to start a search from: traced if there is one, as expected, else by formula."""
        if isinstance(self.traced, Traced) and isinstance(self.traced.expected_batch_size, int):
            return self.traced.expected_batch_size
        formula = self.formula.max_batch_size
        return formula if isinstance(formula, int) else None
