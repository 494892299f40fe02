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
from gpumem_tui.run.control import Control, SideBySide, Unusable
from gpumem_tui.run.events import PROPOSE, Failed, Output, RanOut, Ready, Sample, TraceDone, TraceRequest
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.passes import joined, with_even_passes
from gpumem_tui.search.prediction import Prediction, Traced
from gpumem_tui.search.strategy import Sizes
from gpumem_tui.simulator.allocator.assumptions import Assumption, End, Kind
from gpumem_tui.simulator.allocator.replay import (
    CHECKED_BATCH_SIZE,
    COMPILED_BATCH_SIZES,
    TRACED_BATCH_SIZES,
    AffineTrace,
    NotAffine,
)
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.simulator.fast.layers import NotRepeating, deepened, deepened_assumed, shallow_layers
from gpumem_tui.step import Phase
from gpumem_tui.workload.command import BATCH
from gpumem_tui.workload.spec import WorkloadSpec

_OF_A_VALUE = re.compile(r"\b(AssertionError|IndexError|ValueError|RuntimeError|TypeError|ZeroDivisionError)\b")
"""Errors of programs about a number that they cannot work with."""
_UNBOUNDED = "a size is taken from a number that only the GPU computes and nothing bounds, and nothing is computed here"
_COMPILED = "a compiled model is traced at the batch size asked for alone: search finds the largest"
_MOST_MULTIPLE = _NEAR_MULTIPLE = 8
_COMPILES, _DOES_NOT = re.compile(r"torch[._]compile\b"), re.compile(r"no.?compile|compile\W+(false|0|no)\b", re.I)


@dataclass(frozen=True)
class Predicted:
    """Before the first trial: both predictions, and what the child's interpreter said of itself.

    Attributes:
        guess: a largest batch size to try first, where traces are no affine form; None for none.
        is_near: whether that comes of traces which are affine but for some bytes.
        multiple: the batch sizes that are worth a trial are multiples of it.
        samples: the largest batch that the data has; 0 where that is not known.
        traced_at: the largest size that ran as the step was traced; 0 for none.
        settled: a command's own search for a larger batch than it was given, and what that found; None for none.
    """

    prediction: Prediction
    ready: Ready
    guess: int | None = None
    multiple: int = 1
    is_near: bool = False
    samples: int = 0
    traced_at: int = 0
    settled: RanOut | None = None


@dataclass(frozen=True)
class TraceProgress:
    """The command is run to be traced at a batch size. `sample`: of the phase that begins; None as the run does."""

    batch_size: int
    sample: Sample | None = None


WhileTracing = Output | TraceProgress
"""The events while a command is traced."""


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
    """Trace a step. Yields what happens meanwhile to a command of the user's, and last what is predicted."""
    found: Predicted | None = None
    with closing(SideBySide(config.terms, control)) as runner:
        for event in _tracing(_Traces(config, runner), batch_size, not_affine):
            if isinstance(event, Predicted):
                found = event
            elif config.workload.command is not None:
                yield event
    assert found is not None, "it is predicted, or an error is raised"
    even = None if not_affine else with_even_passes(config, found.prediction.traced)
    with suppress(Unusable, ChildDied):
        for event in () if even is None else predicting(even, control):
            if isinstance(event, Predicted):
                prediction = joined(found.prediction, event.prediction, batch_size, config.target_batch or 0)
                found = replace(found if prediction is found.prediction else event, prediction=prediction)
            else:
                yield event
    yield found


@dataclass
class _Traces:
    """The runs that are traced, one for each batch size; `refused` shows what it ended in at others.

    Attributes:
        whole: of the network that these stand for; None for none.
        end: which end they take of rows that only a GPU's values tell.
        dies: a command ends where memory runs out first, so that nothing is learnt of others but what they need.
    """

    config: SearchConfig
    runner: SideBySide
    runs: dict[int, tuple[Ready, TraceDone]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    takes_many: bool = True
    whole: _Traces | None = None
    end: End = "most"
    dies: bool = False
    heard: Ready | None = None

    @property
    def ready(self) -> Ready | None:
        """The report of the first process that was traced, else of the last one; None before."""
        return next((ready for ready, _ in self.runs.values()), self.heard)

    def request(self, size: int) -> TraceRequest:
        """Return what asks for a run."""
        config = self.config
        gpu, limit_bytes = config.device.gpu, config.limit_bytes
        ooms = None if config.workload.command is not None and not self.dies else 0
        return TraceRequest(config.workload, gpu, config.steps, size, config.change, self.end, limit_bytes, ooms)

    def run(self, size: int, then: TraceRequest | None = None) -> Iterator[WhileTracing]:
        """Run it at a batch size, and meanwhile what is asked for next if there is room.

        A command that ends as memory runs out is run once more on a device that then has no end, for what it needs.

        Raises:
            Unusable: it cannot be traced.
        """
        request: TraceRequest | None = self.request(size)
        while request is not None:
            died = yield from self._run(request, then)
            request, then = None if died is None else replace(request, ooms=died.ooms - 1), None
            self.dies = self.dies or (request is not None and request.ooms == 0)

    def _run(self, request: TraceRequest, then: TraceRequest | None) -> Generator[WhileTracing, None, Failed | None]:
        """Run it, and return that it ended as memory ran out; None where it made its steps."""
        size = request.batch_size
        yield TraceProgress(size)
        ready: Ready | None = None
        for event in self.runner.converse(request, then):
            if isinstance(event, Ready):
                ready = event
                (self.whole or self).heard = event
            elif isinstance(event, Output):
                yield event
            elif isinstance(event, Sample):
                yield TraceProgress(size, event)
            elif isinstance(event, TraceDone) and ready is not None:
                self.runs[size] = ready, event
            elif isinstance(event, Failed) and event.kind == "memory":
                return event
            elif isinstance(event, Failed):
                raise Unusable(event)
        return None

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

    @property
    def samples(self) -> int:
        """The largest batch that the data has, by the loaders whose batches grow with it; 0 where that is not known.

        Loaders whose samples grow with the batch, too, make so many batches of any size. Some count whole batches.
        Loaders that draw by a rate draw all if more are asked for.
        """
        fed_by = {
            size: done.fed_by
            for size, (_, done) in self.runs.items()
            if all(batch != samples or samples >= size for samples, batch in done.fed_by)
        }
        if not fed_by or not self.config.workload.takes_batch:
            return 0
        last = max(fed_by)
        grow = (
            (samples, batch)
            for place, (samples, batch) in enumerate(fed_by[last])
            if all(
                len(fed) > place
                and fed[place][1] * last == batch * size
                and (fed[place][0] == samples or abs(fed[place][0] - samples) < batch < samples / 2)
                for size, fed in fed_by.items()
            )
        )
        return min((samples * last // batch for samples, batch in grow), default=0)

    @property
    def settled(self) -> RanOut | None:
        """The search that the command makes from any batch for a larger one that fits; None where it makes none."""
        found = [(size, done.ran_out) for size, (_, done) in self.runs.items()]
        if not self.config.workload.takes_batch or not found:
            return None
        looks = all(one is not None and one.tried and (one.settled or 0) > size for size, one in found)
        return found[-1][1] if looks else None

    def pair(self, then: TraceRequest | None) -> Generator[WhileTracing, None, tuple[int, int]]:
        """Run two sizes that the command takes, and return them: what it ends at, a multiple of 2, 4 or 8 may mend.

        Args:
            then: what is asked for after these; None for nothing.

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
                for size, following in ((first, self.request(second)), (second, then)):
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
        """The sizes that the command takes, as far as known: where it ran at none, those that suit most programs."""
        given = Sizes(self.config.batch_multiple)
        return given.without(self.refused) if self.runs or not self.refused else replace(given, multiple=_MOST_MULTIPLE)

    def fit(self, checked: int | None) -> Generator[WhileTracing, None, Traced]:
        """Run two sizes, which give the affine form, and `checked`, which checks it; return the trace.

        Raises:
            NotAffine: the runs are of no such form.
        """
        first, second = yield from self.pair(None if checked is None else self.request(checked))
        if checked in (first, second) or (checked is not None and 0 < self.samples < checked):
            checked = CHECKED_BATCH_SIZE if second == TRACED_BATCH_SIZES[1] else 2 * second
        if checked is not None:
            yield from self.run(checked)
        if any(done.ran_out for _, done in self.runs.values()):
            raise NotAffine("where memory runs out the command continues with less")
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
        done = replace(done, trace=trace, only_at=0, batch_multiple=self.sizes.multiple, notes=notes)
        return self.config.traced(ready, replace(done, samples=self.samples))

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
        yield from self.run(small, self.request(large))
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
        """Return whether it is compiled: a script of a command names `torch.compile`, and no word switches that off."""
        command = self.config.workload.command
        if command is None:
            return self.config.workload.recipe.compile
        if not self.takes_many or any(map(_DOES_NOT.search, command.words)):
            return False
        scripts = (Path(command.cwd, word) for word in command.words if word.endswith(".py"))
        return any(_COMPILES.search(path.read_text(errors="replace")) for path in scripts if path.is_file())

    @property
    def refusal(self) -> str:
        """Why only multiples are traced; "" where all sizes are."""
        ends = (f"at {size} the command ends in {why}" for size, why in self.refused.items())
        return f"traced at multiples of {self.sizes.multiple}: {'; '.join(ends)}" if self.refused else ""


def _tracing(traces: _Traces, batch_size: int | None, not_affine: str) -> Iterator[Predicted | WhileTracing]:
    """Trace it: at the batch size asked for alone, or as an affine form of the batch, which that size checks."""
    config = traces.config
    found: Traced | Unknown
    guess, is_near = None, False
    try:
        if reason := _only_at(config.workload, batch_size, not_affine):
            found = yield from _alone(traces, batch_size or 1, reason)
        else:
            found, guess, is_near = yield from _affine(traces, batch_size)
    except Unusable as error:
        if traces.ready is None or not config.others_answer(error.kind):
            raise
        found = Unknown(str(error))
    except ChildDied as death:
        if traces.ready is None or not config.others_answer("workload"):
            raise
        found = Unknown(f"tracing failed: {death}")
    assert traces.ready is not None
    if isinstance(found, Traced) and config.change in ("", PROPOSE):
        found = yield from _with_other_values(traces, found)
    prediction, ran = Prediction(config.formula, found), max(traces.runs, default=0)
    ready, multiple, samples = traces.ready, traces.sizes.multiple, traces.samples
    yield Predicted(prediction, ready, guess, multiple, is_near, samples, ran, traces.settled)


def _with_other_values(traces: _Traces, most: Traced) -> Generator[WhileTracing, None, Traced]:
    """Trace it once more where only a GPU's values tell sizes, with other numbers and with fewer rows; return one.

    Raises:
        Unusable: something is sized by a number that nothing bounds.
    """
    unbounded = tuple(one for one in most.done.assumptions if one.kind == "number")
    others = tuple(one for one in most.done.assumptions if one.kind != "number")
    if unbounded:
        most = yield from _with_other_numbers(traces, most, unbounded)
    if others:
        most = yield from _with_fewest(traces, most)
    return most


def _without(traced: Traced, *kinds: Kind) -> Traced:
    """Return a trace without what it assumes of numbers that a program reads, as these size nothing."""
    read = [one for one in traced.done.assumptions if one.kind in kinds]
    notes = tuple(one for one in traced.done.notes if one not in [each.words for each in read])
    assumptions = tuple(one for one in traced.done.assumptions if one not in read)
    return replace(traced, done=replace(traced.done, assumptions=assumptions, notes=notes))


def _other(traces: _Traces, end: End) -> _Traces:
    return replace(traces, config=replace(traces.config, change=""), runs={}, refused={}, end=end)


def _with_other_numbers(
    traces: _Traces, most: Traced, unbounded: tuple[Assumption, ...]
) -> Generator[WhileTracing, None, Traced]:
    """Trace it with other numbers where nothing bounds those that a program reads; return it without these if alike.

    Raises:
        Unusable: something is sized by one of them.
    """
    size = most.done.only_at or max(traces.runs)
    others, again = _other(traces, "otherwise"), _other(traces, "most")
    try:
        yield from others.run(size)
        own, other = traces.at(size), others.at(size)
        if other.is_alike(own):
            return _without(most, "number")
        if other.sizes == own.sizes and others.alone(size).reserved_bytes(size) <= most.reserved_bytes(size):
            return _without(most, "number")  # only released elsewhere, as when Python collects cycles
        yield from again.run(size)  # do two runs differ anyway, as of random lengths?
    except (Unusable, ChildDied) as error:
        return most.without_fewest(str(error))
    if again.at(size).is_alike(traces.at(size)):
        first, *more = unbounded
        others_read = "".join(f" or at {one.place}" for one in more)
        raise Unusable(Failed("workload", f"{_UNBOUNDED}, read at {first.place} ({first.remedy}){others_read}"))
    peaks = [one.alone(size).reserved_bytes(size) for one in (traces, again)]
    if min(peaks) <= others.alone(size).reserved_bytes(size) <= max(peaks):
        return _without(most, "number")
    return most.without_fewest("runs differ at any number read")


def _with_fewest(traces: _Traces, most: Traced) -> Generator[WhileTracing, None, Traced]:
    """Trace it once more with the fewest rows where only a GPU's values tell how many are kept; return both as one.

    One run is enough where the two are alike: what is assumed changes no size.
    """
    others = _other(traces, "fewest")
    size = most.done.only_at or max(traces.runs)  # at one or two samples few rows may be all
    try:
        yield from others.run(size)
        if others.at(size).is_alike(traces.at(size)):
            return _without(most, "count", "place")
        if most.done.only_at:
            return most.beside(others.alone(size, most.done.not_affine))
        return most.beside((yield from others.fit(None)))
    except (Unusable, ChildDied, NotAffine) as error:
        return most.without_fewest(str(error))


def _only_at(workload: WorkloadSpec, batch_size: int | None, not_affine: str) -> str:
    """Say why one batch size is traced alone; empty for an affine form."""
    if not_affine:
        return not_affine
    if not workload.takes_batch:
        return f"the command has no {BATCH} to vary the batch size by"
    return _COMPILED if workload.command is None and workload.recipe.compile and batch_size is not None else ""


def _alone(traces: _Traces, size: int, reason: str) -> Generator[WhileTracing, None, Traced]:
    """Trace one batch size alone."""
    try:
        return (yield from _shallow(traces, size, reason))
    except NotRepeating:
        yield from traces.run(size)
        return traces.alone(size, reason)


def _affine(
    traces: _Traces, batch_size: int | None
) -> Generator[WhileTracing, None, tuple[Traced | Unknown, int | None, bool]]:
    """Trace all batch sizes, else the one that is asked for, else guess a largest one, and say whether it is near."""
    with suppress(NotRepeating, NotAffine):
        return (yield from _shallow(traces, batch_size)), None, False
    try:
        return (yield from traces.fit(batch_size)), None, False
    except NotAffine as found_out:
        error = NotAffine.in_parts(traces.rows) if traces.rows else found_out
    if batch_size is not None:
        if batch_size not in traces.runs:  # as its data has fewer samples
            yield from traces.run(batch_size)
        return traces.alone(batch_size, str(error)), None, False
    sizes = error.sizes if traces.rows else tuple(traces.runs)[:2]
    for size in sizes:
        if size not in traces.runs:
            yield from traces.run(size)
    untraced = Unknown("; ".join(filter(None, [str(error), traces.refusal])))
    if sizes == COMPILED_BATCH_SIZES and (near := traces.nearly(*sizes, must_be_alike=True)):
        return untraced, near, True
    return untraced, traces.guess(sizes), False


def _shallow(traces: _Traces, batch_size: int | None, only_at: str = "") -> Generator[WhileTracing, None, Traced]:
    """Trace a deep network of the catalog by three shallow ones of the same layers, in a fraction of the time.

    Two tell what a layer adds, and the third, at another batch size, must be exactly as these predict.

    Args:
        only_at: why one batch size is traced alone; empty for an affine form.

    Raises:
        NotRepeating, NotAffine: it is no such network; it is to be traced itself.
    """
    config, shape = traces.config, traces.config.workload.shape
    least = 0 if shape is None or config.workload.command is not None else shallow_layers(shape, config.workload.recipe)
    if shape is None or not least:
        raise NotRepeating("not a deep network of the catalog")
    depths = least, least + 1, least + 2
    one, two, three = (
        _Traces(
            replace(config, workload=replace(config.workload, shape=replace(shape, layers=depth))),
            traces.runner,
            whole=traces,
        )
        for depth in depths
    )

    def deep(trace: AffineTrace, size: int, checked: int) -> Generator[WhileTracing, None, AffineTrace]:
        if size not in two.runs:
            yield from two.run(size, three.request(checked))
        yield from three.run(checked)
        if one.rows:
            raise NotRepeating("the step cuts its batch into parts")
        shallow = one.at(size), two.at(size), three.at(checked)
        return deepened(trace, shallow, checked, shape.layers - least)

    if only_at:
        assert batch_size is not None
        first = second = batch_size
        yield from one.run(first, two.request(first))
        trace = AffineTrace.constant(one.at(first))
        found = yield from deep(trace, first, first)
    else:
        first, second = yield from one.pair(two.request(TRACED_BATCH_SIZES[0]))
        trace = AffineTrace.fit((first, one.at(first)), (second, one.at(second)))
        found = yield from deep(trace, first, CHECKED_BATCH_SIZE * first // TRACED_BATCH_SIZES[0])
        if batch_size == 1:
            yield from one.run(1, two.request(1))
            if not trace.holds(1, one.at(1)):
                single = yield from deep(AffineTrace.constant(one.at(1)), 1, 1)
                found = replace(found, apart=((1, single.at(1)),))
    traces.runs.update(one.runs)
    ready, done = one.runs[second]
    assumed = deepened_assumed(done.assumed, two.runs[first][1].assumed, shape.layers - least)
    at = first if only_at else 0
    told = replace(done, trace=found, assumed=assumed, only_at=at, not_affine=only_at)
    return config.traced(ready, replace(told, traced_layers=depths))


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
            return (yield from _Traces(config, runner).between(small, large))
    return None


def _extrapolated(peaks: Sequence[tuple[int, int]], config: SearchConfig, ready: Ready) -> int | None:
    """Find where the line through two runs' allocated peaks meets the device's capacity; None if it does not rise."""
    (size, peak), (other, other_peak) = peaks
    slope = (other_peak - peak) / (other - size)
    capacity = config.device.gpu.cuda_total_bytes - ready.context_bytes
    capacity = min(capacity, config.limit_bytes or capacity)
    return size + max(0, int((capacity - peak) / slope)) if slope > 0 else None
