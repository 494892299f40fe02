"""The JSON of `plan --json` as types: a model's plan, a command's, and a number that was solved for."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from gpumem_tui.catalog.loader import GpuPrice
from gpumem_tui.formula.accumulation import Accumulation
from gpumem_tui.formula.techniques import NotApplicable
from gpumem_tui.memory import Range, Unknown
from gpumem_tui.plan.answers import Answer, LargestOnGpu, TracedAnswer, answer, lacking, on_gpu, traced_answer
from gpumem_tui.plan.combination import Combination, Effect
from gpumem_tui.plan.combining import command_of
from gpumem_tui.plan.command import CommandPlan, on_every_gpu, ranks_line, techniques_of_command
from gpumem_tui.plan.curves import Curve, CurveMark, CurveSeries
from gpumem_tui.plan.export import all_curves, command_line
from gpumem_tui.plan.fitting import Fitted, NotMade
from gpumem_tui.plan.goals import Quantity
from gpumem_tui.plan.judgement import Judgement, judgements
from gpumem_tui.plan.limits import How, Limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import Known, all_techniques, command_answer, judged_at_once, plan_answer, untraced
from gpumem_tui.plan.replayed import assignment_of
from gpumem_tui.plan.speed import cost_of, price_of, rate, run
from gpumem_tui.report.objects import SCHEMA, JsonObject, known, reason_of
from gpumem_tui.search.config import Device
from gpumem_tui.search.prediction import Fit, Formula, Prediction, Traced
from gpumem_tui.search.printed import (
    Bytes,
    DeviceObject,
    FormulaObject,
    PredictedObject,
    PredictObject,
    TracedObject,
    workload_object,
)
from gpumem_tui.simulator.allocator.profile import beside_allocator_bytes
from gpumem_tui.workload.spec import WorkloadSpec

# A model's plan


class _PlanAccumulation(JsonObject, frozen=True):
    steps: int
    global_batch_size: int
    target_batch: int | None
    global_batch_tokens: int | None

    @classmethod
    def of(cls, now: Answer) -> _PlanAccumulation:
        """Return the passes of a step of a plan."""
        return cls(
            steps=now.accumulation.steps,
            global_batch_size=now.accumulation.global_batch_size,
            target_batch=now.plan.target_batch,
            global_batch_tokens=now.global_batch_tokens or None,
        )


class _Speed(JsonObject, frozen=True):
    """The least and the most of one GPU's speed, never measured here."""

    samples_per_s: tuple[float, float] | None
    tokens_per_s: tuple[float, float] | UnsetType | None = UNSET
    assumed_share: tuple[float, float] | UnsetType = UNSET
    assumed_from: str | UnsetType = UNSET
    peak_tflops: float | UnsetType = UNSET
    computed_by: str | UnsetType = UNSET
    unavailable: str | UnsetType = UNSET

    @classmethod
    def of(cls, plan: Plan) -> _Speed:
        """Return how fast a plan is."""
        found = rate(plan)
        if isinstance(found, Unknown):
            return cls(samples_per_s=None, unavailable=found.reason)
        tokens, share = plan.shape.seq_len, found.engine.share
        return cls(
            samples_per_s=(found.least, found.most),
            tokens_per_s=(found.least * tokens, found.most * tokens) if tokens else None,
            assumed_share=(share.least, share.most),
            assumed_from=share.source,
            peak_tflops=found.engine.tflops,
            computed_by=found.engine.name,
        )


class _Run(JsonObject, frozen=True, kw_only=True):
    """The least and the most that the wanted tokens take."""

    tokens: int | UnsetType = UNSET
    link: str | UnsetType | None = UNSET
    hours: tuple[float, float] | None
    gpu_hours: tuple[float, float] | UnsetType = UNSET
    cost: tuple[float, float] | UnsetType | None = UNSET
    price_per_hour: GpuPrice | UnsetType | None = UNSET
    unavailable: str | UnsetType = UNSET

    @classmethod
    def of(cls, plan: Plan) -> _Run:
        """Return what the tokens of a plan take."""
        found = run(plan)
        if isinstance(found, Unknown):
            return cls(hours=None, unavailable=found.reason)
        return cls(
            tokens=found.tokens,
            link=None if found.link is None else found.link.name,
            hours=found.hours,
            gpu_hours=found.gpu_hours,
            cost=found.cost,
            price_per_hour=price_of(plan),
        )


class _LargestOn(JsonObject, frozen=True):
    name: str
    title: str
    total_bytes: int
    formula_max_batch_size: int
    traced_max_batch_size: int | None
    unavailable: str | None
    same_architecture: bool
    cost_per_million: tuple[float, float] | None
    price_per_hour: GpuPrice | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, row: LargestOnGpu, plan: Plan) -> _LargestOn:
        """Return the largest batch on a GPU, and what it costs there."""
        cost = cost_of(plan, row.gpu)
        return cls(
            name=row.gpu.name,
            title=row.gpu.whole.title,
            total_bytes=row.gpu.total_bytes,
            formula_max_batch_size=row.by_formula,
            traced_max_batch_size=known(row.traced),
            unavailable=reason_of(row.traced),
            same_architecture=row.same_architecture,
            cost_per_million=None if isinstance(cost, Unknown) else cost.per_million,
            price_per_hour=None if isinstance(cost, Unknown) else cost.price,
            notes=row.lacks,
        )


class _Technique(JsonObject, frozen=True):
    name: str
    option: str
    saved_bytes: int
    peak_bytes: int
    fits: bool
    max_batch_size: int | None
    cost: str
    source: str
    formula_only: bool
    is_traced: bool

    @classmethod
    def of(cls, effect: Effect) -> _Technique:
        """Return what a technique comes to."""
        return cls(
            name=effect.change.name,
            option=effect.change.option,
            saved_bytes=effect.saved_bytes,
            peak_bytes=effect.peak_bytes,
            fits=effect.fits,
            max_batch_size=effect.known_largest,
            cost=effect.change.cost,
            source=effect.change.source,
            formula_only=effect.formula_only,
            is_traced=effect.by == "traced",
        )


class _Useless(JsonObject, frozen=True):
    name: str
    reason: str


class _ByTrace(JsonObject, frozen=True):
    fits: bool | None
    peak_allocated_bytes: int | None
    max_batch_size: int | None
    unavailable: str | UnsetType = UNSET

    @classmethod
    def of(cls, traced: TracedAnswer | Unknown) -> _ByTrace:
        """Return what a trace reports, or why it is missing."""
        if isinstance(traced, Unknown):
            return cls(fits=None, peak_allocated_bytes=None, max_batch_size=None, unavailable=traced.reason)
        return cls(
            fits=traced.fits,
            peak_allocated_bytes=traced.peak_allocated_bytes,
            max_batch_size=known(traced.max_batch_size),
        )


class _Combination(JsonObject, frozen=True):
    """Techniques that together make it fit; null where none do, and `unavailable` gives the reason."""

    techniques: tuple[str, ...] | None
    batch_size: int | UnsetType = UNSET
    peak_bytes: int | UnsetType = UNSET
    max_batch_size: int | UnsetType = UNSET
    accumulation: Accumulation | UnsetType = UNSET
    formula_only: bool | UnsetType = UNSET
    traced: _ByTrace | UnsetType = UNSET
    command: str | UnsetType | None = UNSET
    unavailable: str | UnsetType = UNSET

    @classmethod
    def of(cls, found: Combination | Unknown, traced: TracedAnswer | Unknown) -> _Combination:
        """Return a combination of techniques.

        Args:
            traced: of the combination, unless only the formula knows it; or why there is no trace.
        """
        if isinstance(found, Unknown):
            return cls(techniques=None, unavailable=found.reason)
        command = command_line(found.plan)
        return cls(
            techniques=tuple(change.name for change in found.changes),
            batch_size=found.batch_size,
            peak_bytes=found.by_formula.peak_bytes,
            max_batch_size=found.by_formula.max_batch_size,
            accumulation=found.by_formula.accumulation,
            formula_only=found.formula_only,
            traced=_ByTrace.of(Unknown("only the formula knows it") if found.formula_only else traced),
            command=assignment_of(found.changes) + command if isinstance(command, str) else None,
        )


class _Curve(JsonObject, frozen=True):
    key: str
    title: str
    x: str
    y: str
    note: str
    series: tuple[CurveSeries, ...]
    marks: tuple[CurveMark, ...]

    @classmethod
    def of(cls, curve: Curve) -> _Curve:
        """Return all points of a curve."""
        return cls(
            key=curve.key,
            title=curve.title,
            x=curve.x_label,
            y=curve.y_label,
            note=curve.note,
            series=curve.series,
            marks=curve.marks,
        )


def _verdict(now: Answer, by_trace: TracedAnswer | Unknown) -> tuple[bool, bool, int]:
    """Return whether a plan fits, keeps the headroom, and the spare bytes: by trace where there is one."""
    if isinstance(by_trace, Unknown):
        return now.fits, now.fits, now.spare_bytes
    return by_trace.fit == "fits", by_trace.fits, by_trace.free_range.low_bytes


class PlanObject(PredictedObject, frozen=True):
    """`plan --json` of a model: the object of `predict --json`, and what only a plan has."""

    answer: str
    fits: bool
    keeps_headroom: bool
    spare_bytes: int
    verdict_by: Literal["trace", "formula"]
    accumulation: _PlanAccumulation
    speed: _Speed
    run: _Run
    notes: tuple[str, ...]
    gpus: tuple[_LargestOn, ...]
    techniques: tuple[_Technique, ...]
    not_applicable: tuple[_Useless, ...]
    combination: _Combination
    traceable_combination: _Combination
    curves: tuple[_Curve, ...]
    judgements: tuple[Judgement, ...]
    command: str | None

    @classmethod
    def of(
        cls,
        plan: Plan,
        traced: Traced | Unknown,
        device: Device | None = None,
        trace_of: Known = untraced,
        network: str = "",
    ) -> PlanObject:
        """Work a plan out.

        Args:
            traced: of this plan, made on any GPU of its architecture; or why it is missing.
            device: where it would run; None for the plan's GPU, simulated.
            trace_of: what traces say of plans that may be recommended.
            network: what was traced, as `plan_answer` takes it.
        """
        if isinstance(traced, Traced):
            traced = on_gpu(plan, traced)
        workload, now = WorkloadSpec(plan.recipe, shape=plan.shape), answer(plan)
        by_trace = traced_answer(plan, traced) if isinstance(traced, Traced) else traced
        best, on_gpus = judged_at_once(plan, traced, by_trace, trace_of)
        judged = all_techniques(plan, by_trace, trace_of)
        formula = Formula(workload, plan.gpu.total_bytes, plan.headroom, plan.extras, beside_allocator_bytes(plan.gpu))
        fits, keeps_headroom, spare_bytes = _verdict(now, by_trace)
        return cls(
            schema=SCHEMA,
            workload=workload_object(workload, plan.batch_size, sorted(plan.extras)),
            device=DeviceObject.of(device or Device(plan.gpu, simulated=True)),
            formula=FormulaObject.of(formula, plan.batch_size),
            traced=TracedObject.of(traced, plan.batch_size, Prediction(formula, traced)),
            answer=plan_answer(now, by_trace, best, on_gpus, network),
            fits=fits,
            keeps_headroom=keeps_headroom,
            spare_bytes=spare_bytes,
            verdict_by="formula" if isinstance(by_trace, Unknown) else "trace",
            accumulation=_PlanAccumulation.of(now),
            speed=_Speed.of(plan),
            run=_Run.of(plan),
            notes=lacking(plan),
            gpus=tuple(_LargestOn.of(row, plan) for row in on_gpus),
            techniques=tuple(map(_Technique.of, judged.helping)),
            not_applicable=tuple(_Useless(name=one.name, reason=one.reason) for one in judged.not_applicable),
            combination=_Combination.of(best.formula_only or best.combination, best.traced),
            traceable_combination=_Combination.of(best.traceable, best.traced),
            curves=tuple(map(_Curve.of, all_curves(plan, traced, on_gpus))),
            judgements=judgements(plan, by_trace.known_batch_size if isinstance(by_trace, TracedAnswer) else None),
            command=known(command_line(plan)),
        )


# A number that a plan was solved for


class SolveObject(JsonObject, frozen=True):
    """The object that `plan --solve --json` prints."""

    schema: Literal[1]
    solve: Quantity
    value: int | None
    how: How | None
    beyond: int | None
    formula: int | None
    note: str | None
    lift: _Combination | None
    model: str
    gpu: str
    headroom: float
    command: str | None

    @classmethod
    def of(cls, plan: Plan, found: Limit) -> SolveObject:
        """Say what a plan was solved for."""
        return cls(
            schema=SCHEMA,
            solve=found.quantity,
            value=found.value,
            how=found.how if found.value is not None else None,
            beyond=found.beyond,
            formula=found.formula,
            note=found.note or None,
            lift=None if found.lift is None else _Combination.of(found.lift, Unknown("by formula")),
            model=plan.shape.name,
            gpu=plan.gpu.name,
            headroom=plan.headroom,
            command=None if found.plan is None else known(command_line(found.plan)),
        )


# A command's plan


class _Tried(JsonObject, frozen=True):
    """A change, made to the command alone."""

    key: str
    name: str
    how: str
    command: str
    in_the_program: tuple[str, ...]
    saved_bytes: int
    peak_bytes: int
    device_used_bytes: int | None
    peak_reserved_bytes: int | None
    buckets: Bytes | None
    fits: bool
    max_batch_size: int | None
    cost: str
    cost_source: str
    source: Literal["traced", "formula"]
    unavailable: str | UnsetType = UNSET

    @classmethod
    def of(cls, plan: CommandPlan, row: Effect) -> _Tried:
        """Return what a change comes to."""
        command, written = command_of(plan, Combination((row.change,), plan.batch_size))
        return cls(
            key=row.change.key,
            name=row.change.name,
            how=row.change.how,
            command=command,
            in_the_program=tuple(written),
            saved_bytes=row.saved_bytes,
            peak_bytes=row.peak_bytes,
            device_used_bytes=row.device_used_bytes,
            peak_reserved_bytes=row.reserved_bytes,
            buckets=None if row.buckets is None else row.buckets.as_json(),
            fits=row.fits,
            max_batch_size=known(row.largest),
            cost=row.change.cost,
            cost_source=row.change.source,
            source=row.by,
            unavailable=reason_of(row.largest) or UNSET,
        )


class _Set(JsonObject, frozen=True):
    """Changes that were made together."""

    changes: tuple[str, ...]
    batch_size: int
    passes: int
    fits: bool | None
    peak_bytes: int | None
    device_used_bytes: int | None
    command: str
    in_the_program: tuple[str, ...]
    unavailable: str | UnsetType = UNSET

    @classmethod
    def of(cls, plan: CommandPlan, one: Combination) -> _Set:
        """Return what a set of changes comes to, or why it was not run."""
        command, written = command_of(plan, one)
        peak_bytes = plan.peak_bytes(one)
        return cls(
            changes=tuple(change.key for change in one.changes),
            batch_size=one.batch_size,
            passes=one.passes,
            fits=None if isinstance(peak_bytes, Unknown) else plan.fit_with(one) == "fits",
            peak_bytes=known(peak_bytes),
            device_used_bytes=known(plan.device_used_bytes(one)),
            command=command,
            in_the_program=tuple(written),
            unavailable=reason_of(peak_bytes) or UNSET,
        )


class _CommandOn(JsonObject, frozen=True):
    """The command on another GPU."""

    name: str
    title: str
    total_bytes: int
    fits: bool
    fit: Fit
    free_bytes: int
    free_range: Range
    max_batch_size: int | None
    may_fit_batch_size: int | None
    traced_on: str
    exact: bool

    @classmethod
    def of(cls, plan: CommandPlan, there: TracedAnswer) -> _CommandOn:
        """Return whether it fits there."""
        return cls(
            name=plan.gpu.name,
            title=plan.gpu.whole.title,
            total_bytes=plan.gpu.total_bytes,
            fits=there.fit == "fits",
            fit=there.fit,
            free_bytes=there.spare_bytes,
            free_range=there.free_range,
            max_batch_size=known(there.full_batch_size),
            may_fit_batch_size=known(there.may_fit_batch_size),
            traced_on=plan.config.device.gpu.name,
            exact=plan.is_exact,
        )


class _Batch(JsonObject, frozen=True):
    """The command at another batch size."""

    batch_size: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    device_used_range: Range
    fits: bool
    fit: Fit

    @classmethod
    def of(cls, row: TracedAnswer) -> _Batch:
        """Return what a batch size takes."""
        return cls(
            batch_size=row.plan.batch_size,
            peak_allocated_bytes=row.peak_allocated_bytes,
            peak_reserved_bytes=row.peak_reserved_bytes,
            device_used_bytes=row.device_used_bytes,
            device_used_range=row.device_used_range,
            fits=row.fit == "fits",
            fit=row.fit,
        )


class _Ranks(JsonObject, frozen=True):
    ranks: int
    sharded: bool
    note: str


class CommandPlanObject(PredictedObject, frozen=True):
    """`plan --json -- COMMAND`: the object of `predict --json`, and what follows from it."""

    answer: str
    accumulation: Accumulation | None
    techniques: tuple[_Tried, ...]
    not_applicable: tuple[NotApplicable, ...]
    together: tuple[_Set, ...]
    gpus: tuple[_CommandOn, ...]
    batch_sizes: tuple[_Batch, ...]
    ranks: _Ranks

    @classmethod
    def of(cls, plan: CommandPlan) -> CommandPlanObject:
        """Say what a command takes, and what would make it fit."""
        found = plan.answer()
        judged = techniques_of_command(plan, found)
        step = PredictObject.of(plan.config, plan.predicted.prediction, plan.batch_size)
        return cls(
            schema=SCHEMA,
            workload=step.workload,
            device=step.device,
            formula=step.formula,
            traced=step.traced,
            answer=command_answer(plan, found),
            accumulation=plan.accumulation,
            techniques=tuple(_Tried.of(plan, row) for row in judged.helping),
            not_applicable=judged.not_applicable,
            together=tuple(_Set.of(plan, one) for one in plan.together),
            gpus=tuple(_CommandOn.of(there, known_there) for there, known_there in on_every_gpu(plan)),
            batch_sizes=tuple(map(_Batch.of, found.batches())),
            ranks=_Ranks(ranks=plan.ranks, sharded=plan.base.done.is_sharded, note=ranks_line(plan)),
        )


# A command that fits


class FitObject(JsonObject, frozen=True):
    """The object that `fit --dry-run --json` prints.

    Attributes:
        command: as it is typed, with its variables.
        device_used_bytes: at the most, at the peak.
        confirmed: whether a trial on a GPU of this machine measured it.
    """

    schema: Literal[1]
    command: str
    environment: dict[str, str]
    batch_size: int
    max_batch_size: int
    ranks: int
    accumulation: Accumulation
    device: DeviceObject
    device_used_bytes: int
    confirmed: bool
    allocator: str | None
    changes: tuple[str, ...]
    not_made: tuple[NotMade, ...]

    @classmethod
    def of(cls, found: Fitted) -> FitObject:
        """Describe a command that fits."""
        return cls(
            schema=SCHEMA,
            command=found.line,
            environment=dict(found.environment),
            batch_size=found.batch_size,
            max_batch_size=found.safe,
            ranks=found.ranks,
            accumulation=found.step,
            device=DeviceObject.of(found.config.device),
            device_used_bytes=found.used.high_bytes,
            confirmed=found.result is not None and not found.config.device.simulated,
            allocator=None if found.remedy is None else found.remedy.option,
            changes=tuple(change.key for change in found.changes),
            not_made=found.not_made,
        )
