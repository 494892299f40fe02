"""The result of a plan: by the closed form at once, by a trace where there is one, and on every GPU of the catalog."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.accumulation import Accumulation, accumulation, tokens_per_global_batch
from gpumem_tui.formula.checks import why_formula_only
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
from gpumem_tui.formula.recipe import Setup
from gpumem_tui.formula.records import BF16_SINCE, as_run_on
from gpumem_tui.formula.rows import FormulaRow, Moment
from gpumem_tui.ledger import Ledger
from gpumem_tui.memory import Breakdown, Bucket, Range, Unknown
from gpumem_tui.plan.plan import Plan, Subject
from gpumem_tui.run.events import Ready
from gpumem_tui.search.beside import as_beside
from gpumem_tui.search.prediction import Fit, KnownUnknown, Traced
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.profile import beside_allocator_bytes, profile_for
from gpumem_tui.step import Phase

# By the closed form


@dataclass(frozen=True)
class Answer:
    """The closed form's answer to a plan, at its batch size on one of its GPUs.

    Attributes:
        prediction: its rows, buckets and peak.
        usable_bytes: what the allocator can take of the GPU, with the headroom left free; the driver's reserve, the
            CUDA context and workspaces need the rest.
        max_batch_size: the largest batch on one GPU that stays within `usable_bytes`; 0 for none.
        obstacle: what is too large, in one line; None if the step fits.
        accumulation: passes per optimizer step, and the global batch they make, in samples.
        global_batch_tokens: its tokens; 0 for a network without a sequence.
    """

    plan: Plan
    prediction: FormulaPrediction
    usable_bytes: int
    max_batch_size: int
    obstacle: str | None
    accumulation: Accumulation
    global_batch_tokens: int

    @property
    def breakdown(self) -> Breakdown:
        """The peak by bucket."""
        return self.prediction.breakdown

    @property
    def peak_bytes(self) -> int:
        """Allocated bytes at the peak, on one GPU."""
        return self.prediction.peak_bytes

    @property
    def spare_bytes(self) -> int:
        """The bytes left within `usable_bytes`; negative: the bytes that are missing."""
        return self.usable_bytes - self.prediction.needed_bytes

    @property
    def fits(self) -> bool:
        """Return whether the step stays within `usable_bytes`, the allocator's cache with it."""
        return self.spare_bytes >= 0


def formula_only(plan: Plan) -> bool:
    """Return whether nothing but the closed form can answer the plan."""
    return bool(plan.extras) or bool(why_formula_only(plan.shape, plan.recipe))


def answer(plan: Plan) -> Answer:
    """Ask the closed form; it takes well under a millisecond for a transformer.

    Raises:
        ValueError: a number that no plan can have (a batch size, GPUs or target below 1, a headroom that is no share).
    """
    steps = accumulation(target_of(plan), plan.batch_size, plan.recipe.pass_micro_batches)
    tokens, gpu, extras = tokens_per_global_batch(plan.shape, steps), plan.gpu, plan.extras
    total_bytes, headroom = gpu.total_bytes, plan.headroom
    beside_bytes, recipe = beside_allocator_bytes(gpu), as_run_on(plan.recipe, gpu)
    prediction = predict(plan.shape, recipe, plan.batch_size, extras)
    usable = max(0, usable_bytes(total_bytes, headroom) - beside_bytes)
    return Answer(
        plan=plan,
        prediction=prediction,
        usable_bytes=usable,
        max_batch_size=max_batch_size(plan.shape, recipe, total_bytes, headroom, extras, beside_bytes=beside_bytes),
        obstacle=largest_obstacle(prediction, usable, f"of the {gpu.title}'s usable"),
        accumulation=steps,
        global_batch_tokens=tokens,
    )


def predicted(plan: Plan, batch_size: int | None = None) -> FormulaPrediction:
    """Return the closed form at the plan's batch size, or at another."""
    size = plan.batch_size if batch_size is None else batch_size
    return predict(plan.shape, as_run_on(plan.recipe, plan.gpu), size, plan.extras)


def terms_of(plan: Plan) -> tuple[FormulaRow, ...]:
    """Return every term of the closed form at the plan's batch size, whenever in a step it is there."""
    return terms(plan.shape, as_run_on(plan.recipe, plan.gpu), plan.batch_size, plan.extras)


def moments_of(plan: Plan) -> dict[Moment, MomentBytes]:
    """Return what the closed form needs at each moment of a step."""
    return by_moment(plan.shape, as_run_on(plan.recipe, plan.gpu), plan.extras)


def largest_batch(plan: Plan, within_bytes: int | None = None) -> int:
    """Return the largest batch on one GPU by the closed form; 0 for none.

    Args:
        within_bytes: what it has to stay within; None for `usable_of`.
    """
    within = usable_of(plan) if within_bytes is None else within_bytes
    return max_batch_size(plan.shape, as_run_on(plan.recipe, plan.gpu), within, 0.0, plan.extras)


def usable_as_traced(plan: Plan, largest: int | None) -> int:
    """Return the bytes that give the closed form the traced largest batch: what changes of the plan are judged by.

    Args:
        largest: as traced, with the plan's headroom left free; None for no trace, and so `usable_of`.
    """
    usable = usable_of(plan)
    if largest is None:
        return usable
    too_many = predicted(plan, largest + 1).needed_bytes - 1
    return min(too_many, max(usable, predicted(plan, largest).needed_bytes) if largest else usable)


def headroom_of(plan: Subject) -> int:
    """Return the bytes of its GPU that the plan leaves free.

    Raises:
        ValueError: a headroom that is no share of the GPU.
    """
    return plan.gpu.total_bytes - usable_bytes(plan.gpu.total_bytes, plan.headroom)


def usable_of(plan: Plan) -> int:
    """Return what the allocator can take of the plan's GPU, with the headroom left free.

    Raises:
        ValueError: a headroom that is no share of the GPU.
    """
    return max(0, usable_bytes(plan.gpu.total_bytes, plan.headroom) - beside_allocator_bytes(plan.gpu))


def target_of(plan: Plan) -> int:
    """Return the samples per optimizer step over all GPUs: the wanted ones, else those of one pass."""
    return plan.target_batch or plan.pass_samples


def setup_of(plan: Plan) -> Setup:
    """Return what is trained and how, without the batch and the GPU."""
    return Setup(plan.shape, plan.recipe, plan.extras)


def with_setup(plan: Plan, setup: Setup) -> Plan:
    """Return `plan` with another setup; a target below one pass of more GPUs becomes that pass."""
    target = plan.target_batch
    if target is not None:
        target = max(target, plan.batch_size * setup.recipe.pass_micro_batches)
    return replace(plan, shape=setup.shape, recipe=setup.recipe, extras=setup.extras, target_batch=target)


# By trace


@dataclass(frozen=True)
class TracedAnswer:
    """The traced step's answer on the plan's GPU: the context is counted and the allocator run.

    Figures are worked out when they are asked for, which takes a replay, and kept; `worked_out` asks for them all.

    Attributes:
        traced: the trace, on the whole of the plan's GPU.
    """

    plan: Subject
    traced: Traced

    @cached_property
    def breakdown(self) -> Breakdown:
        """The buckets at the moment of the highest allocated bytes."""
        return self.traced.at(self.plan.batch_size).breakdown

    @cached_property
    def highest(self) -> Mapping[Bucket, int]:
        """The most that each bucket holds at any moment of a step; their moments differ."""
        peaks = self.traced.at(self.plan.batch_size).bucket_peaks
        return {bucket: one.size_bytes for bucket, one in peaks.items()}

    @cached_property
    def peak_allocated_bytes(self) -> int:
        """The highest allocated bytes."""
        return self.traced.at(self.plan.batch_size).peak_allocated_bytes

    @cached_property
    def peak_reserved_bytes(self) -> int:
        """The highest reserved bytes."""
        return self.traced.at(self.plan.batch_size).peak_reserved_bytes

    @cached_property
    def peak_phase(self) -> Phase | None:
        """The phase of a step that the peak is in; None for a trace without phases."""
        moment = self.traced.at(self.plan.batch_size).peak_moment
        return None if moment is None else moment[0].phase

    @cached_property
    def device_used_bytes(self) -> int:
        """Reserved and context. More than `total_bytes` where the plan does not fit."""
        return self.traced.device_used_bytes(self.plan.batch_size)

    @cached_property
    def device_used_range(self) -> Range:
        """Reserved and context with the least and with the most of what is not known of them."""
        return self.traced.device_used_range(self.plan.batch_size)

    @cached_property
    def free_range(self) -> Range:
        """The bytes that `device_used_range` leaves of the GPU; negative: the bytes that are missing."""
        return self.traced.free_range(self.plan.batch_size)

    @cached_property
    def unknowns(self) -> tuple[KnownUnknown, ...]:
        """The parts of the device's memory with only a known range."""
        return self.traced.unknowns(self.plan.batch_size)

    @cached_property
    def fit(self) -> Fit:
        """Return whether the whole run goes through without running out of memory, as far as known."""
        return self.traced.fit(self.plan.batch_size)

    @cached_property
    def max_batch_size(self) -> int | Unknown:
        """The largest batch that fits with the plan's headroom left free, as by formula; or why that is not known."""
        headroom_bytes = headroom_of(self.plan)
        return self.traced.max_batch_size_leaving(headroom_bytes) if headroom_bytes else self.full_batch_size

    @property
    def known_batch_size(self) -> int | None:
        """`max_batch_size` if known."""
        return self.max_batch_size if isinstance(self.max_batch_size, int) else None

    @property
    def full_batch_size(self) -> int | Unknown:
        """The largest batch that fits on the whole GPU with the most that is possible."""
        return self.traced.max_batch_size

    @property
    def may_fit_batch_size(self) -> int | Unknown:
        """The largest batch that fits with the least that is possible."""
        return self.traced.may_fit_batch_size

    @property
    def total_bytes(self) -> int:
        """The bytes that the GPU has as CUDA reports them."""
        return self.plan.gpu.cuda_total_bytes

    @property
    def spare_bytes(self) -> int:
        """The bytes of the device left at the peak; negative: those missing. Cached segments count as used."""
        return self.total_bytes - self.device_used_bytes

    @property
    def fits(self) -> bool:
        """Return whether the step fits with the most that is possible and leaves the headroom free."""
        return self.fit == "fits" and self.keeps_headroom

    @property
    def keeps_headroom(self) -> bool:
        """Return whether it leaves the plan's headroom free."""
        if isinstance(self.max_batch_size, Unknown):
            return self.traced.fits_leaving(self.plan.batch_size, headroom_of(self.plan))
        return self.plan.batch_size <= self.max_batch_size

    @property
    def verdict(self) -> Fit | None:
        """Return `fit` where the headroom is left free too; None where it fits but does not leave that free."""
        return None if self.fit == "fits" and not self.keeps_headroom else self.fit

    @property
    def frees_cache(self) -> bool:
        """Return whether the headroom is left free by giving back cached segments, which are kept on the whole GPU."""
        known = isinstance(self.max_batch_size, int)
        return known and self.fits and self.free_range.low_bytes < headroom_of(self.plan)

    @property
    def ledger(self) -> Ledger[None]:
        """The device at the peak."""
        return self.traced.ledger(self.plan.batch_size)

    def at(self, batch_size: int) -> TracedAnswer:
        """Return the answer at another batch size."""
        return replace(self, plan=self.plan.at(batch_size))

    def batches(self) -> list[TracedAnswer]:
        """Return powers of two up to the largest batch that fits, it and the next one, and the planned one."""
        sizes = {self.plan.batch_size}
        largest = self.max_batch_size
        if isinstance(largest, int):
            sizes |= {1 << power for power in range(largest.bit_length())} | {max(1, largest), largest + 1}
        return [self.at(size) for size in sorted(sizes)]

    def places(self) -> list[Place]:
        """Return what holds the peak, the largest first."""
        totals: Counter[tuple[Bucket, str, str]] = Counter()
        for held in self.traced.held_at_peak(self.plan.batch_size):
            module = re.sub(r"\b\d+\b", "*", held.site.module)
            totals[held.bucket, module, held.site.source] += held.size_bytes
        return [Place(*where, size_bytes) for where, size_bytes in totals.most_common()]

    def worked_out(self) -> tuple[object, ...]:
        """Work every figure out, and return them.

        Raises:
            NotAffine: the trace cannot be carried over to the plan's batch size.
        """
        return (
            self.breakdown, self.highest, self.peak_allocated_bytes, self.peak_reserved_bytes, self.peak_phase,
            self.device_used_bytes, self.device_used_range, self.free_range, self.unknowns, self.fit,
            self.max_batch_size, self.full_batch_size, self.may_fit_batch_size,
        )  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Bytes held at the peak by one place of the program; layers of one kind are counted together."""

    bucket: Bucket
    module: str
    source: str
    size_bytes: int


def traced_answer(plan: Plan, traced: Traced, finder: BatchFinder | None = None) -> TracedAnswer:
    """Ask a trace about the plan's batch size and GPU.

    `traced` must be of the plan's shape, recipe and architecture (`tracing.trace_key`), made on any GPU.
    Takes tens of milliseconds for a large model, and a new largest batch ten times that: not for the screen's thread.

    Args:
        finder: of this very trace; what it found for one plan spares work on the next.

    Raises:
        NotAffine: the trace cannot be carried over to the plan's batch size.
    """
    found = TracedAnswer(plan, on_gpu(plan, traced, finder))
    found.worked_out()
    return found


def on_gpu(plan: Plan, traced: Traced, finder: BatchFinder | None = None) -> Traced:
    """Return a trace made on any GPU, on the whole of the plan's GPU.

    On another architecture it has that one's context; which kernels run there, the trace does not know.

    Args:
        finder: of that trace.
    """
    ready = traced.ready
    if not ready.profile.endswith(f" {plan.gpu.sm}"):
        profile = profile_for(ready.torch_version, plan.gpu).using(plan.gpu, ready.groups, ready.libraries)
        ready = replace(Ready.of(ready.torch_version, profile), profile=ready.profile)
    return replace(traced.on(plan.gpu, ready), finder=finder or traced.finder)


# Both

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
    """Return the phase of the traced peak where the closed form's peak is in another one; None where they agree."""
    phase = traced.peak_phase
    return None if phase in _PHASES[formula.prediction.moment] else phase


def cache_words(traced: TracedAnswer) -> str:
    """Say why less is left than the headroom of a plan that keeps it.

    Args:
        traced: one that `frees_cache`.
    """
    kept = f"{100 * traced.plan.headroom:g} %"
    return f"The free figure counts cache as used: with {kept} kept free the allocator gives cache back, and it fits"


# On every GPU


@dataclass(frozen=True)
class LargestOnGpu:
    """The largest batches on one GPU with the plan's headroom left free; 0 for none.

    Attributes:
        formula: None for a command, which has no closed form.
        traced: None without a trace; or why it cannot tell.
        same_architecture: of the GPU that the trace was made for; of a command, whether kernels run as there.
        lacks: what the plan asks for that this GPU has not, a sentence each.
        answer: of a command there; None for a model's plan, of which more than the largest batch is not asked.
        is_estimate: so is the trace, by which no batch fits for certain.
    """

    gpu: Gpu
    formula: int | None
    traced: int | Unknown | None
    same_architecture: bool
    lacks: tuple[str, ...] = ()
    answer: TracedAnswer | None = None
    is_estimate: bool = False

    def fit_of(self, plan: Subject) -> Fit:
        """Return whether the planned batch fits there with the plan's headroom left free, as its headline states."""
        if self.answer is not None:
            return self.answer.fit
        if plan.batch_size > self.largest:
            return "may not fit" if self.is_estimate else "does not fit"
        return "may fit" if self.is_estimate else "fits"

    @property
    def by_formula(self) -> int:
        """A model's, which has a closed form."""
        assert self.formula is not None, "a command has no closed form"
        return self.formula

    @property
    def largest(self) -> int:
        """By the trace where it tells, else by formula."""
        return self.traced if isinstance(self.traced, int) else self.formula or 0


TraceOf = Callable[[Plan], "Traced | Unknown | None"]
"""The trace of a plan's step; why there can be none; None where it was not traced so far."""


def largest_by_gpu(plan: Plan, traced: Traced | None, trace_of: TraceOf = lambda _: None) -> tuple[LargestOnGpu, ...]:
    """Return every GPU of the catalog, the one with the least memory first. With a trace this takes seconds.

    Args:
        traced: of the plan, made on any GPU; None for the formula alone.
        trace_of: asked for the plan on the first GPU of each class whose attention takes another kernel, which
            `kernel_plans` returns too.
    """
    answering: dict[object, tuple[Traced, BatchFinder | None]] = {}
    why: dict[object, Unknown] = {}
    if traced is not None:
        answering[_kernels(plan, plan.gpu)] = traced, _finder(traced)
        for there in kernel_plans(plan):
            found = trace_of(there)
            if isinstance(found, Traced):
                answering[_kernels(plan, there.gpu)] = found, _finder(found)
            else:
                reason = found.reason if isinstance(found, Unknown) else "not traced so far"
                why[_kernels(plan, there.gpu)] = Unknown(f"attention takes another kernel on {there.gpu.sm}: {reason}")
    rows = []
    for gpu in _by_memory(plan.gpu):
        there, kernels = replace(plan, gpu=gpu), _kernels(plan, gpu)
        by_trace: int | Unknown | None = why.get(kernels)
        same = is_estimate = False
        if kernels in answering:
            found, finder = answering[kernels]
            by_trace = on_gpu(there, found, finder).max_batch_size_leaving(headroom_of(there))
            same, is_estimate = found.ready.profile.endswith(f" {gpu.sm}"), found.done.is_estimate
        row = LargestOnGpu(gpu, largest_batch(there), by_trace, same, lacking(there), is_estimate=is_estimate)
        rows.append(row)
    return tuple(rows)


def kernel_plans(plan: Plan) -> tuple[Plan, ...]:
    """Return the plan on a GPU of each class whose attention takes another kernel than the plan's own takes."""
    firsts = {_kernels(plan, gpu): replace(plan, gpu=gpu) for gpu in reversed(_by_memory(plan.gpu))}
    firsts.pop(_kernels(plan, plan.gpu), None)
    return tuple(firsts.values())


def _by_memory(planned: Gpu) -> list[Gpu]:
    """Return the catalog's GPUs, each with such an inference engine in it as the planned one."""
    listed = sorted(gpus().values(), key=lambda one: (one.total_bytes, one.name))
    return [as_beside(gpu, planned) for gpu in listed]


def _finder(traced: Traced) -> BatchFinder | None:
    return None if traced.done.only_at else BatchFinder(traced.trace, traced.settings)


def _kernels(plan: Plan, gpu: Gpu) -> object:
    """Return the figures shared by GPUs on which the plan's attention runs the same kernels."""
    chosen = as_run_on(plan.recipe, gpu)
    fused = plan.shape.record.has_attention and chosen.attention == "auto"
    return chosen, fused and gpu.compute_capability >= _FLASH_SINCE


_FLASH_SINCE = (8, 0)
_TENSOR_CORES_SINCE = (7, 0)
_CUDA_GUIDE = "CUDA C++ Programming Guide, arithmetic instructions by compute capability"
_SDPA = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"


def lacking(plan: Plan) -> tuple[str, ...]:
    """Return what a plan asks of its GPU that the architecture does not have: a sentence each, with its source."""
    capability, title = plan.gpu.compute_capability, plan.gpu.title
    recipe = plan.recipe
    found = []
    if recipe.precision in ("bf16", "amp-bf16") and capability < BF16_SINCE:
        found.append(
            f"{title} ({plan.gpu.sm}) has no bfloat16 arithmetic: it is emulated, slowly; amp-fp16 is what it has "
            f"({_CUDA_GUIDE}; bfloat16 since 8.0)"
        )
    if recipe.precision == "amp-fp16" and capability < _TENSOR_CORES_SINCE:
        found.append(f"{title} ({plan.gpu.sm}) has no tensor cores: 16 bits save memory, not time ({_CUDA_GUIDE})")
    if plan.shape.record.has_attention and capability < _FLASH_SINCE:
        if recipe.attention == "flash":
            found.append(f"{title} ({plan.gpu.sm}) has no flash attention: --attention auto takes another ({_SDPA})")
        elif recipe.attention == "auto" and recipe.precision in ("bf16", "amp-bf16"):
            found.append(
                f"no fused attention kernel takes bfloat16 on {title} ({plan.gpu.sm}): attention writes its scores, "
                f"S² of them ({_SDPA})"
            )
        elif recipe.attention == "auto":
            found.append(f"no flash attention on {title} ({plan.gpu.sm}): PyTorch takes the efficient kernel ({_SDPA})")
    return tuple(found)
