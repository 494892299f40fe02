"""The ledger table: Formula | Traced | Simulated or Measured | error, a row a bucket, at one batch size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Union

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.predict import FormulaPrediction
from gpumem_tui.ledger import Ledger
from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, Breakdown, Bucket, Unknown, Value
from gpumem_tui.run.events import TrialDone
from gpumem_tui.search.assumed import assumed_line, workspace_lines
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.report import frozen_line, parts_lines, peak_line
from gpumem_tui.search.runner import TrialFinished
from gpumem_tui.search.words import compared, highest_line, proves_something, range_line, shortfall
from gpumem_tui.tui.search.state import SearchState

PEAK = "= allocated peak"
RESERVED = "= reserved"
USED = "= device used"

RowKey = Union[Bucket, str]  # noqa: UP007  an alias cannot be written with | on Python 3.10
"""A bucket, or the title of a sum of those above it."""

Column = Mapping[RowKey, Value]
"""The figures of one producer; a row that it lacks is Unknown."""

_ROWS: tuple[RowKey, ...] = (
    *ALLOCATED_BUCKETS, PEAK, Bucket.CACHE, RESERVED, Bucket.CONTEXT, USED, Bucket.DRIVER_RESERVED, Bucket.FREE,
)  # fmt: skip


@dataclass(frozen=True)
class LedgerLine:
    """A line of the table.

    Attributes:
        error: the compared prediction − trial, in bytes. `error_share`: the same relative to the trial.
    """

    title: str
    formula: Value
    traced: Value
    tried: Value
    error: Value
    error_share: float | None

    @property
    def values(self) -> tuple[Value, Value, Value]:
        """The figures, a column each."""
        return self.formula, self.traced, self.tried

    @property
    def is_sum(self) -> bool:
        """The row adds up the ones above it."""
        return self.title.startswith("=")


@dataclass(frozen=True)
class LedgerView:
    """The ledger as a table: its columns, captions and notes.

    Attributes:
        trial: the number of the trial in the third column, None before there is one.
        tried_title: the third column's heading. `error_title`: the last one's, which names the compared prediction;
            empty where how far it is off would prove nothing.
        captions: of a trial that did not fit: what was missing, and what the columns mean then.
        notes: when the peak is, what else is to be known of the figures, why a dash is where it does, all that a
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
    """Return the table for the trial that is shown, or for the predicted batch size before there is one."""
    batch_size, shown = state.shown_batch_size, state.shown
    gpu = state.config.device.gpu
    formula = _formula_column(state.formula.at(batch_size))
    traced = _traced_column(gpu, state.traced, batch_size)
    tried = _tried_column(gpu, shown.result if shown is not None else None)
    against = compared(state.config, state.traced)
    predicted = formula if against == "formula" else traced
    ended_early = shown is not None and shown.result.outcome != "fit"
    rows = []
    for key in _ROWS:
        error, share = (_EARLY, None) if ended_early else _error(predicted[key], tried[key])
        rows.append(
            LedgerLine(
                title=_title(key, gpu),
                formula=formula[key],
                traced=traced[key],
                tried=tried[key],
                error=error,
                error_share=share,
            )
        )
    tried_title = state.config.device.measured_title
    said = [f"trial {shown.number} said: {shown.result.detail}"] if shown is not None and shown.result.detail else []
    headed: tuple[tuple[str, Column], ...] = (("formula", formula), ("traced", traced), (tried_title.lower(), tried))
    if state.config.workload.shape is None:
        headed = headed[1:]  # there is no closed form to wait for
    return LedgerView(
        batch_size=batch_size,
        trial=shown.number if shown is not None else None,
        tried_title=tried_title,
        error_title=f"{against} error" if proves_something(state.config, state.traced) else "",
        captions=_captions(state, shown),
        rows=tuple(rows),
        notes=(
            *_moment(state, batch_size),
            *_noted(state, shown, batch_size),
            *_reasons(headed),
            *said,
        ),
    )


def _captions(state: SearchState, shown: TrialFinished | None) -> tuple[str, ...]:
    """Return what the trial was short of, and that its column ends there while the traced one has the whole step."""
    if shown is None or shown.result.outcome == "fit" or not shown.result.device_used_bytes:
        return ()
    by_then = f"{state.config.device.measured_title}: reached by then"
    needed = "" if isinstance(state.traced, Unknown) else f" · Traced: what batch {shown.result.batch_size:,} needs"
    why = (shortfall(shown.result, state.config.limit_bytes),) if shown.result.outcome == "oom" else ()
    return *why, by_then + needed


def _moment(state: SearchState, batch_size: int) -> Iterable[str]:
    """Yield the lines below the table: the range of the traced total, the moment of its peak, what was assumed."""
    if not isinstance(state.traced, Unknown):
        if said := range_line(state.traced.device_used_range(batch_size), state.traced.unknowns(batch_size)):
            yield f"Traced: {said}"
        yield peak_line(state.traced, batch_size)
        if more := highest_line(state.traced.at(batch_size)):
            yield more
        yield from parts_lines(state.traced, batch_size)
        yield from filter(None, (frozen_line(state.traced, batch_size),))
        yield from workspace_lines(state.traced, batch_size)
        if assumed := assumed_line(state.traced):
            yield assumed


def _noted(state: SearchState, shown: TrialFinished | None, batch_size: int) -> Iterable[str]:
    """Return what else is to be known of the figures: the trace's notes and the shown trial's, each once."""
    of_trace = () if isinstance(state.traced, Unknown) else state.traced.notes(batch_size)
    return dict.fromkeys(map(str, (*of_trace, *(shown.result.notes if shown is not None else ()))))


def _title(key: RowKey, gpu: Gpu) -> str:
    if key is Bucket.FREE:
        total = gpu.total_bytes / GIB
        return f"free of {total:.{0 if total >= 100 else 1}f} GiB"
    return key.title if isinstance(key, Bucket) else key


def _formula_column(prediction: FormulaPrediction | Unknown) -> Column:
    if isinstance(prediction, Unknown):
        return dict.fromkeys(_ROWS, prediction)
    column: dict[RowKey, Value] = dict.fromkeys(_ROWS, Unknown("not counted by the closed form"))
    column.update({row.bucket: prediction.breakdown[row.bucket] for row in prediction.rows})
    column[PEAK] = prediction.peak_bytes
    return column


def _traced_column(gpu: Gpu, traced: Traced | Unknown, batch_size: int) -> Column:
    if isinstance(traced, Unknown):
        return dict.fromkeys(_ROWS, traced)
    replay, used_bytes = traced.at(batch_size), traced.device_used_bytes(batch_size)
    return _column(gpu, replay.breakdown, replay.peak_allocated_bytes, replay.peak_reserved_bytes, used_bytes)


def _tried_column(gpu: Gpu, result: TrialDone | None) -> Column:
    if result is None:
        return dict.fromkeys(_ROWS, Unknown("no trial has ended yet"))
    if not result.device_used_bytes:
        return dict.fromkeys(_ROWS, Unknown(result.buckets_unknown))
    breakdown = result.breakdown or Unknown(result.buckets_unknown)
    return _column(gpu, breakdown, result.peak_allocated_bytes, result.peak_reserved_bytes, result.device_used_bytes)


def _column(
    gpu: Gpu, breakdown: Breakdown | Unknown, allocated_bytes: int, reserved_bytes: int, used_bytes: int
) -> Column:
    """Return a device's ledger, and the sums between its rows."""
    ledger: Ledger[None] = Ledger.of_step(
        breakdown,
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        used_bytes=used_bytes,
        cuda_total_bytes=gpu.cuda_total_bytes,
        total_bytes=gpu.total_bytes,
    )
    rows: dict[RowKey, Value] = {row.kind: row.size_bytes for row in ledger.rows}
    return {**rows, PEAK: allocated_bytes, RESERVED: reserved_bytes, USED: used_bytes}


_EARLY = Unknown("the trial ended early: its figures are those reached until then")


def _error(said: Value, was: Value) -> tuple[Value, float | None]:
    """Return how far a prediction is off, in bytes and as a share of what was tried."""
    if isinstance(said, Unknown):
        return said, None
    if isinstance(was, Unknown):
        return was, None
    if said == was:
        return 0, 0.0
    return said - was, (said - was) / was if was > 0 else None


def _reasons(columns: Iterable[tuple[str, Column]]) -> Iterable[str]:
    """Yield each column's first reason; a column that knows everything gives none."""
    for title, column in columns:
        unknown = [value.reason for value in column.values() if isinstance(value, Unknown)]
        if unknown:
            yield f"– {title}: {unknown[0]}"
