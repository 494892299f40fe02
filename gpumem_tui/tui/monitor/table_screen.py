"""Common to the screens with a table of processes: they follow news, are filtered and sorted."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from msgspec.structs import replace
from textual.binding import Binding, BindingType
from textual.widget import Widget

from gpumem_tui.tui.kit.background import in_daemon_thread, report_error, setter_for
from gpumem_tui.tui.kit.main_screen import KeyBar
from gpumem_tui.tui.kit.textual_internals import AbstractScreen
from gpumem_tui.tui.monitor.state import TableState, sorted_by
from gpumem_tui.tui.replay.keys import ReplayKeys

if TYPE_CHECKING:
    from textual.widgets import Input

    from gpumem_tui.monitor.alerts import Alert
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.monitor.snapshot import Snapshot
    from gpumem_tui.tui.kit.dialogs import PagesScreen, Report

State = TypeVar("State", bound=TableState)
Ending = Literal["terminate", "kill"]
_ENDINGS: dict[Ending, tuple[str, str]] = {
    "terminate": ("Terminate", "It is asked to end (SIGTERM) and may still save its state."),
    "kill": ("Kill", "It ends at once (SIGKILL). Unsaved work is lost."),
}
_SHARE = 0.15
"""Share of the screen's thread that reading news may take; beyond it the screen reads less often."""
_LONGEST_S = 1.0
SORT, REVERSE = "Sort by the next column, or by the one before", "Sort the other way round"
UNFILTER = "List all processes again"
USERS = "Totals by user: memory, GPUs, processes"


class TableScreen(ReplayKeys, Generic[State], metaclass=AbstractScreen):
    """Looks at what is new when it hears of something; never waits for it.

    Attributes:
        WORDS: what a filter may consist of.
        SHORTEST_S: between two looks at what is new, however much is.
        notifier: tells of alerts that begin; None for what is past, or where somebody else tells.
    """

    WORDS: ClassVar[str]
    SHORTEST_S: ClassVar[float]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("greater_than_sign", "sort(1)", show=False, tooltip=SORT),
        Binding("less_than_sign", "sort(-1)", show=False, tooltip=SORT),
        Binding("r", "reverse", show=False, tooltip=REVERSE),
        Binding("u", "users", show=False, tooltip=USERS),
        Binding("m", "flip('mine')", show=False, tooltip="Only your own processes and training jobs, or everybody's"),
    ]
    notifier: Notifier | None = None
    _state: State
    _report: tuple[PagesScreen, Callable[[], Report | None]] | None = None

    @property
    def state(self) -> State:
        """Return the state that is shown."""
        return self._state

    @property
    @abstractmethod
    def listed(self) -> Widget:
        """The table that has the keys once a filter is typed."""

    @property
    @abstractmethod
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The snapshots that are shown, by the host's name."""

    @abstractmethod
    def look(self) -> bool:
        """Take in what is new and draw it; False if nothing is."""

    @abstractmethod
    def _enter(self, state: State) -> None:
        """Show another state."""

    def follow(self, subscribe: Callable[[Callable[[], None]], None]) -> None:
        """Look now, and from here on whenever there is something new: looking again and again costs CPU time."""
        self._news = asyncio.Event()
        subscribe(setter_for(self._news))
        self.look()
        self.run_worker(self._look_at_news())

    async def _look_at_news(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            began_s = time.thread_time()
            try:
                if self.look():
                    looked_s = time.thread_time() - began_s
                    await asyncio.sleep(min(max(self.SHORTEST_S, looked_s / _SHARE), _LONGEST_S))
            except Exception as error:  # noqa: BLE001  one picture is lost, not all that come
                report_error(self.app, error)
                await asyncio.sleep(self.SHORTEST_S)

    # The filter

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter by what is typed at once, unless it is a time."""
        self._enter(replace(self._state, filter="" if self.is_time(event.value) else event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go back to the table, which stays filtered, or to the time that was typed."""
        self.go_to(event.input)
        self._close_filter()

    async def action_filter(self) -> None:
        """Ask for words."""
        from textual.widgets import Input

        if not self.query(Input):
            await self.mount(Input(placeholder=self.WORDS, compact=True), before=self.query_one(KeyBar))
        self.add_class("-filtering")
        self.query_one(Input).focus()
        self._draw()

    def action_unfilter(self) -> None:
        """List all processes again."""
        from textual.widgets import Input

        for typed in self.query(Input):
            typed.value = ""
        self._close_filter()
        self._enter(replace(self._state, filter=""))

    def _close_filter(self) -> None:
        if self.has_class("-filtering"):
            self.remove_class("-filtering")
            self.listed.focus()
            self._draw()

    # The order, and what is on or off

    def action_sort(self, step: int) -> None:
        """Sort by the next column, or by the one before."""
        self._enter(sorted_by(self._state, step))

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self.action_flip("reverse")

    def action_flip(self, name: str) -> None:
        """Turn something on or off: whose processes are listed, the tree, the peak, only the GPU in focus."""
        flipped: dict[str, Any] = {name: not getattr(self._state, name)}
        self._enter(replace(self._state, **flipped))

    # Sending alerts

    @property
    def is_telling(self) -> bool:
        """Return whether alerts are sent to anybody."""
        return self.notifier is not None and self.notifier.is_wanted

    def tell(self, host: str, alerts: Sequence[Alert]) -> None:
        """Tell of alerts that have just begun on a host."""
        if self.notifier is not None:
            self.notifier.update(host, alerts)

    @property
    def telling(self) -> str:
        """Why nobody could be told, in a line; empty if they could."""
        return "" if self.notifier is None else self.notifier.problem

    def on_unmount(self) -> None:
        """Tell nobody any more."""
        super().on_unmount()
        if self.notifier is not None:
            self.notifier.close()

    # Reports over it

    def action_users(self) -> None:
        """Show what each user holds, as it continues."""
        from gpumem_tui.tui.monitor.reports import users_report

        self.open_report(lambda: users_report(self.snapshots))

    def open_report(self, make: Callable[[], Report | None]) -> None:
        """Show a report that is made anew for each picture; nothing if missing."""
        from gpumem_tui.tui.kit.dialogs import PagesScreen

        def closed(_: None) -> None:
            self._report = None

        if (report := make()) is not None:
            self._report = PagesScreen(report), make
            self.app.push_screen(self._report[0], closed)

    def draw_report(self) -> None:
        """Draw the report anew, if one is shown."""
        if self._report is not None:
            screen, make = self._report
            if (report := make()) is not None:
                screen.show(report)

    # A process's end

    def ask_to_end(self, ending: Ending, about: str, end: Callable[[], tuple[str, bool]]) -> None:
        """Ask, then end a process: the one that is asked about, even if its pid is reused by then.

        Args:
            about: which process, in one line.
            end: ends it; returns what to say, and whether it failed. Runs in a thread.
        """
        from gpumem_tui.tui.kit.dialogs import QuestionScreen

        async def signal() -> None:
            words, failed = await in_daemon_thread(end)
            self.notify(words, severity="error" if failed else "information")

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(signal())

        verb, effect = _ENDINGS[ending]
        self.app.push_screen(QuestionScreen(verb, f"{verb} this process?", about, effect), answered)
