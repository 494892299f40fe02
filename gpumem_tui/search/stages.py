"""The stages of a traced run: the peak of each, and what holds it; the one with the highest decides."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_tui.memory import Bucket, format_bytes
from gpumem_tui.report.objects import JsonObject
from gpumem_tui.report.tables import TextColumn, TextTable
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import PhasePeak
from gpumem_tui.simulator.allocator.timeline import Held
from gpumem_tui.step import Phase, RunStage
from gpumem_tui.step.buckets import STEADY_BUCKETS

STAGE_WORDS = {
    RunStage.LOAD: "loading",
    RunStage.RESUME: "resuming",
    RunStage.WARM_UP: "the first step",
    RunStage.TRAIN: "training",
    RunStage.EVALUATE: "evaluation",
    RunStage.SAVE: "saving",
    RunStage.GENERATE: "generation",
    RunStage.INFER: "inference",
    RunStage.ROLLOUT: "the rollout",
    RunStage.REFERENCE: "the reference's forward",
    RunStage.WEIGHT_SYNC: "weight sync",
}
_OF_EVERY_RUN = frozenset((RunStage.LOAD, RunStage.WARM_UP, RunStage.TRAIN, RunStage.INFER))
_BAR = 24
_TABLE = TextTable(
    TextColumn("stage", 11), TextColumn("", _BAR), TextColumn("peak", 10, ">"), TextColumn("largest part of it", 44)
)


def stages_shown(traced: Traced, batch_size: int) -> tuple[PhasePeak, ...]:
    """Return the stages of a run that does more than load and train, or peaks as it loads; else none."""
    stages = traced.at(batch_size).stages
    is_plain = {one.stage for one in stages} <= _OF_EVERY_RUN and highest(stages) is not RunStage.LOAD
    return () if is_plain else stages


def highest(stages: tuple[PhasePeak, ...]) -> RunStage | None:
    """Return the stage with the highest peak, the first of several; None without any."""
    return max(stages, key=lambda one: one.peak_allocated_bytes).stage if stages else None


def deciding_words(traced: Traced, batch_size: int) -> tuple[str, ...]:
    """Name the stage that decides whether a run fits, where that is not its training."""
    stage = highest(stages_shown(traced, batch_size))
    trains = stage in (None, RunStage.TRAIN, RunStage.WARM_UP)
    return () if stage is None or trains else (f"the peak is in {STAGE_WORDS[stage]}",)


def largest_held(traced: Traced, batch_size: int, stage: PhasePeak) -> Held | None:
    """Return the place that holds most at a peak, but for weights, gradients and optimizer state if possible."""
    held = traced.at(batch_size).timeline.held_after(stage.event)
    return next((one for one in held if one.bucket not in STEADY_BUCKETS), next(iter(held), None))


def stage_lines(traced: Traced, batch_size: int) -> Iterator[str]:
    """Yield a bar a stage, the largest bucket at its peak, and the line that holds most of what is made there."""
    stages = stages_shown(traced, batch_size)
    if not stages:
        return
    most_bytes, top = max(one.peak_allocated_bytes for one in stages), highest(stages)
    yield _TABLE.header
    for one in stages:
        cells = round(_BAR * one.peak_allocated_bytes / most_bytes) if most_bytes else 0
        bucket = max(one.breakdown.buckets, key=lambda bucket: one.breakdown[bucket], default=Bucket.OTHER)
        held = largest_held(traced, batch_size, one)
        place = f"; {format_bytes(held.size_bytes)} at {held.site.source}" if held and held.site.source else ""
        words = f"{bucket.title} {format_bytes(one.breakdown[bucket])}{place}"
        name, size = one.stage.value, format_bytes(one.peak_allocated_bytes)
        yield _TABLE.row(name, "█" * max(1, cells), size, f"{'HIGHEST: ' if one.stage is top else ''}{words}")


# JSON


class HeldObject(JsonObject, frozen=True):
    """The bytes that one place holds of a bucket at a moment."""

    bucket: Bucket
    module: str
    operator: str
    source: str
    bytes: int
    allocations: int
    part: str | None
    fused_with: tuple[str, ...]

    @classmethod
    def of(cls, held: Held) -> HeldObject:
        """Return what a place holds at the peak."""
        return cls(
            bucket=held.bucket,
            module=held.site.module,
            operator=held.site.operator,
            source=held.site.source,
            bytes=held.size_bytes,
            allocations=held.allocations,
            part=held.site.part or None,
            fused_with=held.site.fused,
        )


class StagePeakObject(JsonObject, frozen=True):
    """The highest moment of a stage of the run; `largest`: the place that holds most of what is made there."""

    stage: RunStage
    step: int
    phase: Phase
    peak_allocated_bytes: int
    buckets: dict[str, int]
    largest: HeldObject | None

    @classmethod
    def of(cls, traced: Traced, batch_size: int, peak: PhasePeak) -> StagePeakObject:
        """Ask the replay what is live then."""
        held = largest_held(traced, batch_size, peak)
        return cls(
            stage=peak.stage,
            step=peak.step,
            phase=peak.phase,
            peak_allocated_bytes=peak.peak_allocated_bytes,
            buckets=peak.breakdown.as_json(),
            largest=None if held is None else HeldObject.of(held),
        )
