"""Memory over the first and a later training step: from the trace, or as the textbook draws it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumem_tui.formula.rows import ALWAYS, Moment
from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, Bucket
from gpumem_tui.plan.answers import on_gpu, terms_of
from gpumem_tui.plan.curves import Curve, CurveMark, CurveSeries
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.timeline import Timeline, rounded

_STEPS = (1, 2)
_SLICES = 12
"""Points that a traced phase is drawn with."""

Totals = Sequence[int]
"""Bytes by bucket, in the order of `ALLOCATED_BUCKETS`."""


def memory_over_step(plan: Plan, traced: Traced | None = None) -> Curve:
    """The buckets over steps 1 and 2: activations rise and fall, gradients build, optimizer state appears and stays.

    Args:
        traced: a trace of this plan; without one the closed form's sizes are drawn in the textbook's order. With one
            this takes tens of milliseconds.
    """
    if traced is None:
        moments, marks = _schematic(plan)
        note = "schematic: the formula's sizes at the moments that it knows, not to scale in time"
    else:
        moments, marks = _moments(on_gpu(plan, traced).trace.at(plan.batch_size))
        note = f"traced ({traced.profile}); along x the allocations in their order, not time"
    return Curve(
        "memory-over-step",
        "Memory over a step",
        "order of allocations" if traced is not None else "phase",
        "GiB",
        tuple(_series(moments)),
        f"{note}; at batch {plan.batch_size}",
        stacked=True,
        marks=tuple(marks),
    )


def _series(moments: Sequence[tuple[float, Totals]]) -> Iterator[CurveSeries]:
    for index, bucket in enumerate(ALLOCATED_BUCKETS):
        if any(totals[index] for _, totals in moments):
            yield CurveSeries(bucket.title, tuple((x, totals[index] / GIB) for x, totals in moments))


def _moments(timeline: Timeline) -> tuple[list[tuple[float, Totals]], list[CurveMark]]:
    """The fullest moment of each slice of each phase of the steps drawn, by event number."""
    ends = [mark.event for mark in timeline.marks[1:]] + [len(timeline.events)]
    drawn = [(mark, end) for mark, end in zip(timeline.marks, ends, strict=True) if mark.step in _STEPS]
    cuts = sorted({cut for mark, end in drawn for cut in _cuts(mark.event, end)})
    totals = [0] * len(ALLOCATED_BUCKETS)
    moments: list[tuple[float, Totals]] = []
    position = 0
    for start in cuts:
        fullest, fullest_at = tuple(totals), position
        for position in range(position, start):  # noqa: B020  continues where the last slice ended
            number = timeline.events[position]
            index = abs(number) - 1
            size = rounded(timeline.sizes[index])
            totals[timeline.buckets[index]] += size if number > 0 else -size
            if sum(totals) > sum(fullest):
                fullest, fullest_at = tuple(totals), position
        position = start
        moments.append((float(fullest_at), fullest))
    return moments, [CurveMark(float(mark.event), f"{mark.phase.value} {mark.step}") for mark, _ in drawn]


def _cuts(start: int, end: int) -> Iterator[int]:
    slices = max(1, min(_SLICES, end - start))
    for number in range(1, slices + 1):
        yield start + (end - start) * number // slices


_PHASES = {
    "batch": None,
    "forward": Moment.LOSS,
    "backward": Moment.LOSS_BACKWARD,
    "blocks": Moment.LAST_BLOCK,
    "backward ends": Moment.FIRST_BLOCK,
    "optimizer": Moment.UPDATE,
}
"""By name on the chart, the formula's moment; None for the weights and the batch alone."""


def _schematic(plan: Plan) -> tuple[list[tuple[float, Totals]], list[CurveMark]]:
    """One point a moment; the optimizer's state is there from the first update on."""
    rows = terms_of(plan)
    moments: list[tuple[float, Totals]] = []
    marks = []
    for step in _STEPS:
        for name, moment in _PHASES.items():
            held = [row for row in rows if moment in row.moments or (moment is None and row.moments == ALWAYS)]
            if step == 1 and moment is not Moment.UPDATE:
                held = [row for row in held if row.bucket is not Bucket.OPTIMIZER]
            x = float(len(moments))
            totals = tuple(sum(row.size_bytes for row in held if row.bucket is one) for one in ALLOCATED_BUCKETS)
            moments.append((x, totals))
            marks.append(CurveMark(x, f"{name} {step}"))
    return moments, marks
