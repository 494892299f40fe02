"""The JSON of `predict` and `search`: schema 1, whose keys are a public contract.

The types are the schema, see `report.objects.JsonObject`. Bytes are whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from gpumem_tui.catalog.tables import made
from gpumem_tui.causes import Cause, CauseKind, causes_in
from gpumem_tui.formula.accumulation import Accumulation
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.rows import FormulaRow
from gpumem_tui.formula.weights import trained_parameters
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, Range, Unknown
from gpumem_tui.report.objects import SCHEMA, JsonObject, known, reason_of
from gpumem_tui.report.shown import ledger_html, ledger_text, lines_html
from gpumem_tui.run.events import Outcome, RanOut, TrialDone
from gpumem_tui.run.later import NotReached
from gpumem_tui.search.assumed import ConvolutionPasses, RowsAssumed, convolutions
from gpumem_tui.search.beside import largest_share
from gpumem_tui.search.budget import Gate, GateObject
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.fragmentation import AllocatorObject, remedy
from gpumem_tui.search.prediction import Fit, Formula, KnownUnknown, Prediction, Traced
from gpumem_tui.search.report import answer_line, wanted_accumulation
from gpumem_tui.search.stages import HeldObject, StagePeakObject
from gpumem_tui.search.verdict import Conclusion, Verdict, WithHeadroom
from gpumem_tui.simulator.allocator.replay import PhasePeak, Replay
from gpumem_tui.simulator.allocator.timeline import BucketPeak
from gpumem_tui.step import Phase, RunStage
from gpumem_tui.workload.spec import WorkloadSpec

Bytes = dict[str, int]
"""By bucket."""
_FORMULA_BUCKETS = tuple(bucket for bucket in ALLOCATED_BUCKETS if bucket is not Bucket.OTHER)
_NOT_PRINTED = ("name", "source", "published_parameters", "part")
"""Fields of a model's shape that are no part of the printed one."""

# The workload and its device


class _Subject(JsonObject, frozen=True):
    model: str
    command: tuple[str, ...] | UnsetType = UNSET
    batch_size: int | UnsetType | None = UNSET
    model_type: str | UnsetType = UNSET
    architecture: str | UnsetType = UNSET
    seq_len: int | UnsetType | None = UNSET
    parameters: int | UnsetType = UNSET
    trained_parameters: int | UnsetType = UNSET
    shape: dict[str, Any] | UnsetType = UNSET


_WithRecipe: Any = msgspec.defstruct(
    "_WithRecipe",
    [(name, kind | UnsetType, UNSET) for name, kind in get_type_hints(Recipe).items()],
    bases=(_Subject,),
    frozen=True,
)


class WorkloadObject(_WithRecipe, frozen=True):  # type: ignore[call-arg,misc]
    """The training that a result is about: a model with its recipe, or a command."""

    extras: tuple[str, ...] | UnsetType = UNSET


def workload_object(
    workload: WorkloadSpec, batch_size: int | None = None, extras: Sequence[str] | UnsetType = UNSET
) -> WorkloadObject:
    """Return what is trained.

    Args:
        batch_size: None for none in particular.
        extras: of a plan, techniques that only the formula knows.
    """
    command, model, shape, recipe = workload.command, workload.hugging_face, workload.shape, workload.recipe
    values: dict[str, object] = {}
    if command is not None:
        values = {"command": command.words, "gpus": recipe.gpus}
        if not command.takes_batch:
            values["batch_size"] = None if command.proposal is None else command.proposal.batch_size
    if batch_size is not None and (command is None or command.takes_batch):
        values["batch_size"] = batch_size
    if model is not None:
        values |= {"model_type": model.model_type, "architecture": model.architecture, "seq_len": model.seq_len}
    if shape is not None:
        values["parameters"] = count_parameters(shape)
        values["trained_parameters"] = trained_parameters(shape, recipe)
        values["shape"] = {name: value for name, value in asdict(shape).items() if value and name not in _NOT_PRINTED}
    if model is not None or shape is not None:
        values |= asdict(recipe)
    values |= {"model": workload.name, "extras": extras if extras is UNSET else tuple(extras)}
    return made(WorkloadObject, values)


class _Engine(JsonObject, frozen=True):
    """An inference engine in the GPU; `share` is null for one whose size was typed."""

    size_bytes: int
    share: float | None


class DeviceObject(JsonObject, frozen=True):
    """Where it runs. `total_bytes` includes the engine."""

    name: str
    total_bytes: int
    simulated: bool
    reason: str | None
    beside: _Engine | UnsetType = UNSET

    @classmethod
    def of(cls, device: Device) -> DeviceObject:
        """Describe a device."""
        whole, engine = device.gpu.whole, device.gpu.engine
        return cls(
            name=whole.title,
            total_bytes=whole.total_bytes,
            simulated=device.simulated,
            reason=device.reason or None,
            beside=UNSET if engine is None else _Engine(size_bytes=engine.size_bytes, share=engine.share or None),
        )


# The closed form


class _Row(JsonObject, frozen=True):
    bucket: Bucket
    name: str
    size_bytes: int
    formula: str
    source: str
    note: str

    @classmethod
    def of(cls, row: FormulaRow) -> _Row:
        """Return a term of the closed form."""
        return cls(
            bucket=row.bucket,
            name=row.name,
            size_bytes=row.size_bytes,
            formula=row.expression,
            source=row.source,
            note=row.note,
        )


class FormulaObject(JsonObject, frozen=True, kw_only=True):
    """The closed form at a batch size. Figures are null if missing, and `unavailable` gives the reason."""

    buckets: Bytes | None
    peak_bytes: int | None
    highest: Bytes | UnsetType = UNSET
    moment: str | UnsetType = UNSET
    cache_bytes: int | UnsetType = UNSET
    max_batch_size: int | None
    fits: bool | UnsetType = UNSET
    spare_bytes: int | UnsetType = UNSET
    headroom: float | UnsetType = UNSET
    rows: tuple[_Row, ...] | UnsetType = UNSET
    assumptions: tuple[str, ...] | UnsetType = UNSET
    unavailable: str | UnsetType = UNSET

    @classmethod
    def of(cls, formula: Formula, batch_size: int) -> FormulaObject:
        """Ask the closed form."""
        found = formula.at(batch_size)
        if isinstance(found, Unknown):
            return cls(buckets=None, peak_bytes=None, max_batch_size=None, unavailable=found.reason)
        spare_bytes = formula.usable_bytes() - found.needed_bytes
        return cls(
            buckets=found.breakdown.as_json(_FORMULA_BUCKETS),
            peak_bytes=found.peak_bytes,
            highest=found.highest.as_json(_FORMULA_BUCKETS),
            moment=found.moment.value,
            cache_bytes=found.cache_bytes,
            max_batch_size=known(formula.max_batch_size),
            fits=spare_bytes >= 0,
            spare_bytes=spare_bytes,
            headroom=formula.headroom,
            rows=tuple(map(_Row.of, found.rows)),
            assumptions=found.assumptions,
        )


# The traced step


class _Highest(JsonObject, frozen=True):
    bytes: int
    step: int
    phase: Phase

    @classmethod
    def of(cls, peak: BucketPeak) -> _Highest:
        """Return the most that a bucket holds."""
        return cls(bytes=peak.size_bytes, step=peak.mark.step, phase=peak.mark.phase)


class _Unknown(JsonObject, frozen=True):
    name: str
    low_bytes: int
    high_bytes: int
    source: str

    @classmethod
    def of(cls, unknown: KnownUnknown) -> _Unknown:
        """Return a part of the device total known between two ends."""
        size = unknown.size
        return cls(name=unknown.name, low_bytes=size.low_bytes, high_bytes=size.high_bytes, source=unknown.source)


class _Moment(JsonObject, frozen=True):
    step: int
    phase: Phase
    operator: str
    module: str
    source: str
    function: str

    @classmethod
    def of(cls, replay: Replay) -> _Moment | None:
        """Return the moment of the peak, where there is one."""
        if replay.peak_moment is None:
            return None
        mark, site = replay.peak_moment
        return cls(
            step=mark.step,
            phase=mark.phase,
            operator=site.operator,
            module=site.module,
            source=site.source,
            function=site.function,
        )


class _Assumed(JsonObject, frozen=True):
    operator: str
    times: int
    why: str


class _PhasePeak(JsonObject, frozen=True):
    step: int
    phase: Phase
    stage: RunStage
    peak_allocated_bytes: int
    reserved_bytes: int
    buckets: Bytes

    @classmethod
    def of(cls, peak: PhasePeak) -> _PhasePeak:
        """Return the highest moment of a phase."""
        return cls(
            step=peak.step,
            phase=peak.phase,
            stage=peak.stage,
            peak_allocated_bytes=peak.peak_allocated_bytes,
            reserved_bytes=peak.reserved_bytes,
            buckets=peak.breakdown.as_json(),
        )


class _Part(JsonObject, frozen=True):
    bucket: Bucket
    part: str
    bytes: int


class _Cause(JsonObject, frozen=True, kw_only=True):
    """A named cause of memory. `bytes`: of a leak, in a step; `kept_line`: the statement that keeps them."""

    cause: CauseKind
    bytes: int | None
    line: str | None
    kept_line: str | None
    steps_left: int | UnsetType = UNSET
    sentence: str

    @classmethod
    def of(cls, cause: Cause, steps_left: int | None = None) -> _Cause:
        """Return a cause, and of a leak after how many steps the device is full."""
        return cls(
            cause=cause.cause,
            bytes=cause.size_bytes or None,
            line=cause.line or None,
            kept_line=cause.kept_at or None,
            steps_left=UNSET if steps_left is None or cause.cause != "leak" else steps_left,
            sentence=str(cause),
        )


class _Roomy(JsonObject, frozen=True):
    share: float
    max_batch_size: int | None


class TracedObject(JsonObject, frozen=True, kw_only=True):
    """The traced step at a batch size. Figures are null where there is no trace, and `unavailable` gives the reason.

    `ledger`: the device at the peak, rows that sum to its total; what the step lacks is a negative `free`.
    """

    buckets: Bytes | None
    ledger: Bytes | UnsetType = UNSET
    highest: dict[str, _Highest] | UnsetType = UNSET
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    max_batch_size: int | None
    expected_batch_size: int | UnsetType | None = UNSET
    parameters: int | UnsetType | None = UNSET
    profile: str | None
    fits: bool | UnsetType = UNSET
    fit: Fit | UnsetType = UNSET
    device_used_range: Range | UnsetType = UNSET
    free_range: Range | UnsetType = UNSET
    may_fit_batch_size: int | UnsetType | None = UNSET
    unknowns: tuple[_Unknown, ...] | UnsetType = UNSET
    peak: _Moment | UnsetType | None = UNSET
    context_bytes: int | UnsetType = UNSET
    context_source: str | UnsetType = UNSET
    causes: tuple[_Cause, ...] | UnsetType = UNSET
    out_of_memory: RanOut | UnsetType | None = UNSET
    notes: tuple[str, ...] | UnsetType = UNSET
    steps: int | UnsetType = UNSET
    not_reached: tuple[NotReached, ...] | UnsetType = UNSET
    traced_layers: tuple[int, ...] | UnsetType = UNSET
    assumed: tuple[_Assumed, ...] | UnsetType = UNSET
    assumptions: tuple[RowsAssumed, ...] | UnsetType = UNSET
    convolutions: dict[str, ConvolutionPasses] | UnsetType = UNSET
    momentary_peak_bytes: int | UnsetType | None = UNSET
    momentary_reserved_bytes: int | UnsetType | None = UNSET
    phases: tuple[_PhasePeak, ...] | UnsetType = UNSET
    stages: tuple[StagePeakObject, ...] | UnsetType = UNSET
    frozen_saving_bytes: int | UnsetType = UNSET
    parts: tuple[_Part, ...] | UnsetType = UNSET
    composition: tuple[HeldObject, ...] | UnsetType = UNSET
    allocator: AllocatorObject | UnsetType | None = UNSET
    unavailable: str | UnsetType = UNSET
    with_headroom: _Roomy | UnsetType = UNSET
    largest_share: float | UnsetType | None = UNSET

    @classmethod
    def of(cls, traced: Traced | Unknown, batch_size: int, roomy: Prediction | None = None) -> TracedObject:
        """Replay the trace.

        Args:
            roomy: the prediction whose largest batch that leaves the headroom free is given too.
        """
        with_headroom: _Roomy | UnsetType = UNSET
        if roomy is not None:
            with_headroom = _Roomy(share=roomy.formula.headroom, max_batch_size=known(roomy.with_headroom))
        if isinstance(traced, Unknown):
            return cls(
                buckets=None,
                peak_allocated_bytes=None,
                peak_reserved_bytes=None,
                device_used_bytes=None,
                max_batch_size=None,
                profile=None,
                unavailable=traced.reason,
                with_headroom=with_headroom,
            )
        replay, fit, notes = traced.at(batch_size), traced.fit(batch_size), traced.notes(batch_size)
        momentary, momentary_reserved = traced.momentary_peaks(batch_size) or (None, None)
        return cls(
            buckets=replay.breakdown.as_json(),
            ledger=_rows(traced, batch_size),
            highest={bucket.value: _Highest.of(one) for bucket, one in replay.bucket_peaks.items()},
            peak_allocated_bytes=replay.peak_allocated_bytes,
            peak_reserved_bytes=replay.peak_reserved_bytes,
            device_used_bytes=traced.device_used_bytes(batch_size),
            max_batch_size=known(traced.max_batch_size),
            expected_batch_size=known(traced.expected_batch_size),
            parameters=traced.done.parameters or None,
            profile=traced.ready.profile,
            fits=fit == "fits",
            fit=fit,
            device_used_range=traced.device_used_range(batch_size),
            free_range=traced.free_range(batch_size),
            may_fit_batch_size=known(traced.may_fit_batch_size),
            unknowns=tuple(map(_Unknown.of, traced.unknowns(batch_size))),
            peak=_Moment.of(replay),
            context_bytes=traced.ready.context_bytes,
            context_source=traced.ready.context_source,
            out_of_memory=traced.done.ran_out,
            causes=tuple(_Cause.of(one, traced.steps_left(batch_size)) for one in causes_in(notes)),
            notes=tuple(map(str, notes)),
            steps=UNSET if traced.done.not_reached is None else traced.done.steps,
            not_reached=UNSET if traced.done.not_reached is None else traced.done.not_reached,
            traced_layers=traced.done.traced_layers,
            assumed=tuple(_Assumed(operator=name, times=times, why=why) for name, times, why in traced.done.assumed),
            assumptions=RowsAssumed.of(traced),
            convolutions={
                how: ConvolutionPasses(passes=passes, largest=largest)
                for how, (passes, largest) in convolutions(traced, batch_size).items()
            },
            momentary_peak_bytes=momentary,
            momentary_reserved_bytes=momentary_reserved,
            phases=tuple(map(_PhasePeak.of, replay.phases)),
            stages=tuple(StagePeakObject.of(traced, batch_size, one) for one in replay.stages),
            frozen_saving_bytes=traced.frozen_saving_bytes(batch_size),
            parts=tuple(_Part(bucket=bucket, part=part, bytes=size) for bucket, part, size in traced.parts(batch_size)),
            composition=tuple(map(HeldObject.of, traced.held_at_peak(batch_size))),
            allocator=AllocatorObject.of(remedy(traced, batch_size)),
            unavailable=reason_of(traced.max_batch_size) or UNSET,
            with_headroom=with_headroom,
            largest_share=UNSET if traced.gpu.engine is None else known(largest_share(traced, batch_size)),
        )


def _rows(traced: Traced, batch_size: int) -> Bytes:
    """Return the rows of the whole device at the peak, an inference engine in it as another process."""
    sizes = traced.ledger(batch_size).known()
    if traced.gpu.engine_bytes:
        sizes[Bucket.OTHER_PROCESSES] = traced.gpu.engine_bytes
    return {bucket.value: sizes[bucket] for bucket in Bucket if bucket in sizes}


# The printed objects


class PredictedObject(JsonObject, frozen=True):
    """Fields of every object about one step."""

    schema: Literal[1]
    workload: WorkloadObject
    device: DeviceObject
    formula: FormulaObject
    traced: TracedObject


class PredictObject(PredictedObject, frozen=True):
    """The object that `predict --json` prints; `answer` is the verdict in a line."""

    answer: str
    gate: GateObject | UnsetType = UNSET
    accumulation: Accumulation | UnsetType = UNSET

    @classmethod
    def of(
        cls, config: SearchConfig, prediction: Prediction, batch_size: int, gate: Gate | None = None
    ) -> PredictObject:
        """Say what is predicted of a batch size.

        Args:
            gate: what it is held against; None for nothing.
        """
        return cls(
            schema=SCHEMA,
            workload=workload_object(config.workload, batch_size),
            device=DeviceObject.of(config.device),
            formula=FormulaObject.of(prediction.formula, batch_size),
            traced=TracedObject.of(prediction.traced, batch_size, prediction),
            answer=answer_line(config, prediction, batch_size),
            gate=UNSET if gate is None else GateObject.of(gate),
            accumulation=wanted_accumulation(config, batch_size) or UNSET,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.answer!r})"

    def __str__(self) -> str:
        """Return the answer, and the rows of the device at the peak, a line each."""
        return ledger_text(self.answer, self.traced.ledger or {})

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        lines = lines_html((one.source, one.bytes) for one in self.traced.composition or ())
        return ledger_html(self.answer, self.traced.ledger or {}, notes=self.traced.notes or ()) + lines


class TrialLine(JsonObject, frozen=True, tag_field="event", tag="trial"):
    """A trial, as it ends: a line of `search --json`."""

    schema: Literal[1]
    number: int
    batch_size: int
    outcome: Outcome
    simulated: bool
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    buckets: Bytes | None
    buckets_unavailable: str | None
    steps: int
    step_seconds: tuple[float, ...]
    seconds: float
    alloc_retries: int
    detail: str | None
    causes: tuple[_Cause, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, number: int, result: TrialDone, device: Device) -> TrialLine:
        """Say how a trial has ended."""
        return cls(
            schema=SCHEMA,
            number=number,
            batch_size=result.batch_size,
            outcome=result.outcome,
            simulated=device.simulated,
            peak_allocated_bytes=result.peak_allocated_bytes,
            peak_reserved_bytes=result.peak_reserved_bytes,
            device_used_bytes=result.device_used_bytes,
            buckets=result.buckets,
            buckets_unavailable=result.buckets_unknown or None,
            steps=result.steps,
            step_seconds=result.step_seconds,
            seconds=round(result.seconds, 3),
            alloc_retries=result.alloc_retries,
            detail=result.detail or None,
            causes=tuple(map(_Cause.of, causes_in(result.notes))),
            notes=tuple(map(str, result.notes)),
        )


class ResultLine(JsonObject, frozen=True, tag_field="event", tag="result"):
    """The last line of `search --json`."""

    schema: Literal[1]
    outcome: Conclusion
    max_batch_size: int
    safe_batch_size: int
    at_most_batch_size: int
    first_failing: int | None
    verified: bool
    with_headroom: WithHeadroom | None
    trials: int
    ooms: int
    message: str
    workload: WorkloadObject
    device: DeviceObject
    advice: tuple[str, ...]
    allocator: AllocatorObject | None = None
    samples: int | None = None
    formula: FormulaObject | UnsetType = UNSET
    traced: TracedObject | UnsetType = UNSET
    accumulation: Accumulation | UnsetType = UNSET

    @classmethod
    def of(
        cls, config: SearchConfig, verdict: Verdict, prediction: Prediction | None, advice: Sequence[str]
    ) -> ResultLine:
        """Say how a search has ended."""
        at = max(1, verdict.max_batch_size)
        return cls(
            schema=SCHEMA,
            outcome=verdict.outcome,
            max_batch_size=verdict.max_batch_size,
            safe_batch_size=verdict.safe_batch_size,
            at_most_batch_size=verdict.at_most_batch_size,
            first_failing=verdict.first_failing,
            verified=verdict.verified,
            with_headroom=verdict.with_headroom,
            trials=verdict.trials,
            ooms=verdict.ooms,
            message=verdict.message,
            workload=workload_object(config.workload),
            device=DeviceObject.of(config.device),
            advice=tuple(advice),
            formula=UNSET if prediction is None else FormulaObject.of(prediction.formula, at),
            traced=UNSET if prediction is None else TracedObject.of(prediction.traced, at),
            allocator=AllocatorObject.of(verdict.remedy),
            samples=verdict.samples or None,
            accumulation=wanted_accumulation(config, verdict.safe_batch_size) or UNSET,
        )
