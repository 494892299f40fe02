"""The Plan screen for a command: what fits, and what-ifs that fill in as their runs end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Size

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.errors import EXIT_FAILED
from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.plan.combining import Planner
from gpumem_tui.plan.command import CommandFigures, CommandPlan, Runs, Watch, on_every_gpu
from gpumem_tui.plan.control import Option
from gpumem_tui.run.children import ChildDied
from gpumem_tui.run.control import Cancelled, Control, Unusable
from gpumem_tui.run.events import Output
from gpumem_tui.search.predicting import WhileTracing
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.dialogs import PickScreen, TextScreen
from gpumem_tui.tui.kit.figures import Rows
from gpumem_tui.tui.kit.row_list import FixedRows, RowList
from gpumem_tui.tui.kit.steered_screen import SteeredScreen, Tell
from gpumem_tui.tui.plan import command as views
from gpumem_tui.tui.plan.command import CommandPlanState

_TICK_S = 1.0

Clock = Callable[[], datetime]
Step = Callable[[CommandPlanState], CommandPlanState]


class CommandPlanScreen(SteeredScreen):
    """The plan of a command, on one GPU at a time.

    Args:
        runs: what is run behind the screen.
        run_all: try every change at once, not only when asked to.
        clock: the time of day.
    """

    CSS_PATH = "command_screen.tcss"
    SMALLEST = (60, 16)
    TOPIC = "plan"
    TABLES = ("column",)
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012  as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"pane('{pane}')", pane, tooltip=words) for pane, (key, words) in views.PANES.items()),
        Binding("g", "gpu", "GPU", tooltip="Plan for another GPU: answered without running again"),
        Binding("r", "run", "run what-ifs", tooltip="Run the what-ifs that have not been run"),
        Binding("c", "cancel", "stop", tooltip="End the run; what was found stays"),
        Binding("escape", "cancel", "stop", show=False, tooltip="End the run as well"),
        Binding("question_mark", "app.help", "help", key_display="?", tooltip="The keys and what the columns mean"),
        Binding("q", "app.quit", "quit", tooltip="Leave; what runs is ended"),
    ]

    def __init__(self, runs: Runs, *, run_all: bool = True, clock: Clock = datetime.now) -> None:
        super().__init__()
        self._runs = runs
        self._run_all = run_all
        self._clock = clock
        self._state = CommandPlanState(runs.config, runs.batch_size)
        self._figures: CommandFigures | None = None
        self._gpus: tuple[tuple[CommandPlan, TracedAnswer], ...] = ()
        self._working = False
        self._pane = "what-ifs"
        self._began_s = time.monotonic()

    @property
    def state(self) -> CommandPlanState:
        """The state of the plan so far."""
        return self._state

    @property
    def settled(self) -> bool:
        """Nothing runs, and all that is known is on the screen."""
        return not self._state.busy and (self._state.plan is None or self._is_worked_out)

    # What is on it

    def compose_parts(self) -> ComposeResult:
        """Yield header, verdict, and the ledger beside the lists."""
        yield FixedRows(id="plan-header")
        yield FixedRows(id="plan-verdict")
        with Horizontal(id="plan-body"):
            with Vertical(id="plan-left"):
                yield FixedRows(id="ledger", title="Ledger")
                yield RowList(id="batches", title="Batch sizes")
            with Vertical(id="plan-right"):
                yield RowList(id="what-ifs", title="What-ifs")
                yield RowList(id="GPUs", title="GPUs")
                yield RowList(id="places", title="What holds the peak")

    def on_mount(self) -> None:
        """Begin at once: there is nothing to see before."""
        self.set_interval(_TICK_S, self._draw_top)
        self.action_pane(self._pane)
        self._draw()
        self.call_after_refresh(self._begin, self._run_all)

    def laid_out(self, size: Size) -> None:  # noqa: ARG002  each list is drawn for its own size
        """Draw for another size of the terminal."""
        self.call_after_refresh(self._draw)

    # Keys

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Offer only what does something now."""
        state = self._state
        match action:
            case "run":
                return not state.busy and (state.plan is None or bool(state.waiting or state.spared))
            case "cancel":
                return state.busy
            case "gpu":
                return bool(self._gpus)
            case _:
                return True

    def action_pane(self, pane: str) -> None:
        """Show a list, and give it the keys."""
        self._pane = pane
        for other in views.PANES:
            self.set_class(other == pane, f"-on-{other}")
        self.query_one(f"#{pane}", RowList).focus()

    def action_turn(self, way: int) -> None:
        """Show the list before or after the one that is shown."""
        panes = list(views.PANES)
        self.action_pane(panes[(panes.index(self._pane) + way) % len(panes)])

    def action_run(self) -> None:
        """Run what has not been run, what is not needed too once the rest has."""
        self._begin(run_all=True)

    def action_cancel(self) -> None:
        """End the run."""
        self._control.cancel()

    def action_gpu(self) -> None:
        """Pick a GPU; the trace answers for it."""
        rows = {there.gpu: views.gpu_details(there, found) for there, found in self._gpus}
        options = [Option(gpu.name, details) for gpu, details in rows.items()]

        def picked(name: str | None) -> None:
            if name is not None:
                self._plan_for(next(gpu for gpu in rows if gpu.name == name))

        self.app.push_screen(PickScreen("GPU", options, self._state.gpu.name), picked)

    @on(RowList.Chosen, "#GPUs")
    def _choose_gpu(self, message: RowList.Chosen) -> None:
        self._plan_for(next(there.gpu for there, _ in self._gpus if there.gpu.name == message.key))

    @on(RowList.Chosen, "#what-ifs")
    def _explain(self, message: RowList.Chosen) -> None:
        if self._figures is None:
            return
        if (together := views.set_details(self._state, message.key)) is not None:
            title, lines, command = together
            self.app.push_screen(TextScreen(title, lines, plain=command))
        elif (found := views.technique_details(self._state, self._figures, message.key)) is not None:
            self.app.push_screen(TextScreen(*found))

    def _plan_for(self, gpu: Gpu) -> None:
        self._enter(views.planned_for(self._state, gpu))

    # The runs

    def _begin(self, run_all: bool) -> None:
        if self.ending:
            return
        self._began_s = time.monotonic()
        self._enter(views.begun(self._state))
        self.run_behind(partial(self._drive, self._state, run_all=run_all))

    def _drive(self, state: CommandPlanState, control: Control, tell_screen: Tell, *, run_all: bool) -> None:
        """Run what is to be run, in a thread of its own."""

        def tell(step: Step) -> None:
            tell_screen(lambda: self._enter(step(self._state)))

        def watch(event: WhileTracing) -> None:
            if isinstance(event, Output):
                tell(partial(views.printing, text=event.text))
            elif event.sample is not None:
                tell(partial(views.reaching, sample=event.sample))

        try:
            self._run(state, control, tell, watch, run_all=run_all)
            tell(views.ended)
        except Cancelled:
            tell(views.ended)
        except Unusable as error:
            tell(partial(views.ended, failure=str(error), exit_code=error.exit_code))
        except ChildDied as error:
            tell(partial(views.ended, failure=f"tracing failed: {error}", exit_code=EXIT_FAILED))

    def _run(
        self, state: CommandPlanState, control: Control, tell: Callable[[Step], None], watch: Watch, *, run_all: bool
    ) -> None:
        if state.plan is None:
            predicted, waiting, refused = self._runs.trace(control, watch)
            step = partial(views.traced, predicted=predicted, waiting=waiting, refused=refused)
            tell(step)
            state = step(state)
        assert state.plan is not None, "it has just been traced"
        if run_all:
            for now in Planner(state.plan, self._runs, state.waiting, control, watch, state.every).run():
                tell(partial(views.went_on, step=now))

    async def end(self) -> int:
        """End what runs, wait until its processes are gone, and return the exit code for leaving now."""
        code = self._state.leaving_code
        await super().end()
        return code

    # Drawing

    def _enter(self, state: CommandPlanState) -> None:
        """Show another state; what has to be worked out follows."""
        before, self._state = self._state, state
        if state.plan is not None and not self._working and not self._is_worked_out:
            self._working = True
            self.run_worker(self._work_out())
        if (state.busy, state.waiting, state.plan) != (before.busy, before.waiting, before.plan):
            self.refresh_bindings()
        self._draw()

    @property
    def _is_worked_out(self) -> bool:
        figures = self._figures
        return figures is not None and figures.plan is self._state.plan and bool(self._gpus)

    async def _work_out(self) -> None:
        """Work out the figures until they are those of the state, which may change meanwhile; of every GPU once."""
        try:
            while (plan := self._state.plan) is not None and not self._is_worked_out:
                self._figures = await in_daemon_thread(partial(CommandFigures.of, plan))
                self._draw()
                if not self._gpus:  # they depend on the trace of the command as it is only
                    self._gpus = tuple(await in_daemon_thread(partial(on_every_gpu, plan)))
                    self._draw()
                    self.refresh_bindings()
        finally:
            self._working = False

    def _draw_top(self) -> None:
        state, figures = self._state, self._figures
        now, elapsed_s = f"{self._clock():%H:%M}", int(time.monotonic() - self._began_s)
        self._show("plan-header", lambda width, _: [views.header_row(state, now, width)])
        self._show("plan-verdict", lambda width, _: views.verdict_rows(state, figures, elapsed_s, width))

    def _draw(self) -> None:
        self._draw_top()
        state, figures, gpus = self._state, self._figures, self._gpus
        self._show("ledger", lambda width, _: views.ledger_rows(figures, width))
        self._show("batches", lambda width, _: views.batch_list_rows(figures, width))
        self._show("what-ifs", lambda width, selected: views.technique_rows(state, figures, width, selected))
        self._show("GPUs", lambda width, _: views.gpu_list_rows(state, gpus, width))
        self._show("places", lambda width, _: views.place_rows(figures, width))

    def _show(self, name: str, rows: Rows) -> None:
        self.query_one(f"#{name}", RowList).show(rows)
