"""A command's plan while it is made: what runs, what was found, and the functions that make the next state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.errors import EXIT_INTERRUPTED
from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.combining import Planning
from gpumem_tui.plan.command import CommandPlan
from gpumem_tui.run.events import Sample
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.words import how_far
from gpumem_tui.text import is_progress_bar


@dataclass(frozen=True)
class CommandPlanState:
    """Everything known of a command's plan.

    Attributes:
        plan: None until the command as it is has been traced.
        answer: what that trace reports on the planned GPU; None while it is worked out.
        running: what is being traced. `waiting`: the changes that can be. `to_go`: how many of them are. `every`: all
            of them, those too that are not needed.
        left_s: about how long all of them take from the moment on when `running` began.
        busy: a run is under way.
        printed: the last line that the running command printed. `reached`: where it is, and how long it takes yet.
        failure: why the command cannot be traced; one line. `exit_code`: what that means.
    """

    config: SearchConfig
    batch_size: int
    plan: CommandPlan | None = None
    answer: TracedAnswer | None = None
    running: Combination | None = None
    waiting: tuple[Combination, ...] = ()
    to_go: int = 0
    every: bool = False
    left_s: float = 0.0
    busy: bool = False
    printed: str = ""
    reached: str = ""
    failure: str = ""
    exit_code: int = 0

    @property
    def gpu(self) -> Gpu:
        """The GPU that is planned for; the traces are of `config`'s."""
        return self.config.device.gpu if self.plan is None else self.plan.gpu

    @property
    def works_out(self) -> bool:
        """Return whether the trace is being asked on the planned GPU."""
        return self.plan is not None and self.answer is None and not self.failure

    @property
    def spared(self) -> tuple[Combination, ...]:
        """The changes that were not needed."""
        return () if self.plan is None else self.plan.spared

    @property
    def leaving_code(self) -> int:
        """The program's exit code if it ended now."""
        return EXIT_INTERRUPTED if self.busy and self.plan is None else self.exit_code


def begun(state: CommandPlanState) -> CommandPlanState:
    """Note that a run is under way, of what was spared too."""
    spared, plan = state.spared, state.plan
    if plan is not None and spared:
        plan = replace(plan, tried=tuple(one for one in plan.tried if not one.is_spared))
        spared = tuple(replace(one, is_spared=False) for one in spared)
        state = replace(state, plan=plan, waiting=(*state.waiting, *spared), every=True)
    return replace(state, busy=True, failure=_unanswered(state), exit_code=0, printed="")


def _silent(state: CommandPlanState) -> CommandPlanState:
    """Return the state without what the run before printed, and how far that came."""
    return replace(state, printed="", reached="")


def traced(
    state: CommandPlanState, plan: CommandPlan, answer: TracedAnswer, waiting: Sequence[Combination]
) -> CommandPlanState:
    """Take the trace of the command as it is, and what it states."""
    return replace(_silent(state), plan=plan, answer=answer, waiting=tuple(waiting))


def answered(state: CommandPlanState, answer: TracedAnswer) -> CommandPlanState:
    """Take what the trace reports on the planned GPU; nothing where another one is planned for by now."""
    return replace(state, answer=answer) if answer.plan.gpu == state.gpu else state


def went_on(state: CommandPlanState, step: Planning) -> CommandPlanState:
    """Take how far the runs have come; which GPU is planned for stays."""
    assert state.plan is not None, "the command itself is traced first"
    plan = replace(step.plan, elsewhere=state.plan.elsewhere)
    known = replace(_silent(state), plan=plan, running=step.running, waiting=step.waiting)
    return replace(known, to_go=step.to_go, left_s=step.left_s)


def printing(state: CommandPlanState, text: str) -> CommandPlanState:
    """Take a line that the running command has printed, but for its progress bar.

    A command that trains a model of transformers has no such line.
    """
    is_ours = state.config.workload.hugging_face is not None or is_progress_bar(text)
    return state if is_ours else replace(state, printed=text)


def reaching(state: CommandPlanState, sample: Sample) -> CommandPlanState:
    """Take how far the running command has come; the running time is shown already."""
    return replace(state, reached=how_far(replace(sample, progress=replace(sample.progress, elapsed_s=0.0))))


def unanswered(state: CommandPlanState, failure: str, gpu: Gpu) -> CommandPlanState:
    """Note why the trace gives nothing on a GPU; nothing where another one is planned for by now."""
    return replace(state, failure=failure) if gpu == state.gpu else state


def _unanswered(state: CommandPlanState) -> str:
    """Return why the trace gives nothing on the planned GPU, which further runs do not change; else nothing."""
    return state.failure if state.plan is not None and state.answer is None else ""


def planned_for(state: CommandPlanState, gpu: Gpu) -> CommandPlanState:
    """Plan for another GPU, on which the trace is yet to be asked."""
    if state.plan is None or gpu == state.gpu:
        return state
    return replace(state, plan=replace(state.plan, elsewhere=gpu), answer=None, failure="")


def ended(state: CommandPlanState, failure: str = "", exit_code: int = 0) -> CommandPlanState:
    """Note that nothing runs any more."""
    plan, running, waiting = state.plan, state.running, state.waiting
    if plan is not None and running is not None and plan.is_alone(running):
        waiting = (running, *waiting)
    failure = failure or _unanswered(state)
    return replace(_silent(state), busy=False, running=None, waiting=waiting, failure=failure, exit_code=exit_code)


def progress_words(state: CommandPlanState, elapsed_s: int) -> str:
    """Say what runs now, and how long it takes yet; where nothing does, what could be run."""
    if state.busy:
        running = state.running
        what = f"running {state.config.workload.noun}" if running is None else f"what-if: {running.words}"
        left = f", {state.to_go} to go" if state.to_go else ""
        left += f", about {state.left_s:,.0f} s left" if running is not None and state.left_s >= 1 else ""
        printed = f" │ {state.printed}" if state.printed else ""
        reached = f", {state.reached}" if state.reached else ""
        return f"{what}{left} · {elapsed_s} s{reached}{printed}"
    if state.failure:
        why = "" if state.plan is None else f"{state.failure}; "
        return f"{why}r runs it again"
    if count := len(state.waiting) + len(state.spared):
        words, them = ("1 what-if", "it") if count == 1 else (f"{count} what-ifs", "them")
        fits = state.plan is not None and state.plan.fits_as_it_is
        why = "not run" if state.waiting else f"skipped, {'already fits' if fits else 'what fits costs no more'}"
        return f"{words} {why}: r runs {them}"
    return "every what-if has been run" if state.plan is not None else "r traces it"
