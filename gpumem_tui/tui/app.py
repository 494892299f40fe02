"""The terminal program. Nothing outside `gpumem_tui.tui` imports Textual."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, ClassVar, get_args

from textual.app import SystemCommand
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.css.query import NoMatches
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Resize
from textual.filter import LineFilter, Monochrome
from textual.message import Message
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.theme import Theme
from textual.timer import Timer
from textual.widget import Widget

from gpumem_tui.errors import OptionError
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.clipboard import is_in_tmux, to_tmux
from gpumem_tui.tui.kit.filters import AsciiFilter, PlainFilter
from gpumem_tui.tui.kit.first_picture import leave_signals
from gpumem_tui.tui.kit.glyphs import LIGHT_PALETTE, PALETTE, THEME, THEMES, see_cursor
from gpumem_tui.tui.kit.main_screen import FRAME_CSS, Act, ActingApp, MainScreen, ScreenName, permitted, refused
from gpumem_tui.tui.kit.textual_internals import ParsedOnce, TerminalDriver, screen_text

if TYPE_CHECKING:
    from textual.actions import ActionParseResult
    from textual.dom import DOMNode

SignalHandler = Callable[[int, FrameType | None], object] | int | None
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
_EXIT_SIGNAL_BASE = 128
_ORDERLY_S = 2.0
"""How long a signal waits for an orderly end before it makes a hard one."""
_MOUNT_S = 1.0
_LOOK_S = 0.01
"""How long the program's end waits for widgets, and how often it looks."""

SCREENS: tuple[ScreenName, ...] = get_args(ScreenName)
"""On keys 1, 2, 3; a snapshot on 4 where the program was opened with one."""

_GO = "To the Monitor or hosts, to Search, Plan, the snapshot"
COPY_A_PART = "for a part of it, hold shift, drag over it, and press ctrl+c then"
"""In a browser. (On a Mac browsers' terminals give no such way: there all is copied.)"""
_OWN_COMMANDS = ("Theme",)
"""Textual's own commands that mean something here."""
_PALETTE_LINES = 8
_PALETTE_GONE_S = 0.1
"""Until what is under the command palette is drawn again."""

_GARBAGE_S = 2.0
"""How soon a dialogue that was closed is collected, with those that are closed until then."""

_GARBAGE = 20_000, 20, 20
"""When garbage is collected (`gc.set_threshold`): hosts bring 24,000 objects a second, none of them in a circle."""


class GpuMemApp(ActingApp[int]):
    """The main screens, one at a time.

    Args:
        screens: how each is made; called when it is first shown, in a thread unless it is the first. It may take its
            time, and raise an `OptionError`. A screen that is absent has no key.
        first: the one to open on.
        ascii_only: draw with ASCII characters only.
        theme: the name of a theme; empty, or one that does not exist, for the program's own.
        keep_theme: keeps a theme that is chosen for the next time; it may raise an `OSError`. None to keep none.
        python: the interpreter that training runs in; None for the usual one.
        forbidden: what the program does not do.
    """

    TITLE = "gpumem-tui"
    CSS = FRAME_CSS
    COMMAND_PALETTE_BINDING: ClassVar[str] = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+p", "command_palette", show=False, priority=True, tooltip="All commands by name, and the themes"),
        Binding("ctrl+o", "jump", show=False, tooltip="Jump: a letter on each pane; that letter gives it the keys"),
        Binding("ctrl+c", "interrupt", show=False, priority=True, tooltip="Leave; of `run`: interrupt the command"),
        Binding("ctrl+z", "suspend_process", show=False, tooltip="Stop the program; fg continues"),
        *(Binding(str(key), f"show('{name}')", name, show=False, tooltip=_GO) for key, name in enumerate(SCREENS, 1)),
    ]

    _coloured: Theme | None = None
    _colours: dict[str, str]

    class Killed(Message):
        """A signal asked the program to end with this exit code."""

        def __init__(self, code: int) -> None:
            super().__init__()
            self.code = code

    def __init__(  # noqa: PLR0913 - named only, each with its default
        self,
        screens: Mapping[ScreenName, Callable[[], MainScreen]],
        first: ScreenName,
        *,
        ascii_only: bool = False,
        theme: str = "",
        keep_theme: Callable[[str], None] | None = None,
        python: str | None = None,
        forbidden: frozenset[Act] = frozenset(),
    ) -> None:
        self.DEFAULT_MODE = first  # type: ignore[misc]  # Textual opens on it
        super().__init__()
        self._handlers: dict[signal.Signals, SignalHandler] = {}
        self._ending = False
        self._collecting: Timer | None = None
        self.left = threading.Event()  # set by whoever ran the app, when the terminal is restored too
        self._ascii = AsciiFilter(enabled=ascii_only)
        self._plain = PlainFilter(lambda: self.theme_variables)
        self._makers = screens
        self._python = python
        self.forbidden = forbidden
        self._made: dict[ScreenName, MainScreen] = {}
        self._making: dict[ScreenName, asyncio.Task[OptionError | None]] = {}
        for name in screens:
            self.add_mode(name, partial(self.main_screen, name))
        for own in THEMES:
            self.register_theme(own)
        self._keep_theme = keep_theme
        self._wanted_theme = theme or THEME.name
        self.theme = self._wanted_theme if self._wanted_theme in self.available_themes else THEME.name
        self.stylesheet = ParsedOnce(variables=self.get_css_variables())
        self._shown_theme = self.theme

    def main_screen(self, name: ScreenName) -> MainScreen:
        """Return a main screen, made if need be.

        Raises:
            KeyError: the program was opened without that screen.
        """
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def parting_lines(self) -> Iterator[str]:
        """Yield what its screens leave in the terminal."""
        for screen in self._made.values():
            yield from screen.parting_lines()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to show only the available screens, and not from within a dialogue."""
        if action == "show":
            return parameters[0] in self._makers and not self.screen.is_modal
        return True

    def action_show(self, name: ScreenName) -> None:
        """Go to a main screen; to make it may take a while, and keys are answered meanwhile."""
        self.run_worker(self._show(name), group="show", exclusive=True)

    async def _show(self, name: ScreenName) -> None:
        if name not in self._made:
            if name not in self._making:
                self._making[name] = asyncio.create_task(self._make(name))
            error = await asyncio.shield(self._making[name])  # another key may end the wait, not the making
            if error is not None:
                self.notify(str(error), title=name.capitalize(), severity="error")
                return
        if not self._ending:
            if isinstance(self.screen, CommandPalette):  # opened meanwhile, on the screen that is left now
                await self.pop_screen()
            await self.switch_mode(name)

    async def _make(self, name: ScreenName) -> OptionError | None:
        """Make a main screen, once however often it is asked for meanwhile; or why it cannot be made."""
        try:
            made = await in_daemon_thread(self._makers[name])
        except OptionError as error:
            return error
        finally:
            del self._making[name]
        self._made[name] = made
        if self._ending:
            made.cancel()
        return None

    def on_main_screen_wanted(self, message: MainScreen.Wanted) -> None:
        """Show the screen that is wanted, and have it take over what another one hands over."""
        if message.screen in self._makers:
            self.run_worker(self._hand_over(message.screen, message.what), group="show", exclusive=True)

    async def _hand_over(self, name: ScreenName, what: object) -> None:
        from gpumem_tui.plan.plan import Plan

        if name == "search" and isinstance(what, Plan):
            from gpumem_tui.options.configuration import configure, options_of

            try:
                options = options_of(what, self._python)
                what = options.trained, await in_daemon_thread(lambda: configure(options))
            except OptionError as error:
                self.notify(str(error), title="Search", severity="error")
                return
        await self._show(name)
        if name in self._made and (why_not := self._made[name].take_over(what)):
            self.notify(why_not, title=name.capitalize(), severity="warning")

    def action_help(self) -> None:
        """Show the keys of the screen, and what else there is to know of it."""
        from gpumem_tui.tui.kit.help import HelpScreen

        if isinstance(self.screen, MainScreen):
            self.push_screen(HelpScreen.of(self.screen))

    def action_jump(self) -> None:
        """Show a letter on each pane of the screen, and go to the one whose letter is pressed."""
        from gpumem_tui.tui.kit.jump import JumpScreen, panes_of

        if isinstance(self.screen, MainScreen):
            self.push_screen(JumpScreen(panes_of(self.screen)), lambda pane: None if pane is None else pane.focus())

    def action_manual(self, topic: str) -> None:
        """Open the manual at a topic."""
        from gpumem_tui.tui.kit.manual import ManualScreen

        self.push_screen(ManualScreen(topic))

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,  # noqa: ARG002 - Textual's signature
    ) -> None:
        """Notify as Textual does, with brackets as text: notices, on every screen, name commands and paths."""
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=False)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy as Textual does, and within tmux into its buffer too: tmux ignores Textual's way by default."""
        super().copy_to_clipboard(text)
        if is_in_tmux() and not self.is_web:
            self.run_worker(in_daemon_thread(lambda: to_tmux(text)))

    def get_css_variables(self) -> dict[str, str]:
        """Return the colours of the theme, worked out once: Textual asks for each screen."""
        if self._coloured is not self.current_theme:
            self._coloured, self._colours = self.current_theme, super().get_css_variables()
            if self.current_theme not in THEMES:
                see_cursor(self._colours)
        return self._colours

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return what memory is drawn with, for themes that do not say."""
        return PALETTE if self.current_theme.dark else LIGHT_PALETTE

    def action_command_palette(self) -> None:
        """Open the palette, unless there are but a few lines: there Textual 8's list of commands fails on its keys.

        Textual's own has an id: opened while the last one is still being taken away, it ended the program.
        """
        if self.size.height >= _PALETTE_LINES and not isinstance(self.screen, CommandPalette):
            self.push_screen(CommandPalette())

    def on_resize(self, event: Resize) -> None:
        """Close the command palette in a terminal that has become too small for it."""
        if event.size.height < _PALETTE_LINES and isinstance(self.screen, CommandPalette):
            self.pop_screen()

    def get_driver_class(self) -> type[Driver]:
        """Return our driver in the place of Textual's for terminals."""
        found = super().get_driver_class()
        return TerminalDriver if found is LinuxDriver else found

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's filters, and ours after them."""
        filters: Iterable[LineFilter] = super().get_line_filters()
        if self.no_color:
            filters = (self._plain if isinstance(each, Monochrome) else each for each in filters)
        return [*filters, *([self._ascii] if self._ascii.enabled else [])]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the keys that do something now, by name, and Textual's own where they make sense."""
        for active in screen.active_bindings.values():
            binding, node = active.binding, active.node
            if node is screen and active.enabled and binding.show and not screen.is_modal:
                action = binding.action
                title = f"{binding.description.capitalize()} ({self.get_key_display(binding)})"
                yield SystemCommand(title, binding.tooltip, lambda a=action: self.run_action(a, screen))
        for command in super().get_system_commands(screen):
            if command.title in _OWN_COMMANDS:
                yield command
        picture = partial(self.set_timer, _PALETTE_GONE_S, self._save_picture)
        yield SystemCommand("Screenshot", "Save a picture of the screen (SVG) in the working directory", picture)

    def _save_picture(self) -> None:
        """Write a picture. Textual's own way needs a folder for downloads, and reports nothing if that is missing."""
        if refused(self, Act.WRITE):
            return
        try:
            path = self.save_screenshot(path=os.getcwd())
        except OSError as error:
            self.notify(f"no picture can be written here: {error.strerror}", title="Screenshot", severity="error")
        else:
            self.notify(f"written to {path}", title="Screenshot")

    def on_load(self) -> None:
        """Catch signals before the terminal is taken: none may leave it in disorder, nor a child process behind."""
        leave_signals()
        if threading.current_thread() is threading.main_thread():  # the only one that may install handlers
            self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def on_mount(self) -> None:
        """Collect garbage from the first frame on, and name a theme that is missing."""
        self.call_after_refresh(self._collect_garbage)
        self.theme_changed_signal.subscribe(self, self._theme_chosen)
        if self.theme != self._wanted_theme:
            self.notify(f"there is no theme {self._wanted_theme}; ctrl+p lists them", severity="warning")

    def _theme_chosen(self, theme: Theme) -> None:
        """Keep it for the next time, where the program may write."""
        is_new, self._shown_theme = theme.name != self._shown_theme, theme.name
        if is_new and self._keep_theme is not None and permitted(self, Act.WRITE):
            try:
                self._keep_theme(theme.name)
            except OSError as error:
                self.notify(f"the theme is not kept: {error.strerror}", severity="warning")

    @staticmethod
    def _collect_garbage() -> None:
        """Collect garbage from the first frame on, and only in what came after it."""
        if not gc.isenabled():
            gc.freeze()
            gc.set_threshold(*_GARBAGE)
            gc.enable()

    def pop_screen(self) -> AwaitComplete:
        """Close a dialogue, and collect it soon: it is a mebibyte in circles, which else stays for an hour.

        Where none is open nothing is closed: enter typed twice in the command palette closes that twice.
        """
        if len(self.screen_stack) <= 1:
            return AwaitComplete()
        if self._collecting is None:
            self._collecting = self.set_timer(_GARBAGE_S, self._collect_dialogues)
        return super().pop_screen()

    def _collect_dialogues(self) -> None:
        self._collecting = None
        gc.collect()

    def on_unmount(self) -> None:
        """Give the signals back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Do nothing once the program is being left, in a dialogue not yet mounted, in a list without a line."""
        stack = self.screen_stack
        if self._ending or (stack and stack[-1].is_modal and not stack[-1].is_mounted):
            return False
        try:
            return await super().run_action(action, default_namespace, namespaces)
        except NoMatches:
            if not self.screen.is_modal:
                raise
            return True
        except LookupError:  # Textual 8 looks for the line that is a page further
            if self.focused is None or self.focused.scrollable_content_region.area:
                raise
            return True

    async def action_quit(self) -> None:
        """End what runs, then the program."""
        self.exit(await self._end())

    async def action_interrupt(self) -> None:
        """Ctrl-C: end the program, unless a screen has another use for it; in a browser copy what is shown."""
        if self.is_web:
            self.copy_to_clipboard(screen_text(self.screen))
            self.notify(f"the screen is copied, as text; {COPY_A_PART}", title="Copied")
        elif not any(screen.interrupt() for screen in self._made.values()):
            await self.action_quit()

    def tooltip_of(self, binding: Binding) -> str:
        """Return what a key does, for the help: ctrl+c is another key in a browser."""
        return f"Copy the screen as text; {COPY_A_PART}" if self.is_web and binding.key == "ctrl+c" else binding.tooltip

    async def on_gpu_mem_app_killed(self, message: Killed) -> None:
        """End what runs, then the program, as a signal asked for."""
        await self._end()
        self.exit(message.code)

    async def _end(self) -> int:
        """Return the exit code of the screens that have one to give: the first that is not 0."""
        self._ending = True
        codes = [await screen.end() for screen in tuple(self._made.values())]
        await self._until_mounted()
        return next((code for code in codes if code), 0)

    async def _until_mounted(self) -> None:
        """Wait for what is being put up: Textual 8 fails if it takes down half a screen."""
        deadline_s = monotonic() + _MOUNT_S
        while monotonic() < deadline_s:
            screens = [screen for screen in {*self._made.values(), *self.screen_stack} if screen.parent]
            if all(node.is_mounted for screen in screens for node in screen.walk_children(Widget, with_self=True)):
                return
            await asyncio.sleep(_LOOK_S)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=self._leave, args=(_EXIT_SIGNAL_BASE + number,), daemon=True).start()

    def _leave(self, code: int) -> None:
        """End all screens in a thread of its own: when the terminal is gone, the event loop may hang writing to it."""
        for screen in self._made.values():
            with suppress(Exception):  # also if one screen fails at it, the program ends
                screen.cancel()
        self.post_message(self.Killed(code))
        if not self.left.wait(_ORDERLY_S):
            os._exit(code)


def run_app(app: GpuMemApp) -> int:
    """Run the program in this process's terminal and return the process exit code; answers stay in the terminal."""
    code = app.run()
    app.left.set()
    has_hung_up = code == _EXIT_SIGNAL_BASE + signal.SIGHUP
    for line in () if has_hung_up else app.parting_lines():
        print(line)
    return code if code is not None else app.return_code or 0
