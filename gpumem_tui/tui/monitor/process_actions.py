"""Acts on the chosen process of the Monitor: read about it, look into it, attach to it, end it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace
from textual.binding import Binding, BindingType

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.main_screen import Act, permitted, refused
from gpumem_tui.tui.monitor.entries import Entry, entry_of
from gpumem_tui.tui.monitor.state import Feed, MonitorState
from gpumem_tui.tui.monitor.table_screen import Ending, TableScreen

if TYPE_CHECKING:
    from gpumem_tui.attach.target import Target
    from gpumem_tui.doctor.beside import HeldBeside
    from gpumem_tui.probe.wire import LookAnswer
    from gpumem_tui.tui.kit.dialogs import DetailsScreen
    from gpumem_tui.watch.records import ProbedProcess

_POLL_S = 0.1
_LOOK_S = 120.0
_ATTACH_S = 60.0
"""How long an answer may take."""

_END = "Terminate it (SIGTERM), kill it (SIGKILL): asks first"
PROCESS_BINDINGS: list[BindingType] = [
    Binding(
        "enter", "details", "details", key_display="enter",
        tooltip="Details of the process; of one that ran out of memory, what filled the device",
    ),
    Binding(
        "l", "look", "look", tooltip="Look into its next step: what the peak consists of, by module and by line"
    ),
    Binding("a", "attach", "attach", tooltip="Attach: put a probe into this Python process; asks first"),
    Binding("R", "ranks", "ranks", tooltip="The ranks of its job side by side"),
    Binding("o", "order", "sort", tooltip="Then a letter: the column to sort by, free GPUs first, the process's plan"),
    Binding(
        "C", "keep_context", show=False,
        tooltip="Keep what it takes outside its allocator (CUDA context) for predictions on such a GPU; asks first",
    ),
]  # fmt: skip
"""For the screen's own list: of a key that a class and its base both have, Textual keeps the class's alone."""
END_BINDINGS: list[BindingType] = [
    Binding("T", "end('terminate')", "terminate", tooltip=_END),
    Binding("K", "end('kill')", "kill", tooltip=_END),
]


class ProcessActions(TableScreen[MonitorState]):
    """The part of the Monitor that the keys about one process lead to.

    Attributes:
        feed: what the Monitor draws from.
        read_only: no process is ended, attached to, or looked into: they are not on this machine, or not now.
    """

    def __init__(self, feed: Feed, *, read_only: bool) -> None:
        super().__init__()
        self.feed = feed
        self.read_only = read_only
        self._state = MonitorState()
        self._chosen: tuple[MonitorState, Entry | None] = self._state, None
        self._details: DetailsScreen | None = None
        self._looked: Sequence[str] = ()

    def parting_lines(self) -> Iterable[str]:
        """Return the peaks of the last look into a process."""
        return self._looked

    @property
    def chosen(self) -> Entry | None:
        """The process under the cursor."""
        if self._chosen[0] is not self._state:  # every key asks, several times a second
            self._chosen = self._state, entry_of(self._state, self._state.cursor)
        return self._chosen[1]

    @property
    def may_end(self) -> bool:
        """Return whether processes may be ended."""
        return self._may(Act.END)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what does something now."""
        entry = self.chosen
        watched = entry.watched if entry is not None and not entry.has_ended else None
        match action:
            case "details":
                return entry is not None
            case "end":
                return self.may_end and entry is not None and entry.host is not None
            case "look":
                return self._may(Act.LOOK) and watched is not None
            case "attach":
                return self._may(Act.ATTACH) and entry is not None and entry.watched is None and _is_python(entry.host)
            case "ranks":
                return watched is not None and (watched.process.process.world_size or 0) > 1
            case "keep_context":
                return self._may(Act.WRITE) and bool(self._held())
            case _:
                return super().check_action(action, parameters)

    def _may(self, act: Act) -> bool:
        return not self.read_only and permitted(self, act)

    # Reading

    def action_details(self) -> None:
        """Show all facts about the chosen process; of one that has ended, how, with its post-mortem if any."""
        from gpumem_tui.tui.kit.dialogs import DetailsScreen
        from gpumem_tui.tui.monitor.reports import details_rows, end_report

        entry = self.chosen
        if entry is None:
            return
        if entry.has_ended and (watched := entry.watched) is not None:
            self.open_report(lambda: end_report(watched, self._state))
            return

        def closed(wanted: str | None) -> None:
            self._details = None
            if wanted is not None:
                self.run_worker(self.run_action(wanted))

        may_end = self.may_end and entry.host is not None
        may_look = self.check_action("look", ()) is True
        may_keep = self.check_action("keep_context", ()) is True
        rows = details_rows(self._state, entry)
        self._details = DetailsScreen(rows, may_end=may_end, may_look=may_look, may_keep=may_keep)
        self.app.push_screen(self._details, closed)

    def action_ranks(self) -> None:
        """Show the ranks of its job, as they continue."""
        from gpumem_tui.tui.monitor.reports import ranks_report

        entry = self.chosen
        if entry is not None and entry.watched is not None:
            key = entry.watched.process.key
            self.open_report(lambda: ranks_report(self._state, key))

    def draw_dialogues(self) -> None:
        """Draw what is over the Monitor too."""
        if self._details is not None:
            from gpumem_tui.tui.monitor.reports import details_rows

            entry = self.chosen
            self._details.show(None if entry is None else details_rows(self._state, entry))
        self.draw_report()

    def action_order(self) -> None:
        """Ask for a letter: the column to sort by, the order of GPUs, or the plan of the chosen process."""
        from gpumem_tui.tui.monitor.ordering import FREE_FIRST, LETTERS, PLAN, OrderScreen, choices
        from gpumem_tui.tui.monitor.state import sorted_on

        def chosen(letter: str | None) -> None:
            if letter in LETTERS:
                self._enter(sorted_on(self._state, LETTERS[letter]))
            elif letter == FREE_FIRST:
                self.action_flip("free_first")
            elif letter == PLAN:
                self.action_plan()

        self.app.push_screen(OrderScreen(list(choices(self._state, self.chosen))), chosen)

    def action_plan(self) -> None:
        """Take it to the Plan screen, or say why there is no plan of it."""
        from gpumem_tui.plan.running import plan_of
        from gpumem_tui.tui.monitor.ordering import why_no_plan

        entry = self.chosen
        if reason := why_no_plan(entry):
            self.notify(f"no plan: {reason}", severity="warning")
            return
        assert entry is not None
        assert entry.watched is not None
        plan = plan_of(entry.watched, entry.sample, entry.gpu)
        if isinstance(plan, Unknown):
            self.notify(f"no plan: {plan.reason}", severity="warning")
            return
        expected = entry.watched.expected
        if not isinstance(expected, Unknown) and expected.untrained_bytes:
            left_out = format_bytes(expected.untrained_bytes)
            self.notify(f"the plan leaves out {left_out} of modules that nothing trains", severity="warning")
        self.post_message(self.Wanted("plan", plan))

    # Memory outside its allocator

    def _held(self) -> list[HeldBeside]:
        entry = self.chosen
        if entry is None or entry.watched is None or entry.gpu is None:
            return []
        from gpumem_tui.doctor.beside import held

        return list(held([replace(entry.gpu, processes=(entry.process,))], self._state.published))

    def action_keep_context(self) -> None:
        """Ask, then keep it for predictions."""
        from gpumem_tui.catalog.calibration import save
        from gpumem_tui.catalog.shapes import CatalogError
        from gpumem_tui.doctor.beside import learned, unkept
        from gpumem_tui.tui.kit.dialogs import QuestionScreen

        snapshot = self._state.snapshot
        found = [] if snapshot is None else learned(self._held(), snapshot.driver_version)
        if not found or refused(self, Act.WRITE):
            return
        if not unkept(found):
            self.notify(f"the stored value for {found[0].gpu} is already this: {found[0].size_words}")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                try:
                    self.notify(f"kept in {save(found[0])}: predictions for {found[0].gpu} use it from now on")
                except (CatalogError, OSError) as error:
                    self.notify(str(error), severity="error")

        about = f"{found[0].size_words} of {found[0].gpu}, driver {found[0].driver}, torch {found[0].torch}"
        effect = (
            "It is outside what PyTorch reserved: CUDA's context and libraries. Predictions for such GPUs will use it."
        )
        self.app.push_screen(QuestionScreen("Keep", "Keep what this process takes?", about, effect), answered)

    # Looking into it

    def action_look(self) -> None:
        """Have its probe record the next step."""
        entry = self.chosen
        if entry is not None and entry.watched is not None and not refused(self, Act.LOOK):
            self.run_worker(self._look_into(entry.watched.process))

    async def _look_into(self, process: ProbedProcess) -> None:
        from gpumem_tui.tui.kit.dialogs import WaitingScreen
        from gpumem_tui.tui.monitor.reports import until_complete
        from gpumem_tui.watch.report import peaks
        from gpumem_tui.watch.requests import NoAnswer, await_look, request_look

        left_off = threading.Event()

        def wait() -> None:
            if left_off.wait(_POLL_S):
                raise NoAnswer("left off")

        effect = "Its next step is recorded and takes longer. If you cancel, it is recorded anyway."
        waiting = WaitingScreen("A look into the next step", process.title, effect)

        def ask() -> LookAnswer:
            return await_look(process, request_look(process), _LOOK_S, wait=wait, say=waiting.tell)

        await self.app.push_screen(waiting, lambda _: left_off.set())
        try:
            look = await in_daemon_thread(ask)
        except NoAnswer as error:
            if not left_off.is_set():
                waiting.fail(str(error))
            return
        if not left_off.is_set():
            waiting.dismiss(None)
            self._looked = [f"{process.title}: {words}" for words in peaks(look)]
            self.open_report(until_complete(process, look))

    # Attaching to it

    def action_attach(self) -> None:
        """Ask, then put a probe into it."""
        entry = self.chosen
        if entry is not None and entry.host is not None and not refused(self, Act.ATTACH):
            self.run_worker(self._ask_to_attach(entry.host))

    async def _ask_to_attach(self, host: HostProcess) -> None:
        from gpumem_tui.attach.running import explanation
        from gpumem_tui.attach.target import AttachRefused, inspect
        from gpumem_tui.tui.kit.dialogs import QuestionScreen, WaitingScreen

        try:
            target = await in_daemon_thread(lambda: inspect(host.pid))
        except AttachRefused as refused:
            screen = WaitingScreen("The probe cannot be put in", f"pid {host.pid}: {host.command}", "")
            await self.app.push_screen(screen)
            screen.fail(f"{refused.reason}.\n\n{refused.remedy}" if refused.remedy else refused.reason)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._put_in(target))

        question = QuestionScreen("Attach", "Put a probe into this process?", target.host.title, explanation(target))
        self.app.push_screen(question, answered)

    async def _put_in(self, target: Target) -> None:
        from gpumem_tui.attach.running import attach
        from gpumem_tui.attach.target import NotAttached
        from gpumem_tui.tui.kit.dialogs import WaitingScreen

        effect = "It starts the probe when its main thread is next in Python. To cancel changes nothing."
        waiting = WaitingScreen("Attaching", target.host.title, effect)
        await self.app.push_screen(waiting)
        try:
            attached = await in_daemon_thread(lambda: attach(target, _ATTACH_S))
        except (NotAttached, OSError) as error:
            if waiting.is_current:
                waiting.fail(str(error))
            else:
                self.notify(str(error), severity="error")
            return
        if waiting.is_current:
            waiting.dismiss(None)
        pause_s = attached.pause_s
        pause = pause_s.reason if isinstance(pause_s, Unknown) else f"it stood still for {pause_s * 1e3:.1f} ms"
        then = "it publishes from its next step on" if attached.has_torch else "it publishes once it imports torch"
        self.notify(f"{target.host.title}: the probe is in ({pause}); {then}")

    # Ending it

    def action_end(self, ending: Ending) -> None:
        """Ask, then end the chosen process."""
        from gpumem_tui.tui.monitor.processes import describe

        entry = self.chosen
        host = entry.host if entry is not None else None
        if entry is not None and host is not None and not refused(self, Act.END):
            self.ask_to_end(ending, describe(entry), lambda: self.end_it(host, ending))

    def end_it(self, host: HostProcess, ending: Ending) -> tuple[str, bool]:
        """End a process where the Monitor looks; return what to say, and whether it failed. Not for the event loop."""
        from gpumem_tui.monitor.processes import CannotSignal, kill, terminate

        try:
            terminate(host) if ending == "terminate" else kill(host)
        except CannotSignal as error:
            return str(error), True
        return f"pid {host.pid} ({host.name}) {'asked to end' if ending == 'terminate' else 'killed'}", False


def _is_python(host: HostProcess | None) -> bool:
    return host is not None and "python" in f"{host.name} {host.command}".lower()
