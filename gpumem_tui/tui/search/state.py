"""The Search screen's state: one immutable value, and the functions that make the next one from what happened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from gpumem_tui.errors import EXIT_INTERRUPTED
from gpumem_tui.memory import Unknown
from gpumem_tui.run.events import Output, Sample
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted, TraceProgress
from gpumem_tui.search.prediction import Formula, Traced
from gpumem_tui.search.runner import SearchEvent, TrialFinished, TrialProgress
from gpumem_tui.search.verdict import Verdict


class Stage(Enum):
    """The stage that a search is in. The value is how the screen names it."""

    IDLE = "ready"
    PREDICTING = "predicting"
    RUNNING = "running"
    FOUND = "finished"
    NOTHING_FITS = "nothing fits"
    CANCELLED = "cancelled"
    FAILED = "failed"


_STAGE_OF_VERDICT = {
    "found": Stage.FOUND,
    "nothing_fits": Stage.NOTHING_FITS,
    "cancelled": Stage.CANCELLED,
    "failed": Stage.FAILED,
}


@dataclass(frozen=True)
class Failure:
    """A search that ended without a verdict: one line, and the exit code it represents."""

    message: str
    exit_code: int


@dataclass(frozen=True)
class SearchState:
    """Everything the Search screen shows.

    Attributes:
        paused: the user holds the search. `cancelling`: the user ended it and its last event is not here yet.
        tracing: the batch size at which a command is being traced; None while it is not.
        selected: the number of the trial the user chose to look at; None to follow the search.
        failure: why there is no verdict; empty with one.
    """

    config: SearchConfig
    stage: Stage = Stage.IDLE
    predicted: Predicted | None = None
    tracing: int | None = None
    trials: tuple[TrialFinished, ...] = ()
    running: TrialProgress | None = None
    paused: bool = False
    cancelling: bool = False
    selected: int | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None

    @property
    def busy(self) -> bool:
        """A search runs (or is held, or is being cancelled)."""
        return self.stage in (Stage.PREDICTING, Stage.RUNNING)

    @property
    def exit_code(self) -> int:
        """The exit code of the program if it ended now."""
        if self.busy:
            return EXIT_INTERRUPTED
        if self.failure is not None:
            return self.failure.exit_code
        return self.verdict.exit_code if self.verdict is not None else 0

    @cached_property
    def formula(self) -> Formula:
        """The closed form: it needs no search to answer."""
        return self.config.formula if self.predicted is None else self.predicted.prediction.formula

    @property
    def traced(self) -> Traced | Unknown:
        """The traced step, or why it is missing (yet)."""
        if self.predicted is not None:
            return self.predicted.prediction.traced
        reasons = {Stage.IDLE: "known once a search starts", Stage.PREDICTING: "being traced"}
        return Unknown(reasons.get(self.stage, "the search ended before the step was traced"))

    @property
    def with_headroom(self) -> int | Unknown:
        """The traced largest batch that leaves the headroom free, as the formula's does, or why it is missing."""
        if self.predicted is not None:
            return self.predicted.prediction.with_headroom
        return Unknown("known once the step is traced")

    @property
    def followed(self) -> TrialFinished | None:
        """The trial to look at when the user chose none: the last that fits, else the last."""
        fitting = [trial for trial in self.trials if trial.result.outcome == "fit"]
        return next(reversed(fitting or self.trials), None)

    @property
    def shown(self) -> TrialFinished | None:
        """The trial the ledger table is about; None before the first has ended."""
        chosen = (trial for trial in self.trials if trial.number == self.selected)
        return next(chosen, self.followed)

    @property
    def predicted_size(self) -> int | None:
        """The largest batch size by the best prediction so far; None if nobody can tell."""
        if self.predicted is not None:
            return self.predicted.prediction.best_max_batch_size
        largest = self.formula.max_batch_size
        return largest if isinstance(largest, int) else None

    @property
    def shown_batch_size(self) -> int:
        """The batch size the ledger table is about: the trial's that is shown or runs, else the predicted one."""
        if self.shown is not None:
            return self.shown.result.batch_size
        if self.running is not None:
            return self.running.batch_size
        return max(1, self.predicted_size or 1)


def reduce(state: SearchState, event: SearchEvent) -> SearchState:
    """Return the state after an event of the search.

    Raises:
        TypeError: not an event of a search.
    """
    match event:
        case Output() | TraceProgress(sample=Sample()):
            return state  # the lines are kept next to it, see `Printed`
        case TraceProgress(batch_size):
            return replace(state, tracing=batch_size)
        case Predicted():
            return replace(state, stage=Stage.RUNNING, predicted=event, tracing=None)
        case TrialProgress():
            return replace(state, stage=Stage.RUNNING, running=event)
        case TrialFinished():
            return replace(state, running=None, trials=(*state.trials, event))
        case Verdict():
            return replace(ended(state), stage=_STAGE_OF_VERDICT[event.outcome], verdict=event)
        case _:
            raise TypeError(f"{type(event).__name__} is no event of a search")


def started(state: SearchState) -> SearchState:
    """Begin a new search of the same configuration."""
    return SearchState(state.config, Stage.PREDICTING)


def ended(state: SearchState) -> SearchState:
    """No search runs any more."""
    return replace(state, running=None, tracing=None, paused=False, cancelling=False)


def held(state: SearchState, *, paused: bool) -> SearchState:
    """Hold the search as the user wants, or let it continue."""
    return replace(state, paused=paused)


def cancelling(state: SearchState) -> SearchState:
    """Note that the user ended the search; its last event is still to come."""
    return replace(state, cancelling=True)


def failed(state: SearchState, failure: Failure) -> SearchState:
    """End the search without a verdict."""
    return replace(ended(state), stage=Stage.FAILED, failure=failure)


def selecting(state: SearchState, number: int) -> SearchState:
    """Show trial `number`; to choose the followed one means to continue following."""
    followed = state.followed
    follows = followed is not None and followed.number == number
    return replace(state, selected=None if follows else number)
