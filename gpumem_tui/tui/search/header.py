"""The one header line: program, device in words, torch, the time to the minute."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget

from gpumem_tui.tui.kit.figures import MUTED
from gpumem_tui.tui.kit.glyphs import PROGRAM
from gpumem_tui.tui.search.state import SearchState
from gpumem_tui.tui.search.workload import device_words

_ROOMY = 100


class HeaderLine(Widget):
    """Drops what matters least where the line is too short: torch's version first, then why the GPU is simulated."""

    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__()
        self._device: tuple[str, str] = ("", "")
        self._torch = ""
        self._time = ""

    def show(self, state: SearchState, time: str) -> None:
        """Render a state at a time of day."""
        torch = f"torch {state.predicted.ready.torch_version}" if state.predicted is not None else ""
        shown = (device_words(state.config), torch, time)
        if shown != (self._device, self._torch, self._time):
            self._device, self._torch, self._time = shown
            self.refresh()

    def render(self) -> Content:
        """The line at the widget's width."""
        name, reason = self._device
        gap = "  " if self.size.width >= _ROOMY else " "
        room = self.size.width - len(PROGRAM) - len(gap) - len(name) - 1 - len(self._time)
        extras = ""
        for extra in (reason, self._torch):
            if extra and len(extras) + len(extra) + 3 <= room:
                extras += f" · {extra}"
        space = max(1, room - len(extras) + 1)
        return Content.assemble(
            (PROGRAM, "bold $primary"),
            gap,
            (name, "bold"),
            (extras, MUTED),
            " " * space,
            (self._time, MUTED),
        )
