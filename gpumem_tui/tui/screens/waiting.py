"""A dialogue while something is under way that may take long, or never come."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

_TICK_S = 1.0


class WaitingScreen(ModalScreen[None]):
    """Says for how long it has waited; leaving it is leaving off. Stays, with the reason, when it fails.

    Args:
        title: what is under way; `about`: with whom, in one line; `effect`: what that means, and what leaving off does.
    """

    CSS_PATH = "process.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", "leave off")]

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
