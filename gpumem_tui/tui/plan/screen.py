"""The Plan screen: what-if, for a model, whose controls change every number at once, and for a command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.geometry import Size
from textual.message import Message

from gpumem_tui.catalog.loader import gpus, is_named
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.checks import why_formula_only
from gpumem_tui.memory import Unknown
from gpumem_tui.plan import state as states
from gpumem_tui.plan.control import Choice, Option
from gpumem_tui.plan.controls import control_of
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.state import PlanState
from gpumem_tui.report.output import so_far
from gpumem_tui.search.beside import as_beside
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.clipboard import copy_to_clipboard
from gpumem_tui.tui.kit.dialogs import PickScreen, TextScreen
from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.glyphs import BAR_ORDER
from gpumem_tui.tui.kit.help import HelpScreen, bucket_lines, help_heading
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.row_list import FixedRows, RowList
from gpumem_tui.tui.plan.controls import PlanControls
from gpumem_tui.tui.plan.explain import Text as TextOf
from gpumem_tui.tui.plan.explain import control_help, explanation, traced_explanation
from gpumem_tui.tui.plan.lists import gpu_words
from gpumem_tui.tui.plan.numbers import (
    OF_EVERY_SUBJECT,
    PANES,
    PaneNames,
    fact_rows,
    header_row,
    layout_classes,
    ledger_rows,
    verdict_rows,
)
from gpumem_tui.tui.plan.panes import PlanPane
from gpumem_tui.tui.plan.planned import MakePlanned, ModelPlanned, News, Planned

_SWITCH_S = 0.0005
"""Traces and panes are worked out in threads of this process: while the screen is there, it has its turn this soon and
not after 5 ms."""
_TURNS: list[float] = []
"""The turns that threads had before each Plan screen that is there; the first is given back when the last one goes."""
_CLOCK_S = _ENDS_WITHIN_S = 1.0
_PANES = "Numbers, techniques, every GPU, batch sizes, places"
_PANES_OF_MODELS = "Curves, limits, judgement, compare"
_ESCAPE = "Back to the controls"
_SCREENS = "To Monitor, Search, Plan, where 1 2 3 type or pick a choice"

Clock = Callable[[], datetime]
_OF_MODELS = frozenset({"undo", "redo", "search"})
"""Actions that a plan without controls and a closed form lacks."""


def why_no_search(plan: Plan) -> str:
    """Return why a search cannot have a plan's settings; "" if it can."""
    if reason := why_formula_only(plan.shape, plan.recipe):
        return reason
    if plan.recipe.sharding != "none" and not is_named(plan.gpu):
        return "a search on a GPU of this machine runs the step of one GPU: set sharding to none"
    if plan.extras:
        return "a search cannot run what only the formula knows: set loss to whole and offload to none"
    return ""


class PlanScreen(MainScreen):
    """The screen of one plan.

    Args:
        make: makes what is planned, given where its news go.
        clock: the time of day.
    """

    CSS_PATH = "screen.tcss"
    SMALLEST = (72, 18)
    TOPIC = "plan"
    TABLES = ("number", "column")
    PANE_HELP: ClassVar[Mapping[str, str]] = {
        "controls": "Model and training. ← → change a value, digits type it, enter lists choices; h explains.",
        "ledger": "Bytes of one GPU by bucket, at the peak. Enter explains a row.",
        "facts": "Batch sizes, passes and what else follows from the plan. Enter explains a row.",
        "pane": "The list named above it. Enter takes a row over: a change, a GPU; ← → show the other lists.",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(PANES[pane], f"pane('{pane}')", pane, show=False, tooltip=_PANES) for pane in OF_EVERY_SUBJECT),
        *(
            Binding(key, f"pane('{pane}')", pane, show=False, tooltip=_PANES_OF_MODELS)
            for pane, key in PANES.items()
            if pane not in OF_EVERY_SUBJECT
        ),
        Binding("escape", "controls", "controls", show=False, tooltip=_ESCAPE),
        Binding("u", "undo", "undo", tooltip="Undo: take the last change back"),
        Binding("ctrl+r", "redo", "redo", show=False, tooltip="Redo: make it again"),
        Binding("r", "trace", "run", tooltip="Trace again, where that failed; run the what-ifs not run so far"),
        Binding("x", "stop", "stop", tooltip="Stop what runs: what was found stays, r continues"),
        Binding("g", "gpu", "GPU", tooltip="Plan for another GPU: answered without running again"),
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
    class Told(Message):
        """The work behind the screen has news."""

        news: News

    def __init__(self, make: MakePlanned, *, clock: Clock = datetime.now) -> None:
        super().__init__()
        self._planned = make(self._tell)
        self._clock = clock
        self._waits_since_s = self._took_s = 0.0
        self._could = (False, False, False)
        self._pane = "numbers" if self._model is not None else "techniques"

    @property
    def planned(self) -> Planned:
        """The subject of the plan."""
        return self._planned

    @property
    def _model(self) -> ModelPlanned | None:
        """A model's plan, which has controls and a closed form; None for a command."""
        return self._planned if isinstance(self._planned, ModelPlanned) else None

    def parting_lines(self) -> Iterable[str]:
        """Return whether it fits, and the command line that opens the plan again."""
        if verdict := self._planned.verdict:
            yield verdict
            if isinstance(line := self._planned.line, str):
                yield f"This plan again: {line}"

    @property
    def settled(self) -> bool:
        """Nothing is being worked out any more."""
        return not self._planned.busy and self.query_one(PlanPane).settled

    # Widgets

    def compose_parts(self) -> ComposeResult:
        """Yield header, controls, numbers, pane."""
        yield FixedRows(id="plan-header")
        with Horizontal(id="body"):
            if self._model is not None:
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
                yield PlanPane(self._planned.content)

    def on_mount(self) -> None:
        """Show the numbers at once; the trace and the pane follow."""
        _TURNS.append(sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_S)
        self.set_class(self._model is None, "-bare")
        self.query_one("#controls" if self._model is not None else "#pane").focus()
        self._planned.begin()
        self.set_interval(_CLOCK_S, self._tick)
        self._draw()

    def on_unmount(self) -> None:
        """Give threads back the turns that they had; what runs behind the screen ends as well."""
        if _TURNS:  # empty where the program ended before the screen was there
            before_s = _TURNS.pop()
            sys.setswitchinterval(_SWITCH_S if _TURNS else before_s)
        super().on_unmount()

    def laid_out(self, size: Size) -> None:
        """Show one pane, two, or three side by side."""
        for name, there in layout_classes(*size).items():
            self.set_class(there, name)
        self.call_after_refresh(self._draw)

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what does something for what is planned."""
        match action:
            case "trace":
                return self._planned.can_run()
            case "stop":
                return self._planned.busy
            case "gpu":
                return self.has_key(action, parameters) and self._planned.can_move()
            case _:
                return self.has_key(action, parameters)

    def has_key(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Return whether an action can ever be done for what is planned; a model's GPU is a control."""
        if action == "pane":
            return parameters[0] in self._planned.panes
        return action != "gpu" if self._model is not None else action not in _OF_MODELS

    def action_gpu(self) -> None:
        """Pick a GPU to plan for."""
        here = self._planned.shown.gpu
        by_name = {gpu.name: gpu for gpu in gpus().values()}
        known = self._planned.fits
        options = [Option(name, gpu_words(gpu, known.get(name))) for name, gpu in by_name.items()]

        def picked(name: str | None) -> None:
            if name is not None:
                self._plan_for(as_beside(by_name[name], here))

        self.app.push_screen(PickScreen("GPU", options, here.name), picked)

    # The controls, of a model

    def on_plan_controls_stepped(self, message: PlanControls.Stepped) -> None:
        """Take the step to the next state."""
        self._step(message.step)

    def on_plan_controls_picking(self, message: PlanControls.Picking) -> None:
        """Open the list of a choice."""
        assert self._model is not None, "controls are of a model"
        key, draft = message.key, self._model.state.draft
        control = control_of(draft, key)
        assert isinstance(control, Choice), "numbers are typed"

        def picked(value: str | None) -> None:
            if value is not None:
                self._step(lambda state: states.chosen(states.paused(state), key, value))

        title = control.label[:1].upper() + control.label[1:]
        self.app.push_screen(PickScreen(title, control.options(draft), control.get(draft)), picked)

    def on_row_list_moved(self, message: RowList.Moved) -> None:
        """Note another control: the next change is a step of its own."""
        if isinstance(message.rows, PlanControls):
            self._step(states.paused)

    def action_undo(self) -> None:
        """Take the last change back, and what is being typed."""
        self.query_one(PlanControls).end_typing()
        self._step(states.undone)

    def action_redo(self) -> None:
        """Make a change again that was taken back."""
        self.query_one(PlanControls).end_typing()
        self._step(states.redone)

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
        """Give the keys back to the controls, where there are any."""
        for controls in self.query(PlanControls):
            controls.focus()

    def action_stop(self) -> None:
        """End what runs; what was found stays."""
        self._planned.stop()
        self._draw_numbers()

    def on_pane_names_wanted(self, message: PaneNames.Wanted) -> None:
        """Show the pane whose name was clicked."""
        self.action_pane(message.pane)

    @on(RowList.Chosen, "#pane")
    def _act_on_pane(self, message: RowList.Chosen) -> None:
        """Apply a technique; plan for a GPU; mark this plan to compare others with it; explain anything else."""
        pane, model = self.query_one(PlanPane), self._model
        match pane.choice(message.key):
            case Plan() | Gpu() if not pane.settled:
                self.notify("this list is of the plan before: one moment")
            case Plan() as plan:
                self._step(lambda state: states.replaced(state, plan))
            case Gpu() as gpu:
                self._plan_for(gpu)
            case (title, lines, command):
                self.app.push_screen(TextScreen(title, lines, plain=command))
            case _ if model is not None and self._visible_pane() == "compare":
                model.mark()
                self._draw_panes()
            case _:
                self.action_explain()

    @on(RowList.Chosen, "#ledger,#facts")
    def action_explain(self) -> None:
        """Explain the row under the cursor; show the keys where a row states all there is to say."""
        rows, model = self.focused, self._model
        found = None
        if model is not None and isinstance(rows, PlanControls):
            found = control_help(model.state, rows.key) if rows.key else None
        elif isinstance(rows, RowList):
            found = self._explained(rows.key)
        self.app.push_screen(HelpScreen.of(self) if found is None else TextScreen(*found))

    def _explained(self, key: str) -> TextOf | None:
        """Return all there is to say about a row: by formula and trace of a model, by trace alone of a command."""
        if self._model is not None:
            return explanation(self._model.plan, key)
        traced = self._planned.shown.by_trace
        return None if traced is None else traced_explanation(traced, key)

    def more_keys(self) -> Sequence[tuple[str, str]]:
        """Return the keys of the controls, where there are any, and the one between lists."""
        if self._model is None:
            return (("tab", "ledger, facts, pane"),)
        return (
            ("0 … 9", "type a number, or pick a choice by its place; backspace takes a digit away, esc the number"),
            ("tab", "controls, ledger, pane"),
            ("wheel", "turns the control under the pointer"),
        )

    def help_lines(self) -> Iterable[Row]:
        """Return the legend of the bars."""
        return [help_heading("Buckets"), *bucket_lines(BAR_ORDER), []]

    # Copying and handing over

    def action_copy(self) -> None:
        """Copy the command line that opens this plan again, or say why it is missing."""
        line = self._planned.line
        if isinstance(line, Unknown):
            self.notify(line.reason, severity="warning")
        else:
            copy_to_clipboard(self, line)

    def take_over(self, what: object) -> str:
        """Continue from another plan, which undo takes back; a command's screen refuses a model's plan."""
        if not isinstance(what, Plan):
            return ""
        if self._model is None:
            return "a command is planned here: `gpumem-tui` without it plans for a process"
        self._step(lambda state: states.replaced(state, what))
        return ""

    def action_search(self) -> None:
        """Search with these settings, if a search can have them."""
        assert self._model is not None, "the key is offered for a model"
        if why_not := why_no_search(self._model.plan):
            self.notify(why_not, severity="warning")
        else:
            self.post_message(self.Wanted("search", self._model.plan))

    # Work behind the screen

    def action_trace(self) -> None:
        """Trace once more where it failed; run what has not been run."""
        if self._planned.can_run():
            self._planned.again()
            self._draw_numbers()

    def _tell(self, news: News) -> None:
        """Pass news on from the thread that has them."""
        self.post_message(self.Told(news))

    def on_plan_screen_told(self, message: Told) -> None:
        """Show news, if they are of what is on the screen."""
        if message.news():
            self._draw_numbers()
            self._draw_panes()
        else:
            self.query_one(PlanPane).trace_arrived()

    def cancel(self) -> None:
        """End what runs; safe to call from any thread."""
        self._planned.close(0.0)

    async def end(self) -> int:
        """End what runs, and wait until its processes are gone; return the exit code for leaving now."""
        code = self._planned.leaving_code
        code = await super().end() or code
        await in_daemon_thread(partial(self._planned.close, _ENDS_WITHIN_S))
        return code

    # Drawing

    def _step(self, step: Callable[[PlanState], PlanState]) -> None:
        """Show another state of a model: controls and numbers now, the trace and the pane when they are there."""
        assert self._model is not None, "controls are of a model"
        before = self._model.state
        self._model.enter(step(before))
        state = self._model.state
        self.query_one(PlanControls).show_state(state)
        if state.plan != before.plan:
            self._draw_numbers()
            self._draw_panes()
        elif state.now.problem != before.now.problem:
            self._draw_header()

    def _plan_for(self, gpu: Gpu) -> None:
        self._planned.plan_for(gpu)
        self._draw()

    def _draw(self) -> None:
        if self._model is not None:
            self.query_one(PlanControls).show_state(self._model.state)
        self._draw_numbers()
        self._draw_panes()

    def _draw_header(self) -> None:
        shown, now = self._planned.shown, f"{self._clock():%H:%M}"
        self.query_one("#plan-header", RowList).show(lambda width, _: [header_row(shown, now, width)])

    def _tick(self) -> None:
        self._draw_header()
        if self._planned.busy:
            self._draw_verdict()

    def _draw_verdict(self) -> None:
        """Show whether it fits; while a trace is under way, for how long, and about how long yet by the last one."""
        shown, now_s = self._planned.shown, time.monotonic()
        if shown.traced is None:
            self._waits_since_s = self._waits_since_s or now_s
        elif self._waits_since_s:
            self._took_s, self._waits_since_s = now_s - self._waits_since_s, 0.0
        waits_s = now_s - self._waits_since_s if self._waits_since_s else 0.0
        waited = so_far(waits_s, self._took_s) if waits_s >= 1 else ""
        self.query_one("#verdict", RowList).show(lambda width, _: verdict_rows(shown, width, waited))

    def _draw_numbers(self) -> None:
        if self._could != (can := (self._planned.can_run(), self._planned.can_move(), self._planned.busy)):
            self._could = can
            self.refresh_bindings()
        self._draw_header()
        self._draw_verdict()
        shown = self._planned.shown
        self.query_one("#ledger", RowList).show(lambda width, _: ledger_rows(shown, width))
        self.query_one("#facts", RowList).show(lambda width, _: fact_rows(shown, width))

    def _draw_panes(self) -> None:
        pane = self._visible_pane()
        self.set_class(pane == "numbers", "-on-numbers")
        for names in self.query(PaneNames):
            names.show_panes(self._panes(), pane)
        self.query_one(PlanPane).want(self._planned.request(pane, with_step=self.has_class("-step")))

    def on_plan_pane_drawn(self, message: PlanPane.Drawn) -> None:
        """Show memory over a step, which came with the pane."""
        self.query_one("#step", RowList).show(message.step)

    def _panes(self) -> list[str]:
        return [pane for pane in self._planned.panes if pane != "numbers" or self.has_class("-single")]

    def _visible_pane(self) -> str:
        return self._pane if self._pane in self._panes() else "techniques"
