"""The two predictions that stand beside a measurement: the closed form and the traced step. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.extras import NO_EXTRAS, Extras
from gpumem_tui.formula.predict import DEFAULT_HEADROOM, FormulaPrediction, max_batch_size, predict
from gpumem_tui.memory import Unknown
from gpumem_tui.search.events import Ready, TraceDone
from gpumem_tui.simulator.replay import AffineTrace, BatchFinder, NotAffine, Replay, replay
from gpumem_tui.simulator.settings import AllocatorSettings
from gpumem_tui.simulator.timeline import Held
from gpumem_tui.snapshots.recording import Recording, record
from gpumem_tui.workload.spec import WorkloadSpec


@dataclass(frozen=True)
class Formula:
    """The closed form for one workload and GPU.

    Attributes:
        total_bytes: the memory that `headroom` is a share of: the device's, or a user's cap.
        extras: techniques that only the closed form knows.
    """

    workload: WorkloadSpec
    total_bytes: int
    headroom: float = DEFAULT_HEADROOM
    extras: Extras = NO_EXTRAS

    @cached_property
    def max_batch_size(self) -> int | Unknown:
        """Largest batch size by the closed form, or why there is none."""
        shape = self.workload.shape
        if shape is None:
            return Unknown(_no_formula(self.workload))
        return max_batch_size(shape, self.workload.recipe, self.total_bytes, self.headroom, self.extras)

    def at(self, batch_size: int) -> FormulaPrediction | Unknown:
        """The closed form's rows at a batch size, or why there are none."""
        shape = self.workload.shape
        if shape is None:
            return Unknown(_no_formula(self.workload))
        return predict(shape, self.workload.recipe, batch_size, self.extras)


def _no_formula(workload: WorkloadSpec) -> str:
    return "no formula for a command" if workload.command is not None else "no formula for a workload file"


@dataclass(frozen=True)
class Traced:
    """The traced step for one workload and GPU, at any batch size.

    Attributes:
        capacity_bytes: what the allocator can take: CUDA's total less the context.
        allowed_bytes: a user's cap on reserved bytes, None for none.
        profile, context_bytes: the simulator's assumptions (see `Profile`).
        seconds: how long tracing took.
        assumed: operators whose kernels' scratch is not known and counted as none: (operator, times, why).
        only_at: the one batch size this is about, where memory depends on the batch in ways that no line through
            traces predicts, and `not_affine` says so; 0: it answers for every size.
        changes, is_sharded: as `TraceDone` has them.
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
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    _runs: dict[int, tuple[Replay, bool]] = field(default_factory=dict, repr=False, compare=False)

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
            settings=settings,
        )

    def at(self, batch_size: int) -> Replay:
        """The step at a batch size on this device, or without limit where it does not fit; kept for the next time.

        Raises:
            ValueError: only one batch size was traced, and it is another.
        """
        if self.only_at not in (0, batch_size):
            raise ValueError(f"traced at batch size {self.only_at} only, not at {batch_size}")
        return self._run(batch_size)[0]

    def recorded(self, batch_size: int) -> Recording:
        """The run at a batch size on this device, event by event, up to where memory runs out if it does.

        Raises:
            ValueError: only one batch size was traced, and it is another.
        """
        if self.only_at not in (0, batch_size):
            raise ValueError(f"traced at batch size {self.only_at} only, not at {batch_size}")
        return record(self.trace.at(batch_size), self.capacity_bytes, self.settings, self.allowed_bytes)

    def fits(self, batch_size: int) -> bool:
        """Whether the step fits on this device."""
        return self._run(batch_size)[1]

    def _run(self, batch_size: int) -> tuple[Replay, bool]:
        if batch_size not in self._runs:
            timeline = self.trace.at(batch_size)
            found = replay(timeline, self.capacity_bytes, self.settings, self.allowed_bytes)
            shown = found if found.fits else replay(timeline, settings=self.settings)
            self._runs[batch_size] = shown, found.fits
        return self._runs[batch_size]

    def held_at_peak(self, batch_size: int) -> list[Held]:
        """What is live at the peak, by bucket and place in the program, the largest first."""
        return self.trace.at(batch_size).held_after(self.at(batch_size).peak_event)

    def device_used_bytes(self, batch_size: int) -> int:
        """What the device holds for this process at the peak: reserved and context."""
        return self.at(batch_size).peak_reserved_bytes + self.context_bytes

    @property
    def grows(self) -> bool:
        """False if not one allocation depends on the batch size."""
        return bool(self.only_at) or any(self.trace.slopes)

    @cached_property
    def max_batch_size(self) -> int | Unknown:
        """Largest batch size that fits by replay, or why that cannot be told."""
        if self.only_at:
            return Unknown(self.not_affine)
        try:
            return BatchFinder(self.trace, self.settings).largest(self.capacity_bytes, self.allowed_bytes)
        except NotAffine as error:
            return Unknown(str(error))


@dataclass(frozen=True)
class Prediction:
    """Both predictions."""

    formula: Formula
    traced: Traced | Unknown

    @property
    def best_max_batch_size(self) -> int | None:
        """The size to start a search from: traced if there is one, else by formula."""
        if isinstance(self.traced, Traced) and isinstance(self.traced.max_batch_size, int):
            return self.traced.max_batch_size
        formula = self.formula.max_batch_size
        return formula if isinstance(formula, int) else None
