"""Which parts of the Monitor stand where at a terminal's size. Processes always keep their place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size

from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.history import History
from gpumem_tui.monitor.ledger import DEVICE_BUCKETS
from gpumem_tui.monitor.probes import with_unlisted
from gpumem_tui.monitor.snapshot import Snapshot, Source
from gpumem_tui.monitor.users import viewer
from gpumem_tui.settings import Settings
from gpumem_tui.tui.kit.figures import Row, clock
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.monitor.entries import charted, count, moved, offering
from gpumem_tui.tui.monitor.gpus import GpuPanel, Layout, layout
from gpumem_tui.tui.monitor.header import alert_row, header_row, help_alerts, is_troubled, lasting_last, trouble_rows
from gpumem_tui.tui.monitor.history import ChartSpan, HistoryChart
from gpumem_tui.tui.monitor.process_actions import END_BINDINGS, PROCESS_BINDINGS, ProcessActions
from gpumem_tui.tui.monitor.processes import ProcessTable
from gpumem_tui.tui.monitor.state import HOLD_S, Feed, MonitorState, focused_on, seen, sorted_on
from gpumem_tui.tui.monitor.table_screen import SORT, UNFILTER
from gpumem_tui.tui.replay.keys import REPLAY_BINDINGS

if TYPE_CHECKING:
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.recording.player import Player
    from gpumem_tui.watch.published import ProbeSource


STYLES = Path(__file__).with_name("screen.tcss")
_WRITTEN_S = 0.1
"""After the first picture: by then it is on the terminal. To ask probes much is imported, which would hold it up."""
_PATIENCE_S = 1.0
"""Until the first snapshot, the seconds it has taken are counted on the screen this often."""
_PAGE = 10
_ENDLESS = 10**6
_MOVES = {"up,k": -1, "down,j": 1, "pageup": -_PAGE, "pagedown": _PAGE, "home": -_ENDLESS, "end": _ENDLESS}
_CHOOSE = "Choose a process; page up, page down, home and end too"
_GPU = "The next GPU, the one before: its ledger and its history"
_SPAN = "History: a shorter time, a longer one"
_FILTER = "Filter by user, pid, command, container or gpu3; esc clears"
_HELP = "All alerts, keys, columns"
_MARGINS = 2
_ALERTS_HEIGHT = 14
"""Rows of terminal from which alerts have a line of their own; below it they take the header's."""


class MonitorScreen(ProcessActions):
    """Takes in what `source` has when it hears of something new; never waits for it.

    Args:
        source: where snapshots come from: already started, stopped when the screen ends.
        settings: how much is remembered and shown, whether the bell rings, whose processes are listed.
        history, alerts: what remembers the snapshots, and what judges them; None for new ones, by the settings.
        past_s: how far back `history` reaches already.
        read_only: no process is ended, attached to, or looked into.
        notice: the header's first words.
        probes: what probes publish on the machine of the source: already started, stopped when the screen ends; None
            for nothing.
        clock: a snapshot's time as text.
        replay: what plays the recording that the source is of; None for what is now.
        past: the snapshots before the moment that was sought last.
        user: who is watching, whose processes alone may be listed; empty for the one here.
        notifier: tells of alerts that begin.
    """

    CSS_PATH: ClassVar[PurePath | list[str | PurePath]] = STYLES
    SMALLEST = (40, 8)
    TOPIC = "monitor"
    PANE_HELP: ClassVar[Mapping[str, str]] = {
        "HistoryChart": "The chosen GPU's memory over time. ← → choose a moment, esc none.",
        "ProcessTable": "A line a process and GPU. Enter shows all facts about the one under the cursor.",
    }
    WORDS = "user, pid, command, container, gpu3"
    SHORTEST_S = 0.05
    AUTO_FOCUS = "ProcessTable"
    BLANK = True  # nothing of its own behind its widgets
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"move({step})", show=False, tooltip=_CHOOSE) for key, step in _MOVES.items()),
        *PROCESS_BINDINGS,
        Binding("p", "flip('at_peak')", "peak", tooltip="Processes with a probe as at their peak, or as now"),
        Binding("h", "chart", "its history", tooltip="History of the process, or of the GPU again"),
        Binding("slash", "filter", "filter", key_display="/", tooltip=_FILTER),
        Binding("s", "sort(1)", show=False, tooltip=SORT),
        Binding("t", "flip('tree')", "tree", tooltip="Tree: children below their parents"),
        Binding("g", "gpu(1)", "GPU", tooltip=_GPU),
        Binding("f", "flip('only_focus')", "this GPU", tooltip="Only the processes of the GPU in focus"),
        Binding("v", "switch", "history", tooltip="History or processes, where there is room for one"),
        *END_BINDINGS,
        Binding("space", "pause", "pause", tooltip="Freeze the screen, or continue; sampling never stops"),
        Binding("question_mark", "app.help", "help", key_display="?", tooltip=_HELP),
        Binding("h,f1", "app.help", show=False),  # as in nvitop and btop, where h has no history to show
        Binding("q", "app.quit", "quit", tooltip="Leave"),
        Binding("G", "gpu(-1)", show=False, tooltip=_GPU),
        Binding("left_square_bracket", "span(-1)", show=False, tooltip=_SPAN),
        Binding("right_square_bracket", "span(1)", show=False, tooltip=_SPAN),
        Binding("escape", "unfilter", "no filter", tooltip=UNFILTER),
        Binding("escape", "unselect", show=False, tooltip="No process is chosen any more"),
        *REPLAY_BINDINGS,
    ]

    def __init__(  # noqa: PLR0913 - named only, each with its default
        self,
        source: Source,
        settings: Settings | None = None,
        *,
        history: History | None = None,
        alerts: Alerts | None = None,
        past_s: float = 0.0,
        read_only: bool = False,
        notice: str = "",
        probes: ProbeSource | None = None,
        clock: Callable[[float], str] = clock,
        replay: Player | None = None,
        past: Callable[[], Sequence[Snapshot]] = tuple,
        user: str = "",
        notifier: Notifier | None = None,
    ) -> None:
        settings = settings or Settings()
        history = history or History(settings.interval_s, settings.history_hours)
        super().__init__(Feed(source, history, alerts or Alerts(settings), probes), read_only=read_only)
        self.replay, self._past, self.notifier = replay, past, notifier
        self._state = replace(self._state, mine=settings.mine, user=user or viewer())
        self._bell = settings.bell
        self._notice = notice
        self._clock = clock
        self._span = ChartSpan(settings.chart_minutes * 60, past_s)
        self._began_s = time.monotonic()
        self._plan: Layout | None = None
        self._prefers_history, self._drawn_size = False, Size()

    # Widgets

    def compose_parts(self) -> ComposeResult:
        """Yield header, alerts, GPUs, history and processes, and what is shown in their place."""
        yield Lines(id="header")
        yield Lines(id="alerts", classes="-gone")
        yield GpuPanel()
        yield HistoryChart(self._span)
        yield ProcessTable()
        yield Lines(id="trouble")

    def on_mount(self) -> None:
        """Show what there is already, and look for more."""
        self._header, self._alert_line = self.query_one("#header", Lines), self.query_one("#alerts", Lines)
        self._gpu_panel, self._chart = self.query_one(GpuPanel), self.query_one(HistoryChart)
        self._table, self._trouble = self.query_one(ProcessTable), self.query_one("#trouble", Lines)
        self._waiting = self.set_interval(_PATIENCE_S, self._draw)
        self.follow(self.feed.subscribe)

    def laid_out(self, size: Size) -> None:
        """Draw for another size of the terminal."""
        if size != self._drawn_size:
            self._draw()

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The newest one, by its host's name."""
        from gpumem_tui.watch.report import probe_report

        shown = self._state.snapshot
        probes = probe_report(self._state.published)
        return {} if shown is None else {shown.host.name: with_unlisted(shown, probes)}

    @property
    def listed(self) -> ProcessTable:
        """Return the table of processes, which has the keys once a filter is typed."""
        return self._table

    # News

    def look(self) -> bool:
        """Take in the newest snapshot and draw it; False if nothing is new."""
        if self.has_jumped() and self.replay is not None:
            self.feed.restart(self._past(), self.replay.past_step_s)
        is_first = self.feed.latest is None
        if not self.feed.look():
            if self.feed.is_held:
                asyncio.get_running_loop().call_later(HOLD_S, self._news.set)
            return False
        if is_first:
            self._waiting.stop()
            self.call_after_refresh(self.set_timer, _WRITTEN_S, self._ask_probes)
        if self._bell and self.feed.rings:
            self.app.bell()
        assert self.feed.latest is not None
        self.tell(self.feed.latest.host.name, self.feed.alerts)
        self._enter(seen(self._state, self.feed.latest, self.feed.published, self.feed.alerts))
        return True

    def _ask_probes(self) -> None:
        self.feed.asks = True
        self._news.set()

    @on(GpuPanel.Chosen)
    def _gpu_chosen(self, message: GpuPanel.Chosen) -> None:
        self._enter(replace(self._state, focus=message.key))

    @on(ProcessTable.Chosen)
    def _process_chosen(self, message: ProcessTable.Chosen) -> None:
        self._enter(replace(self._state, cursor=message.key))
        if message.opened:
            self.action_details()

    @on(ProcessTable.SortWanted)
    def _heading_clicked(self, message: ProcessTable.SortWanted) -> None:
        self._enter(sorted_on(self._state, message.order))

    @on(ProcessTable.Moved)
    def _wheel_turned(self, message: ProcessTable.Moved) -> None:
        self.action_move(message.step)

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what does something now."""
        state = self._state
        match action:
            case "unfilter":
                return bool(state.filter) or self.has_class("-filtering")
            case "gpu":
                return len(state.gpus) > 1
            case "flip" if parameters == ("only_focus",):
                return len(state.gpus) > 1
            case "flip" if parameters == ("at_peak",):
                return bool(state.parts)
            case "switch":
                troubled = self.has_class("-troubled")
                return self._plan is not None and not troubled and not (self._plan.history and self._plan.table)
            case "pause" | "span":
                return self.replay is None and not self.has_class("-troubled")
            case "filter" | "sort" | "order" | "flip" if parameters != ("mine",):  # also before anything is listed
                return not self.has_class("-troubled")
            case "chart":
                chosen = self.chosen
                return charted(state) is not None or (chosen is not None and chosen.watched is not None)
            case _:
                return super().check_action(action, parameters)

    def action_move(self, step: int) -> None:
        """Move the cursor up or down the processes."""
        self._enter(moved(self._state, step))

    def action_gpu(self, step: int) -> None:
        """Put the next GPU, or the one before, in focus."""
        self._enter(focused_on(self._state, step))

    def action_switch(self) -> None:
        """Show the history or the processes, where there is room for one."""
        self._prefers_history = not self._prefers_history
        self._draw()

    def action_span(self, step: int) -> None:
        """Show a shorter or a longer time in the chart."""
        self._span.step(step)
        self._draw_history()

    def action_pause(self) -> None:
        """Hold the picture, or catch up."""
        state = replace(self._state, paused=not self._state.paused)
        if not state.paused and self.feed.latest is not None:
            state = seen(state, self.feed.latest, self.feed.published, self.feed.alerts)
        self._enter(state)

    def action_unselect(self) -> None:
        """Choose no process any more."""
        self._enter(replace(self._state, cursor=None))

    def has_key(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Return whether an action can be done here: not to what is past or elsewhere."""
        if action in ("pause", "span"):
            return self.replay is None
        return self.may_end if action == "end" else super().has_key(action, parameters)

    def help_first(self) -> Iterator[Row]:
        """Yield all current alerts."""
        yield from super().help_first()
        yield from help_alerts(self._state.alerts)

    def help_lines(self) -> Iterator[Row]:
        """Yield the legend of the ledger."""
        from gpumem_tui.tui.kit.help import bucket_lines, help_entry, help_heading

        yield help_heading("Ledger")
        yield from bucket_lines(DEVICE_BUCKETS, process="pid and name")
        yield help_entry("", "a process with a probe is divided into its buckets")
        yield []

    def action_chart(self) -> None:
        """Show the history of the chosen process, or of the GPU; where there is no room for it, in the table's place.

        Without a GPU, where it is of a process anyway, in all of the place, or next to the table again.
        """
        wanted = not self._state.charts_process
        if wanted and self._plan is not None and not self._plan.history:
            self._prefers_history = True
        self._enter(replace(self._state, charts_process=wanted))

    def cancel(self) -> None:
        """Stop reading; safe to call from any thread."""
        self.feed.stop()

    # Drawing

    @property
    def _cells(self) -> Size:
        """The screen's size; before its first layout the terminal's, so that it is laid out only once."""
        return self.size or self.app.size

    def _enter(self, state: MonitorState) -> None:
        """Show another state at once, and offer the keys that fit it."""
        before, self._state = self._state, state
        watched = charted(state)
        self.feed.follow(watched.process.key if watched is not None else None)
        self._draw()
        if offering(before) != offering(state):
            self.refresh_bindings()

    def _draw(self) -> None:
        width, height = self._drawn_size = self._cells
        if self.has_class("-tiny"):
            return
        inner = width - _MARGINS
        state = self._state
        troubled = is_troubled(state.snapshot) and not count(state)
        self.set_class(troubled, "-troubled")
        alerts = self.feed.alerts if state.gpus else lasting_last(self.feed.alerts)
        shown = alerts if not troubled else ()
        own_line = bool(shown) and height >= _ALERTS_HEIGHT
        self._alert_line.set_class(not own_line, "-gone")
        header = header_row(
            state, inner, self._clock, (self.replay_words or self.feed.notice, self.telling, self._notice)
        )
        if own_line:
            self._alert_line.show_rows([alert_row(shown, inner)])
        self._header.show_rows([alert_row(shown, inner) if shown and not own_line else header])
        if troubled:
            waited_s = time.monotonic() - self._began_s
            self._trouble.show_rows(trouble_rows(state.snapshot, inner, height - 2, waited_s))
            return
        rows = height - 2 - own_line - self.has_class("-filtering")
        gpus, listed = len(state.gpus), count(state)
        if not gpus and charted(state) is None:
            self._place(Layout(columns=1, card=0, detail=0, gpus=0, history=0, table=rows))
        else:
            alone, prefer = not gpus and state.charts_process, self._prefers_history
            self._place(layout(inner, rows, gpus, listed, prefer_history=prefer, history_alone=alone))
        assert self._plan is not None
        self._gpu_panel.show(state, self._plan, inner)
        self._table.show(state, inner, self._plan.table)
        self._draw_history()
        self.draw_dialogues()

    def _place(self, plan: Layout) -> None:
        if plan == self._plan:
            return
        self._plan = plan
        for widget, rows in ((self._gpu_panel, plan.gpus), (self._chart, plan.history)):
            widget.styles.height = rows
            widget.set_class(not rows, "-gone")
        self._table.set_class(not plan.table, "-gone")
        self.refresh_bindings()

    @on(HistoryChart.Changed)
    def _draw_history(self) -> None:
        if self._plan is not None and self._plan.history:
            self._chart.show(self._state, self.feed, self._cells.width - _MARGINS, self._plan.history)
