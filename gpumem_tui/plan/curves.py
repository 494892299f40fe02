"""How a plan's answers move with one of its numbers: data to draw, with the numbers to print next to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpumem_tui.catalog.loader import gpus, models
from gpumem_tui.catalog.shapes import ModelShape, ShapeError
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.recipe import RECOMPUTES
from gpumem_tui.formula.resolved import fused
from gpumem_tui.formula.rows import ALWAYS, Moment
from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, Bucket
from gpumem_tui.plan.answers import LargestOnGpu, largest_batch, on_gpu, terms_of
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.beside import as_beside
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.timeline import Timeline, rounded

_SHORTEST = 128
_LONGEST = 131_072
_SMALLEST_SIDE = 32
_WIDTHS = 5
"""An MLP is compared with itself at so many hidden widths, each twice the one before."""


@dataclass(frozen=True)
class CurveSeries:
    """A line of a plot: points by rising x. `names`: what each point is, where x alone does not say it."""

    name: str
    points: tuple[tuple[float, float], ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurveMark:
    """Something begins at `x`."""

    x: float
    label: str


@dataclass(frozen=True)
class Curve:
    """A chart of one quantity of the plan against another.

    Attributes:
        key: names it in code and JSON.
        note: what is assumed, or how to read it.
        x_here: where the plan is; None where that is no one place.
        log_x: equal steps of x are doublings.
        stacked: the series are parts of a sum, the first at the bottom.
        marks: where on the x axis something begins.
        nothing: what it means that y is 0 throughout; "" where that cannot be.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    series: tuple[CurveSeries, ...]
    note: str
    x_here: float | None = None
    log_x: bool = False
    stacked: bool = False
    marks: tuple[CurveMark, ...] = ()
    nothing: str = ""


def curves(plan: Plan, on_gpus: Sequence[LargestOnGpu] = ()) -> tuple[Curve, ...]:
    """Return every curve that the closed form draws of `plan`; those with no axis in this network are left out.

    Args:
        on_gpus: the catalog's GPUs, with what a trace reports of each: a line of its own next to the formula's.
    """
    found = (
        batch_by_sample_size(plan), batch_by_model(plan), batch_by_gpu(plan, on_gpus), activations_by_recompute(plan)
    )  # fmt: skip
    return tuple(curve for curve in found if curve is not None)


def batch_by_sample_size(plan: Plan) -> Curve | None:
    """Return the largest batch against the sequence length, or against the image side."""
    sizes = _sample_sizes(plan.shape)
    if not sizes:
        return None
    label, _ = _axis(plan.shape)
    points = tuple((float(size), float(largest_batch(replace(plan, shape=shape)))) for size, shape in sizes)
    if not plan.shape.seq_len:
        note = "twice the side is four times the pixels"
    elif fused(plan.shape, plan.recipe):
        note = "fused attention: doubling the sequence about halves the batch"
    else:
        note = "attention keeps its scores, S² of them: doubling the sequence more than halves the batch"
    return Curve(
        "batch-by-sample-size",
        f"Largest batch by {label}",
        label,
        "largest batch",
        (CurveSeries("formula", points),),
        note,
        x_here=plan.shape.seq_len or plan.shape.image_size,
        log_x=True,
        nothing=f"by formula, nothing fits at any {label} from {sizes[0][0]:,} upward",
    )


def batch_by_model(plan: Plan) -> Curve | None:
    """Return the largest batch over the family's models, at the plan's sample size where they take it."""
    sized = sorted({count_parameters(shape): shape for shape in _relatives(plan.shape)}.items())
    if len(sized) < 2:
        return None
    points = tuple((count / 1e9, float(largest_batch(replace(plan, shape=shape)))) for count, shape in sized)
    series = CurveSeries("formula", points, tuple(shape.name for _, shape in sized))
    return Curve(
        "batch-by-model",
        "Largest batch by model size",
        "billion parameters",
        "largest batch",
        (series,),
        f"models of the {plan.shape.family} family, this plan's recipe and GPU",
        x_here=count_parameters(plan.shape) / 1e9,
        log_x=True,
        nothing=f"by formula no model of the {plan.shape.family} family fits",
    )


def batch_by_gpu(plan: Plan, on_gpus: Sequence[LargestOnGpu] = ()) -> Curve:
    """Return the largest batch over the memory of the catalog's GPUs, by formula and as `on_gpus` has it by trace."""
    by_size = {gpu.total_bytes: gpu for gpu in [*(as_beside(gpu, plan.gpu) for gpu in gpus().values()), plan.gpu]}
    sized = sorted(by_size.items())
    points = tuple((total / GIB, float(largest_batch(replace(plan, gpu=gpu)))) for total, gpu in sized)
    series = [CurveSeries("formula", points, tuple(gpu.whole.title for _, gpu in sized))]
    traced = {row.gpu.total_bytes / GIB: float(row.traced) for row in on_gpus if isinstance(row.traced, int)}
    if traced:
        series.append(CurveSeries("traced", tuple(sorted(traced.items()))))
    return Curve(
        "batch-by-gpu",
        "Largest batch by GPU memory",
        "GiB of GPU memory",
        "largest batch",
        tuple(series),
        f"{100 * plan.headroom:.0f} % of each GPU left free",
        x_here=plan.gpu.total_bytes / GIB,
        log_x=True,
        nothing="by formula it fits on no GPU of the catalog",
    )


def activations_by_recompute(plan: Plan) -> Curve | None:
    """Return activations against the sequence length, or image side, for every recompute strategy."""
    sizes = _sample_sizes(plan.shape)
    if not sizes:
        return None
    label, _ = _axis(plan.shape)
    series = []
    for recompute in RECOMPUTES:
        recipe = replace(plan.recipe, recompute=recompute)
        points = tuple(
            (float(size), _activation_bytes(replace(plan, shape=shape, recipe=recipe)) / GIB) for size, shape in sizes
        )
        series.append(CurveSeries(recompute, points))
    return Curve(
        "activations-by-recompute",
        f"Activations by {label}",
        label,
        "GiB of activations, by formula",
        tuple(series),
        f"at batch {plan.batch_size}, output head included; full recompute keeps the blocks' inputs and one block",
        x_here=plan.shape.seq_len or plan.shape.image_size,
        log_x=True,
    )


def _activation_bytes(plan: Plan) -> int:
    rows = [row for row in terms_of(plan) if row.bucket is Bucket.ACTIVATIONS and row.grows_with_batch]
    return max(sum(row.size_bytes for row in rows if moment in row.moments) for moment in Moment)


def _axis(shape: ModelShape) -> tuple[str, str]:
    return ("sequence length", "seq_len") if shape.seq_len else ("image side", "image_size")


def _sample_sizes(shape: ModelShape) -> list[tuple[int, ModelShape]]:
    """Return powers of two (of patches, for a ViT) that the architecture takes, and its own size."""
    if shape.seq_len:
        sizes: Sequence[int] = _doublings(_SHORTEST, _LONGEST)
    elif shape.image_size:
        sizes = _doublings(max(_SMALLEST_SIDE, 4 * shape.patch_size), 64 * (shape.patch_size or 16))
    else:
        return []
    _, field = _axis(shape)
    found = []
    for size in sorted({*sizes, getattr(shape, field)}):
        with suppress(ShapeError):
            found.append((size, shape.overridden(**{field: size})))
    return found


def _doublings(first: int, last: int) -> list[int]:
    return [first << power for power in range((last // first).bit_length())]


def _relatives(shape: ModelShape) -> list[ModelShape]:
    """Return the family's models at the sample size of `shape` where they take it, and `shape` itself."""
    if not (shape.seq_len or shape.image_size):
        return [
            replace(shape, hidden=shape.hidden << power, name=f"hidden {shape.hidden << power}")
            for power in range(_WIDTHS)
        ]
    _, field = _axis(shape)
    found = []
    for other in models().values():
        if other.family == shape.family and other.name != shape.name:
            with suppress(ShapeError):
                found.append(other.overridden(**{field: getattr(shape, field)}))
    return [*found, shape]


_STEPS = (1, 2)
_SLICES = 12
"""Points that a traced phase is drawn with."""

Totals = Sequence[int]
"""Bytes by bucket, in the order of `ALLOCATED_BUCKETS`."""


def memory_over_step(plan: Plan, traced: Traced | None = None) -> Curve:
    """Return the buckets over steps 1 and 2: activations rise and fall, optimizer state appears and stays.

    Args:
        traced: a trace of this plan; without one the closed form's sizes are drawn in the textbook's order. With one
            this takes tens of milliseconds.
    """
    if traced is None:
        moments, marks = _schematic(plan)
        note = "schematic: the formula's sizes at the moments that it knows, not to scale in time"
    else:
        moments, marks = _moments(on_gpu(plan, traced).trace.at(plan.batch_size))
        note = f"traced ({traced.ready.profile}); along x the allocations in their order, not time"
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
    """Return the fullest moment of each slice of each phase of the steps drawn, by event number."""
    ends = [mark.event for mark in timeline.marks[1:]] + [len(timeline.events)]
    drawn = [(mark, end) for mark, end in zip(timeline.marks, ends, strict=True) if mark.step in _STEPS]
    cuts = set()
    for mark, end in drawn:
        count = max(1, min(_SLICES, end - mark.event))
        cuts |= {mark.event + (end - mark.event) * number // count for number in range(1, count + 1)}
    totals = [0] * len(ALLOCATED_BUCKETS)
    moments: list[tuple[float, Totals]] = []
    position = 0
    for start in sorted(cuts):
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
    """Return one point a moment; the optimizer's state is there from the first update on."""
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
