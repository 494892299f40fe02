"""The Plan screen: what-if. Every control changes every number at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import ClassVar, cast

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.events import Resize
from textual.message import Message

from gpumem_tui.plan import state as states
from gpumem_tui.plan.answers import answer
from gpumem_tui.plan.control import Choice
from gpumem_tui.plan.controls import control_of
from gpumem_tui.plan.measured import MeasuredRate
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.state import PlanState
from gpumem_tui.plan.store import PlanStore
from gpumem_tui.plan.tracing import BackgroundTracer, MakeTracer, Pending, PlanTracer, TraceFailed, TraceState
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.dialogs import HelpScreen, PickScreen, TextScreen
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.row_list import FixedRows, RowList
from gpumem_tui.tui.plan.controls import PlanControls
from gpumem_tui.tui.plan.explain import control_help, explanation, plan_help
from gpumem_tui.tui.plan.files import PlanFiles, why_no_search
from gpumem_tui.tui.plan.goals_form import GoalsScreen
from gpumem_tui.tui.plan.header import PANES, PaneNames, header_row, layout_classes
from gpumem_tui.tui.plan.numbers import fact_rows, ledger_rows, verdict_rows
from gpumem_tui.tui.plan.panes import PaneRequest, PlanPane

_SWITCH_S = 0.0005
"""Traces and panes are worked out in threads of this process: the screen has its turn this soon, not after 5 ms."""
_CLOCK_S = _ENDS_WITHIN_S = 1.0

Clock = Callable[[], datetime]


class PlanScreen(MainScreen):
    """One plan at a time.

    Args:
        plan: to begin with.
        tracer: makes what traces plans, given where its news go.
        store: where plans are saved; None for the user's data folder.
        clock: the time of day.
    """

    CSS_PATH = "screen.tcss"
    SMALLEST = (72, 18)
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"pane('{pane}')", pane, show=False) for pane, key in PANES.items()),
        Binding("escape", "controls", "controls", show=False),
        Binding("u", "undo", "undo", tooltip="Take the last change back"),
        Binding("ctrl+r", "redo", "redo", show=False, tooltip="Make it again"),
        Binding("r", "trace", "trace again", show=False),
        Binding("w", "save", "save", tooltip="Save the plan under a name"),
        Binding("o", "open", "open", tooltip="Open a saved plan"),
        Binding("g", "goals", "goals", show=False, tooltip="Tokens, price, known learning rate, gradient norms"),
        Binding("x", "export", "export", tooltip="As Markdown, as a command line or as JSON"),
        Binding("h", "explain", "explain", tooltip="The formula, the numbers in it, the source and the limits"),
        Binding("s", "search", "search", tooltip="Search the largest batch with these settings"),
        Binding("question_mark", "help", "help", key_display="?", tooltip="The keys and what the columns mean"),
        Binding("q", "app.quit", "quit", tooltip="Leave"),
        *(Binding(f"f{at}", f"app.show('{to}')", show=False) for at, to in enumerate(("monitor", "search", "plan"), 1)),
    ]

    class SearchWanted(Message):
        """The user wants to search with the settings of a plan."""

        def __init__(self, plan: Plan) -> None:
            super().__init__()
            self.plan = plan

    class TraceArrived(Message):
        """The tracer knows more."""

        def __init__(self, traced: TraceState) -> None:
            super().__init__()
            self.traced = traced

    def __init__(
        self,
        plan: Plan,
        *,
        tracer: MakeTracer = BackgroundTracer,
        store: PlanStore | None = None,
        clock: Clock = datetime.now,
    ) -> None:
        super().__init__()
        self._state = states.opened(plan)
        self._answer = answer(plan)
        self._tracer = tracer(self._on_trace)
        self._traced: TraceState = Pending(plan)
        self._measured: tuple[MeasuredRate, ...] = ()
        self._files = PlanFiles(store or PlanStore(), plan)
        self._clock = clock
        self._pane = "numbers"

    @property
    def state(self) -> PlanState:
        """What the controls say."""
        return self._state

    @property
    def traced(self) -> TraceState:
        """What the trace says of the plan."""
        return self._traced

    @property
    def tracer(self) -> PlanTracer:
        """What traces the plan."""
        return self._tracer

    @property
    def settled(self) -> bool:
        """Nothing is being worked out any more."""
        return not isinstance(self._traced, Pending) and self.query_one(PlanPane).settled

    # What is on it

    def compose_parts(self) -> ComposeResult:
        """Header, controls, numbers, pane."""
        yield FixedRows(id="plan-header")
        with Horizontal(id="body"):
            yield PlanControls()
            with Container(id="right"):
                yield PaneNames(classes="top")
                with Vertical(id="numbers") as numbers:
                    numbers.border_title = "Memory of one GPU"
                    yield FixedRows(id="verdict")
                    with Container(id="figures"):
                        yield RowList(id="ledger")
                        yield RowList(id="facts")
                        yield FixedRows(id="step")
                yield PlanPane(self._tracer)

    def on_mount(self) -> None:
        """The numbers at once; the trace and the pane follow."""
        sys.setswitchinterval(_SWITCH_S)
        self.query_one(PlanControls).focus()
        self._traced = self._tracer.want(self._state.plan)
        self.set_interval(_CLOCK_S, self._draw_header)
        self._draw()

    def on_resize(self, event: Resize) -> None:
        """One pane, two, or three beside each other; a tiny terminal gets one line that says what is needed."""
        for name, there in layout_classes(*event.size).items():
            self.set_class(there, name)
        self.fit_terminal(event)
        self.call_after_refresh(self._draw)

    # The controls

    def on_plan_controls_nudged(self, message: PlanControls.Nudged) -> None:
        """A step."""
        self._enter(states.nudged(self._state, message.key, message.way, jump=message.jump))

    def on_plan_controls_typed(self, message: PlanControls.Typed) -> None:
        """A digit more or less; a number is one step of the history from its first digit to its last."""
        before = states.paused(self._state) if message.first else self._state
        self._enter(states.entered(before, message.key, message.value))

    def on_plan_controls_numbered(self, message: PlanControls.Numbered) -> None:
        """A choice by its place, or why there is none at it."""
        self._enter(states.chosen_by_digit(self._state, message.key, message.digit))

    def on_plan_controls_abandoned(self, message: PlanControls.Abandoned) -> None:
        """The number typed is not to be."""
        if self._state.by == message.key:
            self._enter(states.undone(self._state))

    def on_plan_controls_picking(self, message: PlanControls.Picking) -> None:
        """The list of a choice."""
        key = message.key
        control = control_of(self._state.draft, key)
        assert isinstance(control, Choice), "numbers are typed"

        def picked(value: str | None) -> None:
            if value is not None:
                self._enter(states.chosen(states.paused(self._state), key, value))

        options, current = control.options(self._state.draft), control.get(self._state.draft)
        self.app.push_screen(PickScreen(control.label[:1].upper() + control.label[1:], options, current), picked)

    def on_row_list_moved(self, message: RowList.Moved) -> None:
        """Another control: the next change is a step of its own."""
        if isinstance(message.rows, PlanControls):
            self._enter(states.paused(self._state))

    def action_undo(self) -> None:
        """Back by one change."""
        self._enter(states.undone(self._state))

    def action_redo(self) -> None:
        """Forward again."""
        self._enter(states.redone(self._state))

    @work
    async def action_goals(self) -> None:
        """What the plan is for: none of it changes what fits."""
        goals = await self._program.push_screen_wait(GoalsScreen(self._state.plan))
        if goals is not None:
            self._enter(states.replaced(self._state, replace(self._state.plan, goals=goals)))

    # The panes

    def action_pane(self, pane: str) -> None:
        """Show a pane from its top and give it the keys."""
        self._pane = pane
        self.query_one("#pane", RowList).begin()
        self._draw_panes()
        self.query_one("#ledger" if pane == "numbers" else "#pane", RowList).focus()

    def action_turn(self, way: int) -> None:
        """The pane before or after the one that is shown."""
        panes = self._panes()
        self.action_pane(panes[(panes.index(self._visible_pane()) + way) % len(panes)])

    def action_controls(self) -> None:
        """Give the keys back to the controls."""
        self.query_one(PlanControls).focus()

    def on_pane_names_wanted(self, message: PaneNames.Wanted) -> None:
        """A pane's name was clicked."""
        self.action_pane(message.pane)

    @on(RowList.Chosen, "#pane")
    def _act_on_pane(self, message: RowList.Chosen) -> None:
        """Apply a technique; pick another plan to compare with; explain anything else."""
        pane = self.query_one(PlanPane)
        plan = pane.plan_of(message.key)
        if plan is not None and not pane.settled:
            self.notify("this list is of the plan before: one moment")
        elif plan is not None:
            self._enter(states.replaced(self._state, plan))
        elif self._visible_pane() == "compare":
            self.run_worker(self._choose_other())
        else:
            self.action_explain()

    @on(RowList.Chosen, "#ledger,#facts")
    def _act_on_numbers(self) -> None:
        self.action_explain()

    def action_explain(self) -> None:
        """The row under the cursor: its formula, the numbers in it, its source and its limits; the keys where a row
        says all there is to say."""
        rows = self.focused
        found = None
        if isinstance(rows, PlanControls):
            found = control_help(self._state, rows.key) if rows.key else None
        elif isinstance(rows, RowList):
            found = explanation(self._state.plan, rows.key)
        self.app.push_screen(HelpScreen(plan_help()) if found is None else TextScreen(*found))

    def action_help(self) -> None:
        """The keys, wherever the cursor is."""
        self.app.push_screen(HelpScreen(plan_help()))

    # Saved plans, and what else leaves the screen

    @work
    async def action_save(self) -> None:
        """Under a name."""
        await self._files.save(self._program, self._state.plan)
        self._draw_header()

    @work
    async def action_open(self) -> None:
        """A saved one."""
        if (plan := await self._files.open(self._program)) is not None:
            self._enter(states.replaced(self._state, plan))
        self._draw_header()

    async def _choose_other(self) -> None:
        await self._files.choose_other(self._program)
        self._draw_panes()

    def action_export(self) -> None:
        """As text."""
        self.run_worker(self._files.export(self._program, self._state.plan, self._traced, self._tracer))

    def load(self, plan: Plan) -> None:
        """Go on from another plan; undo leads back."""
        self._enter(states.replaced(self._state, plan))

    def take_measured(self, rates: Iterable[MeasuredRate]) -> None:
        """What searches have measured so far, for the plans of the same step."""
        self._measured = tuple(rates)
        if self.is_mounted:
            self._draw_panes()

    def action_search(self) -> None:
        """With these settings, if a search can have them."""
        if why_not := why_no_search(self._state.plan):
            self.notify(why_not, severity="warning")
        else:
            self.post_message(self.SearchWanted(self._state.plan))

    @property
    def _program(self) -> App[int]:
        return cast("App[int]", self.app)

    # The trace

    def action_trace(self) -> None:
        """Once more, where it failed: a process may have been killed, or torch installed meanwhile."""
        if isinstance(self._traced, TraceFailed):
            self._traced = self._tracer.again(self._state.plan)
            self._draw_numbers()

    def _on_trace(self, traced: TraceState) -> None:
        """From the tracer's thread."""
        self.post_message(self.TraceArrived(traced))

    def on_plan_screen_trace_arrived(self, message: TraceArrived) -> None:
        """News of a plan that is still on the screen."""
        if message.traced.plan == self._state.plan:
            self._traced = message.traced
            self._draw_numbers()
            self._draw_panes()
        else:
            self.query_one(PlanPane).trace_arrived()

    def cancel(self) -> None:
        """End the trace; safe to call from any thread."""
        self._tracer.close(0.0)

    async def end(self) -> int:
        """End the trace, and wait until its process is gone."""
        code = await super().end()
        await in_daemon_thread(partial(self._tracer.close, _ENDS_WITHIN_S))
        return code

    # Drawing

    def _enter(self, state: PlanState) -> None:
        """Show another state: controls and numbers now, the trace and the pane when they are there."""
        before, self._state = self._state, state
        self.query_one(PlanControls).show_state(state)
        if state.plan != before.plan:
            self._answer = answer(state.plan)
            self._traced = self._tracer.want(state.plan)
            self._draw_numbers()
            self._draw_panes()
        elif state.now.problem != before.now.problem:
            self._draw_header()

    def _draw(self) -> None:
        self.query_one(PlanControls).show_state(self._state)
        self._draw_numbers()
        self._draw_panes()

    def _draw_header(self) -> None:
        name = self._files.title(self._state.plan)
        time = f"{self._clock():%H:%M}"
        found, traced, stale = self._answer, self._traced, self._state.now.problem is not None
        self.query_one("#plan-header", RowList).show(
            lambda width, selected: [header_row(found, traced, name, time, width, stale=stale)]
        )

    def _draw_numbers(self) -> None:
        self._draw_header()
        found, traced = self._answer, self._traced
        self.query_one("#verdict", RowList).show(lambda width, selected: verdict_rows(found, traced, width))
        self.query_one("#ledger", RowList).show(lambda width, selected: ledger_rows(found, traced, width))
        self.query_one("#facts", RowList).show(lambda width, selected: fact_rows(found, traced, width))

    def _draw_panes(self) -> None:
        self.set_class(self._visible_pane() == "numbers", "-on-numbers")
        for names in self.query(PaneNames):
            names.show_panes(self._panes(), self._visible_pane())
        pane, plan, step = self._visible_pane(), self._state.plan, self.has_class("-step")
        self.query_one(PlanPane).want(
            PaneRequest.of(pane, plan, self._files.other, self._traced, with_step=step, measured=self._measured)
        )

    def on_plan_pane_drawn(self, message: PlanPane.Drawn) -> None:
        """The pane is there, and with it memory over a step."""
        self.query_one("#step", RowList).show(message.step)

    def _panes(self) -> list[str]:
        return [pane for pane in PANES if pane != "numbers" or self.has_class("-single")]

    def _visible_pane(self) -> str:
        return self._pane if self._pane in self._panes() else "techniques"
