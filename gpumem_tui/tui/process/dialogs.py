"""Dialogues about one process: all that is known of it, the question before it is ended, the wait for its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from gpumem_tui.monitor.processes import CannotSignal, kill, terminate
from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.tui.kit.figures import Row
from gpumem_tui.tui.kit.lines import assembled

Ending = Literal["terminate", "kill"]


class DetailsScreen(ModalScreen[Ending | Literal["look"] | None]):
    """Gives back what the user wants done with the process, if anything.

    Args:
        lines: the text; `may_end`: offer to end the process; `may_look`: to look into its next step.
    """

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss(None)", "close"),
        Binding("l", "look", "look"),
        Binding("T", "end('terminate')", "terminate"),
        Binding("K", "end('kill')", "kill"),
    ]

    def __init__(self, lines: Sequence[Row], *, may_end: bool, may_look: bool) -> None:
        super().__init__()
        self._lines = lines
        self._may_end = may_end
        self._may_look = may_look
        self._is_listed = True

    def compose(self) -> ComposeResult:
        """One scrollable text."""
        with VerticalScroll(id="details") as box:
            self._frame(box)
            yield Static(assembled(self._lines))

    def show(self, lines: Sequence[Row] | None) -> None:
        """Later figures; None where there are none, as the process is no longer listed."""
        if not self.is_mounted:
            return
        if self._is_listed != (lines is not None):
            self._is_listed = lines is not None
            self._frame(self.query_one("#details", VerticalScroll))
        if lines is not None and lines != self._lines:
            self._lines = lines
            self.query_one(Static).update(assembled(lines))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Ending and looking are offered only where they can be done."""
        offered = {"end": self._may_end, "look": self._may_look}
        return offered[action] and self._is_listed if action in offered else True

    def _frame(self, box: VerticalScroll) -> None:
        box.border_title = "Process" if self._is_listed else "Process: no longer listed, these were its last figures"
        keys = [("look", "l look"), ("end", "T terminate · K kill"), ("dismiss", "esc closes")]
        box.border_subtitle = " · ".join(words for action, words in keys if self.check_action(action, ()))

    def action_end(self, ending: Ending) -> None:
        """Close, and go on to the question."""
        self.dismiss(ending)

    def action_look(self) -> None:
        """Close, and look."""
        self.dismiss("look")


class QuestionScreen(ModalScreen[bool]):
    """Whether to do something to a process. Nothing is chosen beforehand but to leave it alone.

    Args:
        verb: what is done; `question`: whether to.
        about: to which process, in one line; `effect`: what that does to it.
    """

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,q", "dismiss(False)", "leave it"),
        Binding("y", "dismiss(True)", "yes"),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, verb: str, question: str, about: str, effect: str) -> None:
        super().__init__()
        self._verb = verb
        self._question = question
        self._about = about
        self._effect = effect

    def compose(self) -> ComposeResult:
        """The question and two buttons."""
        with Vertical(id="confirm") as box:
            box.border_title = self._question
            yield Static(Content(self._about), id="about")
            yield Static(Content(self._effect), id="effect")
            with Horizontal(id="buttons"):
                yield Button("Leave it (n)", id="no", compact=True)
                yield Button(f"{self._verb} (y)", id="yes", variant="error", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """The answer."""
        self.dismiss(event.button.id == "yes")


class ConfirmScreen(QuestionScreen):
    """Whether to end a process.

    Args:
        ending: how; `about`: which process, in one line.
    """

    _SAID: ClassVar[dict[Ending, tuple[str, str]]] = {
        "terminate": ("Terminate", "It is asked to end (SIGTERM) and may still save its state."),
        "kill": ("Kill", "It ends at once (SIGKILL). What it has not saved is lost."),
    }

    def __init__(self, ending: Ending, about: str) -> None:
        verb, effect = self._SAID[ending]
        super().__init__(verb, f"{verb} this process?", about, effect)


def end_process(host: HostProcess, ending: Ending) -> tuple[str, bool]:
    """Signal a process; returns what to tell, and whether it failed. May take a while: not for the event loop."""
    try:
        terminate(host) if ending == "terminate" else kill(host)
    except CannotSignal as error:
        return str(error), True
    return f"pid {host.pid} ({host.name}) {'asked to end' if ending == 'terminate' else 'killed'}", False


_TICK_S = 1.0


class WaitingScreen(ModalScreen[None]):
    """Says for how long it has waited; leaving it is leaving off. Stays, with the reason, when it fails.

    Args:
        title: what is under way; `about`: with whom, in one line; `effect`: what that means, and what leaving off does.
    """

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", "cancel")]

    def __init__(self, title: str, about: str, effect: str) -> None:
        super().__init__()
        self._about = about
        self._effect = effect
        self._doing = title
        self._stage = "waiting"
        self._began_s = time.monotonic()

    def compose(self) -> ComposeResult:
        """Three texts."""
        with Vertical(id="confirm", classes="waiting") as box:
            box.border_title = self._doing
            box.border_subtitle = "esc leaves off"
            yield Static(Content(self._about), id="about")
            yield Static(Content(self._effect), id="effect")
            yield Static(self._stage, id="outcome")

    def on_mount(self) -> None:
        """Count the seconds."""
        self._clock = self.set_interval(_TICK_S, self._tick)

    def tell(self, stage: str) -> None:
        """How far it is; shown with the next second. May come from another thread."""
        self._stage = stage

    def fail(self, reason: str) -> None:
        """It came to nothing; say why until that is read."""
        self._clock.stop()
        self.query_one("#confirm").border_subtitle = "esc closes"
        self.query_one("#effect").display = False
        outcome = self.query_one("#outcome", Static)
        outcome.add_class("failed")
        outcome.update(Content(reason))

    def _tick(self) -> None:
        self.query_one("#outcome", Static).update(f"{self._stage}, {time.monotonic() - self._began_s:.0f} s")
