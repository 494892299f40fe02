"""The ledger table: Formula | Traced | Simulated or Measured | error, a row a bucket, at one batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from gpumem_tui.formula.predict import FormulaPrediction
from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, Bucket, Unknown, Value
from gpumem_tui.search.comparison import caveat, compared
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.ranges import range_line
from gpumem_tui.search.report import assumed_line, peak_line
from gpumem_tui.search.runner import TrialFinished
from gpumem_tui.search.shortfall import shortfall
from gpumem_tui.trial.events import TrialDone
from gpumem_tui.tui.search.state import SearchState

PEAK = "= allocated peak"
RESERVED = "= reserved"
USED = "= device used"
DRIVER = Bucket.DRIVER_RESERVED.title
CACHE = Bucket.CACHE.title
CONTEXT = Bucket.CONTEXT.title
FREE = "free"

Column = dict[str, Value]
"""The figures of one producer by row title; a row it says nothing of is Unknown."""


@dataclass(frozen=True)
class LedgerLine:
    """One line of the table. `error` is the compared prediction − trial in bytes, `error_share` the same relative to
    the trial."""

    title: str
    formula: Value
    traced: Value
    tried: Value
    error: Value
    error_share: float | None

    @property
    def is_sum(self) -> bool:
        """The row adds up the ones above it."""
        return self.title.startswith("=")


@dataclass(frozen=True)
class LedgerView:
    """The whole table.

    Attributes:
        trial: the number of the trial in the third column, None before there is one.
        tried_title: the third column's heading. `error_title`: the last one's, which names the compared prediction.
        captions: of a trial that did not fit: what was missing, and what the columns mean then.
        notes: when the peak is, what else is to be known of the figures, why a dash stands where it does, all that a
            trial that did not fit said.
    """

    batch_size: int
    trial: int | None
    tried_title: str
    error_title: str
    captions: tuple[str, ...]
    rows: tuple[LedgerLine, ...]
    notes: tuple[str, ...]


def ledger_view(state: SearchState) -> LedgerView:
    """The table for the trial that is shown, or for the predicted batch size before there is one."""
    batch_size, shown = state.shown_batch_size, state.shown
    gpu = state.config.device.gpu
    formula = _formula_column(state.formula.at(batch_size))
    traced = _traced_column(state.traced, batch_size)
    tried = _tried_column(shown.result if shown is not None else None)
    total = gpu.total_bytes / GIB
    free = f"free of {total:.{0 if total >= 100 else 1}f} GiB"
    driver_bytes = gpu.total_bytes - gpu.cuda_total_bytes
    for column in (formula, traced, tried):
        used = column[USED]
        column[DRIVER] = used if isinstance(used, Unknown) else driver_bytes
        column[free] = used if isinstance(used, Unknown) else gpu.cuda_total_bytes - used
    against = compared(state.config, state.traced)
    predicted = formula if against == "formula" else traced
    error_of = _error_of(predicted, tried, shown.result if shown is not None else None)
    titles = [
        *(bucket.title for bucket in ALLOCATED_BUCKETS), PEAK, CACHE, RESERVED, CONTEXT, USED, DRIVER, free,
    ]  # fmt: skip
    tried_title = state.config.device.measured_title
    said = [f"trial {shown.number} said: {shown.result.detail}"] if shown is not None and shown.result.detail else []
    headed = (("formula", formula), ("traced", traced), (tried_title.lower(), tried))
    doubt = caveat(state.config, state.traced) if shown is not None else ""
    return LedgerView(
        batch_size=batch_size,
        trial=shown.number if shown is not None else None,
        tried_title=tried_title,
        error_title=f"{against} error",
        captions=_captions(state, shown),
        rows=tuple(LedgerLine(t, formula[t], traced[t], tried[t], *error_of(t)) for t in titles),
        notes=(*filter(None, (doubt,)), *_moment(state, batch_size), *_noted(state, shown), *_reasons(headed), *said),
    )


def _captions(state: SearchState, shown: TrialFinished | None) -> tuple[str, ...]:
    """What the trial was short of, and that its column ends there, while the traced one is about the whole step."""
    if shown is None or shown.result.outcome == "fit" or not shown.result.device_used_bytes:
        return ()
    by_then = f"{state.config.device.measured_title}: reached by then"
    needed = "" if isinstance(state.traced, Unknown) else f" · Traced: what batch {shown.result.batch_size:,} needs"
    why = (shortfall(shown.result, state.config.limit_bytes),) if shown.result.outcome == "oom" else ()
    return *why, by_then + needed


def _moment(state: SearchState, batch_size: int) -> Iterable[str]:
    """Of when the traced column is, a bucket that is empty at that moment counts nothing; and what it leaves out."""
    if not isinstance(state.traced, Unknown):
        if said := range_line(state.traced.device_used_range(batch_size), state.traced.unknowns(batch_size)):
            yield f"Traced: {said}"
        yield peak_line(state.traced, batch_size)
        if assumed := assumed_line(state.traced):
            yield assumed


def _noted(state: SearchState, shown: TrialFinished | None) -> Iterable[str]:
    """What else is to be known of the figures: the trace's notes and the shown trial's, each once."""
    of_trace = () if isinstance(state.traced, Unknown) else state.traced.notes
    return dict.fromkeys((*of_trace, *(shown.result.notes if shown is not None else ())))


def _all(titles: Iterable[str], value: Value) -> Column:
    return dict.fromkeys(titles, value)


_BUCKET_TITLES = tuple(bucket.title for bucket in ALLOCATED_BUCKETS)
_ABOVE_DEVICE = (*_BUCKET_TITLES, PEAK, CACHE, RESERVED, CONTEXT, USED)


def _formula_column(prediction: FormulaPrediction | Unknown) -> Column:
    if isinstance(prediction, Unknown):
        return _all(_ABOVE_DEVICE, prediction)
    column = _all(_ABOVE_DEVICE, Unknown("not counted by the closed form"))
    column.update({row.bucket.title: prediction.breakdown[row.bucket] for row in prediction.rows})
    column[PEAK] = prediction.peak_bytes
    return column


def _traced_column(traced: Traced | Unknown, batch_size: int) -> Column:
    if isinstance(traced, Unknown):
        return _all(_ABOVE_DEVICE, traced)
    replay = traced.at(batch_size)
    column = _figures(replay.peak_allocated_bytes, replay.peak_reserved_bytes, traced.device_used_bytes(batch_size))
    return {**column, **{bucket.title: replay.breakdown[bucket] for bucket in ALLOCATED_BUCKETS}}


def _tried_column(result: TrialDone | None) -> Column:
    if result is None:
        return _all(_ABOVE_DEVICE, Unknown("no trial has ended yet"))
    breakdown = result.breakdown
    if not result.device_used_bytes:
        return _all(_ABOVE_DEVICE, Unknown(result.buckets_unknown))
    column = _figures(result.peak_allocated_bytes, result.peak_reserved_bytes, result.device_used_bytes)
    for bucket in ALLOCATED_BUCKETS:
        column[bucket.title] = Unknown(result.buckets_unknown) if breakdown is None else breakdown[bucket]
    return column


def _figures(allocated_bytes: int, reserved_bytes: int, used_bytes: int) -> Column:
    return {
        PEAK: allocated_bytes,
        CACHE: reserved_bytes - allocated_bytes,
        RESERVED: reserved_bytes,
        CONTEXT: used_bytes - reserved_bytes,
        USED: used_bytes,
    }


def _error_of(
    predicted: Column, tried: Column, result: TrialDone | None
) -> Callable[[str], tuple[Value, float | None]]:
    """How far the prediction is off, by row. A trial that ended early is nothing to compare with."""
    if result is not None and result.outcome != "fit":
        early = Unknown("the trial ended early: its figures are those reached until then")
        return lambda title: (early, None)
    return partial(_error, predicted, tried)


def _error(predicted: Column, tried: Column, title: str) -> tuple[Value, float | None]:
    said, was = predicted[title], tried[title]
    if isinstance(said, Unknown):
        return said, None
    if isinstance(was, Unknown):
        return was, None
    if said == was:
        return 0, 0.0
    return said - was, (said - was) / was if was > 0 else None


def _reasons(columns: Iterable[tuple[str, Column]]) -> Iterable[str]:
    """Each column's first reason; a column that knows everything gives none."""
    for title, column in columns:
        unknown = [value.reason for value in column.values() if isinstance(value, Unknown)]
        if unknown:
            yield f"– {title}: {unknown[0]}"
