"""Several hosts at once: a line each, their GPUs, the processes of all; enter opens a host's own Monitor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from msgspec import structs
from msgspec.structs import replace
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size

from gpumem_tui.monitor.alerts import Key
from gpumem_tui.monitor.history import History
from gpumem_tui.monitor.notify import Notifier
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.recording.file import when
from gpumem_tui.recording.player import Player
from gpumem_tui.remote.connection import Connection, Fleet
from gpumem_tui.remote.status import HostPhase, HostStatus, RemoteProcess, alerts_of
from gpumem_tui.settings import Settings
from gpumem_tui.tui.hosts.one import HostMonitor, end_there
from gpumem_tui.tui.hosts.order import HOST_LETTERS, PROCESS_LETTERS, HostOrder
from gpumem_tui.tui.hosts.rows import (
    HostsState,
    chosen_rows,
    hosts_header,
    hosts_heading,
    hosts_rows,
    listed_processes,
    processes_heading,
    processes_rows,
    processes_title,
)
from gpumem_tui.tui.kit.figures import MUTED, Row, clock
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.main_screen import Act, permitted, refused
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.monitor.process_actions import END_BINDINGS
from gpumem_tui.tui.monitor.state import sorted_on
from gpumem_tui.tui.monitor.table_screen import UNFILTER, Ending, TableScreen
from gpumem_tui.tui.replay.keys import REPLAY_BINDINGS

_TICK_S = 1.0
"""Ages continue without news."""
_HOSTS_SHARE = 0.5
_EXPAND = "The GPUs of the host below it, or not"
_MONITOR = "The full Monitor of the host; esc there leads back"
_FILTER = (
    "Filter by host, gpu3, pid, user, command; hosts by free>=2 (GPUs), free>=20GiB (on one), use<50, user=ada, "
    "model=h100, alert; esc clears"
)
_SORT = "Sort the list that has the cursor by the next column: hosts by free, use, alerts, users, models"


class HostList(RowList):
    """Hosts, or processes of theirs: enter leads to the host's Monitor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "its Monitor", key_display="enter", tooltip=_MONITOR),
        Binding("right", "screen.turn(1)", show=False, tooltip=_EXPAND),
        Binding("left", "screen.turn(-1)", show=False, tooltip=_EXPAND),
    ]


class HostsScreen(TableScreen[HostsState]):
    """Shows what the connections say; never waits for one.

    Args:
        fleet: started already, stopped when the screen ends.
        settings: of the hosts' Monitors.
        allow_signals: offer to end processes there.
    """

    CSS_PATH = "screen.tcss"
    SMALLEST = (60, 12)
    TOPIC = "hosts"
    WORDS = "host, gpu3, pid, user, command, free>=2, free>=20GiB, use<50, user=ada, model=h100, alert"
    SHORTEST_S = 0.25
    AUTO_FOCUS = "#hosts"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "expand", "GPUs", tooltip=_EXPAND),
        Binding("f", "only", "this host", tooltip="Only the processes of this host, or of all"),
        Binding("o", "order", "sort", tooltip="Then a letter: the column to sort the list with the cursor by"),
        Binding("s", "sort(1)", show=False, tooltip=_SORT),
        Binding("slash", "filter", "filter", key_display="/", tooltip=_FILTER),
        Binding("c", "connect", "connect now", tooltip="Try the hosts that are away at once"),
        *END_BINDINGS,
        Binding("tab", "other", "other list", tooltip="To the other list"),
        Binding("question_mark", "app.help", "help", key_display="?", tooltip="The keys and what the columns mean"),
        Binding("q", "app.quit", "quit", tooltip="Leave"),
        Binding("f1", "app.help", show=False),
        Binding("escape", "unfilter", show=False, tooltip=UNFILTER),
        *REPLAY_BINDINGS,
    ]

    def __init__(self, fleet: Fleet | Player, settings: Settings, *, allow_signals: bool = False) -> None:
        super().__init__()
        self.notifier = None if isinstance(fleet, Player) else Notifier(settings.notify)
        self.replay = fleet if isinstance(fleet, Player) else None
        self._fleet = fleet
        self._settings = settings
        self._hosts, self._processes = HostList(id="hosts"), HostList(id="hosts-processes")
        self._allow_signals = allow_signals
        self._histories: dict[str, History] = {}
        self._added: dict[str, Snapshot] = {}
        self._state = HostsState(fleet.statuses, time.monotonic(), mine=settings.mine)
        self._open = ""
        self._rung: set[tuple[str, Key]] = set()
        self._listed: list[RemoteProcess] = []
        self._listed_for: tuple[object, ...] = (None,) * 6

    @property
    def listed(self) -> HostList:
        """Return the list of processes, which has the keys once a filter is typed."""
        return self._processes

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The newest snapshot of each host that answers."""
        live = (status for status in self._state.statuses if status.phase is HostPhase.LIVE)
        return {status.host.name: status.report.snapshot for status in live if status.report is not None}

    def compose_parts(self) -> ComposeResult:
        """Yield header, hosts and processes."""
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
        self.set_interval(_TICK_S, self._tick)
        self.follow(self._fleet.subscribe)

    def laid_out(self, _size: Size) -> None:
        """Draw for another size of the terminal."""
        self._draw()

    def on_screen_resume(self) -> None:
        """Show what has come while a host's Monitor was open."""
        self._open = ""
        self.look()

    # News

    def _tick(self) -> None:
        """Let ages continue, unless it was looked just now."""
        if time.monotonic() - self._looked_s > _TICK_S / 2:
            self.look()

    def look(self) -> bool:
        """Take in all hosts' states, and the history of those whose Monitor has been opened."""
        self._looked_s = time.monotonic()
        if self.has_jumped():
            self._histories.clear()  # of another time
        statuses = self._fleet.statuses
        for name, history in self._histories.items():
            self._remember(name, history)
        for status in statuses if self.is_telling else ():
            self.tell(status.host.name, alerts_of(status, time.time()))
        if self._settings.bell and self.replay is None:
            self._ring(statuses)
        now_s = time.monotonic() if self.replay is None else self.replay.shown_s
        self._enter(replace(self._state, statuses=statuses, now_s=now_s))
        self.draw_report()
        return True

    def _ring(self, statuses: Iterable[HostStatus]) -> None:
        """Ring the bell if an alert has begun, or a host has gone away."""
        found = {(each.host.name, alert.key) for each in statuses for alert in alerts_of(each, 0.0)}
        if found - self._rung:
            self.app.bell()
        self._rung = found

    def _remember(self, name: str, history: History) -> None:
        report = self._fleet.connections[name].status.report
        if report is None or self._added.get(name) is report.snapshot:
            return
        self._added[name] = report.snapshot
        if name != self._open:  # its Monitor adds it itself
            history.add(report.snapshot, {})

    @on(RowList.Chosen, "#hosts")
    def _host_chosen(self, message: RowList.Chosen) -> None:
        self._open_host(message.key)

    @on(RowList.Chosen, "#hosts-processes")
    def _process_chosen(self, message: RowList.Chosen) -> None:
        self._open_host(message.key.partition("\t")[0])

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
        """Offer to end only where that can be done; what is past cannot be connected to."""
        if action == "end":
            return self._allow_signals and permitted(self, Act.END) and self._processes.has_focus
        return self.replay is None if action == "connect" else super().check_action(action, parameters)

    def action_end(self, ending: Ending) -> None:
        """Ask, then end the chosen process: the one that was asked about, even if its pid is reused by then."""
        chosen = self.chosen_process
        host = None if chosen is None else chosen.known
        if chosen is None or host is None or refused(self, Act.END):
            return
        connection = self._fleet.connections[chosen.host_name]
        if isinstance(connection, Connection):  # what is past cannot be ended
            program = host.command or host.name
            where = chosen.place if chosen.gpu is None else f"GPU {chosen.place}"
            about = f"pid {host.pid} of {host.user} on {chosen.host_name}, {where}: {program}"
            self.ask_to_end(ending, about, lambda: end_there(connection, host, ending))

    def _open_host(self, name: str) -> None:
        connection = self._fleet.connections.get(name)
        if connection is None:
            return
        status = connection.status
        if status.report is None:
            said = status.problem or "it has not answered yet"
            self.app.notify(said, title=name, severity="error" if status.phase is HostPhase.AWAY else "information")
            return
        settings = structs.replace(self._settings, mine=self._state.mine)
        history = self._histories.setdefault(name, History(settings.interval_s, settings.history_hours))
        self._open = name
        self.app.push_screen(
            HostMonitor(connection, settings, history, signals=self._allow_signals, replay=self.replay)
        )

    def action_turn(self, way: int) -> None:
        """Right lists the GPUs of the host, left takes them away."""
        name = self.chosen
        opened = self._state.opened
        self._enter(replace(self._state, opened=opened | {name} if way > 0 else opened - {name}))

    def action_expand(self) -> None:
        """List the GPUs of the host under the cursor, or no more."""
        self.action_turn(-1 if self.chosen in self._state.opened else 1)

    def action_only(self) -> None:
        """List the processes of the host under the cursor, or of all."""
        self._enter(replace(self._state, only="" if self._state.only else self.chosen))

    def action_connect(self) -> None:
        """Try the hosts that are away at once."""
        self._fleet.connect_now()

    def action_other(self) -> None:
        """Go from the hosts to the processes, and back."""
        (self._hosts if self._processes.has_focus else self._processes).focus()
        self.refresh_bindings()

    def action_unfilter(self) -> None:
        """List all processes of all hosts again."""
        self._state = replace(self._state, only="")
        super().action_unfilter()

    def action_sort(self, step: int) -> None:
        """Sort the list that has the cursor by the next column, or by the one before."""
        if self._processes.has_focus:
            super().action_sort(step)
            return
        orders = list(HostOrder)
        order = orders[(orders.index(self._state.order) + step) % len(orders)]
        self._enter(replace(self._state, order=order, order_reverse=False))

    def action_order(self) -> None:
        """Ask for a letter: the column to sort the list that has the cursor by; once more reverses it."""
        from gpumem_tui.tui.monitor.ordering import OrderScreen, column_choices

        state, of_processes = self._state, self._processes.has_focus

        def chosen(letter: str | None) -> None:
            if letter is None:
                return
            if of_processes:
                self._enter(sorted_on(self._state, PROCESS_LETTERS[letter]))
                return
            order = HOST_LETTERS[letter]
            again = order is self._state.order and not self._state.order_reverse
            self._enter(replace(self._state, order=order, order_reverse=again))

        offered = (
            column_choices(PROCESS_LETTERS, state.sort, reverse=state.reverse)
            if of_processes
            else column_choices(HOST_LETTERS, state.order, reverse=state.order_reverse)
        )
        self.app.push_screen(OrderScreen(list(offered)), chosen)

    def action_reverse(self) -> None:
        """Sort the list that has the cursor the other way round."""
        self.action_flip("reverse" if self._processes.has_focus else "order_reverse")

    def has_key(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Return whether an action can be done here: not to what is past, nor to processes unless that is allowed."""
        if action == "connect":
            return self.replay is None
        return self._allow_signals if action == "end" else super().has_key(action, parameters)

    def help_lines(self) -> Iterator[Row]:
        """Yield what is done to hosts, and what is not."""
        from gpumem_tui.tui.kit.help import help_entries

        ended = "only what you end is ended" if self._allow_signals else "nothing is ended (--allow-signals offers it)"
        yield from help_entries([("", f"Nothing is installed or written on hosts; {ended}.")])
        yield []

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
        inner = width - 2
        of_processes = (state.statuses, state.sort, state.reverse, state.filter, state.only, state.mine)
        is_same = all(one is other for one, other in zip(of_processes, self._listed_for, strict=True))
        listed = self._listed if is_same else listed_processes(state)
        self._listed, self._listed_for = listed, of_processes
        at = clock(time.time()) if self.replay is None else f"{self.replay_words} · {when(self.replay.now_s)}"
        right: Row = [(f"{self.telling}  ", "bold $warning"), (at, MUTED)] if self.telling else [(at, MUTED)]
        header = hosts_header(state, inner, right)
        lines = {
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
        if not is_same or not listed:
            self._processes.show(processes_rows(state, listed))
        self._draw_chosen()

    @on(RowList.Moved)
    def _draw_chosen(self) -> None:
        self._said.show_rows(chosen_rows(self._state, self.chosen, self.size.width - 2))
