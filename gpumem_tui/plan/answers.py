"""What a plan comes to: by the closed form at once, and by a trace where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpumem_tui.formula.accumulation import Accumulation, accumulation, tokens_per_global_batch
from gpumem_tui.formula.blocks import as_run_on
from gpumem_tui.formula.changes import Setup
from gpumem_tui.formula.predict import (
    FormulaPrediction,
    MomentBytes,
    by_moment,
    largest_obstacle,
    max_batch_size,
    predict,
    terms,
    usable_bytes,
)
from gpumem_tui.formula.rows import FormulaRow, Moment
from gpumem_tui.memory import Breakdown, Ledger, Range, Unknown
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.prediction import Fit, KnownUnknown, Traced
from gpumem_tui.simulator.finder import BatchFinder
from gpumem_tui.simulator.profile import beside_allocator_bytes, profile_for
from gpumem_tui.step import Phase


@dataclass(frozen=True)
class Answer:
    """The closed form's answer.

    Attributes:
        prediction: its rows, buckets and peak at the plan's batch size, on one GPU.
        usable_bytes: what the allocator can take of the GPU, with the plan's headroom left free: the driver's reserve,
            the CUDA context and workspaces are known to need the rest.
        max_batch_size: the largest batch on one GPU that stays within `usable_bytes`; 0 for none.
        accumulation: passes per optimizer step, and the global batch they make, in samples.
        global_batch_tokens: the same in tokens; 0 for a network without a sequence.
        obstacle: what is too large, in one line; None if the plan fits.
    """

    plan: Plan
    prediction: FormulaPrediction
    usable_bytes: int
    max_batch_size: int
    accumulation: Accumulation
    global_batch_tokens: int
    obstacle: str | None

    @property
    def breakdown(self) -> Breakdown:
        """The peak by bucket."""
        return self.prediction.breakdown

    @property
    def peak_bytes(self) -> int:
        """On one GPU."""
        return self.prediction.peak_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left within `usable_bytes`; negative: what is missing."""
        return self.usable_bytes - self.prediction.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether the step stays within `usable_bytes`, the allocator's cache with it."""
        return self.spare_bytes >= 0


@dataclass(frozen=True)
class TracedAnswer:
    """The traced step's answer on the plan's GPU: the context is counted and the allocator run.

    Attributes:
        breakdown: the buckets at the moment of the highest allocated bytes.
        peak_phase: the phase of a step that this moment lies in; None for a trace without phases.
        context_bytes: what the CUDA context takes, by assumption of the `profile`.
        total_bytes: what CUDA says the GPU has.
        device_used_range: reserved and context with the least and with the most of what is not known of them.
        free_range: what that leaves of the GPU; below zero: what is missing.
        fit: whether the whole run goes through without running out of memory, as far as is known.
        max_batch_size: the largest that does with the plan's headroom left free, as by formula; or why that cannot be
            told.
        full_batch_size: the largest that does on the whole GPU, with the most that is possible.
        may_fit_batch_size: the largest that does with the least.
        unknowns: what is known as a range only.
        assumed: operators whose kernels take scratch of unknown size, counted as none: (operator, times, why).
    """

    plan: Plan
    breakdown: Breakdown
    peak_phase: Phase | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int
    total_bytes: int
    device_used_range: Range
    free_range: Range
    fit: Fit
    max_batch_size: int | Unknown
    full_batch_size: int | Unknown
    may_fit_batch_size: int | Unknown
    profile: str
    assumed: tuple[tuple[str, int, str], ...]
    unknowns: tuple[KnownUnknown, ...]

    @property
    def fits(self) -> bool:
        """Whether it fits with the most that is possible and leaves the headroom free."""
        return self.fit == "fits" and self.keeps_headroom

    @property
    def keeps_headroom(self) -> bool:
        """Whether it leaves the plan's headroom free."""
        return isinstance(self.max_batch_size, Unknown) or self.plan.batch_size <= self.max_batch_size

    @property
    def frees_cache(self) -> bool:
        """Whether it leaves the headroom free by giving back cached segments, which it keeps on the whole GPU."""
        known = isinstance(self.max_batch_size, int)
        return known and self.fits and self.free_range.low_bytes < headroom_of(self.plan)

    @property
    def device_used_bytes(self) -> int:
        """Reserved and context. More than `total_bytes` where the plan does not fit."""
        return self.peak_reserved_bytes + self.context_bytes

    @property
    def ledger(self) -> Ledger[None]:
        """The device at the peak."""
        return Ledger.of_step(
            self.breakdown,
            allocated_bytes=self.peak_allocated_bytes,
            reserved_bytes=self.peak_reserved_bytes,
            used_bytes=self.device_used_bytes,
            cuda_total_bytes=self.plan.gpu.cuda_total_bytes,
            total_bytes=self.plan.gpu.total_bytes,
        )

    @property
    def spare_bytes(self) -> int:
        """What the device has left at the peak; negative: what is missing. Cached segments count as used."""
        return self.total_bytes - self.device_used_bytes


_PHASES: Mapping[Moment, tuple[Phase, ...]] = MappingProxyType(
    {
        Moment.LOSS: (Phase.FORWARD, Phase.BACKWARD),
        Moment.LOSS_BACKWARD: (Phase.FORWARD, Phase.BACKWARD),
        Moment.LAST_BLOCK: (Phase.FORWARD, Phase.BACKWARD),
        Moment.FIRST_BLOCK: (Phase.BACKWARD,),
        Moment.EMBEDDING: (Phase.BACKWARD,),
        Moment.UPDATE: (Phase.OPTIMIZER,),
    }
)
"""The phases of a step that each of the closed form's moments may lie in."""


def differing_phase(formula: Answer, traced: TracedAnswer) -> Phase | None:
    """The phase of the traced peak where the closed form's peak is in another one; None where they agree."""
    phase = traced.peak_phase
    return None if phase in _PHASES[formula.prediction.moment] else phase


def cache_words(traced: TracedAnswer) -> str:
    """Why less is left than the headroom of a plan that keeps it.

    Args:
        traced: one that `frees_cache`.
    """
    kept = f"{100 * traced.plan.headroom:g} %"
    return (
        f"What is left counts cached memory as used: with {kept} kept free the allocator gives cache back, and it fits"
    )


def setup_of(plan: Plan) -> Setup:
    """What is trained and how, without the batch and the GPU."""
    return Setup(plan.shape, plan.recipe, plan.extras)


def with_setup(plan: Plan, setup: Setup) -> Plan:
    """`plan` with other things trained, or otherwise; a target below one pass of more GPUs becomes that pass."""
    target = plan.target_batch
    if target is not None:
        target = max(target, plan.batch_size * setup.recipe.data_parallel)
    return replace(plan, shape=setup.shape, recipe=setup.recipe, extras=setup.extras, target_batch=target)


def predicted(plan: Plan, batch_size: int | None = None) -> FormulaPrediction:
    """The closed form at the plan's batch size, or at another."""
    size = plan.batch_size if batch_size is None else batch_size
    return predict(plan.shape, as_run_on(plan.recipe, plan.gpu), size, plan.extras)


def terms_of(plan: Plan) -> tuple[FormulaRow, ...]:
    """Every term of the closed form at the plan's batch size, whenever in a step it is there."""
    return terms(plan.shape, as_run_on(plan.recipe, plan.gpu), plan.batch_size, plan.extras)


def moments_of(plan: Plan) -> dict[Moment, MomentBytes]:
    """What the closed form needs at each moment of a step."""
    return by_moment(plan.shape, as_run_on(plan.recipe, plan.gpu), plan.extras)


def largest_batch(plan: Plan) -> int:
    """The largest batch on one GPU by the closed form; 0 for none."""
    beside_bytes = beside_allocator_bytes(plan.gpu)
    shape, recipe, total_bytes = plan.shape, as_run_on(plan.recipe, plan.gpu), plan.gpu.total_bytes
    return max_batch_size(shape, recipe, total_bytes, plan.headroom, plan.extras, beside_bytes=beside_bytes)


def headroom_of(plan: Plan) -> int:
    """The bytes of its GPU that the plan leaves free.

    Raises:
        ValueError: a headroom that is no share of the GPU.
    """
    return plan.gpu.total_bytes - usable_bytes(plan.gpu.total_bytes, plan.headroom)


def usable_of(plan: Plan) -> int:
    """What the allocator can take of the plan's GPU, with the headroom left free.

    Raises:
        ValueError: a headroom that is no share of the GPU.
    """
    return max(0, usable_bytes(plan.gpu.total_bytes, plan.headroom) - beside_allocator_bytes(plan.gpu))


def target_of(plan: Plan) -> int:
    """Samples per optimizer step over all GPUs: the wanted ones, else those of one pass."""
    return plan.target_batch or plan.batch_size * plan.recipe.data_parallel


def samples(count: int) -> str:
    """A count of samples in words.

    >>> samples(1), samples(2048)
    ('1 sample', '2,048 samples')
    """
    return f"{count:,} sample{'' if count == 1 else 's'}"


def answer(plan: Plan) -> Answer:
    """What the closed form says; well under a millisecond for a transformer.

    Raises:
        ValueError: a number that no plan can have (a batch size, GPUs or target below 1, a headroom that is no share).
    """
    prediction = predicted(plan)
    usable = usable_of(plan)
    steps = accumulation(target_of(plan), plan.batch_size, plan.recipe.data_parallel)
    return Answer(
        plan=plan,
        prediction=prediction,
        usable_bytes=usable,
        max_batch_size=largest_batch(plan),
        accumulation=steps,
        global_batch_tokens=tokens_per_global_batch(plan.shape, steps),
        obstacle=largest_obstacle(prediction, usable, f"of the {plan.gpu.title}'s usable"),
    )


def on_gpu(plan: Plan, traced: Traced, finder: BatchFinder | None = None) -> Traced:
    """A trace made on any GPU, on the whole of the plan's GPU. `finder`: of that trace.

    On another architecture with that one's context; which kernels run there, the trace does not know.
    """
    if not traced.profile.endswith(f" {plan.gpu.sm}"):
        there = profile_for(traced.profile.split()[1], plan.gpu)
        source, context_range = there.context_source, there.context_range
        traced = replace(traced, context_bytes=there.context_bytes, context_source=source, context_range=context_range)
    capacity_bytes = plan.gpu.cuda_total_bytes - traced.context_bytes
    total_range = plan.gpu.cuda_total_range
    return replace(
        traced,
        capacity_bytes=capacity_bytes,
        total_range=total_range,
        allowed_bytes=None,
        finder=finder or traced.finder,
        _runs={},
    )


def traced_answer(plan: Plan, traced: Traced, finder: BatchFinder | None = None) -> TracedAnswer:
    """What the traced step says about the plan's batch size and GPU.

    `traced` must be of the plan's shape, recipe and architecture (`tracing.trace_key`), whatever GPU it was made on.
    Takes tens of milliseconds for a large model, and a new largest batch ten times that: not for the screen's thread.

    Args:
        finder: of this very trace; what it found for one plan spares work on the next.

    Raises:
        NotAffine: the trace cannot be carried over to the plan's batch size.
    """
    here = on_gpu(plan, traced, finder)
    replay = here.at(plan.batch_size)
    return TracedAnswer(
        plan=plan,
        breakdown=replay.breakdown,
        peak_phase=None if replay.peak_moment is None else replay.peak_moment[0].phase,
        peak_allocated_bytes=replay.peak_allocated_bytes,
        peak_reserved_bytes=replay.peak_reserved_bytes,
        context_bytes=here.context_bytes,
        total_bytes=plan.gpu.cuda_total_bytes,
        device_used_range=here.device_used_range(plan.batch_size),
        free_range=here.free_range(plan.batch_size),
        fit=here.fit(plan.batch_size),
        max_batch_size=here.max_batch_size_leaving(headroom_of(plan)),
        full_batch_size=here.max_batch_size,
        may_fit_batch_size=here.may_fit_batch_size,
        profile=here.profile,
        assumed=here.assumed,
        unknowns=here.unknowns(plan.batch_size),
    )
