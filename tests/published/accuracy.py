"""How far the predictions are from what GPUs measured: `python -m tests.published.accuracy`.

A developer's tool: it reads the measurements in a checkout's tests/ (recordings of this project's own runs and figures
that others published) and traces each run again with the torch installed here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.predict import predict
from gpumem_tui.memory import Range, format_bytes, format_range
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import UNLIMITED_BYTES, AffineTrace
from gpumem_tui.workload.spec import WorkloadSpec
from tests.published.measurements import (
    DEFAULT_PUBLISHED,
    DEFAULT_RECORDINGS,
    PUBLISHED_STEPS,
    DataError,
    Kind,
    NotModelled,
    Origin,
    PublishedPeak,
    PublishedRuns,
    Recorded,
    RecordedEdge,
    RecordedRun,
    load_published,
    load_recordings,
)

if TYPE_CHECKING:
    from gpumem_tui.simulator.device.gpu import SimulatedGpu

# Predictions


def traced(workload: WorkloadSpec, gpu: Gpu, batch_size: int, steps: int, version: str = "") -> dict[Kind, int]:
    """The peaks of `steps` steps on the simulated GPU, unlimited, by a version of torch, else the installed one."""
    return _peaks(_run(workload, gpu, batch_size, steps, version), None)


def _peaks(simulated: SimulatedGpu, context_bytes: int | None) -> dict[Kind, int]:
    stats = simulated.allocator.stats
    context_bytes = simulated.profile.context_bytes if context_bytes is None else context_bytes
    return {
        "allocated": stats.peak_allocated_bytes,
        "reserved": stats.peak_reserved_bytes,
        "device_used": stats.peak_reserved_bytes + context_bytes,
    }


def _run(workload: WorkloadSpec, gpu: Gpu, batch_size: int, steps: int, version: str = "") -> SimulatedGpu:
    import torch

    from gpumem_tui.simulator.device.gpu import SimulatedGpu
    from tests.in_process import trained, workload_of

    simulated = SimulatedGpu(gpu, profile_for(version or torch.__version__, gpu), unlimited=True)
    with trained(workload_of(workload), batch_size, steps, simulated):
        return simulated


def traced_published(peak: PublishedPeak) -> int:
    """The simulated counterpart of a published figure, in bytes."""
    return _peaks(_published_run(peak), peak.context_bytes)[peak.kind] + peak.add_bytes


def published_range(peak: PublishedPeak) -> Range:
    """Between what figures the simulated counterpart of a published device total is."""
    simulated = _published_run(peak)
    finder = BatchFinder(AffineTrace.constant(simulated.finish()))
    without_limit = Range(UNLIMITED_BYTES, UNLIMITED_BYTES)
    context = simulated.profile.context_range
    if peak.context_bytes is not None:
        context = Range.of((peak.context_bytes, peak.context_most_bytes or peak.context_bytes))
    found = finder.reserved_range(peak.batch_size, UNLIMITED_BYTES, without_limit) + context
    return found + Range(peak.add_bytes, peak.add_bytes)


def _published_run(peak: PublishedPeak) -> SimulatedGpu:
    return _run_of(msgspec.json.encode(peak))


@lru_cache(maxsize=1)  # a figure and its range are asked for one after the other
def _run_of(encoded: bytes) -> SimulatedGpu:
    peak = msgspec.json.decode(encoded, type=PublishedPeak)
    return _run(peak.workload(), find_gpu(peak.gpu), peak.batch_size, PUBLISHED_STEPS, peak.torch)


@contextmanager
def cudnn_benchmark(is_on: bool) -> Iterator[None]:
    """The switch that a program would set."""
    import torch

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = is_on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# The table


@dataclass(frozen=True)
class AccuracyRow:
    """One figure: predicted by formula and by tracing, and measured. Bytes; `formula_bytes` None where it has none.

    `range`: between what figures a published device total was predicted to lie.
    """

    id: str
    origin: Origin
    kind: Kind
    formula_bytes: int | None
    traced_bytes: int
    measured_bytes: int
    tolerance_percent: float | None = None
    why: str = ""
    range: Range | None = None

    @property
    def error_percent(self) -> float:
        """Traced against measured; below zero the prediction was too low, which is the unsafe side."""
        return 100 * (self.traced_bytes / self.measured_bytes - 1)


@dataclass(frozen=True)
class Summary:
    """The errors of one kind of figure from one origin, in per cent of the measured bytes and without their sign."""

    origin: Origin
    kind: Kind
    rows: int
    median_percent: float
    p95_percent: float
    maximum_percent: float
    under_share: float

    @classmethod
    def of(cls, origin: Origin, kind: Kind, rows: Sequence[AccuracyRow]) -> Summary:
        """Summarize at least one row."""
        errors = sorted(abs(row.error_percent) for row in rows)
        p95 = statistics.quantiles(errors, n=20, method="inclusive")[-1] if len(errors) > 1 else errors[0]
        under = sum(row.traced_bytes < row.measured_bytes for row in rows) / len(rows)
        return cls(origin, kind, len(rows), statistics.median(errors), p95, errors[-1], under)


def summarize(rows: Iterable[AccuracyRow]) -> list[Summary]:
    """One summary for each origin and kind, in order of appearance."""
    groups: dict[tuple[Origin, Kind], list[AccuracyRow]] = {}
    for row in rows:
        groups.setdefault((row.origin, row.kind), []).append(row)
    return [Summary.of(origin, kind, group) for (origin, kind), group in groups.items()]


def published_rows(published: PublishedRuns) -> Iterator[AccuracyRow]:
    """Trace every published run."""
    for peak in published.modelled:
        workload = peak.workload()
        formula_bytes = _formula_bytes(workload, peak.batch_size)
        yield AccuracyRow(
            id=peak.id,
            origin="published",
            kind=peak.kind,
            formula_bytes=formula_bytes,
            traced_bytes=traced_published(peak),
            measured_bytes=peak.measured_bytes,
            tolerance_percent=peak.tolerance_percent,
            why=peak.why,
            range=published_range(peak) if peak.kind == "device_used" else None,
        )


def recorded_rows(recordings: Iterable[Recorded], as_recorded: bool) -> Iterator[AccuracyRow]:
    """Three rows a run; traced again, or with the figures that the simulated GPU gave when it was recorded."""
    for run in recordings:
        if not isinstance(run, RecordedRun) or run.real.error or (as_recorded and run.simulated.error):
            continue
        again = (
            None if as_recorded else traced(run.workload, run.machine.gpu, run.batch_size, run.steps, run.machine.torch)
        )
        kinds: tuple[Kind, ...] = ("allocated", "reserved", "device_used")
        for kind in kinds:
            traced_bytes = run.simulated.peak_bytes(kind) if again is None else again[kind]
            formula_bytes = _formula_bytes(run.workload, run.batch_size) if kind == "allocated" else None
            yield AccuracyRow(run.id, run.machine.origin, kind, formula_bytes, traced_bytes, run.real.peak_bytes(kind))


def _formula_bytes(workload: WorkloadSpec, batch_size: int) -> int | None:
    return None if workload.shape is None else predict(workload.shape, workload.recipe, batch_size).peak_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, or 2 without data to compare with."""
    parser = argparse.ArgumentParser(prog="python -m tests.published.accuracy", description=__doc__)
    parser.add_argument("--recordings", type=Path, default=DEFAULT_RECORDINGS, metavar="DIR")
    parser.add_argument("--published", type=Path, default=DEFAULT_PUBLISHED, metavar="FILE")
    parser.add_argument("--as-recorded", action="store_true", help="do not trace the recorded runs again")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        recordings = load_recordings(options.recordings)
        published = load_published(options.published) if options.published.exists() else PublishedRuns(())
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [*recorded_rows(recordings, options.as_recorded), *published_rows(published)]
    edges = [found for found in recordings if isinstance(found, RecordedEdge) and found.real is not None]
    if not rows and not edges:
        print(
            f"no measurements in {options.recordings} or {options.published}: run this in a checkout, or record some "
            "with python -m tests.gpu.record",
            file=sys.stderr,
        )
        return 2
    (_print_json if options.json else _print_table)(rows, edges, published.not_modelled)
    return 0


def _print_json(
    rows: Sequence[AccuracyRow], edges: Sequence[RecordedEdge], not_modelled: Sequence[NotModelled]
) -> None:
    body = {
        "schema": 1,
        "rows": [{**asdict(row), "error_percent": row.error_percent} for row in rows],
        "summaries": [asdict(summary) for summary in summarize(rows)],
        "largest_batches": [
            {"id": edge.id, "origin": edge.machine.origin, "simulated": edge.simulated, "real": edge.real}
            for edge in edges
        ],
        "not_modelled": [msgspec.to_builtins(entry) for entry in not_modelled],
    }
    print(json.dumps(body, indent=2))


def _range_words(row: AccuracyRow) -> str:
    """Whether what was measured is in the predicted range."""
    if row.range is None:
        return ""
    return f"  {'within' if row.measured_bytes in row.range else 'outside'} {format_range(row.range)}"


def _print_table(
    rows: Sequence[AccuracyRow], edges: Sequence[RecordedEdge], not_modelled: Sequence[NotModelled]
) -> None:
    width = max((len(row.id) for row in rows), default=2)
    print(f"{'configuration':{width}}  {'kind':11}  {'formula':>10}  {'traced':>10}  {'measured':>10}  {'error':>9}")
    for row in rows:
        sizes = (format_bytes(size) for size in (row.formula_bytes, row.traced_bytes, row.measured_bytes))
        print(f"{row.id:{width}}  {row.kind:11}  " + "  ".join(f"{s:>10}" for s in sizes), end="")
        print(f"  {row.error_percent:+8.3f}%" + _range_words(row) + (f"  {row.why}" if row.why else ""))
    for summary in summarize(rows):
        print(
            f"{summary.origin}, {summary.kind}: {summary.rows} rows; error median {summary.median_percent:.3f} %, "
            f"95th percentile {summary.p95_percent:.3f} %, maximum {summary.maximum_percent:.3f} %; "
            f"{summary.under_share:.0%} predicted too low"
        )
    for origin in sorted({edge.machine.origin for edge in edges}):
        exact = [edge.simulated == edge.real for edge in edges if edge.machine.origin == origin]
        print(f"{origin}, largest batch under a cap: {sum(exact)} of {len(exact)} exact")
    if not_modelled:
        print(f"{sum(len(entry.ids) for entry in not_modelled)} published figures cannot be modelled:")
    for entry in not_modelled:
        print(f"  {', '.join(entry.ids)}: {entry.reason}")


if __name__ == "__main__":
    sys.exit(main())
