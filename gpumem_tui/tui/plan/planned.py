"""The subject of a Plan screen, and the work behind it: traces of a model's plan, runs of a command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.errors import EXIT_FAILED, own_error
from gpumem_tui.memory import Unknown
from gpumem_tui.plan import command_state as commands
from gpumem_tui.plan import state as states
from gpumem_tui.plan.answers import TracedAnswer, answer
from gpumem_tui.plan.combining import Planner
from gpumem_tui.plan.command import CommandPlan, Runs, Watch, largest_of_command
from gpumem_tui.plan.command_state import CommandPlanState
from gpumem_tui.plan.export import command_line
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import command_answer, fits_answer
from gpumem_tui.plan.state import PlanState
from gpumem_tui.plan.tracing import BackgroundTracer, Pending, TraceFailed, TraceReady, TraceState
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Cancelled, Control, Unusable
from gpumem_tui.run.events import Output
from gpumem_tui.search.predicting import WhileTracing
from gpumem_tui.tui.plan.numbers import OF_EVERY_SUBJECT, PANES, Shown, shown_command, shown_model
from gpumem_tui.tui.plan.panes import PaneContent, PaneRequest, command_content, model_content

AS_OPENED, AS_MARKED = "as opened", "as marked"
"""Names of the plan that the screen began with, and of the one marked in the pane compare."""

News = Callable[[], bool]
"""Takes in what happened, on the screen's thread; returns whether it is about the numbers that are shown."""
OnNews = Callable[[News], None]
MakeTracer = Callable[[Callable[[TraceState], None]], BackgroundTracer]


class Planned(Protocol):
    """The subject of a Plan screen. All is called on the screen's thread, but `content` and `cancel`."""

    @property
    def shown(self) -> Shown:
        """The figures to draw."""

    @property
    def panes(self) -> tuple[str, ...]:
        """The available panes."""

    @property
    def busy(self) -> bool:
        """Return whether something runs, or is worked out."""

    @property
    def leaving_code(self) -> int:
        """The program's exit code if it ended now."""

    @property
    def line(self) -> str | Unknown:
        """The command line that opens this plan again, or why it is missing."""

    @property
    def verdict(self) -> str:
        """Whether it fits, as far as known; empty before anything is."""

    def begin(self) -> None:
        """Begin what runs behind the screen."""

    def again(self) -> None:
        """Run what failed, and what was not run."""

    def can_run(self) -> bool:
        """Return whether there is something that `again` would run."""

    def stop(self) -> None:
        """End what runs; what was found stays."""

    def can_move(self) -> bool:
        """Return whether another GPU can be planned for."""

    @property
    def fits(self) -> Mapping[str, TracedAnswer]:
        """The trace's answer on each GPU by its name, where that is worked out by now."""

    def plan_for(self, gpu: Gpu) -> None:
        """Plan for another GPU."""

    def request(self, pane: str, *, with_step: bool) -> PaneRequest:
        """Return what a pane needs; nothing is worked out anew for what it does not show."""

    def content(self, request: PaneRequest) -> PaneContent:
        """Work out what a pane shows; from any thread."""

    def close(self, timeout_s: float) -> None:
        """End what runs, and wait for its processes."""


MakePlanned = Callable[[OnNews], Planned]


class ModelPlanned:
    """A model's plan: controls, a closed form, and traces by a tracer.

    Args:
        plan: to begin with.
        on_news: called from any thread.
        tracer: makes what traces plans, given where its news go.
    """

    panes = tuple(PANES)
    leaving_code = 0
    fits: Mapping[str, TracedAnswer] = MappingProxyType({})

    def __init__(self, plan: Plan, on_news: OnNews, tracer: MakeTracer = BackgroundTracer) -> None:
        self.state = states.opened(plan)
        self.trace: TraceState = Pending(plan)
        self.tracer = tracer(lambda trace: on_news(partial(self._take, trace)))
        self._answer = answer(plan)
        self._other = (AS_OPENED, plan)

    @property
    def plan(self) -> Plan:
        """The plan whose numbers are shown."""
        return self.state.plan

    @property
    def shown(self) -> Shown:
        """The figures to draw."""
        return shown_model(self._answer, self.trace, stale=self.state.now.problem is not None)

    @property
    def busy(self) -> bool:
        """Return whether a trace is under way."""
        return isinstance(self.trace, Pending)

    @property
    def line(self) -> str | Unknown:
        """The command line that opens this plan again, or why it is missing."""
        return command_line(self.plan)

    @property
    def verdict(self) -> str:
        """Whether it fits, by trace where there is one."""
        traced = self.trace.answer if isinstance(self.trace, TraceReady) else Unknown("not traced so far")
        return f"{fits_answer(self._answer, traced)[0]}."

    def begin(self) -> None:
        """Ask for the trace of the plan."""
        self.trace = self.tracer.want(self.plan)

    def enter(self, state: PlanState) -> None:
        """Take another state of the controls; the trace of another plan follows."""
        before, self.state = self.state, state
        if state.plan != before.plan:
            self._answer = answer(state.plan)
            self.begin()

    def again(self) -> None:
        """Trace once more where it failed: a process may have been killed, or torch installed meanwhile."""
        if self.can_run():
            self.trace = self.tracer.again(self.plan)

    def can_run(self) -> bool:
        """Return whether the trace failed."""
        return isinstance(self.trace, TraceFailed)

    def stop(self) -> None:
        """End the trace."""
        self.trace = self.tracer.stop(self.plan)

    def can_move(self) -> bool:
        """Return that another GPU can be planned for: the formula answers at once."""
        return True

    def plan_for(self, gpu: Gpu) -> None:
        """Plan for another GPU, which undo takes back."""
        self.enter(states.replaced(self.state, replace(self.plan, gpu=gpu)))

    def mark(self) -> None:
        """Compare others with this plan from now on."""
        self._other = (AS_MARKED, self.plan)

    def request(self, pane: str, *, with_step: bool) -> PaneRequest:
        """Return what a pane needs of plan and trace."""
        ready = self.trace if isinstance(self.trace, TraceReady) else None
        needs = with_step or pane in ("curves", "compare", "gpus", "limits")
        return PaneRequest(
            pane,
            self.plan,
            self._other,
            with_step,
            traced=ready.traced if ready is not None and needs else None,
            answer=ready.answer if ready is not None and pane in ("batches", "places") else None,
        )

    def content(self, request: PaneRequest) -> PaneContent:
        """Work out what a pane shows."""
        return model_content(request, self.tracer)

    def close(self, timeout_s: float) -> None:
        """End the trace, and wait until its process is gone."""
        self.tracer.close(timeout_s)

    def _take(self, trace: TraceState) -> bool:
        if trace.plan != self.plan:
            return False
        self.trace = trace
        return True


Step = Callable[[CommandPlanState], CommandPlanState]
LineFor = Callable[[Gpu], str | Unknown]


class CommandPlanned:
    """A command's plan: what its runs say, on one GPU at a time.

    Args:
        runs: what is run behind the screen.
        on_news: called from any thread.
        line: returns the command line that opens it for a GPU, or why it is missing.
        run_all: try every change at once, not only when asked to.
    """

    panes = OF_EVERY_SUBJECT

    def __init__(self, runs: Runs, on_news: OnNews, line: LineFor, *, run_all: bool = True) -> None:
        self.state = CommandPlanState(runs.config, runs.batch_size)
        self._runs, self._on_news, self._line, self._run_all = runs, on_news, line, run_all
        self._control, self._ended = Control(), threading.Event()
        self._ended.set()
        self._began_s = time.monotonic()
        self._fits: Mapping[str, TracedAnswer] = MappingProxyType({})

    @property
    def fits(self) -> Mapping[str, TracedAnswer]:
        """The trace's answer on each GPU by its name, where that is worked out by now."""
        return self._fits

    @property
    def shown(self) -> Shown:
        """The figures to draw."""
        return shown_command(self.state, int(time.monotonic() - self._began_s))

    @property
    def busy(self) -> bool:
        """Return whether something runs, or is worked out."""
        return self.state.busy or self.state.works_out

    @property
    def leaving_code(self) -> int:
        """The program's exit code if it ended now."""
        return self.state.leaving_code

    @property
    def line(self) -> str | Unknown:
        """The command line that opens this plan again, or why it is missing."""
        return self._line(self.state.gpu)

    @property
    def verdict(self) -> str:
        """Whether it fits, and what to change; empty before its trace."""
        plan, found = self.state.plan, self.state.answer
        return "" if plan is None or found is None else command_answer(plan, found)

    def begin(self) -> None:
        """Trace the command as it is, there is nothing to see before; then run what is to be run."""
        self._start(run_all=self._run_all)

    def again(self) -> None:
        """Run what has not been run, what is not needed too once the rest has."""
        if self.can_run():
            self._start(run_all=True)

    def can_run(self) -> bool:
        """Return whether something has not been run, and nothing runs."""
        state = self.state
        return not state.busy and (state.plan is None or bool(state.waiting or state.spared))

    def stop(self) -> None:
        """End the run; what was found stays."""
        self._control.cancel()

    def can_move(self) -> bool:
        """Return whether there is the trace that answers for another GPU."""
        return self.state.plan is not None

    def plan_for(self, gpu: Gpu) -> None:
        """Plan for another GPU: answered without running again."""
        before, self.state = self.state, commands.planned_for(self.state, gpu)
        if self.state is before or self.state.plan is None:
            return
        plan = self.state.plan

        def work() -> None:
            try:
                found = plan.answer()
                found.worked_out()
            except Exception as error:  # noqa: BLE001  named on the screen; else it would be waited for for ever
                self._tell(partial(commands.unanswered, failure=own_error(error), gpu=gpu))
            else:
                self._tell(partial(commands.answered, answer=found))

        threading.Thread(target=work, name="plan on a GPU", daemon=True).start()

    def request(self, pane: str, *, with_step: bool) -> PaneRequest:  # noqa: ARG002  a command's step has no curve
        """Return what a pane needs of what was run so far."""
        state = self.state
        if pane != "techniques":
            return PaneRequest(pane, state.plan and replace(state.plan, tried=()), answer=state.answer)
        return PaneRequest(pane, state.plan, answer=state.answer, running=state.running, waiting=state.waiting)

    def content(self, request: PaneRequest) -> PaneContent:
        """Work out what a pane shows."""
        return command_content(request)

    def close(self, timeout_s: float) -> None:
        """End what runs, and wait until its processes are gone."""
        self._control.cancel()
        self._ended.wait(timeout_s)

    # The runs, in a thread of their own

    def _start(self, *, run_all: bool) -> None:
        self._began_s = time.monotonic()
        self.state = commands.begun(self.state)
        control, ended = self._control, self._ended = Control(), threading.Event()

        def work() -> None:
            try:
                self._drive(self.state, control, run_all=run_all)
            finally:
                ended.set()

        threading.Thread(target=work, name="plan of a command", daemon=True).start()

    def _drive(self, state: CommandPlanState, control: Control, *, run_all: bool) -> None:
        def tell(step: Step) -> None:
            self._tell(step, control)

        def watch(event: WhileTracing) -> None:
            if isinstance(event, Output):
                tell(partial(commands.printing, text=event.text))
            elif event.sample is not None:
                tell(partial(commands.reaching, sample=event.sample))

        try:
            self._run(state, control, tell, watch, run_all=run_all)
            tell(commands.ended)
        except Cancelled:
            tell(commands.ended)
        except Unusable as error:
            tell(partial(commands.ended, failure=str(error), exit_code=error.exit_code))
        except ChildDied as error:
            tell(partial(commands.ended, failure=f"tracing failed: {error}", exit_code=EXIT_FAILED))
        except Exception as error:  # noqa: BLE001  named on the screen; else it would be waited for for ever
            tell(partial(commands.ended, failure=own_error(error), exit_code=EXIT_FAILED))

    def _run(
        self, state: CommandPlanState, control: Control, tell: Callable[[Step], None], watch: Watch, *, run_all: bool
    ) -> None:
        plan, waiting = state.plan, state.waiting
        if plan is None:
            predicted, changes, refused = self._runs.trace(control, watch)
            plan = CommandPlan(state.config, state.batch_size, predicted, tuple(refused))
            waiting, found = tuple(changes), plan.answer()
            found.worked_out()
            tell(partial(commands.traced, plan=plan, answer=found, waiting=waiting))
            threading.Thread(target=self._look_at_gpus, args=(plan,), name="every GPU", daemon=True).start()
        if run_all:
            for now in Planner(plan, self._runs, waiting, control, watch, state.every).run():
                tell(partial(commands.went_on, step=now))

    def _look_at_gpus(self, plan: CommandPlan) -> None:
        """Work out on which GPUs it fits, for the list that one is picked from; without it that has no marks."""
        with suppress(Exception):
            found = largest_of_command(plan)
            self._fits = {one.gpu.name: one.answer for one in found if one.answer is not None}

    def _tell(self, step: Step, origin: Control | None = None) -> None:
        """Have the screen take a step; one of a run before the last is not taken."""

        def take() -> bool:
            if origin is None or origin is self._control:
                self.state = step(self.state)
                return True
            return False

        self._on_news(take)


def of_model(plan: Plan, tracer: MakeTracer = BackgroundTracer) -> MakePlanned:
    """Return what makes a model's plan for a screen."""
    return lambda on_news: ModelPlanned(plan, on_news, tracer)


def of_command(runs: Runs, line: LineFor, *, run_all: bool = True) -> MakePlanned:
    """Return what makes a command's plan for a screen."""
    return lambda on_news: CommandPlanned(runs, on_news, line, run_all=run_all)
