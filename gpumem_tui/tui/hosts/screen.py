"""Several hosts at once: a line each, their GPUs, the processes of all; enter opens a host's own Monitor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.history import History
from gpumem_tui.monitor.recording_file import when
from gpumem_tui.monitor.snapshot import HostProcess, Snapshot
from gpumem_tui.remote.connection import Connection
from gpumem_tui.remote.fleet import WatchedHost, WatchedHosts
from gpumem_tui.remote.processes import RemoteProcess
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.remote.status import HostStatus, Phase
from gpumem_tui.tui.hosts.help import hosts_help
from gpumem_tui.tui.hosts.rows import (
    chosen_rows,
    hosts_header,
    hosts_heading,
    hosts_rows,
    processes_heading,
    processes_rows,
    processes_title,
)
from gpumem_tui.tui.hosts.state import HostsSort, HostsState, gpu_to_plan_for, listed_processes
from gpumem_tui.tui.kit.acts import Act, permitted, refused
from gpumem_tui.tui.kit.background import in_daemon_thread, setter_for
from gpumem_tui.tui.kit.figures import MUTED, clock
from gpumem_tui.tui.kit.key_bar import KeyBar
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.replay.keys import REPLAY_BINDINGS, ReplayKeys

if TYPE_CHECKING:
    from textual.widgets import Input

    from gpumem_tui.monitor.replay import Replay
    from gpumem_tui.tui.hosts.one import HostMonitor
    from gpumem_tui.tui.process.dialogs import Ending

_TICK_S = 1.0
"""Ages go on without news."""
_SHORTEST_S = 0.25
"""Between two pictures, however many hosts have news."""
_HOSTS_SHARE = 0.5

MakeMonitor = Callable[[WatchedHost, History], "HostMonitor"]


class HostList(RowList):
    """Hosts, or processes of theirs: enter leads to the host's Monitor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "its Monitor", key_display="enter", tooltip="The full Monitor of this host"),
    ]


class HostsScreen(ReplayKeys):
    """Shows what the connections say; never waits for one.

    Args:
        fleet: started already, stopped when the screen ends.
        make_monitor: the Monitor of one host, and what remembers its past.
        make_history: for a host whose Monitor is opened for the first time.
        replay: what plays the recording that the fleet is of; None for what is now.
        allow_signals: offer to end processes there.
    """

    CSS_PATH = "screen.tcss"
    SMALLEST = (60, 12)
    AUTO_FOCUS = "#hosts"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "expand", "GPUs", tooltip="The GPUs of this host, or not"),
        Binding("f", "only", "this host", tooltip="Only the processes of this host, or of all"),
        Binding("s", "sort(1)", "sort", tooltip="Sort the processes by the next column"),
        Binding("slash", "filter", "filter", key_display="/", tooltip="List only the processes that match"),
        Binding("e", "search", "search", tooltip="Search the largest batch that fits on this host"),
        Binding("o", "plan", "plan", tooltip="Plan for the GPU of the process, or for the emptiest of this host"),
        Binding("c", "connect", "connect now", tooltip="Try the hosts that are away at once"),
        Binding("T", "end('terminate')", "terminate", tooltip="Ask the process to end (SIGTERM)"),
        Binding("K", "end('kill')", "kill", tooltip="End the process at once (SIGKILL)"),
        Binding("tab", "other", "other list", tooltip="To the other list"),
        Binding("question_mark", "help", "help", key_display="?", tooltip="The keys and what the columns mean"),
        Binding("q", "app.quit", "quit", tooltip="Leave"),
        Binding("greater_than_sign", "sort(1)", show=False),
        Binding("less_than_sign", "sort(-1)", show=False),
        Binding("r", "reverse", show=False),
        Binding("f1", "help", show=False),
        Binding("escape", "unfilter", show=False),
        *REPLAY_BINDINGS,
    ]

    class SearchWanted(Message):
        """The user wants to search on a host, which is reached by `ssh`."""

        def __init__(self, host: str, ssh: SshOptions) -> None:
            super().__init__()
            self.host = host
            self.ssh = ssh

    class PlanWanted(Message):
        """The user wants to plan for a GPU of a host."""

        def __init__(self, gpu: Gpu) -> None:
            super().__init__()
            self.gpu = gpu

    def __init__(
        self,
        fleet: WatchedHosts,
        make_monitor: MakeMonitor,
        make_history: Callable[[], History],
        replay: Replay[Any] | None = None,
        *,
        allow_signals: bool = False,
    ) -> None:
        super().__init__()
        self.replay = replay
        self._fleet = fleet
        self._make_monitor = make_monitor
        self._make_history = make_history
        self._hosts, self._processes = HostList(id="hosts"), HostList(id="hosts-processes")
        self._allow_signals = allow_signals
        self._histories: dict[str, History] = {}
        self._added: dict[str, Snapshot] = {}
        self._state = HostsState(fleet.statuses, time.monotonic())
        self._open = ""

    @property
    def state(self) -> HostsState:
        """What is shown."""
        return self._state

    def compose_parts(self) -> ComposeResult:
        """Header, hosts, processes, keys; and what is shown in their place."""
        yield Lines(id="hosts-header")
        yield Lines(id="hosts-heading")
        yield self._hosts
        yield Lines(id="hosts-chosen")
        yield Lines(id="processes-title")
        yield Lines(id="processes-heading")
        yield self._processes

    def on_mount(self) -> None:
        """Show what there is, and look for more."""
        self._said = self.query_one("#hosts-chosen", Lines)
        news = asyncio.Event()
        self._fleet.subscribe(setter_for(news))
        self.set_interval(_TICK_S, self._look)
        self._look()
        self.run_worker(self._follow(news))

    def on_resize(self, event: Resize) -> None:
        """A tiny terminal gets one line that says what is needed."""
        self.fit_terminal(event)
        self._draw()

    def on_screen_resume(self) -> None:
        """Back from a host's Monitor."""
        self._open = ""
        self._look()

    # What comes in

    async def _follow(self, news: asyncio.Event) -> None:
        while True:
            await news.wait()
            news.clear()
            self._look()
            await asyncio.sleep(_SHORTEST_S)

    def _look(self) -> None:
        """Take in all hosts' states, and the history of those whose Monitor has been opened."""
        if self.has_jumped():
            self._histories.clear()  # of another time
        statuses = self._fleet.statuses
        for status in statuses:
            self._remember(status)
        now_s = time.monotonic() if self.replay is None else self.replay.shown_s
        self._enter(replace(self._state, statuses=statuses, now_s=now_s))

    def _remember(self, status: HostStatus) -> None:
        name = status.host.name
        history = self._histories.get(name)
        if history is None or status.report is None or self._added.get(name) is status.report.snapshot:
            return
        self._added[name] = status.report.snapshot
        if name != self._open:  # its Monitor adds it itself
            history.add(status.report.snapshot, {})

    @on(RowList.Moved)
    def _cursor_moved(self) -> None:
        self._draw_chosen()

    @on(RowList.Chosen, "#hosts")
    def _host_chosen(self, message: RowList.Chosen) -> None:
        self._open_host(message.key)

    @on(RowList.Chosen, "#hosts-processes")
    def _process_chosen(self, message: RowList.Chosen) -> None:
        self._open_host(message.key.partition("\t")[0])

    def on_input_changed(self, event: Input.Changed) -> None:
        """What is typed counts at once, unless it is a time."""
        self._enter(replace(self._state, filter="" if self.is_time(event.value) else event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Back to the list; the filter stays, and to the time that was typed it goes."""
        self.go_to(event.input)
        self._close_filter()

    # Keys

    @property
    def chosen(self) -> str:
        """The host under the cursor of the list that has the focus."""
        listed = self._processes if self._processes.has_focus else self._hosts
        return listed.key.partition("\t")[0]

    @property
    def chosen_process(self) -> RemoteProcess | None:
        """The process under the cursor, if its list has the focus."""
        key = self._processes.key if self._processes.has_focus else ""
        listed = (each for status in self._state.statuses for each in status.processes)
        return next((each for each in listed if each.key == key), None) if key else None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Ending is offered only where it can be done; what is past cannot be connected to."""
        if action == "end":
            return self._allow_signals and permitted(self, Act.END) and self._processes.has_focus
        if action == "search":
            return self.replay is None and permitted(self, Act.SEARCH)
        return self.replay is None if action == "connect" else super().check_action(action, parameters)

    def action_end(self, ending: Ending) -> None:
        """Ask, then end the chosen process: the one that was asked about, whatever its pid means by then."""
        from gpumem_tui.tui.process.dialogs import ConfirmScreen

        chosen = self.chosen_process
        host = None if chosen is None else chosen.known
        if chosen is None or host is None or refused(self, Act.END):
            return
        connection = self._fleet.connections[chosen.host_name]
        if not isinstance(connection, Connection):
            return  # what is past cannot be ended

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._signal(connection, host, ending))

        about = f"pid {host.pid} of {host.user} on {chosen.host_name}, GPU {chosen.place}: {host.command or host.name}"
        self.app.push_screen(ConfirmScreen(ending, about), answered)

    async def _signal(self, connection: Connection, host: HostProcess, ending: Ending) -> None:
        from gpumem_tui.tui.hosts.one import end_there

        said, failed = await in_daemon_thread(lambda: end_there(connection, host, ending))
        self.notify(said, severity="error" if failed else "information")

    def _open_host(self, name: str) -> None:
        connection = self._fleet.connections.get(name)
        if connection is None:
            return
        status = connection.status
        if status.report is None:
            said = status.problem or "it has not answered yet"
            self.app.notify(said, title=name, severity="error" if status.phase is Phase.AWAY else "information")
            return
        history = self._histories.setdefault(name, self._make_history())
        self._open = name
        self.app.push_screen(self._make_monitor(connection, history))

    def action_turn(self, way: int) -> None:
        """Right lists the GPUs of the host, left takes them away."""
        name = self.chosen
        opened = self._state.opened
        self._enter(replace(self._state, opened=opened | {name} if way > 0 else opened - {name}))

    def action_expand(self) -> None:
        """The GPUs of the host under the cursor, or not."""
        self.action_turn(-1 if self.chosen in self._state.opened else 1)

    def action_only(self) -> None:
        """The processes of the host under the cursor, or of all."""
        self._enter(replace(self._state, only="" if self._state.only else self.chosen))

    def action_sort(self, step: int) -> None:
        """The next column, or the one before."""
        orders = list(HostsSort)
        there = orders[(orders.index(self._state.sort) + step) % len(orders)]
        self._enter(replace(self._state, sort=there, reverse=False))

    def action_reverse(self) -> None:
        """The other way round."""
        self._enter(replace(self._state, reverse=not self._state.reverse))

    def action_connect(self) -> None:
        """Try the hosts that are away at once."""
        self._fleet.connect_now()

    def action_search(self) -> None:
        """The trials run there."""
        connection = self._fleet.connections.get(self.chosen)
        if isinstance(connection, Connection) and not refused(self, Act.SEARCH):
            self.post_message(self.SearchWanted(connection.host.name, connection.ssh))

    def action_plan(self) -> None:
        """For a GPU of the host, from what the host says of it."""
        gpu = gpu_to_plan_for(self._state, self.chosen, self.chosen_process)
        if isinstance(gpu, Unknown):
            self.notify(f"no plan: {gpu.reason}", title=self.chosen, severity="warning")
        else:
            self.post_message(self.PlanWanted(gpu))

    def action_other(self) -> None:
        """From the hosts to the processes, and back."""
        (self._hosts if self._processes.has_focus else self._processes).focus()
        self.refresh_bindings()

    async def action_filter(self) -> None:
        """Ask for words; what is typed counts at once."""
        from textual.widgets import Input

        if not self.query(Input):
            await self.mount(
                Input(placeholder="host, gpu3, pid, user, command", compact=True), before=self.query_one(KeyBar)
            )
        self.add_class("-filtering")
        self.query_one(Input).focus()

    def action_unfilter(self) -> None:
        """All processes again."""
        from textual.widgets import Input

        for typed in self.query(Input):
            typed.value = ""
        self._close_filter()
        self._enter(replace(self._state, filter="", only=""))

    def _close_filter(self) -> None:
        if self.has_class("-filtering"):
            self.remove_class("-filtering")
            self._processes.focus()

    def action_help(self) -> None:
        """The keys and the columns."""
        from gpumem_tui.tui.kit.dialogs import HelpScreen

        self.app.push_screen(HelpScreen([*self.replay_help(), *hosts_help(allow_signals=self._allow_signals)]))

    def cancel(self) -> None:
        """End all connections; safe to call from any thread."""
        self._fleet.stop()

    # Drawing

    def _enter(self, state: HostsState) -> None:
        self._state = state
        if self.is_current:
            self._draw()

    def _draw(self) -> None:
        if self.has_class("-tiny") or not self.is_mounted:
            return
        state, width = self._state, self.size.width or self.app.size.width
        listed = listed_processes(state)
        inner = width - 2
        at = clock(time.time()) if self.replay is None else f"{self.replay_words} · {when(self.replay.now_s)}"
        header = hosts_header(state, inner, [(at, MUTED)])
        lines: dict[str, Any] = {
            "#hosts-header": header,
            "#hosts-heading": hosts_heading(state, inner),
            "#processes-title": [(processes_title(state, listed), "bold $primary")],
            "#processes-heading": processes_heading(state, listed, inner),
        }
        for name, line in lines.items():
            self.query_one(name, Lines).show_rows([line])
        rows = hosts_rows(state)
        count = len(rows(inner, ""))
        most = max(3, int((self.size.height or self.app.size.height) * _HOSTS_SHARE) - 2)
        self._hosts.styles.height = min(count, most)
        self._hosts.show(rows)
        self._processes.show(processes_rows(state, listed))
        self._draw_chosen()

    def _draw_chosen(self) -> None:
        self._said.show_rows(chosen_rows(self._state, self.chosen, self.size.width - 2))
