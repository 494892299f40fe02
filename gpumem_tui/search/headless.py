"""A search or a prediction without a screen: lines or JSON on stdout, progress on stderr if that is a terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gpumem_tui.memory import Unknown
from gpumem_tui.search import json_report, report
from gpumem_tui.search.command import SIDE_EFFECTS
from gpumem_tui.search.comparison import caveat
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.control import Control, Unusable
from gpumem_tui.search.ledger import ledger_lines, reserve_words
from gpumem_tui.search.predicting import CommandOutput, Predicted, TraceStarted
from gpumem_tui.search.prediction import Prediction, Traced
from gpumem_tui.search.ranges import found_line, range_line
from gpumem_tui.search.runner import SearchEvent, SearchFinished, TrialFinished, TrialProgress, TrialStarted, search
from gpumem_tui.search.verdict import Verdict
from gpumem_tui.trial.events import Ready, TrialDone


class CommandLog:
    """What a command prints, on stderr and marked as its own, so that stdout is the program's alone."""

    def __init__(self, config: SearchConfig, *, quiet: bool) -> None:
        self._quiet = quiet or config.workload.hugging_face is not None
        if config.workload.command is not None and not self._quiet:
            print(f"gpumem-tui: {SIDE_EFFECTS}", file=sys.stderr)

    def show(self, event: CommandOutput | TraceStarted) -> None:
        """Show a line that the command printed, or that it is being run again."""
        if self._quiet:
            return
        _progress("")
        if isinstance(event, TraceStarted):
            print(f"tracing batch size {event.batch_size}", file=sys.stderr, flush=True)
        else:
            print(f"  | {event.text}", file=sys.stderr, flush=True)


Advise = Callable[[SearchConfig], list[str]]
SearchFunction = Callable[[SearchConfig, Control], Iterator[SearchEvent]]


def run(
    config: SearchConfig,
    advise: Advise,
    *,
    as_json: bool,
    quiet: bool = False,
    search_function: SearchFunction = search,
) -> int:
    """Search, print, and return the exit code. Ctrl-C cancels the search, and its verdict is printed like any other.

    Args:
        advise: what would help where nothing fits.
        quiet: do not show what a command prints.
        search_function: the search, wherever it runs.
    """
    control = Control()
    before = signal.signal(signal.SIGINT, lambda *_: control.cancel())
    try:
        writer = _Json(config, advise) if as_json else _Plain(config, advise)
        return _run(search_function(config, control), config, CommandLog(config, quiet=quiet), writer)
    finally:
        signal.signal(signal.SIGINT, before)


def show_prediction(
    config: SearchConfig,
    prediction: Prediction,
    ready: Ready | None,
    batch_size: int,
    by: str | None,
    *,
    as_json: bool,
) -> None:
    """Print the prediction of a batch size.

    Args:
        ready: what traced; None if nothing did.
        by: also list what holds the traced peak, by ``module``, ``operator`` or ``source``.
    """
    if not as_json:
        for line in _prediction_lines(config, prediction, ready, batch_size, by):
            print(line)
        return
    body = json_report.prediction_json(config, prediction, batch_size)
    if (steps := json_report.wanted_accumulation(config, batch_size)) is not None:
        body["accumulation"] = json_report.accumulation_json(steps)
    print(json.dumps(body))


def _prediction_lines(
    config: SearchConfig, prediction: Prediction, ready: Ready | None, batch_size: int, by: str | None
) -> Iterator[str]:
    traced = prediction.traced
    where = report.device_line(config.device, config.limit_bytes)
    yield report.workload_line(config.workload, traced.parameters if isinstance(traced, Traced) else 0)
    by_what = "by formula only" if ready is None else f"torch {ready.torch_version}, profile {ready.profile}"
    yield f"on {where}, {by_what}"
    if config.workload.command is None or config.workload.command.takes_batch:
        yield report.predicted_line(prediction)
    yield from report.prediction_notes(prediction)
    yield from ledger_lines(config, prediction, None, batch_size)
    if isinstance(traced, Unknown) and (said := report.formula_fits_line(prediction.formula, batch_size)):
        yield said
    if isinstance(traced, Traced):
        yield report.peak_line(traced, batch_size)
        yield report.fits_line(config.workload, traced, batch_size)
        if said := range_line(traced.device_used_range(batch_size), traced.unknowns(batch_size)):
            yield said
        if note := report.sharding_line(config.workload.recipe):
            yield note
        yield f"CUDA context {report.context_words(traced)}"
        if config.device.gpu.reserves:
            yield f"driver reserve {reserve_words(config.device.gpu)}"
        if line := report.layers_line(traced):
            yield line
        yield from report.assumed_lines(traced)
        yield from traced.notes
        if by is not None:
            yield f"\nthe traced peak by {by}"
            yield from report.composition_lines(traced, batch_size, by)
    if (steps := json_report.wanted_accumulation(config, batch_size)) is not None:
        yield report.accumulation_line(config.workload, steps)


def _run(events: Iterator[SearchEvent], config: SearchConfig, log: CommandLog, writer: _Json | _Plain) -> int:
    prediction: Prediction | None = None
    results: dict[int, TrialDone] = {}
    verdict: Verdict | None = None
    try:
        for event in events:
            if isinstance(event, Predicted):
                prediction = event.prediction
                writer.predicted(event)
            elif isinstance(event, CommandOutput | TraceStarted):
                log.show(event)
            elif isinstance(event, TrialStarted):
                _progress(f"trial {event.number}: batch {event.batch_size} …")
            elif isinstance(event, TrialProgress):
                _progress(
                    f"trial {event.number}: batch {event.batch_size}, step {event.sample.step} {event.sample.phase}"
                )
            elif isinstance(event, TrialFinished):
                _progress("")
                results[event.result.batch_size] = event.result
                writer.trial(event, prediction)
            elif isinstance(event, SearchFinished):
                verdict = event.verdict
    except Unusable as error:
        _progress("")
        print(f"gpumem-tui: {error}{_without_torch(config, error)}", file=sys.stderr)
        return error.exit_code
    _progress("")
    assert verdict is not None, "a search ends with a verdict"
    writer.finished(verdict, prediction, results.get(verdict.max_batch_size))
    return verdict.exit_code


def _without_torch(config: SearchConfig, error: Unusable) -> str:
    """What is known all the same where no step can run for want of torch."""
    largest = config.formula.max_batch_size
    if error.kind != "torch" or isinstance(largest, Unknown):
        return ""
    return f"; by formula the largest batch is {largest:,}: `gpumem-tui predict` and `plan` answer without torch"


class _Json:
    def __init__(self, config: SearchConfig, advise: Advise) -> None:
        self._config = config
        self._advise = advise

    def predicted(self, event: Predicted) -> None:
        """The predictions come with the result."""

    def trial(self, event: TrialFinished, prediction: Prediction | None) -> None:
        self._print(json_report.trial_json(event.number, event.result, self._config.device))

    def finished(self, verdict: Verdict, prediction: Prediction | None, largest: TrialDone | None) -> None:
        advice = self._advise(self._config) if verdict.outcome == "nothing_fits" else []
        self._print(json_report.result_json(self._config, verdict, prediction, advice))

    @staticmethod
    def _print(body: dict[str, Any]) -> None:
        print(json.dumps(body), flush=True)


class _Plain:
    def __init__(self, config: SearchConfig, advise: Advise) -> None:
        self._config = config
        self._advise = advise
        self._print(report.workload_line(config.workload))
        self._print(f"on {report.device_line(config.device, config.limit_bytes)}, strategy {config.strategy}")

    def predicted(self, event: Predicted) -> None:
        self._print(f"torch {event.ready.torch_version}, profile {event.ready.profile}")
        self._print(report.predicted_line(event.prediction))
        for note in report.prediction_notes(event.prediction):
            self._print(note)
        traced = event.prediction.traced
        if isinstance(traced, Traced) and (line := report.assumed_line(traced)):
            self._print(line)

    def trial(self, event: TrialFinished, prediction: Prediction | None) -> None:
        self._print(report.trial_line(self._config, event.number, event.result, prediction))

    def finished(self, verdict: Verdict, prediction: Prediction | None, largest: TrialDone | None) -> None:
        if prediction is not None and largest is not None:
            self._print("")
            for line in ledger_lines(self._config, prediction, largest, largest.batch_size):
                self._print(line)
            if said := caveat(self._config, prediction.traced):
                self._print(said)
            if isinstance(prediction.traced, Traced):
                self._print(report.peak_line(prediction.traced, largest.batch_size))
            self._print("")
        self._print(f"result: {verdict.message}")
        verified = "verified on the simulated GPU" if self._config.device.simulated else "verified"
        checked = f"{verified}, " if verdict.verified else "not verified, " if verdict.outcome == "found" else ""
        trials = "1 trial" if verdict.trials == 1 else f"{verdict.trials} trials"
        self._print(f"{checked}{trials}, {verdict.ooms} out of memory")
        traced = None if prediction is None else prediction.traced
        if self._config.device.simulated and isinstance(traced, Traced) and verdict.outcome == "found":
            for line in filter(None, (found_line(traced, verdict.max_batch_size),)):
                self._print(line)
        if verdict.with_headroom is not None:
            self._print(report.headroom_line(verdict.with_headroom))
        if verdict.outcome == "nothing_fits":
            for line in self._advise(self._config):
                self._print(f"  {line}")
        if (steps := json_report.wanted_accumulation(self._config, verdict.max_batch_size)) is not None:
            self._print(report.accumulation_line(self._config.workload, steps))

    @staticmethod
    def _print(line: str) -> None:
        print(line, flush=True)


def _progress(line: str) -> None:
    """One line on stderr that the next one overwrites; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
