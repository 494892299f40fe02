"""Common to the program's main screens: their frame, the line of keys, and the acts that they may do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, Literal

from textual.actions import parse
from textual.app import ComposeResult
from textual.binding import Binding
from textual.dom import DOMNode
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget

from gpumem_tui.tui.kit.figures import Row, span_width
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.textual_internals import KeysInOrder, Result, SizedScreen


class Act(Enum):
    """Something that changes the machine or a process on it; the value states that it is not done."""

    END = "no process is ended"
    ATTACH = "no probe is put into a process"
    LOOK = "no process is asked to record a step"
    SEARCH = "no search is started"
    WRITE = "no file is written"


TO_PROCESSES = frozenset({Act.END, Act.ATTACH, Act.LOOK})
"""Acts on processes that others may have started."""
EVERY_ACT = frozenset(Act)


class ActingApp(KeysInOrder[Result]):
    """An app whose screens ask, right before they act, whether they may.

    Attributes:
        forbidden: what it does not do.
    """

    forbidden: frozenset[Act] = frozenset()

    def tooltip_of(self, binding: Binding) -> str:
        """Return what a key does, for the help."""
        return binding.tooltip


def permitted(node: DOMNode, act: Act) -> bool:
    """Return whether the program of a screen or widget does this: for the keys that are offered."""
    app = node.app
    return not isinstance(app, ActingApp) or act not in app.forbidden


def refused(node: DOMNode, act: Act) -> bool:
    """Return True, after a notice to the user, if the program does not do this. Called right before acting."""
    if permitted(node, act):
        return False
    node.app.notify(refusal(act), severity="warning")
    return True


def refusal(act: Act) -> str:
    """Return the notice to the user."""
    return f"read-only: {act.value}"


_LAST = ("escape", "question_mark", "q")
"""Esc, help and quit are the last keys, and shown however narrow the screen is."""
_PALETTE = "palette"
"""The command palette's key is right where there is room for it."""
_ROOM_BEFORE_PALETTE = 3

_Shown = tuple[str, str, str]
"""A key, how it is written, and what it does."""


class KeyBar(Lines):
    """A key and what it does; a click presses it. Keys without room are in the help.

    Attributes:
        leads: the keys that come first.
    """

    DEFAULT_CSS = """
    KeyBar { dock: bottom; height: 1; background: $footer-background; color: $footer-foreground; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: list[tuple[int, int, str]] = []
        self.leads: Sequence[str] = ()

    def on_mount(self) -> None:
        """Follow the screen's keys."""
        self.screen.bindings_updated_signal.subscribe(self, self._show_keys)

    def on_resize(self, event: Resize) -> None:
        """Show as many keys as there is room for."""
        super().on_resize(event)
        self._show_keys(self.screen)

    def on_click(self, event: Click) -> None:
        """Press the key that was clicked."""
        offset = event.get_content_offset(self)
        for first, last, key in self._places:
            if offset is not None and first <= offset.x < last:
                self.app.simulate_key(key)

    def _show_keys(self, screen: Screen[object]) -> None:
        if not self.size.width:
            return  # before the first layout, which shows them
        shown = [
            (active.binding.key, self.app.get_key_display(active.binding), active.binding.description)
            for active in screen.active_bindings.values()
            if active.binding.show and active.enabled
        ]
        shown.sort(key=lambda key: self.leads.index(key[0]) if key[0] in self.leads else len(self.leads))
        last = [key for name in _LAST for key in shown if key[0] == name]
        others = [key for key in shown if key not in last]
        while others and _length([*others, *last]) > self.size.width:
            del others[-1]
        shown = [*others, *last]
        row: Row = []
        self._places = []
        for number, key in enumerate(shown):
            self._add(row, key, "  " if number else "")
        palette = self.app.COMMAND_PALETTE_BINDING
        commands = (palette, self.app.get_key_display(Binding(palette, "")), _PALETTE)
        room = self.size.width - span_width(row) - _length([commands])
        if room >= _ROOM_BEFORE_PALETTE and palette in screen.active_bindings:
            self._add(row, commands, " " * room)
        self.show_rows([row])

    def _add(self, row: Row, shown: _Shown, gap: str) -> None:
        key, display, description = shown
        start = span_width(row) + len(gap)
        row += [(gap, ""), (display, "bold $footer-key-foreground"), (f" {description}", "")]
        self._places.append((start, span_width(row), key))


def _length(shown: list[_Shown]) -> int:
    return sum(len(display) + len(description) + 3 for _, display, description in shown) - 2


FRAME_CSS = """
MainScreen > #too-small { display: none; height: 2; color: $foreground; }
MainScreen.-tiny > * { display: none !important; }
MainScreen.-tiny > #too-small { display: block !important; }
"""
"""For the app's style sheet: a widget's own defaults would not hold against those of the screens."""


ScreenName = Literal["monitor", "search", "plan", "snapshot"]


class MainScreen(SizedScreen):
    """Monitor, Search or Plan: a screen on keys 1, 2, 3, made when first shown and kept until the end.

    Attributes:
        SMALLEST: columns and rows below which the screen only states that it needs them.
        TOPIC: its page of the manual; `TABLES`: the heads of that page's tables that its help shows, empty for all.
        PANE_HELP: by a widget's id or class, what the pane shows, for the help while it has the keys.
        ending: the program is being left: nothing is begun any more.
    """

    SMALLEST: ClassVar[tuple[int, int]] = (1, 1)
    TOPIC: ClassVar[str] = ""
    TABLES: ClassVar[tuple[str, ...]] = ()
    PANE_HELP: ClassVar[Mapping[str, str]] = MappingProxyType({})

    ending = False

    class Wanted(Message):
        """The user wants another screen to continue with something."""

        def __init__(self, screen: ScreenName, what: object) -> None:
            super().__init__()
            self.screen, self.what = screen, what

    def take_over(self, _what: object) -> str:
        """Continue with what another screen hands over, where the screen knows it; return why not, empty if it does."""
        return ""

    def compose(self) -> ComposeResult:
        """Yield the screen's own parts, and the frame around them."""
        yield from self.compose_parts()
        yield KeyBar()
        yield Lines(id="too-small")

    def compose_parts(self) -> ComposeResult:
        """Yield what the screen shows, from top to bottom."""
        return ()

    def parting_lines(self) -> Iterable[str]:
        """Return what stays in the terminal when the program is left: the screen's answer, where it has one."""
        return ()

    def interrupt(self) -> bool:
        """Answer Ctrl-C: return whether the screen has seen to it; else the program ends."""
        return False

    def cancel(self) -> None:
        """End all work behind the screen; safe to call from any thread, returns at once."""

    async def end(self) -> int:
        """End all work behind the screen, wait until it is gone, and return the exit code for leaving now."""
        self.ending = True
        self.cancel()
        return 0

    def on_resize(self, event: Resize) -> None:
        """Say what is needed where the terminal is too small, and lay the screen out for its size."""
        (width, height), (columns, rows) = event.size, self.SMALLEST
        self.set_class(width < columns or height < rows, "-tiny")
        needs = f"needs {columns}×{rows}"
        both = f"{needs}, this is {width}×{height}"
        shown = both if len(f" {both} ") <= width else needs
        self.query_one("#too-small", Lines).show_rows([[(shown, "")], [("q quits", "")]])
        self.laid_out(event.size)

    def laid_out(self, _size: Size) -> None:
        """Draw for another size of the terminal."""

    def on_unmount(self) -> None:
        """End what runs behind the screen, however the screen ends."""
        self.cancel()

    # Help (`GpuMemApp.action_help` shows it)

    def help_first(self) -> Iterable[Row]:
        """Return the lines of the help above its keys."""
        return ()

    def help_lines(self) -> Iterable[Row]:
        """Return the lines of the help between its keys and the manual's tables."""
        return ()

    def more_keys(self) -> Sequence[tuple[str, str]]:
        """Return keys that no binding has, such as digits, and what they do."""
        return ()

    def has_key(self, _action: str, _parameters: tuple[object, ...]) -> bool:
        """Return whether an action can ever be done on this screen; the help has its key even while it does nothing."""
        return True

    def help_bindings(self) -> Iterator[Binding]:
        """Yield the bindings that have words for the help: the screen's, its widgets', the app's."""
        nodes: list[DOMNode] = [self, *self.query(Widget), self.app]
        known: set[type] = set()
        for node in nodes:
            for binding in bindings_of(type(node)) if type(node) not in known else ():
                offered = node.check_action if node is self.app else self.has_key
                shown = offered(*_parsed(binding.action))
                if binding.tooltip and shown:
                    yield binding
            known.add(type(node))


def bindings_of(node: type[DOMNode]) -> list[Binding]:
    """Return our bindings of a class: of a key that a class and its base both have, Textual keeps the class's."""
    bindings: list[Binding] = []
    for base in node.__mro__:
        taken = {binding.key for binding in bindings}
        ours = base.__module__.startswith("gpumem_tui.")
        own = list(Binding.make_bindings(base.__dict__.get("BINDINGS", ()) if ours else ()))
        bindings += [binding for binding in own if binding.key not in taken]
    return bindings


def _parsed(action: str) -> tuple[str, tuple[object, ...]]:
    _, name, parameters = parse(action)
    return name, parameters
