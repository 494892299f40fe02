"""The search: predict, then run trials in child processes until a size ran and the next one did not fit.

`search` is a generator of events; the screen, the plain log and the JSON lines are three readers of it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.exit_codes import EXIT_BAD_INPUT, EXIT_FAILED
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.search import strategy, verdict
from gpumem_tui.search.command import CommandProcess
from gpumem_tui.search.events import (
    Failed,
    Output,
    Ready,
    Request,
    Sample,
    TraceDone,
    TraceRequest,
    TrialDone,
    TrialRequest,
)
from gpumem_tui.search.headroom import Room, with_headroom
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.search.process import CannotStart, ChildDied, ChildProcess
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.simulator.replay import AffineTrace, NotAffine
from gpumem_tui.simulator.settings import AllocatorSettings
from gpumem_tui.workload.command import BATCH, Command
from gpumem_tui.workload.spec import WorkloadSpec

TRACED_BATCH_SIZES, CHECKED = (2, 3), 5
_TRACED_ACCUMULATION = 2


@dataclass(frozen=True)
class Device:
    """Where to search. `uuid` is the real GPU's; `reason` says why a simulated one was taken ("": it was asked for).

    `others_bytes` is what other processes hold on it: a search beside them stays within what they leave. `more_uuids`
    are the further GPUs of a command that starts several ranks.
    """

    gpu: Gpu
    simulated: bool
    uuid: str | None = None
    reason: str = ""
    others_bytes: int = 0
    more_uuids: tuple[str, ...] = ()

    @property
    def measured_title(self) -> str:
        """The heading over what trials report: nothing simulated is ever called measured."""
        return "Simulated" if self.simulated else "Measured"


@dataclass(frozen=True)
class SearchConfig:
    """Everything a search needs to know.

    Attributes:
        python: the interpreter that trials run under; this one unless told otherwise.
        steps: full training steps a trial runs; three show lazily made state and steady reuse.
        limit_bytes: cap on what the allocator may reserve; None for the whole device.
        ramp_step: a ramp's step; None for one that suits the prediction.
        timeout_s: a trial silent for longer than this hangs.
        target_batch: samples wanted per optimizer step over all GPUs; None for no wish. No trial depends on it.
        change: to be made to a command while it is traced, as `TraceRequest` has it.
    """

    workload: WorkloadSpec
    device: Device
    strategy: strategy.Name = "guided"
    python: str = sys.executable
    steps: int = 3
    limit_bytes: int | None = None
    headroom: float = DEFAULT_HEADROOM
    ramp_step: int | None = None
    timeout_s: float = 300.0
    target_batch: int | None = None
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    change: str = ""

    @property
    def room(self) -> Room:
        """The memory there is to search in."""
        return Room(self.device.gpu, self.limit_bytes)

    @property
    def formula(self) -> Formula:
        """The closed form of what is searched."""
        return Formula(self.workload, self.room.total_bytes, self.headroom)

    @property
    def where(self) -> str:
        """The device and the cap on it, in words."""
        limit = f" limited to {format_bytes(self.limit_bytes)}" if self.limit_bytes is not None else ""
        return f"{'simulated ' if self.device.simulated else ''}{self.device.gpu.title}{limit}"


@dataclass(frozen=True)
class Predicted:
    """Before the first trial: both predictions, and what the child's interpreter said of itself.

    Attributes:
        guess: a largest batch size to try first, where a command's traces are no affine form; None for none.
    """

    prediction: Prediction
    ready: Ready
    guess: int | None = None


@dataclass(frozen=True)
class CommandOutput:
    """A line that the user's command printed."""

    text: str


@dataclass(frozen=True)
class TraceStarted:
    """The command is run to be traced, at one batch size."""

    batch_size: int


@dataclass(frozen=True)
class TrialStarted:
    """Trial `number` (from 1) begins."""

    number: int
    batch_size: int


@dataclass(frozen=True)
class TrialProgress:
    """A phase of the running trial begins."""

    number: int
    batch_size: int
    sample: Sample


@dataclass(frozen=True)
class TrialFinished:
    """The outcome of trial `number`."""

    number: int
    result: TrialDone


@dataclass(frozen=True)
class SearchFinished:
    """The last event of every search."""

    verdict: Verdict


SearchEvent = Predicted | CommandOutput | TraceStarted | TrialStarted | TrialProgress | TrialFinished | SearchFinished


Child = ChildProcess | CommandProcess


class Cancelled(Exception):
    """The user ended the search."""


class Unusable(Exception):
    """The search cannot start: torch, the workload or the device is not what was promised; one clear line."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.detail)
        self.kind = failure.kind

    @property
    def exit_code(self) -> int:
        """The user's options or files are wrong; or a device or a trace fails."""
        return EXIT_BAD_INPUT if self.kind in ("workload", "torch") else EXIT_FAILED


class Control:
    """The user's hand on a running search; safe to use from another thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._paused = False

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._paused

    def cancel(self) -> None:
        """End the search now; the running trial is killed."""
        self._cancelled.set()

    def pause(self) -> None:
        """Hold the search after the step that is running."""
        with self._lock:
            self._paused = True
            if self._child is not None:
                self._child.pause()

    def resume(self) -> None:
        """Go on after a pause."""
        with self._lock:
            self._paused = False
            if self._child is not None:
                self._child.resume()

    def check(self) -> None:
        """Raise Cancelled if the user ended the search."""
        if self._cancelled.is_set():
            raise Cancelled

    @contextmanager
    def running(self, child: Child) -> Iterator[None]:
        """Commands go to `child` within the context; it is ended after it, whatever happens."""
        with self._lock:
            self._child = child
            if self._paused:
                child.pause()
        try:
            yield
        finally:
            with self._lock:
                self._child = None
            child.end()


def predict(
    config: SearchConfig,
    control: Control | None = None,
    batch_size: int | None = None,
    not_affine: str = "",
    watch: Callable[[CommandOutput | TraceStarted], None] = lambda event: None,
) -> Predicted:
    """Both predictions, the traced one from a child process.

    Args:
        batch_size: where memory does not grow evenly with the batch, trace this size alone; None: do without a trace.
        not_affine: why it does not, as an earlier trace said: spares finding out again.
        watch: called with what a command prints.

    Raises:
        Unusable: no torch there, or a workload that cannot be built.
        ChildDied, Cancelled: the child crashed; the user ended it.
    """
    found: Predicted | None = None
    for event in _predicting(config, control or Control(), batch_size, not_affine):
        if isinstance(event, Predicted):
            found = event
        else:
            watch(event)
    assert found is not None
    return found


def _predicting(
    config: SearchConfig, control: Control, batch_size: int | None = None, not_affine: str = ""
) -> Iterator[Predicted | CommandOutput | TraceStarted]:
    """What happens while a step is traced; ends with what is predicted."""
    if config.workload.command is not None:
        yield from _tracing_command(config, control, batch_size, not_affine)
        return
    ready: Ready | None = None
    traced: Traced | Unknown = Unknown("the trace ended early")
    request = TraceRequest(config.workload, config.device.gpu, config.steps, batch_size, not_affine)
    try:
        for event in _converse(request, config, control):
            if isinstance(event, Ready):
                ready = event
            elif isinstance(event, TraceDone) and ready is not None:
                traced = Traced.of(ready, event, config.device.gpu, config.limit_bytes, config.allocator)
            elif isinstance(event, Failed):
                traced = _untraced(event, config)
    except ChildDied as death:
        if ready is None:
            raise _no_python(config, str(death)) from death
        if config.workload.shape is None and config.device.simulated:
            raise
        traced = Unknown(f"tracing failed: {death}")
    if ready is None:
        raise _no_python(config, "without a word")
    yield Predicted(Prediction(config.formula, traced), ready)


def _tracing_command(
    config: SearchConfig, control: Control, batch_size: int | None, not_affine: str
) -> Iterator[Predicted | CommandOutput | TraceStarted]:
    """A command is run once for each batch size that is traced.

    Two sizes give the affine form; a third one checks it, and is the size asked for where there is one.
    """
    command = config.workload.command
    assert command is not None
    runs: dict[int, tuple[Ready, TraceDone]] = {}

    def run(size: int) -> Iterator[CommandOutput | TraceStarted]:
        yield TraceStarted(size)
        ready: Ready | None = None
        request = TraceRequest(config.workload, config.device.gpu, config.steps, size, change=config.change)
        for event in _converse(request, config, control):
            if isinstance(event, Ready):
                ready = event
            elif isinstance(event, Output):
                yield CommandOutput(event.text)
            elif isinstance(event, TraceDone) and ready is not None:
                runs[size] = ready, event
            elif isinstance(event, Failed):
                raise Unusable(event)

    def traced(size: int, trace: AffineTrace | None, reason: str) -> Traced:
        ready, done = runs[size]
        if trace is None:
            done = replace(done, only_at=size, not_affine=reason)
        else:
            flat = TraceDone.of(trace, done.seconds, done.assumed, notes=done.notes)
            done = replace(flat, changes=done.changes, is_sharded=done.is_sharded)
        return Traced.of(ready, done, config.device.gpu, config.limit_bytes, config.allocator)

    found: Traced | Unknown
    guess: int | None = None
    if not command.takes_batch or not_affine:
        size = batch_size or 1
        yield from run(size)
        found = traced(size, None, not_affine or f"the command has no {BATCH} to vary the batch size by")
    else:
        checked = None if batch_size is None else batch_size if batch_size not in TRACED_BATCH_SIZES else CHECKED
        for size in TRACED_BATCH_SIZES:
            yield from run(size)
        if checked is not None:
            yield from run(checked)
        first, second = ((size, runs[size][1].trace.at(size)) for size in TRACED_BATCH_SIZES)
        try:
            trace = AffineTrace.fit(first, second)
            if checked is not None:
                trace.check(checked, runs[checked][1].trace.at(checked))
            found = traced(second[0], trace, "")
        except NotAffine as error:
            found = Unknown(str(error)) if batch_size is None else traced(batch_size, None, str(error))
            guess = _extrapolated([traced(size, None, "") for size in TRACED_BATCH_SIZES])
    ready = next(iter(runs.values()))[0]
    yield Predicted(Prediction(config.formula, found), ready, guess)


def _extrapolated(runs: Sequence[Traced]) -> int | None:
    """Where the line through two runs' allocated peaks meets the device's capacity; None if it does not rise."""
    (size, peak), (other, other_peak) = ((run.only_at, run.at(run.only_at).peak_allocated_bytes) for run in runs)
    slope = (other_peak - peak) / (other - size)
    capacity = min(runs[0].capacity_bytes, runs[0].allowed_bytes or runs[0].capacity_bytes)
    return size + max(0, int((capacity - peak) / slope)) if slope > 0 else None


def _no_python(config: SearchConfig, death: str) -> Unusable:
    ended = f"{config.python} ended before it had imported torch ({death})"
    return Unusable(Failed("torch", f"{ended}: give --python the interpreter you train in"))


def _untraced(event: Failed, config: SearchConfig) -> Unknown:
    """Why there is no trace, where others still answer: the formula for a catalog model, trials on a real GPU."""
    others = config.workload.shape is not None or not config.device.simulated
    if event.kind == "trace" or (event.kind == "workload" and others):
        return Unknown(event.detail)
    raise Unusable(event)


def search(config: SearchConfig, control: Control | None = None) -> Iterator[SearchEvent]:
    """Find the largest batch size that runs; the last event is always `SearchFinished`.

    Raises:
        Unusable: the search cannot start, or the device refuses.
    """
    control = control or Control()
    results: list[TrialDone] = []
    try:
        for event in _predicting(config, control):
            yield event
            if isinstance(event, Predicted):
                predicted = event
        settings = _strategy_settings(config, predicted)
        traced = predicted.prediction.traced
        grows = traced.grows if isinstance(traced, Traced) else None
        while (size := strategy.next_size(verdict.tried(results), settings)) is not None:
            yield from _trial(size, config, control, results)
            settings = replace(settings, floor=verdict.floor(results))
            if verdict.hopeless(results) or (grows is False and results[-1].outcome == "fit"):
                break
        concluded = verdict.concluded(results, config.where, grows)
        if concluded.outcome == "found":
            roomy = with_headroom(config.room, config.headroom, traced, results, concluded.max_batch_size)
            concluded = replace(concluded, with_headroom=roomy)
        yield SearchFinished(concluded)
    except Cancelled:
        yield SearchFinished(verdict.cancelled(results))
    except Unusable as failure:
        if not results:
            raise
        yield SearchFinished(verdict.failed(results, str(failure)))
    except ChildDied as death:
        yield SearchFinished(verdict.failed(results, f"tracing failed: {death}"))


def _trial(size: int, config: SearchConfig, control: Control, results: list[TrialDone]) -> Iterator[SearchEvent]:
    """One size in a fresh process; a second try if the process died rather than failed."""
    for attempt in (1, 2):
        number = len(results) + 1
        yield TrialStarted(number, size)
        result: TrialDone | None = None
        died = "the trial ended without a word"
        try:
            for event in _converse(_trial_request(size, config), config, control):
                if isinstance(event, Sample):
                    yield TrialProgress(number, size, event)
                elif isinstance(event, Output):
                    yield CommandOutput(event.text)
                elif isinstance(event, TrialDone):
                    result = event
                elif isinstance(event, Failed) and config.workload.command is not None and event.kind == "workload":
                    result = _failed_run(size, event)
                elif isinstance(event, Failed):
                    raise Unusable(event)
        except ChildDied as death:
            died = str(death)
        finished = result or _dead(size, died)
        results.append(finished)
        yield TrialFinished(number, finished)
        if result is not None or attempt == 2:
            return


def _trial_request(size: int, config: SearchConfig) -> TrialRequest:
    device = config.device
    return TrialRequest(
        workload=config.workload,
        gpu=device.gpu,
        simulated=device.simulated,
        batch_size=size,
        steps=config.steps,
        limit_bytes=config.limit_bytes,
        others_bytes=device.others_bytes,
    )


def _converse(request: Request, config: SearchConfig, control: Control) -> Iterator[object]:
    control.check()
    child: Child
    command = config.workload.command
    try:
        if command is None:
            child = ChildProcess(request, config.python, config.device.uuid)
        else:
            child = _command_process(command, request, config)
    except CannotStart as error:
        raise Unusable(Failed("torch", str(error))) from error
    with control.running(child):
        yield from child.events(control.check, config.timeout_s, lambda: control.paused)


def _command_process(command: Command, request: Request, config: SearchConfig) -> CommandProcess:
    """The command as it runs at the requested batch size.

    A trace accumulates twice at most: a third micro-batch holds what the second held.
    """
    size = request.batch_size or 1
    accumulation = command.accumulation(size, config.target_batch, config.workload.recipe.gpus)
    if isinstance(request, TraceRequest):
        accumulation = min(accumulation, _TRACED_ACCUMULATION)
    real = isinstance(request, TrialRequest) and not request.simulated
    uuids = (config.device.uuid, *config.device.more_uuids) if real and config.device.uuid is not None else ()
    return CommandProcess(request, command.filled(size, accumulation), uuids)


def _failed_run(size: int, failure: Failed) -> TrialDone:
    """A run of the command that ended in an error of its own."""
    return TrialDone(size, "error", 0, 0, 0, {}, "", 0.0, 0, detail=failure.detail)


def _dead(size: int, detail: str) -> TrialDone:
    return TrialDone(size, "error", 0, 0, 0, None, "the trial process died", 0.0, 0, detail=detail)


def _strategy_settings(config: SearchConfig, predicted: Predicted) -> strategy.Settings:
    capacity = config.device.gpu.cuda_total_bytes - predicted.ready.context_bytes
    return strategy.Settings(
        strategy=config.strategy,
        predicted=predicted.prediction.best_max_batch_size or predicted.guess,
        capacity_bytes=min(capacity, config.limit_bytes or capacity),
        step=config.ramp_step,
    )
