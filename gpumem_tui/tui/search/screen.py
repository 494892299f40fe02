"""Runs a search to its end, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Size
from textual.widgets import Static

from gpumem_tui.errors import EXIT_FAILED, own_error
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.run.control import Control, Unusable
from gpumem_tui.run.events import Output
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Prediction
from gpumem_tui.search.report import command_found, verdict_lines
from gpumem_tui.search.runner import SearchEvent, TrialProgress, search
from gpumem_tui.tui.kit.clipboard import copy_to_clipboard
from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.main_screen import Act, permitted, refused
from gpumem_tui.tui.kit.output_pane import OutputPane, Printed
from gpumem_tui.tui.kit.steered_screen import SteeredScreen, Tell
from gpumem_tui.tui.search import state as states
from gpumem_tui.tui.search.bar import MemoryBar
from gpumem_tui.tui.search.form import Edited, EditScreen
from gpumem_tui.tui.search.panels import (
    LedgerTable,
    ReasonPanel,
    VerdictPanel,
    WorkloadLine,
    WorkloadPanel,
    header_row,
    search_help,
)
from gpumem_tui.tui.search.plot import BatchPlot, warm
from gpumem_tui.tui.search.state import Failure, SearchState
from gpumem_tui.tui.search.trial_log import TrialLog

_HOLD = "Hold the search after the step that runs, or continue"
_OUTPUT = "The command's output, or the log of trials"
_ENLARGE = "The output as large as the screen, or the panels again"
_REDRAW_S = 0.25
_CLOCK_S = 1.0

SearchFunction = Callable[[SearchConfig, Control], Iterator[SearchEvent]]
Clock = Callable[[], datetime]


class SearchScreen(SteeredScreen):
    """The screen of one search.

    Args:
        config: what to search; `options` is what the user typed to get it, for the form.
        notice: where it will run, in the caller's words.
        autostart: begin as soon as the screen is there.
        search_function, clock: the search and the time of day.
    """

    CSS_PATH = "screen.tcss"
    SMALLEST = (60, 16)
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-normal"), (160, "-wide")]  # noqa: RUF012  as Textual declares it
    VERTICAL_BREAKPOINTS = [(0, "-short"), (24, "-low"), (30, "-mid"), (36, "-tall"), (50, "-high")]  # noqa: RUF012
    TOPIC = "search"
    PANE_HELP: ClassVar[Mapping[str, str]] = {
        "TrialLog": "A line a trial. The ledger and the bar show the trial under the cursor.",
        "OutputPane": "The lines that the command prints. It follows the end until you scroll up.",
        "ledger-pane": "Bytes by bucket at one batch size: predicted, and as the trial ran.",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "start", "start", tooltip="Start a search, or start over after its end"),
        Binding("p", "pause", "pause", tooltip=_HOLD),
        Binding("p", "resume", "continue", tooltip=_HOLD),
        Binding("c", "cancel", "cancel", tooltip="Cancel: the running trial is killed, what was found stays"),
        Binding("e", "edit", "edit", tooltip="Edit the workload, the GPU and the strategy"),
        Binding("v", "switch", "plot/table", tooltip="Plot or table, where there is room for one"),
        Binding("o", "log(True)", "output", tooltip=_OUTPUT),
        Binding("o", "log(False)", "trials", tooltip=_OUTPUT),
        Binding("z", "enlarge(True)", "zoom", tooltip=_ENLARGE),
        Binding("z", "enlarge(False)", "back", key_display="z", tooltip=_ENLARGE),
        Binding("escape", "enlarge(False)", show=False, tooltip="Back from the zoom"),
        Binding("y", "copy", "copy", tooltip="Copy the command with the safe batch size"),
        Binding("question_mark", "app.help", "help", key_display="?", tooltip="The keys and what the columns mean"),
        Binding("q", "app.quit", "quit", tooltip="Quit; a running search is cancelled"),
    ]

    def __init__(
        self,
        config: SearchConfig,
        options: WorkloadOptions,
        notice: str = "",
        *,
        autostart: bool = False,
        search_function: SearchFunction = search,
        clock: Clock = datetime.now,
    ) -> None:
        super().__init__()
        self._state = SearchState(config)
        self._options = options
        self._given = Edited(options, config)
        self._notice = notice
        self._autostart = autostart
        self._search = search_function
        self._clock = clock
        self._printed = Printed.of(config)
        self._shows_output: bool | None = None  # as the user chose; None: until the first trial has ended
        self._began = clock()
        self._drawn: SearchState | None = None
        self._focused_log: TrialLog | OutputPane | None = None

    @property
    def state(self) -> SearchState:
        """The state of the search."""
        return self._state

    def parting_lines(self) -> Iterable[str]:
        """Return the verdict, and the command to run."""
        state = self._state
        if state.failure is not None:
            return (state.failure.message,)
        return () if state.verdict is None else verdict_lines(state.config, state.verdict)

    @property
    def settled(self) -> bool:
        """Return whether all of `state` is on the screen."""
        return self._drawn is self._state

    # Widgets

    def compose_parts(self) -> ComposeResult:
        """Yield header, panels, bar, log and verdict."""
        yield Lines(id="header")
        yield WorkloadLine()
        with Horizontal(id="panels"):
            yield WorkloadPanel()
            with Vertical(id="plot-pane") as plot_pane:
                plot_pane.border_title = "GiB against batch size"
                yield BatchPlot()
            with VerticalScroll(id="ledger-pane"):
                yield LedgerTable()
        yield MemoryBar()
        log, empty = TrialLog(), Static("no trial yet: s starts the search", id="log-empty")
        log.border_title = empty.border_title = "Trials"
        with Horizontal(id="logs"):
            yield log
            yield empty
            yield OutputPane()
        yield ReasonPanel()
        yield VerdictPanel()

    def on_mount(self) -> None:
        """Draw the screen without a search."""
        self._redraws = self.set_interval(_REDRAW_S, self._redraw_if_dirty, pause=True)
        self.set_interval(_CLOCK_S, self._show_time)
        self._draw()
        if self._autostart:
            self.call_after_refresh(self._start_unless_left)

    def _start_unless_left(self) -> None:
        if not self.ending:
            self.action_start()

    def laid_out(self, _size: Size) -> None:
        """Draw for another size of the terminal."""
        self.call_after_refresh(self._draw)
        self.call_after_refresh(self.refresh_bindings)  # the width decides which keys do something

    def take_over(self, what: object) -> str:
        """Search something else, as if opened with it."""
        if self._state.busy:
            return "another search is running: cancel it first"
        match what:
            case (WorkloadOptions() as options, SearchConfig() as config):
                self._take(Edited(options, config))
                self.action_start()
        return ""

    def _take(self, edited: Edited) -> None:
        self._options, config = edited.options, edited.config
        self._notice = ""
        self._printed = Printed.of(config)
        self._shows_output = None
        self.remove_class("-large")
        self._enter(SearchState(config))

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what does something now."""
        state = self._state
        match action:
            case "start":
                return not state.busy and permitted(self, Act.SEARCH)
            case "edit":
                return not state.busy and permitted(self, Act.SEARCH)
            case "pause":
                return state.busy and not state.paused and not state.cancelling
            case "resume":
                return state.busy and state.paused and not state.cancelling
            case "cancel":
                return state.busy and not state.cancelling
            case "switch":
                return self.has_class("-narrow") and not self.has_class("-high") and not self.has_class("-large")
            case "copy":
                return bool(command_found(state.config, state.verdict))
            case "log":
                shared = not self.has_class("-wide") and not self.has_class("-large")
                return self._is_command and shared and self.has_class("-output") is not parameters[0]
            case "enlarge":
                shown = self.has_class("-output") or self.has_class("-wide")
                return self._is_command and shown and self.has_class("-large") is not parameters[0]
            case _:
                return True

    def action_start(self) -> None:
        """Search, or search again."""
        if refused(self, Act.SEARCH):
            return
        self._began = self._clock()
        self._printed = Printed.of(self._state.config)
        self._enter(states.started(self._state))
        self.run_behind(partial(self._drive, partial(self._search, self._state.config), self._printed))

    def action_pause(self) -> None:
        """Hold the search after the step that runs."""
        self._control.pause()
        self._enter(states.held(self._state, paused=True))

    def action_resume(self) -> None:
        """Let the held search continue."""
        self._control.resume()
        self._enter(states.held(self._state, paused=False))

    def action_cancel(self) -> None:
        """End the search; its verdict follows within a moment."""
        self._control.cancel()
        self._enter(states.cancelling(self._state))

    def action_switch(self) -> None:
        """Show the plot or the table, where there is room for one."""
        self.toggle_class("-plot")

    def action_log(self, output: bool) -> None:
        """Show the command's output in the place of the trials, or the other way round."""
        self._shows_output = output
        self._draw()

    def action_enlarge(self, large: bool) -> None:
        """Show the output in the place of all panels, or the panels again."""
        self.set_class(large, "-large")
        self._draw()

    def action_copy(self) -> None:
        """Copy the command with the largest batch size to the clipboard."""
        copy_to_clipboard(self, command_found(self._state.config, self._state.verdict))

    def has_key(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Return whether an action can be done here: only a command has output."""
        return self._is_command if action in ("log", "enlarge", "copy") else super().has_key(action, parameters)

    def help_lines(self) -> list[Row]:
        """Return what the columns and the marks of this search mean."""
        return search_help(self._state.config.device.measured_title, is_command=self._is_command)

    def action_edit(self) -> None:
        """Open the form."""

        def edited(result: Edited | None) -> None:
            if result is not None:
                self._take(result)

        now = Edited(self._options, self._state.config)
        self.app.push_screen(EditScreen(now, self._given), edited)

    def on_trial_log_chosen(self, message: TrialLog.Chosen) -> None:
        """Show the trial that the user looks at."""
        self._enter(states.selecting(self._state, message.number))

    # The search

    def _drive(
        self, search: Callable[[Control], Iterator[SearchEvent]], printed: Printed, control: Control, tell: Tell
    ) -> None:
        """Take what a search states as it comes, and why it ended without a verdict; in a thread of its own."""
        prediction: Prediction | None = None

        def broke(message: str, exit_code: int) -> None:
            tell(lambda: self._enter(states.failed(self._state, Failure(message, exit_code))))

        try:
            for event in search(control):
                printed.take(event)  # there may be much of it: the screen looks when it draws
                if isinstance(event, Output):
                    continue
                if isinstance(event, Predicted):
                    prediction = event.prediction
                    warm(prediction)
                elif isinstance(event, TrialProgress) and event.sample is None and prediction is not None:
                    warm(prediction, [event.batch_size])
                tell(partial(self._take_in, event))
        except Unusable as error:
            broke(str(error), error.exit_code)
        except Exception as error:  # noqa: BLE001  any error: the screen states it in one line
            broke(f"the search itself broke off: {own_error(error)}", EXIT_FAILED)

    def _take_in(self, event: SearchEvent) -> None:
        """Fold an event in; drawn with the next redraw."""
        before = self._state
        self._state = states.reduce(before, event)
        if before.stage is not self._state.stage:
            self._enter(self._state)

    async def end(self) -> int:
        """Cancel what runs, wait until its child process is gone, and return the exit code for leaving now."""
        code = self._state.exit_code
        await super().end()
        return code

    # Drawing

    def _enter(self, state: SearchState) -> None:
        """Show another state at once, and offer the keys that fit it."""
        self._state = state
        if state.busy:
            self._redraws.resume()
        else:
            self._redraws.pause()
        self._draw()
        self.refresh_bindings()

    def _redraw_if_dirty(self) -> None:
        if self._drawn is self._state:
            self._show_verdict()  # its seconds count
            self.query_one(OutputPane).show(self._printed)
        else:
            self._draw()

    def _show_verdict(self) -> None:
        elapsed_s = int((self._clock() - self._began).total_seconds())
        short = not (self.has_class("-tall") or self.has_class("-high"))
        self.query_one(VerdictPanel).show(self._state, self._notice, elapsed_s, short=short)

    def _show_time(self) -> None:
        header = self.query_one("#header", Lines)
        header.show_rows([header_row(self._state, f"{self._clock():%H:%M}", header.content_size.width)])

    def _draw(self) -> None:
        state = self._state
        self._show_time()
        self.query_one(WorkloadLine).show(state)
        self.query_one(WorkloadPanel).show(state)
        ledger = self.query_one(LedgerTable)
        ledger.show(state)
        self.query_one("#ledger-pane").border_title = ledger.title
        self.query_one(MemoryBar).show(state)
        self.query_one(TrialLog).show(state)
        self._show_output()
        self.query_one(ReasonPanel).show(state)
        self._show_verdict()
        self.set_class(not state.trials, "-no-trials")
        self.set_class(state.running is not None, "-running")
        self.query_one(BatchPlot).show(state)
        self._drawn = state

    @property
    def _is_command(self) -> bool:
        return self._state.config.workload.command is not None

    def _show_output(self) -> None:
        """Show the output where it belongs, and give one of the two logs the arrow keys."""
        chosen = self._shows_output
        shown = self._is_command and (not self._state.trials if chosen is None else chosen)
        self.set_class(self._is_command, "-command")
        self.set_class(shown, "-output")
        pane, log = self.query_one(OutputPane), self.query_one(TrialLog)
        pane.show(self._printed)
        wanted = pane if self.has_class("-large") or (shown and not self.has_class("-wide")) else log
        if self._focused_log is not wanted:
            self._focused_log = wanted
            wanted.focus(scroll_visible=False)
        self.refresh_bindings()
