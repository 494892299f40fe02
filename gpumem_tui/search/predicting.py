"""The predictions of a step: the closed form, and the trace that a child process makes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpumem_tui.memory import Unknown
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Control, SideBySide, Unusable, converse
from gpumem_tui.run.events import Failed, Output, Ready, Sample, TraceDone, TraceRequest
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import Prediction, Traced
from gpumem_tui.search.strategy import Sizes
from gpumem_tui.simulator.allocator.replay import (
    CHECKED_BATCH_SIZE,
    COMPILED_BATCH_SIZES,
    TRACED_BATCH_SIZES,
    AffineTrace,
    NotAffine,
)
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.step import Phase
from gpumem_tui.workload.command import BATCH, Command

_OF_A_VALUE = re.compile(r"\b(AssertionError|ValueError|RuntimeError|TypeError|ZeroDivisionError)\b")
"""What programs raise about a number that they cannot work with."""
_MOST_MULTIPLE = _NEAR_MULTIPLE = 8
_COMPILES, _DOES_NOT = re.compile(r"torch[._]compile\b"), re.compile(r"no.?compile|compile\W+(false|0|no)\b", re.I)


@dataclass(frozen=True)
class Predicted:
    """Before the first trial: both predictions, and what the child's interpreter said of itself.

    Attributes:
        guess: a largest batch size to try first, where traces are no affine form; None for none.
        is_near: whether that comes of traces which are affine but for some bytes.
        multiple: the batch sizes that are worth a trial are multiples of it.
    """

    prediction: Prediction
    ready: Ready
    guess: int | None = None
    multiple: int = 1
    is_near: bool = False


@dataclass(frozen=True)
class TraceProgress:
    """The command is run to be traced at a batch size. `sample`: of the phase that begins; None as the run does."""

    batch_size: int
    sample: Sample | None = None


WhileTracing = Output | TraceProgress
"""What happens while a command is traced."""


def predict(
    config: SearchConfig,
    control: Control | None = None,
    batch_size: int | None = None,
    not_affine: str = "",
    watch: Callable[[WhileTracing], None] = lambda _event: None,
) -> Predicted:
    """Return both predictions, the traced one from a child process.

    Args:
        batch_size: where memory does not grow evenly with the batch, trace this size alone; None: do without a trace.
        not_affine: why it does not, as an earlier trace said: spares finding out again.
        watch: called with what a command prints.

    Raises:
        Unusable: no torch there, or a workload that cannot be built.
        ChildDied, Cancelled: the child crashed; the user ended it.
    """
    found: Predicted | None = None
    for event in predicting(config, control or Control(), batch_size, not_affine):
        if isinstance(event, Predicted):
            found = event
        else:
            watch(event)
    assert found is not None
    return found


def predicting(
    config: SearchConfig, control: Control, batch_size: int | None = None, not_affine: str = ""
) -> Iterator[Predicted | WhileTracing]:
    """Trace a step. Yields what happens meanwhile, and last what is predicted."""
    if config.workload.command is not None:
        yield from _tracing_command(config, control, batch_size, not_affine)
        return
    ready: Ready | None = None
    traced: Traced | Unknown = Unknown("the trace ended early")
    peaks: tuple[tuple[int, int], ...] = ()
    request = TraceRequest(config.workload, config.device.gpu, config.steps, batch_size, not_affine)
    try:
        for event in converse(request, config.terms, control):
            if isinstance(event, Ready):
                ready = event
            elif isinstance(event, TraceDone) and ready is not None:
                traced = config.traced(ready, event)
            elif isinstance(event, Failed):
                traced, peaks = _untraced(event, config, ready), event.peaks
    except ChildDied as death:
        if ready is None:
            raise _no_python(config, str(death)) from death
        if config.workload.shape is None and config.device.simulated:
            raise
        traced = Unknown(f"tracing failed: {death}")
    if ready is None:
        raise _no_python(config, "without saying why")
    guess = _extrapolated(peaks, config, ready) if peaks else None
    yield Predicted(Prediction(config.formula, traced), ready, guess)


@dataclass
class _CommandTraces:
    """The runs of a command that are traced, one for each batch size; `refused` says what it ended in at others."""

    config: SearchConfig
    runner: SideBySide
    not_affine: str = ""
    runs: dict[int, tuple[Ready, TraceDone]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    takes_many: bool = True

    def _request(self, size: int) -> TraceRequest:
        config = self.config
        return TraceRequest(
            config.workload, config.device.gpu, config.steps, size, self.not_affine, change=config.change
        )

    def run(self, size: int, following: int | None = None) -> Iterator[WhileTracing]:
        """Run the command at a batch size, and at the following one meanwhile if there is room.

        Raises:
            Unusable: it cannot be traced.
        """
        yield TraceProgress(size)
        ready: Ready | None = None
        then = None if following is None or following in self.runs else self._request(following)
        for event in self.runner.converse(self._request(size), then):
            if isinstance(event, Ready):
                ready = event
            elif isinstance(event, Output):
                yield event
            elif isinstance(event, Sample):
                yield TraceProgress(size, event)
            elif isinstance(event, TraceDone) and ready is not None:
                self.runs[size] = ready, event
            elif isinstance(event, Failed):
                raise Unusable(event)

    def at(self, size: int) -> Timeline:
        """Return what was allocated in a run."""
        return self.runs[size][1].trace.at(size)

    def alone(self, size: int, reason: str = "") -> Traced:
        """Return a run as a trace that answers for its batch size only, and why."""
        ready, done = self.runs[size]
        return self.config.traced(ready, replace(done, only_at=size, not_affine=reason))

    @property
    def rows(self) -> int:
        """The rows of the parts that the step cuts its batch into; 0 where it does not."""
        return max(done.rows_asked_for for _, done in self.runs.values())

    def pair(self, then: int | None) -> Generator[WhileTracing, None, tuple[int, int]]:
        """Run two sizes that the command takes, and return them: what it ends at, a multiple of 2, 4 or 8 may mend.

        Args:
            then: the size that is run after these; None for none.

        Raises:
            Unusable: it ends at these as well, or for another reason than a value; the first such error.
        """
        first_error: Unusable | None = None
        while True:
            sizes = self.sizes
            first, second = TRACED_BATCH_SIZES if sizes.multiple == 1 else (sizes.multiple, 2 * sizes.multiple)
            if sizes == Sizes() and self._seems_compiled:
                first, second = COMPILED_BATCH_SIZES
            try:
                for size, following in ((first, second), (second, then)):
                    if size not in self.runs:
                        yield from self.run(size, following)
                return first, second
            except Unusable as error:
                if self.takes_many and (first, second) == COMPILED_BATCH_SIZES:  # perhaps more samples than there are
                    self.takes_many = False
                    continue
                first_error = first_error or error
                self.refused[size] = str(error)
                may_divide = error.kind == "workload" and _OF_A_VALUE.search(str(error))
                if not may_divide or self.sizes.doubles or self.sizes == sizes:
                    raise first_error from error

    @property
    def sizes(self) -> Sizes:
        """The sizes that the command takes, as far as is known: where it ran at none, those that suit most programs."""
        given = Sizes(self.config.batch_multiple)
        return given.without(self.refused) if self.runs or not self.refused else replace(given, multiple=_MOST_MULTIPLE)

    def fit(self, checked: int | None) -> Generator[WhileTracing, None, Traced]:
        """Run two sizes, which give the affine form, and `checked`, which checks it; return the trace.

        Raises:
            NotAffine: the runs are of no such form.
        """
        first, second = yield from self.pair(checked)
        if checked in (first, second):
            checked = CHECKED_BATCH_SIZE if second == TRACED_BATCH_SIZES[1] else 2 * second
        if checked is not None:
            yield from self.run(checked)
        trace = AffineTrace.fit((first, self.at(first)), (second, self.at(second)))
        if checked == 1 and not trace.holds(1, self.at(1)):
            trace, checked = replace(trace, apart=((1, self.at(1)),)), CHECKED_BATCH_SIZE
            yield from self.run(checked)
        if checked is not None:
            trace.check(checked, self.at(checked))
        else:
            trace.at(self.sizes.multiple)  # as a square of the batch has less than no bytes there
        if self.rows:
            otherwise = NotAffine.in_parts(self.rows)
            yield from self.run(size := otherwise.sizes[0])
            if not trace.holds(size, self.at(size)):
                raise otherwise
        ready, done = self.runs[second]
        notes = (*done.notes, *filter(None, [self.refusal]))
        multiple = self.sizes.multiple
        return self.config.traced(ready, replace(done, trace=trace, only_at=0, batch_multiple=multiple, notes=notes))

    def guess(self, sizes: tuple[int, ...]) -> int | None:
        """Return the largest batch by straight lines through two runs; None where no phase takes more in the larger.

        Each phase of a step has a line of its own, and the first to meet the capacity counts: at small batches the peak
        may lie in the optimizer's step, at large ones in another.
        """
        by_phase: dict[Phase, dict[int, int]] = {}
        for size in sizes:
            for one in self.alone(size).at(size).phases:
                peaks = by_phase.setdefault(one.phase, {})
                peaks[size] = max(peaks.get(size, 0), one.peak_allocated_bytes)
        ready = self.runs[sizes[0]][0]
        both = [list(peaks.items()) for peaks in by_phase.values() if len(peaks) == len(sizes)]
        return min(filter(None, (_extrapolated(peaks, self.config, ready) for peaks in both)), default=None)

    def between(self, small: int, large: int) -> Generator[WhileTracing, None, int | None]:
        """Run two sizes, and return the largest batch that fits by their affine form, or by what is nearly that.

        Raises:
            Unusable: it cannot be traced there.
        """
        yield from self.run(small, large)
        yield from self.run(large)
        return self.nearly(small, large)

    def nearly(self, small: int, large: int, *, must_be_alike: bool = False) -> int | None:
        """Return the largest batch that fits by two runs; None where none does, or they are not `must_be_alike`.

        Where their runs differ in a few allocations, those of the larger that have no equal in size in the smaller one
        are taken to grow with the batch.
        """
        ready, done = self.runs[large]
        below, above = self.at(small), self.at(large)
        try:
            trace = AffineTrace.fit((small, below), (large, above), nearly=True)
        except NotAffine:
            if must_be_alike:
                return None
            alike = set(below.sizes)
            slopes = tuple(0 if size in alike else size // large for size in above.sizes)
            rest = tuple(size - slope * large for size, slope in zip(above.sizes, slopes, strict=True))
            trace = replace(AffineTrace.constant(replace(above, sizes=rest)), slopes=slopes)
        found = self.config.traced(ready, replace(done, trace=trace, only_at=0)).expected_batch_size
        return None if isinstance(found, Unknown) else found

    @property
    def _seems_compiled(self) -> bool:
        """Return whether a script of the command names `torch.compile`, and no word switches that off."""
        command = self.config.workload.command
        if command is None or not self.takes_many or any(map(_DOES_NOT.search, command.words)):
            return False
        scripts = (Path(command.cwd, word) for word in command.words if word.endswith(".py"))
        return any(_COMPILES.search(path.read_text(errors="replace")) for path in scripts if path.is_file())

    @property
    def refusal(self) -> str:
        """Why only multiples are traced; "" where all sizes are."""
        ends = (f"at {size} the command ends in {why}" for size, why in self.refused.items())
        return f"traced at multiples of {self.sizes.multiple}: {'; '.join(ends)}" if self.refused else ""


def _tracing_command(
    config: SearchConfig, control: Control, batch_size: int | None, not_affine: str
) -> Iterator[Predicted | WhileTracing]:
    """Trace a command: at the batch size asked for alone, or as an affine form of the batch, which that size checks."""
    command = config.workload.command
    assert command is not None
    with closing(SideBySide(config.terms, control)) as runner:
        yield from _tracing_with(_CommandTraces(config, runner), command, batch_size, not_affine)


def _tracing_with(
    traces: _CommandTraces, command: Command, batch_size: int | None, not_affine: str
) -> Iterator[Predicted | WhileTracing]:
    found: Traced | Unknown
    guess, is_near = None, False
    if not command.takes_batch or not_affine:
        size = batch_size or 1
        yield from traces.run(size)
        found = traces.alone(size, not_affine or f"the command has no {BATCH} to vary the batch size by")
    else:
        try:
            found = yield from traces.fit(batch_size)
        except NotAffine as found_out:
            error = NotAffine.in_parts(traces.rows) if traces.rows else found_out
            if batch_size is not None:
                found = traces.alone(batch_size, str(error))
            else:
                sizes = error.sizes if traces.rows else tuple(traces.runs)[:2]
                for size in sizes:
                    if size not in traces.runs:
                        yield from traces.run(size)
                found, guess = Unknown("; ".join(filter(None, [str(error), traces.refusal]))), traces.guess(sizes)
                if sizes == COMPILED_BATCH_SIZES and (near := traces.nearly(*sizes, must_be_alike=True)):
                    guess, is_near = near, True
    ready = next(iter(traces.runs.values()))[0]
    yield Predicted(Prediction(traces.config.formula, found), ready, guess, traces.sizes.multiple, is_near)


def near_guess(
    config: SearchConfig, runner: SideBySide, predicted: Predicted
) -> Generator[WhileTracing, None, int | None]:
    """Return the largest batch by two traces near what small batches suggest, which are more alike; None for none.

    Their sizes are multiples of eight, as compilers and libraries choose kernels by alignment.
    """
    traced, guess = predicted.prediction.traced, predicted.guess or 0
    step = math.lcm(_NEAR_MULTIPLE, predicted.multiple)
    small, large = 3 * guess // 4 // step * step, guess // step * step
    if predicted.is_near:
        return predicted.guess
    if 0 < small < large and isinstance(traced, Unknown) and config.device.simulated:
        with suppress(Unusable, ChildDied):
            return (yield from _CommandTraces(config, runner, traced.reason).between(small, large))
    return None


def _extrapolated(peaks: Sequence[tuple[int, int]], config: SearchConfig, ready: Ready) -> int | None:
    """Find where the line through two runs' allocated peaks meets the device's capacity; None if it does not rise."""
    (size, peak), (other, other_peak) = peaks
    slope = (other_peak - peak) / (other - size)
    capacity = config.device.gpu.cuda_total_bytes - ready.context_bytes
    capacity = min(capacity, config.limit_bytes or capacity)
    return size + max(0, int((capacity - peak) / slope)) if slope > 0 else None


def _no_python(config: SearchConfig, death: str) -> Unusable:
    ended = f"{config.python} ended before it had imported torch ({death})"
    return Unusable(Failed("python", f"{ended}: give --python the interpreter you train in"))


def _untraced(event: Failed, config: SearchConfig, ready: Ready | None) -> Unknown:
    """Say why there is no trace, where others still answer: the formula for a catalog model, trials on a real GPU.

    A torch too old to simulate a GPU trains on a real one all the same.
    """
    others = config.workload.shape is not None or not config.device.simulated
    too_old = event.kind == "torch" and ready is not None
    if event.kind == "trace" or (event.kind == "workload" and others) or (too_old and not config.device.simulated):
        return Unknown(event.detail)
    raise Unusable(event)
