"""The terminal program. Nothing outside `gpumem_tui.tui` imports Textual."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import FrameType
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import App, SystemCommand
from textual.color import Color
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen

from gpumem_tui.options import WorkloadOptions
from gpumem_tui.search.runner import SearchConfig, search
from gpumem_tui.tui.glyphs import to_ascii, wants_ascii
from gpumem_tui.tui.screens.search import Clock, SearchFunction, SearchScreen
from gpumem_tui.tui.theme import THEME

SignalHandler = Callable[[int, FrameType | None], object] | int | None
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_EXIT_SIGNAL_BASE = 128
_FAREWELL_S = 2.0
"""How long a signal waits for an orderly end before it makes a hard one."""

_OWN_COMMANDS = ("Theme", "Screenshot")
"""Of Textual's own commands, the ones that mean something here."""


class AsciiFilter(LineFilter):
    """Replaces every drawn character by an ASCII one, whatever widget drew it."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Translate the text of every segment."""
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


class StyleFilter(LineFilter):
    """Gives every segment a style: Textual's own filter for NO_COLOR fails on the plot's segments that have none."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Replace a missing style by the empty one."""
        return [Segment(text, style or Style.null(), control) for text, style, control in segments]


class GpuMemApp(App[int]):
    """Opens on the Search screen.

    Args:
        ascii_only: draw with ASCII characters only.
        search_function, clock: see `SearchScreen`.
    """

    TITLE = "gpumem-tui"
    CSS_PATH = "screens/search.tcss"  # the default screen's: Textual loads a screen's own only when it is pushed
    COMMAND_PALETTE_BINDING: ClassVar[str] = "ctrl+p"

    class Killed(Message):
        """A signal asked the program to end with this exit code."""

        def __init__(self, code: int) -> None:
            super().__init__()
            self.code = code

    def __init__(
        self,
        config: SearchConfig,
        options: WorkloadOptions,
        notice: str = "",
        *,
        autostart: bool = False,
        ascii_only: bool = False,
        search_function: SearchFunction = search,
        clock: Clock = datetime.now,
    ) -> None:
        super().__init__()
        self._handlers: dict[signal.Signals, SignalHandler] = {}
        self.left = threading.Event()  # set by whoever ran the app, when the terminal is restored too
        self._styled = StyleFilter()
        self._ascii = AsciiFilter(enabled=ascii_only)
        self.search_screen = SearchScreen(
            config, options, notice, autostart=autostart, search_function=search_function, clock=clock
        )
        self.register_theme(THEME)
        self.theme = THEME.name

    def get_default_screen(self) -> Screen[None]:
        """The Search screen."""
        return self.search_screen

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's between ours."""
        return [self._styled, *super().get_line_filters(), *([self._ascii] if self._ascii.enabled else [])]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The keys that do something now, by name, and Textual's own where they make sense."""
        for active in screen.active_bindings.values():
            binding, node = active.binding, active.node
            if node is screen and active.enabled and binding.show and not screen.is_modal:
                action = binding.action
                title = f"{binding.description.capitalize()} ({self.get_key_display(binding)})"
                yield SystemCommand(title, binding.tooltip, lambda a=action: self.run_action(a, screen))
        for command in super().get_system_commands(screen):
            if command.title in _OWN_COMMANDS:
                yield command

    def on_mount(self) -> None:
        """A signal must not leave the terminal in disorder nor a child process behind."""
        if threading.current_thread() is threading.main_thread():  # the only one that may install handlers
            self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def on_unmount(self) -> None:
        """Give the signals back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    async def action_quit(self) -> None:
        """End the search, then the program."""
        self.exit(await self.search_screen.end_search())

    async def on_gpu_mem_app_killed(self, message: Killed) -> None:
        """End the search, then the program, as a signal asked for."""
        await self.search_screen.end_search()
        self.exit(message.code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        threading.Thread(target=self._leave, args=(_EXIT_SIGNAL_BASE + number,), daemon=True).start()

    def _leave(self, code: int) -> None:
        """In a thread of its own: when the terminal is gone, the event loop may hang writing to it."""
        self.search_screen.cancel()
        self.post_message(self.Killed(code))
        if not self.left.wait(_FAREWELL_S):
            os._exit(code)


def run(config: SearchConfig, options: WorkloadOptions, notice: str, autostart: bool) -> int:
    """Open the terminal program on the Search screen and return the process exit code.

    Args:
        config: what to search; `options` is what the user typed to get it.
        notice: where it will run, in words.
        autostart: begin at once.
    """
    return run_app(GpuMemApp(config, options, notice, autostart=autostart, ascii_only=wants_ascii(os.environ)))


def run_app(app: GpuMemApp) -> int:
    """Run the program in this process's terminal and return the process exit code."""
    code = app.run()
    app.left.set()
    return code if code is not None else app.return_code or 0
