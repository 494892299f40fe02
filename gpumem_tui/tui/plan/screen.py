"""The Plan screen: what-if. Every control changes every number at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.geometry import Size
from textual.message import Message

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.checks import why_formula_only
from gpumem_tui.memory import Unknown
from gpumem_tui.plan import state as states
from gpumem_tui.plan.answers import answer
from gpumem_tui.plan.control import Choice
from gpumem_tui.plan.controls import control_of
from gpumem_tui.plan.export import command_line
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.state import PlanState
from gpumem_tui.plan.tracing import BackgroundTracer, Pending, TraceFailed, TraceState
from gpumem_tui.report.output import so_far
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.dialogs import PickScreen, TextScreen, copy_to_clipboard
from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.glyphs import BAR_ORDER
from gpumem_tui.tui.kit.help import HelpScreen, bucket_lines, help_heading
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.row_list import FixedRows, RowList
from gpumem_tui.tui.plan.controls import PlanControls
from gpumem_tui.tui.plan.explain import control_help, explanation
from gpumem_tui.tui.plan.numbers import (
    PANES,
    PaneNames,
    fact_rows,
    header_row,
    layout_classes,
    ledger_rows,
    verdict_rows,
)
from gpumem_tui.tui.plan.panes import PaneRequest, PlanPane

_SWITCH_S = 0.0005
"""Traces and panes are worked out in threads of this process: while the screen is there, it has its turn this soon and
not after 5 ms."""
_TURNS: list[float] = []
"""The turns that threads had before each Plan screen that is there; the first is given back when the last one goes."""
_CLOCK_S = _ENDS_WITHIN_S = 1.0
_PANES = "Numbers, techniques, curves, every GPU, limits, judgement, compare"
AS_OPENED, AS_MARKED = "as opened", "as marked"
"""What the plan that the screen began with, and one that enter marked in the pane compare, are called."""
_SCREENS = "To Monitor, Search, Plan, where 1 2 3 type or pick a choice"

Clock = Callable[[], datetime]
MakeTracer = Callable[[Callable[[TraceState], None]], BackgroundTracer]


def why_no_search(plan: Plan) -> str:
    """Return why a search cannot have a plan's settings; "" if it can."""
    if reason := why_formula_only(plan.shape, plan.recipe):
        return reason
    if plan.recipe.sharding != "none" and plan.gpu.name not in gpus():
        return "a search on a GPU of this machine runs the step of one GPU: set sharding to none"
    if plan.extras:
        return "a search cannot run what only the formula knows: set loss to whole and offload to none"
    return ""


class PlanScreen(MainScreen):
    """The screen of one plan.

    Args:
        plan: to begin with.
        tracer: makes what traces plans, given where its news go.
        clock: the time of day.
    """

    CSS_PATH = "screen.tcss"
    SMALLEST = (72, 18)
    TOPIC = "plan"
    TABLES = ("number",)
    MORE_KEYS = (
        ("0 … 9", "type a number, or pick a choice by its place; backspace takes a digit away, esc the number"),
        ("tab", "controls, ledger, pane"),
        ("wheel", "turns the control under the pointer"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"pane('{pane}')", pane, show=False, tooltip=_PANES) for pane, key in PANES.items()),
        Binding("escape", "controls", "controls", show=False, tooltip="Back to the controls; there, end the trace"),
        Binding("u", "undo", "undo", tooltip="Undo: take the last change back"),
        Binding("ctrl+r", "redo", "redo", show=False, tooltip="Redo: make it again"),
        Binding("r", "trace", "trace again", show=False, tooltip="Trace again, where a trace failed"),
        Binding("y", "copy", "copy", tooltip="Copy the command line that opens this plan again"),
        Binding("h", "explain", "explain", tooltip="Explain the control or row: formula, numbers, source, limits"),
        Binding("s", "search", "search", tooltip="Search the largest batch with these settings"),
        Binding("question_mark", "app.help", "help", key_display="?", tooltip="The keys and what the columns mean"),
        Binding("q", "app.quit", "quit", tooltip="Leave"),
        Binding("f1", "app.show('monitor')", show=False, tooltip=_SCREENS),
        Binding("f2", "app.show('search')", show=False, tooltip=_SCREENS),
        Binding("f3", "app.show('plan')", show=False, tooltip=_SCREENS),
    ]

    @dataclass
    class TraceArrived(Message):
        """The tracer knows more."""

        traced: TraceState

    def __init__(
        self,
        plan: Plan,
        *,
        tracer: MakeTracer = BackgroundTracer,
        clock: Clock = datetime.now,
    ) -> None:
        super().__init__()
        self._state = states.opened(plan)
        self._answer = answer(plan)
        self._tracer = tracer(self._on_trace)
        self._traced: TraceState = Pending(plan)
        self._other = (AS_OPENED, plan)
        self._clock = clock
        self._waits_since_s = self._took_s = 0.0
        self._pane = "numbers"

    @property
    def state(self) -> PlanState:
        """The values of the controls, and the plan that they describe."""
        return self._state

    @property
    def traced(self) -> TraceState:
        """The trace of the plan; None before it has come."""
        return self._traced

    @property
    def tracer(self) -> BackgroundTracer:
        """The object that traces the plan."""
        return self._tracer

    @property
    def settled(self) -> bool:
        """Nothing is being worked out any more."""
        return not isinstance(self._traced, Pending) and self.query_one(PlanPane).settled

    # What is on it

    def compose_parts(self) -> ComposeResult:
        """Yield header, controls, numbers, pane."""
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
        """Show the numbers at once; the trace and the pane follow."""
        _TURNS.append(sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_S)
        self.query_one(PlanControls).focus()
        self._traced = self._tracer.want(self._state.plan)
        self.set_interval(_CLOCK_S, self._tick)
        self._draw()

    def on_unmount(self) -> None:
        """Give threads back the turns that they had; what runs behind the screen ends as well."""
        if _TURNS:  # empty where the program ended before the screen was there
            before_s = _TURNS.pop()
            sys.setswitchinterval(_SWITCH_S if _TURNS else before_s)
        super().on_unmount()

    def laid_out(self, size: Size) -> None:
        """Show one pane, two, or three beside each other."""
        for name, there in layout_classes(*size).items():
            self.set_class(there, name)
        self.call_after_refresh(self._draw)

    # The controls

    def on_plan_controls_stepped(self, message: PlanControls.Stepped) -> None:
        """Take the step to the next state."""
        self._enter(message.step(self._state))

    def on_plan_controls_picking(self, message: PlanControls.Picking) -> None:
        """Open the list of a choice."""
        key = message.key
        control = control_of(self._state.draft, key)
        assert isinstance(control, Choice), "numbers are typed"

        def picked(value: str | None) -> None:
            if value is not None:
                self._enter(states.chosen(states.paused(self._state), key, value))

        options, current = control.options(self._state.draft), control.get(self._state.draft)
        self.app.push_screen(PickScreen(control.label[:1].upper() + control.label[1:], options, current), picked)

    def on_row_list_moved(self, message: RowList.Moved) -> None:
        """Note another control: the next change is a step of its own."""
        if isinstance(message.rows, PlanControls):
            self._enter(states.paused(self._state))

    def action_undo(self) -> None:
        """Take the last change back, and what is being typed."""
        self.query_one(PlanControls).end_typing()
        self._enter(states.undone(self._state))

    def action_redo(self) -> None:
        """Make a change again that was taken back."""
        self.query_one(PlanControls).end_typing()
        self._enter(states.redone(self._state))

    # The panes

    def action_pane(self, pane: str) -> None:
        """Show a pane from its top and give it the keys."""
        self._pane = pane
        self.query_one("#pane", RowList).begin()
        self._draw_panes()
        self.query_one("#ledger" if pane == "numbers" else "#pane", RowList).focus()

    def action_turn(self, way: int) -> None:
        """Show the pane before or after the one that is shown."""
        panes = self._panes()
        self.action_pane(panes[(panes.index(self._visible_pane()) + way) % len(panes)])

    def action_controls(self) -> None:
        """Give the keys back to the controls; where they have them, end the trace."""
        controls = self.query_one(PlanControls)
        if controls.has_focus and isinstance(self._traced, Pending):
            self._traced = self._tracer.stop(self._state.plan)
            self._draw_numbers()
        controls.focus()

    def on_pane_names_wanted(self, message: PaneNames.Wanted) -> None:
        """Show the pane whose name was clicked."""
        self.action_pane(message.pane)

    @on(RowList.Chosen, "#pane")
    def _act_on_pane(self, message: RowList.Chosen) -> None:
        """Apply a technique; mark this plan to compare others with it; explain anything else."""
        pane = self.query_one(PlanPane)
        plan = pane.plan_of(message.key)
        if plan is not None and not pane.settled:
            self.notify("this list is of the plan before: one moment")
        elif plan is not None:
            self._enter(states.replaced(self._state, plan))
        elif self._visible_pane() == "compare":
            self._other = (AS_MARKED, self._state.plan)
            self._draw_panes()
        else:
            self.action_explain()

    @on(RowList.Chosen, "#ledger,#facts")
    def action_explain(self) -> None:
        """Explain the row under the cursor; show the keys where a row says all there is to say."""
        rows = self.focused
        found = None
        if isinstance(rows, PlanControls):
            found = control_help(self._state, rows.key) if rows.key else None
        elif isinstance(rows, RowList):
            found = explanation(self._state.plan, rows.key)
        self.app.push_screen(HelpScreen.of(self) if found is None else TextScreen(*found))

    def help_lines(self) -> Iterable[Row]:
        """Return the legend of the bars."""
        return [help_heading("Buckets"), *bucket_lines(BAR_ORDER), []]

    # What leaves the screen

    def action_copy(self) -> None:
        """Copy the command line that opens this plan again, or say why there is none."""
        line = command_line(self._state.plan)
        if isinstance(line, Unknown):
            self.notify(line.reason, severity="warning")
        else:
            copy_to_clipboard(self, line)

    def take_over(self, what: object) -> str:
        """Go on from another plan or another GPU; undo leads back."""
        match what:
            case Plan():
                self._enter(states.replaced(self._state, what))
            case Gpu():
                self._enter(states.replaced(self._state, replace(self._state.plan, gpu=what)))
        return ""

    def action_search(self) -> None:
        """Search with these settings, if a search can have them."""
        if why_not := why_no_search(self._state.plan):
            self.notify(why_not, severity="warning")
        else:
            self.post_message(self.Wanted("search", self._state.plan))

    # The trace

    def action_trace(self) -> None:
        """Trace once more where it failed: a process may have been killed, or torch installed meanwhile."""
        if isinstance(self._traced, TraceFailed):
            self._traced = self._tracer.again(self._state.plan)
            self._draw_numbers()

    def _on_trace(self, traced: TraceState) -> None:
        """Pass news on from the tracer's thread."""
        self.post_message(self.TraceArrived(traced))

    def on_plan_screen_trace_arrived(self, message: TraceArrived) -> None:
        """Show news of the plan, if it is still on the screen."""
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
        time = f"{self._clock():%H:%M}"
        found, traced, stale = self._answer, self._traced, self._state.now.problem is not None
        self.query_one("#plan-header", RowList).show(
            lambda width, _: [header_row(found, traced, time, width, stale=stale)]
        )

    def _tick(self) -> None:
        self._draw_header()
        if isinstance(self._traced, Pending):
            self._draw_verdict()

    def _draw_verdict(self) -> None:
        """Show whether it fits; while a trace is under way, for how long, and about how long yet by the last one."""
        found, traced, now_s = self._answer, self._traced, time.monotonic()
        if isinstance(traced, Pending):
            self._waits_since_s = self._waits_since_s or now_s
        elif self._waits_since_s:
            self._took_s, self._waits_since_s = now_s - self._waits_since_s, 0.0
        waits_s = now_s - self._waits_since_s if self._waits_since_s else 0.0
        waited = so_far(waits_s, self._took_s) if waits_s >= 1 else ""
        self.query_one("#verdict", RowList).show(lambda width, _: verdict_rows(found, traced, width, waited))

    def _draw_numbers(self) -> None:
        self._draw_header()
        self._draw_verdict()
        found, traced = self._answer, self._traced
        self.query_one("#ledger", RowList).show(lambda width, _: ledger_rows(found, traced, width))
        self.query_one("#facts", RowList).show(lambda width, _: fact_rows(found, traced, width))

    def _draw_panes(self) -> None:
        self.set_class(self._visible_pane() == "numbers", "-on-numbers")
        for names in self.query(PaneNames):
            names.show_panes(self._panes(), self._visible_pane())
        pane, plan, step = self._visible_pane(), self._state.plan, self.has_class("-step")
        self.query_one(PlanPane).want(PaneRequest.of(pane, plan, self._other, self._traced, with_step=step))

    def on_plan_pane_drawn(self, message: PlanPane.Drawn) -> None:
        """Show memory over a step, which came with the pane."""
        self.query_one("#step", RowList).show(message.step)

    def _panes(self) -> list[str]:
        return [pane for pane in PANES if pane != "numbers" or self.has_class("-single")]

    def _visible_pane(self) -> str:
        return self._pane if self._pane in self._panes() else "techniques"
