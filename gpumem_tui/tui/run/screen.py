"""A command that trains, in one pane, and the Monitor on it in the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.events import Blur, Focus, Key
from textual.geometry import Size
from textual.keys import key_to_character
from textual.message import Message

from gpumem_tui.text import OutputLines, shortened
from gpumem_tui.tui.kit.background import in_daemon_thread, report_error
from gpumem_tui.tui.kit.main_screen import KeyBar
from gpumem_tui.tui.kit.output_pane import OutputPane, Printed, PrintedLine
from gpumem_tui.tui.monitor.entries import entries
from gpumem_tui.tui.monitor.screen import STYLES, MonitorScreen

if TYPE_CHECKING:
    from gpumem_tui.probe.wire import Exit
    from gpumem_tui.watch.supervising import TerminalCommand


_TITLE = OutputPane.BORDER_TITLE
_CONTROL = {
    "enter": b"\r",
    "backspace": b"\x7f",
    "ctrl+d": b"\x04",
    "ctrl+u": b"\x15",
    "ctrl+w": b"\x17",
    "ctrl+backslash": b"\x1c",
    "delete": b"\x1b[3~",
}


class CommandPane(OutputPane):
    """With the focus it types: letters and a few control keys go to the command, the rest moves the picture.

    Args:
        send: takes what is typed.

    Attributes:
        types: whether it does so; else keys mean what they mean without it.
    """

    BORDER_TITLE = f"{_TITLE} · tab: type into it"

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self.types = True

    async def _on_key(self, event: Key) -> None:
        if not self.types:
            return
        typed = _CONTROL.get(event.key)
        if typed is None and event.is_printable and event.character is not None:
            typed = event.character.encode()
        if typed is not None:
            event.stop()
            event.prevent_default()
            self._send(typed)

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Keys that it types are no bindings: the footer does not offer them meanwhile."""
        character = character or key_to_character(key)
        return self.types and (key in _CONTROL or (character is not None and character.isprintable()))

    def on_focus(self, _event: Focus) -> None:
        """Say where keys go."""
        self.border_title = f"{_TITLE} · keys go to it · tab: back" if self.types else f"{_TITLE} · z: back"

    def on_blur(self, _event: Blur) -> None:
        """Say how keys come here."""
        self.border_title = self.BORDER_TITLE


BESIDE_WIDTH = 160
"""Columns from which the two panes stand side by side, not below."""
_KEYS = 1
_OUTPUT_SHARE = 0.35
_OUTPUT_LEAST = 6
_REDRAW_S = 0.2
_CTRL_C = b"\x03"
_LEAVE_S = 5.0
"""How long a command that is asked to end may take before it is killed."""


class RunScreen(MonitorScreen):
    """The Monitor with the output of a command above or next to it. The program ends when the command does.

    Made as the Monitor is, then told `of` which command.
    """

    CSS_PATH: ClassVar[PurePath | list[str | PurePath]] = [STYLES, Path(__file__).with_name("screen.tcss")]
    SMALLEST = (40, 16)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "quit", tooltip="Stop the command and quit"),
        Binding("z", "zoom", "zoom", tooltip="The output alone, the Monitor alone, or both"),
    ]

    @dataclass
    class CommandEnded(Message):
        """The command has ended."""

        ended: Exit

    _command: TerminalCommand
    _words: str
    _zoomed = ""
    _has_chosen = False

    def of(self, command: TerminalCommand, words: str) -> RunScreen:
        """Have it show a command, and return itself.

        Args:
            command: already started; followed from when the screen opens, ended when the screen ends.
            words: how it was typed.
        """
        self.printed = Printed([PrintedLine(f"$ {words}", "heading")])
        self._command, self._words = command, words
        return self

    # Widgets

    def compose_parts(self) -> ComposeResult:
        """Yield the command's output, and the Monitor's parts in a pane of their own."""
        with Container(id="panes"):
            yield CommandPane(self._command.send)
            yield Vertical(*super().compose_parts(), id="monitor-pane")

    def on_mount(self) -> None:
        """Follow the command; the Monitor's own handler of this comes after."""
        self.query_one(KeyBar).leads = ("enter", "z")
        threading.Thread(target=self._follow_command, name="command", daemon=True).start()
        self.set_interval(_REDRAW_S, lambda: self.query_one(CommandPane).show(self.printed))

    def laid_out(self, size: Size) -> None:
        """Divide the place between the two, and draw the Monitor."""
        self._divide(size)
        super().laid_out(size)

    def _divide(self, size: Size) -> None:
        beside = size.width >= BESIDE_WIDTH
        self.set_class(beside, "-beside")
        self.set_class(self._zoomed == "output", "-output-only")
        self.set_class(self._zoomed == "monitor", "-monitor-only")
        output, monitor = self.query_one(CommandPane), self.query_one("#monitor-pane")
        output.styles.height = "100%" if beside or self._zoomed else self._output_rows(size)
        monitor.styles.width = "1fr" if not beside or self._zoomed else self._cells.width
        self.call_after_refresh(self._resize_command)

    def _output_rows(self, size: Size) -> int:
        return max(_OUTPUT_LEAST, round((size.height - _KEYS) * _OUTPUT_SHARE))

    def _resize_command(self) -> None:
        pane = self.query_one(CommandPane).scrollable_content_region
        if pane.width and pane.height:
            self._command.resize(pane.width, pane.height)

    @property
    def _cells(self) -> Size:
        """The Monitor's part of the screen, the line of keys included."""
        whole = super()._cells
        if self._zoomed or not whole:
            return whole
        if whole.width >= BESIDE_WIDTH:
            return Size(whole.width - whole.width * 2 // 5, whole.height)
        return Size(whole.width, whole.height - self._output_rows(whole))

    # The command

    def _follow_command(self) -> None:
        lines = OutputLines()

        def take(chunk: bytes) -> None:
            for line in lines.split(chunk):
                self.printed.add(line)
            self.printed.show_unfinished(lines.unfinished)

        def take_safely(chunk: bytes) -> None:
            try:
                take(chunk)
            except Exception as error:  # noqa: BLE001  some lines are lost, not the command's end
                self.app.call_later(report_error, self.app, error)

        ended = self._command.follow(take_safely)
        for line in lines.rest():
            self.printed.add(line)
        self.printed.show_unfinished("")
        self.post_message(self.CommandEnded(ended))

    def on_run_screen_command_ended(self, message: CommandEnded) -> None:
        """End the program with the command."""
        from gpumem_tui.watch.supervising import exit_code

        if not self.ending:
            self.ending = True
            self.cancel()
            self.app.exit(exit_code(message.ended))

    def look(self) -> bool:
        """Show another state as the Monitor does; the first of the command's processes that publishes is chosen."""
        is_new = super().look()
        if is_new and not self._has_chosen and self._state.cursor is None:
            own = [entry for entry in entries(self._state) if entry.watched and entry.process.pid in self._command.pids]
            if own:
                self._has_chosen = True
                self._enter(replace(self._state, cursor=own[0].key, charts_process=bool(self._state.gpus)))
        return is_new

    # Keys

    def interrupt(self) -> bool:
        """Ctrl-C is the command's."""
        if self._command.ended is None:
            self._command.send(_CTRL_C)
            return True
        return False

    def action_zoom(self) -> None:
        """Enlarge the output, the Monitor, or neither, in turn."""
        self._zoomed = {"": "output", "output": "monitor", "monitor": ""}[self._zoomed]
        pane = self.query_one(CommandPane)
        pane.types = not self._zoomed
        self._divide(self.size)
        self.set_focus(pane if self._zoomed == "output" else self._table, scroll_visible=False)
        self._draw()

    def action_leave(self) -> None:
        """Ask before the command is ended."""
        from gpumem_tui.tui.kit.dialogs import QuestionScreen

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self.app.run_action("quit"))

        effect = f"It is asked to end (SIGTERM), and killed if it has not ended after {_LEAVE_S:.0f} s."
        about = f"PID {self._command.pid} ({shortened(self._words)})"
        question = QuestionScreen("Stop", "Stop training and quit?", about, effect, "Keep running")
        self.app.push_screen(question, answered)

    async def end(self) -> int:
        """End the command, and wait until it has."""
        from gpumem_tui.watch.supervising import exit_code

        await super().end()
        if not await in_daemon_thread(lambda: self._command.wait(_LEAVE_S)):
            self._command.kill()
            await in_daemon_thread(lambda: self._command.wait(_LEAVE_S))
        return 0 if self._command.ended is None else exit_code(self._command.ended)

    def cancel(self) -> None:
        """Stop reading, and ask the command to end."""
        super().cancel()
        self._command.terminate()
