"""All that reaches into what Textual does not promise to keep: its terminal driver, the way of its events, a cache.

Written for Textual 8 (checked on 8.2.8), which `pyproject.toml` asks for. `tests/tui/test_tui_textual_internals.py`
names what a later Textual lacks. Each place shows what it is for. Upstream: Textualize/textual#1582 is open for
stopping and continuing, #1199 (closed) is a key that reaches who gets the focus next; for the others we know of no
issue.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
from abc import ABCMeta
from codecs import getincrementaldecoder
from collections import deque
from time import monotonic
from typing import Any, TypeVar

from textual._styles_cache import StylesCache
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.css.stylesheet import Stylesheet
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Event, Key, Resize
from textual.message import Message
from textual.message_pump import MessagePump, _MessagePumpMeta
from textual.screen import Screen
from textual.timer import Timer
from textual.widget import Widget
from textual.worker import WorkerFailed

from gpumem_tui.tui.kit.background import report_error
from gpumem_tui.tui.kit.first_picture import ALTERNATE, taken_over

USED: dict[type, tuple[str, ...]] = {
    XTermParser: ("feed", "tick"),
    LinuxDriver: (
        "_app", "_loop", "_debug", "_writer_thread", "exit_event", "fileno", "process_message", "run_input_thread",
        "write", "disable_input",
        "suspend_application_mode", "resume_application_mode",
    ),
    StylesCache: ("get_inner_outer",),
    Stylesheet: ("_require_parse", "_variables", "reparse", "rules", "set_variables"),
    Widget: ("_layout_updates",),
    Screen: ("on_event", "_compositor"),
    App: ("on_event", "is_attached", "post_message", "_handle_exception"),
    Key: ("is_forwarded",),
}  # fmt: skip
"""By class of Textual, the names that are used here and might be gone or mean something else in its next version."""

_TICK_S = 0.1
"""An escape key is distinguished from the beginning of a sequence by what does not follow within such a time."""
_LIVELY_S = 1.0
"""So long after a key the time above counts; then there is nothing to look for until the next one, or the end."""


# Textual 8 remembers two colours by the cache that asked for them, and with it every line of a widget that is gone: a
# mebibyte each time the help is opened, up to 1,024 times. They depend on the colours alone.
StylesCache.get_inner_outer = classmethod(StylesCache.__dict__["get_inner_outer"])  # type: ignore[assignment]


class ParsedOnce(Stylesheet):
    """A style sheet that parses each source once for each set of variables.

    Textual 8 parses every source again whenever a screen is shown first, three times before the first frame: a tenth of
    what that takes.
    """

    def set_variables(self, variables: dict[str, str]) -> None:
        """Take variables; only others than before have everything parsed again."""
        if variables != self._variables:
            super().set_variables(variables)
            self._require_parse = True

    def reparse(self) -> None:
        """Parse what was added since the last time."""
        _ = self.rules


class TerminalDriver(LinuxDriver):
    """Textual's, with three changes.

    It waits for keys: Textual looks for an unfinished sequence ten times a second, which was an eighth of the Monitor's
    CPU time (tests/bench/test_monitor_cost.py), and for the end too, which was half of the time that leaving took.

    It may be continued after a stop that it did not see. Textual takes the terminal whenever the process is continued.
    After SIGSTOP, as batch systems send it, the terminal had never been given back: Textual 8 would start a second
    thread that reads keys, and both wait for each other at the end.

    A terminal that is gone is a hang-up, whether or not the system sends the signal too: Textual would show an error.
    """

    _gave_back = False

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._awake, self._wake = os.pipe()  # something in it ends the wait for keys

    def disable_input(self) -> None:
        """Read no more keys, from now on."""
        os.write(self._wake, b"\0")
        super().disable_input()
        os.read(self._awake, 1)

    def run_input_thread(self) -> None:
        """Read keys, the mouse and the terminal's answers until the terminal is given back."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")().decode
        lively_until_s = monotonic() + _LIVELY_S
        while not self.exit_event.is_set():
            patience_s = _TICK_S if monotonic() < lively_until_s else None
            typed = ""
            if self.fileno in select.select([self.fileno, self._awake], [], [], patience_s)[0]:
                lively_until_s = monotonic() + _LIVELY_S
                read = self._read()
                if not read:
                    os.kill(os.getpid(), signal.SIGHUP)
                    return
                typed = decode(read)  # empty in the middle of a character
            try:
                for message in (*(parser.feed(typed) if typed else ()), *parser.tick()):
                    self.process_message(message)
            except Exception as error:  # noqa: BLE001  what was typed is lost, not all that will be
                self._loop.call_soon_threadsafe(report_error, self._app, error)

    def _read(self) -> bytes:
        """Return what was typed; empty once the terminal is gone, which Linux reports in either way."""
        try:
            return os.read(self.fileno, 1 << 12)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return b""

    def write(self, data: str) -> None:
        """Draw; nothing on a terminal that is gone: its queue would fill up and block the exit."""
        if data == ALTERNATE and taken_over():
            return  # the first picture is on that screen already: this would clear it
        if self._writer_thread is None or self._writer_thread.is_alive():
            super().write(data)

    def suspend_application_mode(self) -> None:
        """Give the terminal back."""
        super().suspend_application_mode()
        self._gave_back = True

    def resume_application_mode(self) -> None:
        """Take the terminal, soon: Textual asks in a signal's handler, where a lock that it needs may be held."""
        asyncio.get_running_loop().call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """Take the terminal, and draw everything again: the shell may have written on it."""
        if not self._gave_back:
            super().suspend_application_mode()
        super().resume_application_mode()
        self._gave_back = False
        self._app.call_later(self._app.refresh)


class SizedScreen(Screen[None]):
    """A screen that passes over sizes that are no longer the terminal's.

    Textual 8 lays a screen out anew for each, and tells it of its new size each time: two sizes that wait at once
    call each other up for ever.
    """

    async def on_event(self, event: Event) -> None:
        """Handle every event but a `Resize` to another size."""
        if not isinstance(event, Resize) or event.size == self.app.size:
            await super().on_event(event)


class AbstractScreen(ABCMeta, _MessagePumpMeta):
    """The class of screens that lack what their subclasses have: one with an abstract method cannot be made."""


def forget_height(widget: Widget) -> None:
    """Have a widget's height worked out from the text that it is given next.

    Textual 8 counts one change for all that come before it is idle, and remembers heights by that count: on a slow
    machine the height would be that of an earlier text.
    """
    widget._layout_updates += 1  # noqa: SLF001 - named in `USED`


def screen_text(screen: Screen[object]) -> str:
    """Return what a screen shows, as lines without the spaces at their ends."""
    strips = screen._compositor.render_strips()  # noqa: SLF001 - named in `USED`
    return "\n".join(strip.text.rstrip() for strip in strips).rstrip() + "\n"


Result = TypeVar("Result")
_ROUNDS = 2
"""The first note follows the key itself, the second what its action has posted (a control's change, a dialogue)."""
_KEY_LOOK_S = 0.02
_LONGEST_S = 0.5
"""While a key waits for the one before: how often to look whether that one's note is still on its way, and for how
long. A note goes with the widget that has it, as when a key closes a dialogue."""


class KeyDone(Message):
    """Follows a key from the focused widget up to the app, behind the key's effects on the way."""

    def __init__(self, key: Key, number: int) -> None:
        super().__init__()
        self.key, self.round = key, number


class LastingApp(App[Result]):
    """An app that continues when one of its workers fails: the error is named on the screen. Textual 8 would end it."""

    def _handle_exception(self, error: Exception) -> None:
        if isinstance(error, WorkerFailed):
            report_error(self, error.error)
        else:
            super()._handle_exception(error)


class KeysInOrder(LastingApp[Result]):
    """An app that hands a key out only when the one before has done what it does.

    Textual 8 hands each key to the focused widget as it comes, while the action bound to it runs later, in the app's
    own queue. With ``Down`` and ``9`` in one write, as over a slow line, the 9 would reach the row above, or the field
    that ``Tab`` leaves.
    """

    def __init__(self) -> None:
        super().__init__()
        self._acting: Key | None = None
        self._acting_since_s = 0.0
        self._carrier: MessagePump = self
        self._waiting_keys: deque[Key] = deque()
        self._looking: Timer | None = None

    async def on_event(self, event: Event) -> None:
        """Hold back a key while another one acts."""
        if not isinstance(event, Key) or event.is_forwarded:
            await super().on_event(event)
        elif self._acting is None:
            await self._hand_out(event)
        else:
            self._waiting_keys.append(event)
            if self._looking is None:
                self._looking = self.set_interval(_KEY_LOOK_S, self._look)
            await self._look()

    async def on_key_done(self, message: KeyDone) -> None:
        """Wait again behind what the key's action has posted; then the next key."""
        if message.key is not self._acting:
            return  # given up: it came late
        if message.round == _ROUNDS or not self._send(KeyDone(message.key, message.round + 1)):
            await self._next_key()

    async def _hand_out(self, key: Key) -> None:
        self._acting, self._acting_since_s = key, monotonic()
        self._carrier = self.focused or self.screen
        await super().on_event(key)
        if not self._carrier.post_message(KeyDone(key, 1)):
            await self._next_key()

    def _send(self, note: KeyDone) -> bool:
        """Send a note from the widget that has the focus now."""
        self._carrier = self.focused or self.screen
        return self._carrier.post_message(note)

    async def _look(self) -> None:
        """Continue when a note was lost."""
        if not self._carrier.is_attached or monotonic() - self._acting_since_s > _LONGEST_S:
            await self._next_key()

    async def _next_key(self) -> None:
        self._acting = None
        if self._waiting_keys:
            await self._hand_out(self._waiting_keys.popleft())
        if not self._waiting_keys and self._looking is not None:
            self._looking.stop()
            self._looking = None
