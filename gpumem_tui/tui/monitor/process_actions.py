"""What can be done with the chosen process of the Monitor: read about it, look into it, attach to it, end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from textual.binding import Binding, BindingType
from textual.message import Message

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.tui.kit.acts import Act, permitted, refused
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.monitor.entries import Entry, entry_of
from gpumem_tui.tui.monitor.feed import Feed
from gpumem_tui.tui.monitor.state import MonitorState
from gpumem_tui.tui.replay.keys import ReplayKeys

if TYPE_CHECKING:
    from gpumem_tui.attach.target import Target
    from gpumem_tui.plan.plan import Plan
    from gpumem_tui.probe.documents import LookAnswer
    from gpumem_tui.tui.kit.pages import PagesScreen, Report
    from gpumem_tui.tui.process.dialogs import DetailsScreen, Ending
    from gpumem_tui.watch.published import Placed, WatchedProcess
    from gpumem_tui.watch.records import ProbedProcess

_POLL_S = 0.1
_LOOK_S = 120.0
_ATTACH_S = 60.0
"""How long an answer may take."""

PROCESS_BINDINGS: list[BindingType] = [
    Binding("enter", "details", "details", key_display="enter", tooltip="All that is known of the process"),
    Binding("l", "look", "look", tooltip="What its next step's peak consists of"),
    Binding("a", "attach", "attach", tooltip="Put a probe into this Python process"),
    Binding("R", "ranks", "ranks", tooltip="The ranks of its job side by side"),
    Binding("o", "plan", "plan", tooltip="Plan with its model on its GPU"),
]
"""For the screen's own list: of a key that a class and its base both have, Textual keeps the class's alone."""


class ProcessActions(ReplayKeys):
    """The part of the Monitor that the keys about one process lead to.

    Attributes:
        feed: what the Monitor draws from.
        read_only: no process is ended, attached to, or looked into: they are not on this machine, or not now.
    """

    class PlanWanted(Message, namespace="monitor_screen"):
        """The user wants to plan with what a process trains."""

        def __init__(self, plan: Plan) -> None:
            super().__init__()
            self.plan = plan

    def __init__(self, feed: Feed, *, read_only: bool) -> None:
        super().__init__()
        self.feed = feed
        self.read_only = read_only
        self._state = MonitorState()
        self._chosen_in: MonitorState | None = None
        self._chosen: Entry | None = None
        self._details: DetailsScreen | None = None
        self._report: tuple[PagesScreen, Callable[[], Report | None]] | None = None

    @property
    def state(self) -> MonitorState:
        """What is shown."""
        return self._state

    @property
    def chosen(self) -> Entry | None:
        """The process under the cursor."""
        if self._chosen_in is not self._state:  # every key asks, several times a second
            self._chosen_in, self._chosen = self._state, entry_of(self._state, self._state.cursor)
        return self._chosen

    @property
    def may_end(self) -> bool:
        """Whether processes may be ended."""
        return self._may(Act.END)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only what does something now is offered."""
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
            case "plan":
                return watched is not None and not isinstance(watched.expected, Unknown)
            case _:
                return super().check_action(action, parameters)

    def _may(self, act: Act) -> bool:
        return not self.read_only and permitted(self, act)

    # Reading

    def action_details(self) -> None:
        """All that is known of the chosen process; of one that has ended, how, and its post-mortem if there is one."""
        from gpumem_tui.tui.monitor.process_details import details_rows
        from gpumem_tui.tui.process.dialogs import DetailsScreen

        entry = self.chosen
        if entry is None:
            return
        if entry.has_ended and entry.watched is not None:
            self._open(self._post_mortem(entry.watched))
            return

        def closed(wanted: Ending | Literal["look"] | None) -> None:
            self._details = None
            if wanted == "look":
                self.action_look()
            elif wanted is not None:
                self.action_end(wanted)

        may_end = self.may_end and entry.host is not None
        may_look = self.check_action("look", ()) is True
        self._details = DetailsScreen(details_rows(self._state, entry), may_end=may_end, may_look=may_look)
        self.app.push_screen(self._details, closed)

    def action_ranks(self) -> None:
        """The ranks of its job, as they go on."""
        entry = self.chosen
        if entry is not None and entry.watched is not None:
            key = entry.watched.process.key
            self._open(lambda: self._ranks(key))

    def draw_dialogues(self) -> None:
        """What stands over the Monitor goes on too."""
        if self._details is not None:
            from gpumem_tui.tui.monitor.process_details import details_rows

            entry = self.chosen
            self._details.show(None if entry is None else details_rows(self._state, entry))
        if self._report is not None:
            screen, make = self._report
            report = make()
            if report is not None:
                screen.show(report)

    def _open(self, make: Callable[[], Report | None]) -> None:
        from gpumem_tui.tui.kit.pages import PagesScreen

        report = make()
        if report is None:
            return

        def closed(_: None) -> None:
            self._report = None

        self._report = PagesScreen(report), make
        self.app.push_screen(self._report[0], closed)

    def _post_mortem(self, watched: WatchedProcess) -> Callable[[], Report | None]:
        from gpumem_tui.tui.kit.pages import Page, Report
        from gpumem_tui.tui.process.post_mortem import ended_rows, post_mortem_rows

        case = watched.case

        def make() -> Report | None:
            snapshot = self._state.snapshot
            if snapshot is None:
                return None
            if case is None:
                return Report("Ended", (Page("", lambda width: ended_rows(watched, width, snapshot.time_s)),))
            rows = Page("", lambda width: post_mortem_rows(case, width, snapshot.time_s))
            return Report("Out of memory", (rows,))

        return make

    def _ranks(self, key: tuple[int, int]) -> Report | None:
        from gpumem_tui.tui.kit.pages import Page, Report
        from gpumem_tui.tui.monitor.ranks import ranks_rows
        from gpumem_tui.watch.jobs import job_of

        watched = self._state.published.by_key.get(key)
        job = job_of(self._state.published, watched) if watched is not None else None
        if job is None:
            return None
        indices: dict[object, str] = {gpu.uuid: f"GPU {gpu.index}" for gpu in self._state.gpus}

        def name(placed: Placed) -> str:
            return indices.get(placed.gpu_uuid, placed.sample.device)

        rows = Page("", lambda width: ranks_rows(job, name, width))
        return Report(f"{len(job.ranks)} of {job.world_size} ranks", (rows,))

    def action_plan(self) -> None:
        """Take it to the Plan screen."""
        from gpumem_tui.plan.watched import plan_of

        entry = self.chosen
        if entry is None or entry.watched is None:
            return
        plan = plan_of(entry.watched, entry.sample, entry.gpu)
        if isinstance(plan, Unknown):
            self.notify(f"no plan: {plan.reason}", severity="warning")
            return
        expected = entry.watched.expected
        if not isinstance(expected, Unknown) and expected.untrained_bytes:
            left_out = format_bytes(expected.untrained_bytes)
            self.notify(f"the plan leaves out {left_out} of modules that nothing trains", severity="warning")
        self.post_message(self.PlanWanted(plan))

    # Looking into it

    def action_look(self) -> None:
        """Have its probe record the next step."""
        entry = self.chosen
        if entry is not None and entry.watched is not None and not refused(self, Act.LOOK):
            self.run_worker(self._look_into(entry.watched.process))

    async def _look_into(self, process: ProbedProcess) -> None:
        from gpumem_tui.tui.process.dialogs import WaitingScreen
        from gpumem_tui.watch.requests import NoAnswer, await_look, request_look

        left_off = threading.Event()

        def wait() -> None:
            if left_off.wait(_POLL_S):
                raise NoAnswer("left off")

        effect = "Its next step is recorded and takes longer. If you cancel, it is recorded all the same."
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
            self._open(_until_complete(process, look))

    # Attaching to it

    def action_attach(self) -> None:
        """Ask, then put a probe into it."""
        entry = self.chosen
        if entry is not None and entry.host is not None and not refused(self, Act.ATTACH):
            self.run_worker(self._ask_to_attach(entry.host))

    async def _ask_to_attach(self, host: HostProcess) -> None:
        from gpumem_tui.attach.running import explanation
        from gpumem_tui.attach.target import Refused, inspect
        from gpumem_tui.tui.process.dialogs import QuestionScreen, WaitingScreen

        try:
            target = await in_daemon_thread(lambda: inspect(host.pid))
        except Refused as refused:
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
        from gpumem_tui.attach.running import AttachFailed, attach
        from gpumem_tui.attach.target import Refused
        from gpumem_tui.tui.process.dialogs import WaitingScreen

        effect = "It is told to start the probe when its main thread is next in Python. To cancel changes nothing."
        waiting = WaitingScreen("Attaching", target.host.title, effect)
        await self.app.push_screen(waiting)
        try:
            attached = await in_daemon_thread(lambda: attach(target, _ATTACH_S))
        except (Refused, AttachFailed, OSError) as error:
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
        """Ask, then end the chosen process: the one that was asked about, whatever its pid means by then."""
        from gpumem_tui.tui.monitor.processes import describe
        from gpumem_tui.tui.process.dialogs import ConfirmScreen

        entry = self.chosen
        host = entry.host if entry is not None else None
        if entry is None or host is None or refused(self, Act.END):
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._signal(host, ending))

        self.app.push_screen(ConfirmScreen(ending, describe(entry)), answered)

    async def _signal(self, host: HostProcess, ending: Ending) -> None:
        said, failed = await in_daemon_thread(lambda: self.end_it(host, ending))
        self.notify(said, severity="error" if failed else "information")

    def end_it(self, host: HostProcess, ending: Ending) -> tuple[str, bool]:
        """End a process where the Monitor looks; what to say, and whether it failed. Not for the event loop."""
        from gpumem_tui.tui.process.dialogs import end_process

        return end_process(host, ending)


def _until_complete(process: ProbedProcess, look: LookAnswer) -> Callable[[], Report]:
    """A look's report; the probe writes it again once it knows what the steps after it have released."""
    from gpumem_tui.probe.files import WireError
    from gpumem_tui.watch.documents import read_look

    shown, report = look, look_report(process, look)

    def make() -> Report:
        nonlocal shown, report
        if shown.kept is None and "kept" not in shown.unavailable:
            newest: LookAnswer | None = None
            with suppress(WireError):
                newest = read_look(process.files, process.uid)
            if newest is not None and newest.request == look.request and newest != shown:
                shown, report = newest, look_report(process, newest)
        return report

    return make


def look_report(process: ProbedProcess, look: LookAnswer) -> Report:
    """A look's pages; only one, with the reasons, if nothing was recorded."""
    from gpumem_tui.tui.kit.pages import Page, Report
    from gpumem_tui.tui.process.look import look_title, place_page, step_page

    pages = [Page("by bucket", lambda width: step_page(look, width))]
    if look.devices:
        pages += [
            Page("by module", lambda width: place_page(look, "module", width)),
            Page("by source line", lambda width: place_page(look, "source", width)),
        ]
    return Report(process.title, tuple(pages), look_title(look))


def _is_python(host: HostProcess | None) -> bool:
    return host is not None and "python" in f"{host.name} {host.command}".lower()
