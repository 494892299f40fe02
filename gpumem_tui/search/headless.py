"""A search or a prediction without a screen: lines or JSON on stdout, progress on stderr if that is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED, RunError
from gpumem_tui.memory import Unknown
from gpumem_tui.report.output import Printer, Progress, complain, interrupts, note
from gpumem_tui.run.children import ChildDied, side_effects
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import Ready, Sample, TrialDone
from gpumem_tui.search import report
from gpumem_tui.search.budget import Gate, GateTerms, footprint
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted, TraceProgress, WhileTracing, predict
from gpumem_tui.search.prediction import Prediction
from gpumem_tui.search.printed import PredictObject, ResultLine, TrialLine
from gpumem_tui.search.runner import TrialFinished, TrialProgress, search
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.search.words import how_far


class CommandLog:
    """The output of a command, on stderr and marked as its own, so that stdout is the program's alone.

    Args:
        progress: the line that is under way on stderr, to be cleared first.
        batch_size: that is predicted: the formula's answer is there until the traced one is; None for no such.
    """

    def __init__(
        self, config: SearchConfig, *, quiet: bool, progress: Progress | None = None, batch_size: int | None = None
    ) -> None:
        self._by_formula = "" if batch_size is None else report.formula_takes(config.formula, batch_size)
        self._quiet = quiet or config.workload.hugging_face is not None
        self._workload = config.workload
        self._progress = progress or Progress()
        self._begun = ""
        self._reached: tuple[int, Sample, float] | None = None
        if config.workload.command is not None and not self._quiet:
            complain(side_effects(config.steps), 0)

    def show(self, event: WhileTracing) -> None:
        """Show a line that the command printed, that it is being run again, or how far it has come."""
        if isinstance(event, TraceProgress) and event.sample is not None:
            self._reached = event.batch_size, event.sample, time.monotonic()
            self._progress.say(self._line())
            return
        if isinstance(event, TraceProgress):
            self._begun, self._reached = f"tracing {self._workload.batch_words(event.batch_size)}", None
            if not self._quiet and not self._progress.is_shown:
                note(self._begun)
        elif not self._quiet:
            self._progress.clear()
            note(f"  | {event.text}")

    def following(self) -> AbstractContextManager[None]:
        """Show each second what is under way."""
        return self._progress.follow(self._line)

    def _line(self, elapsed_s: float = 0.0) -> str:
        if self._reached is None:
            known = f"{self._by_formula}; tracing" if self._by_formula else ""
            begun = f"{self._begun}, before its first step" if self._begun else ""
            return f"{known or begun or f'starting PyTorch for {self._workload.name}'} … {elapsed_s:.0f} s"
        batch_size, sample, told_s = self._reached
        at, since_s = sample.progress, time.monotonic() - told_s
        left_s = None if at.left_s is None else max(0.0, at.left_s - since_s)
        now = replace(sample, progress=replace(at, elapsed_s=at.elapsed_s + since_s, left_s=left_s))
        return f"tracing {self._workload.batch_words(batch_size)}, {how_far(now)}"


Advise = Callable[[SearchConfig], tuple[str, list[str]]]


def run(config: SearchConfig, advise: Advise, *, as_json: bool, quiet: bool = False) -> int:
    """Search, print, and return the exit code. Ctrl-C cancels the search, and its verdict is printed like any other.

    Args:
        advise: the change that would help most where nothing fits, and lines on that and others.
        quiet: do not show what a command prints.
    """
    control = Control()
    with interrupts(control.cancel):
        printer = _Printer(config, advise, as_json=as_json, quiet=quiet)
        log = CommandLog(config, quiet=quiet, progress=printer.progress)
        verdict: Verdict | None = None
        try:
            with ExitStack() as tracing:
                tracing.enter_context(log.following())
                for event in search(config, control):
                    if isinstance(event, WhileTracing):
                        log.show(event)
                        continue
                    tracing.close()
                    if isinstance(event, Verdict):
                        verdict = event
                    else:
                        printer.show(event)
        except Unusable as error:
            printer.release()
            return complain(unusable_words(config, error), error.exit_code)
        assert verdict is not None, "a search ends with a verdict"
        printer.finish(verdict)
        return verdict.exit_code


def predicted(
    config: SearchConfig, batch_size: int, control: Control, watch: Callable[[WhileTracing], None] = lambda _: None
) -> tuple[Prediction, Ready | None]:
    """Return both predictions and the tracer.

    Without a torch that traces, the closed form answers where there is one: None for what traced.

    Args:
        watch: called with what happens meanwhile.

    Raises:
        RunError: no prediction is possible.
        Cancelled: `control` has ended it.
    """
    try:
        found = predict(config, control, batch_size, watch=watch)
    except (Unusable, ChildDied) as error:
        if isinstance(error, Unusable) and error.kind == "torch" and config.workload.shape is not None:
            return Prediction(config.formula, Unknown(str(error))), None
        raise run_error(config, error) from error
    traced, formula = found.prediction.traced, found.prediction.formula
    if isinstance(traced, Unknown) and isinstance(formula.at(batch_size), Unknown):
        raise RunError(traced.reason, EXIT_BAD_INPUT)
    return found.prediction, found.ready


def show_prediction(  # noqa: PLR0913 - all that is printed
    config: SearchConfig,
    prediction: Prediction,
    ready: Ready | None,
    batch_size: int,
    by: str | None,
    *,
    explain: bool,
    as_json: bool,
    gate: Gate | None = None,
) -> None:
    """Print the prediction of a batch size.

    Args:
        ready: what traced; None if nothing did.
        by: also list what holds the traced peak, by ``module``, ``operator`` or ``source``.
        explain: also print what the figures rest on.
        gate: what it is held against; None for nothing.
    """

    def lines() -> Iterator[str]:
        yield from report.prediction_lines(config, prediction, ready, batch_size, by, explain=explain)
        if gate is not None:
            yield ""
            yield from gate.lines()

    Printer(as_json=as_json).show(body=lambda: PredictObject.of(config, prediction, batch_size, gate), lines=lines)


def gate_or_exit(config: SearchConfig, prediction: Prediction, batch_size: int, terms: GateTerms) -> Gate:
    """Hold a traced step against a budget and a baseline; where there is no trace, end the program and say why.

    Raises:
        OptionError: the baseline cannot be read, written or compared with.
    """
    if isinstance(prediction.traced, Unknown):
        said = f"there is no trace to hold against a budget or a baseline: {prediction.traced.reason}"
        raise SystemExit(complain(said, EXIT_FAILED))
    found = terms.held(footprint(config, prediction.traced, batch_size))
    if terms.baseline is not None and found.before is None:
        complain(f"--baseline {terms.baseline}: written; later predictions are compared with it", 0)
    return found


def run_error(config: SearchConfig, error: Unusable | ChildDied) -> RunError:
    """Return the line and the exit code for what ended a trace."""
    if isinstance(error, Unusable):
        return RunError(unusable_words(config, error), error.exit_code)
    return RunError(f"tracing failed: {error}")


def unusable_words(config: SearchConfig, error: Unusable) -> str:
    """Return why no step can run; if torch is missing, the formula's answer, or why there is no answer."""
    largest, model = config.formula.max_batch_size, config.workload.hugging_face
    if error.kind != "torch" or (isinstance(largest, Unknown) and model is None):
        return str(error)
    if isinstance(largest, Unknown):
        return f"{config.workload.name}: {largest.reason}, so transformers has to build it, and {error}"
    return f"{error}; by formula the largest batch is {largest:,}: `gpumem-tui predict` and `plan` answer without torch"


_BETWEEN_LINES_S = 10.0


class _TrialLog:
    """Lines on stderr for each trial, with the seconds since the search began.

    Where no progress is shown there, a trial has a line when it begins, and every 10 s.
    """

    def __init__(self, progress: Progress, *, is_shown: bool) -> None:
        self._progress, self._is_shown = progress, is_shown
        self._began_s = self._last_s = time.monotonic()

    def begin(self, number: int, batch_size: int) -> None:
        """Say that a trial begins."""
        if not self._progress.is_shown:
            self._say(f"trial {number}: batch {batch_size} …")

    def go_on(self, line: str) -> None:
        """Say how far it has come, if no line was written for long."""
        if not self._progress.is_shown and time.monotonic() - self._last_s >= _BETWEEN_LINES_S:
            self._say(line)

    def end(self, number: int, result: TrialDone) -> None:
        """Say how it has ended."""
        outcome = report.OUTCOME_WORDS[result.outcome]
        self._say(f"trial {number}: batch {result.batch_size} {outcome}, took {result.seconds:.1f} s")

    def _say(self, line: str) -> None:
        self._last_s = time.monotonic()
        if self._is_shown:
            self._progress.clear()
            note(f"{self._last_s - self._began_s:5.0f} s  {line}")


class _Printer:
    """Prints a search: as JSON as it continues, where the predictions come with the result.

    Lines are held until the answer is above them; trials are on stderr meanwhile.

    Attributes:
        progress: what is under way, on stderr.
    """

    def __init__(self, config: SearchConfig, advise: Advise, *, as_json: bool, quiet: bool) -> None:
        self._config = config
        self._advise = advise
        self._prediction: Prediction | None = None
        self._results: dict[int, TrialDone] = {}
        self._output = Printer(as_json=as_json)
        self.progress = self._output.progress
        self._held: list[str] | None = None if as_json else []
        self._trials = _TrialLog(self.progress, is_shown=not as_json and not quiet)
        self._log(lambda: report.begun_lines(config))

    def _log(self, lines: Callable[[], Iterable[str]], body: Callable[[], object] | None = None) -> None:
        if self._held is None:
            self._output.show(body=body, lines=lines)
        else:
            self._held += lines()

    def release(self) -> None:
        """Print the lines that were held."""
        held, self._held = self._held or (), None
        self._output.show(lines=lambda: held)

    def show(self, event: Predicted | TrialProgress | TrialFinished) -> None:
        """Print an event."""
        match event:
            case Predicted(prediction=prediction, ready=ready):
                self._prediction = prediction
                self._log(lambda: report.predicted_lines(prediction, ready))
            case TrialProgress(sample=None):
                self.progress.say(f"trial {event.number}: batch {event.batch_size} …")
                self._trials.begin(event.number, event.batch_size)
            case TrialProgress(sample=Sample() as sample):
                self.progress.say(line := f"trial {event.number}: batch {event.batch_size}, {how_far(sample)}")
                self._trials.go_on(line)
            case TrialFinished(number=number, result=result):
                self._results[result.batch_size] = result
                self._trials.end(number, result)
                self._log(
                    lambda: [report.trial_line(self._config, number, result, self._prediction)],
                    lambda: TrialLine.of(number, result, self._config.device),
                )

    def finish(self, verdict: Verdict) -> None:
        """Print how the search has ended."""
        config, prediction = self._config, self._prediction
        change, advice = self._advise(config) if verdict.outcome == "nothing_fits" else ("", [])
        largest = self._results.get(verdict.max_batch_size)
        if self._held is not None:
            self._held[:0] = report.verdict_lines(config, verdict, change)
        self.release()
        self._output.show(
            body=lambda: ResultLine.of(config, verdict, prediction, advice),
            lines=lambda: report.result_lines(config, verdict, prediction, largest, advice),
        )
