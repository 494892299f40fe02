"""Dialogues over any screen: a list to pick from, a text or a report to read, a question, a wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Click, Resize
from textual.screen import ModalScreen
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option as ListOption

from gpumem_tui.plan.control import Option
from gpumem_tui.tui.kit.clipboard import copy_to_clipboard
from gpumem_tui.tui.kit.figures import MUTED, Row, Span, span_width
from gpumem_tui.tui.kit.lines import Lines, assembled

Answer = TypeVar("Answer")
_TICK_S = 1.0
_PAGE_GAP = "   "


class Modal(ModalScreen[Answer]):
    """Takes all keys until it is closed."""

    def dismiss(self, result: Answer | None = None) -> AwaitComplete:
        """Close it, and what is open over it. Once: keys typed before it has closed come here too."""
        if self not in self.app.screen_stack:
            return AwaitComplete()
        self.pop_until_active()
        return super().dismiss(result)


class Dialog(Modal[Answer]):
    """A box in the middle of the screen below it."""

    CSS_PATH = Path(__file__).with_name("dialogs.tcss")


class ScrolledDialog(Dialog[Answer]):
    """A box whose `VerticalScroll` the usual keys move."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "leaf(-1)", show=False),
        Binding("pagedown", "leaf(1)", show=False),
        Binding("home", "jump(0)", show=False),
        Binding("end", "jump(1)", show=False),
    ]

    @property
    def scrolled(self) -> VerticalScroll:
        """The widget that the keys scroll."""
        return self.query_one(VerticalScroll)

    def action_scroll(self, lines: int) -> None:
        """Scroll by lines."""
        self.scrolled.scroll_relative(y=lines, animate=False)

    def action_leaf(self, step: int) -> None:
        """Scroll by screenfuls."""
        self.scrolled.scroll_relative(y=step * max(1, self.scrolled.size.height - 1), animate=False)

    def action_jump(self, end: int) -> None:
        """Scroll to the first line or to the last."""
        self.scrolled.scroll_to(y=self.scrolled.max_scroll_y * end, animate=False)


# Choices


class PickScreen(Dialog[str | None]):
    """A list to pick from; the result is the value that was picked, None for none.

    Args:
        title: what is picked. `current`: the value to begin on.
        complaints: lines about what could not be listed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "cancel"),
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("down", "move(1)", show=False, priority=True),
        Binding("pageup", "move(-10)", show=False, priority=True),
        Binding("pagedown", "move(10)", show=False, priority=True),
        Binding("enter", "pick", show=False, priority=True),
    ]

    def __init__(
        self,
        title: str,
        options: Sequence[Option],
        current: str = "",
        complaints: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._about = title
        self._options = list(options)
        self._current = current
        self._complaints = complaints

    def compose(self) -> ComposeResult:
        """Yield a filter over the list."""
        with Vertical(classes="dialog") as box:
            box.border_title = self._about
            box.border_subtitle = "type to filter · ↑↓ · enter picks · esc leaves"
            yield Input(placeholder="filter", compact=True, id="filter")
            yield OptionList(id="options", compact=True)
            yield Static(id="complaints")

    def on_mount(self) -> None:
        """List everything, with the cursor on what is set now."""
        self._complain(*self._complaints)
        self.query_one(OptionList).can_focus = False
        self._list("")

    @on(Input.Changed, "#filter")
    def _filter(self, event: Input.Changed) -> None:
        self._list(event.value)

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_move(self, steps: int) -> None:
        """Move up or down in the list, while the keys type into the filter."""
        options = self.query_one(OptionList)
        if options.option_count:
            options.highlighted = min(max(0, (options.highlighted or 0) + steps), options.option_count - 1)

    def action_pick(self) -> None:
        """Give back the value under the cursor."""
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            self.dismiss(options.get_option_at_index(options.highlighted).id)

    def _complain(self, *lines: str) -> None:
        complaints = self.query_one("#complaints", Static)
        complaints.display = bool(lines)
        complaints.update(Content("\n".join(lines)))

    def _list(self, wanted: str) -> None:
        words = wanted.lower().split()
        matching = [o for o in self._options if all(word in f"{o.value} {o.note}".lower() for word in words)]
        width = max((len(option.value) for option in self._options), default=0) + 2
        options = self.query_one(OptionList)
        options.set_options(
            ListOption(Content.assemble(f"{option.value:<{width}}", (option.note, MUTED)), id=option.value)
            for option in matching
        )
        values = [option.value for option in matching]
        if values:
            options.highlighted = values.index(self._current) if self._current in values and not words else 0
            self.call_after_refresh(options.scroll_to_highlight)  # before the list has a size nothing can scroll


# Texts


class TextScreen(ScrolledDialog[str | None]):
    """A text to read; `plain` is its form to copy.

    Args:
        lines: as they are drawn. `plain`: as it is copied; "" for none.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,h,question_mark", "dismiss(None)", "close"),
        Binding("y", "copy", "copy"),
    ]

    def __init__(self, title: str, lines: Sequence[Sequence[Span]], plain: str = "") -> None:
        super().__init__()
        self._about = title
        self._lines = lines
        self._plain = plain

    @property
    def heading(self) -> str:
        """The title of the box."""
        return self._about

    @property
    def keys_offered(self) -> str:
        """The keys that the frame names."""
        return "y copies · " if self._plain else ""

    def compose(self) -> ComposeResult:
        """Yield one scrollable text."""
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Static(assembled(self._lines))

    def on_mount(self) -> None:
        """Write title and keys into the frame."""
        self.scrolled.border_title = self.heading
        self.scrolled.border_subtitle = f"{self.keys_offered}esc closes"

    def show_lines(self, lines: Sequence[Sequence[Span]]) -> None:
        """Show a later text."""
        if lines != self._lines:
            self._lines = lines
            self.query_one(Static).update(assembled(lines))

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Offer to copy only a text that can be taken."""
        return bool(self._plain) if action == "copy" else True

    def action_copy(self) -> None:
        """Copy to the clipboard."""
        copy_to_clipboard(self, self._plain)


_TERMINATE, _KILL = 'end("terminate")', 'end("kill")'


class DetailsScreen(TextScreen):
    """The details of a process; the result is the Monitor's action that the user wants, None for none.

    Args:
        lines: the text; `may_end`: offer to end the process; `may_look`: to look into its next step.
        may_keep: to keep what it takes outside its allocator.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "dismiss('look')", "look"),
        Binding("C", "dismiss('keep_context')", "keep its context"),
        Binding("T", f"dismiss('{_TERMINATE}')", "terminate"),
        Binding("K", f"dismiss('{_KILL}')", "kill"),
    ]

    def __init__(self, lines: Sequence[Row], *, may_end: bool, may_look: bool, may_keep: bool) -> None:
        super().__init__("Process", lines)
        self._may = {"look": may_look, "keep_context": may_keep, _TERMINATE: may_end, _KILL: may_end}
        self._is_listed = True

    @property
    def heading(self) -> str:
        """Say whether these are the last figures of a process that is gone."""
        return self._about if self._is_listed else "Process: no longer listed, these were its last figures"

    @property
    def keys_offered(self) -> str:
        """The keys that do something with the process."""
        keys = {"l look": "look", "C keeps its context": "keep_context", "T terminate": _TERMINATE, "K kill": _KILL}
        return "".join(f"{key} · " for key, action in keys.items() if self._is_listed and self._may[action])

    def show(self, lines: Sequence[Row] | None) -> None:
        """Show later figures; None once the process is no longer listed."""
        if not self.is_mounted:
            return
        if self._is_listed != (lines is not None):
            self._is_listed = lines is not None
            self.on_mount()
        if lines is not None:
            self.show_lines(lines)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what can be done."""
        if action != "dismiss" or parameters == (None,):
            return super().check_action(action, parameters)
        return self._is_listed and self._may[str(parameters[0])]


@dataclass(frozen=True)
class Report:
    """The content of a `PagesScreen`.

    Attributes:
        pages: by their names, the lines of each at a width in cells. A single page needs no name.
        note: a line above the pages; empty for none.
    """

    title: str
    pages: Mapping[str, Callable[[int], list[Row]]]
    note: str = ""


class PagesScreen(ScrolledDialog[None]):
    """A report of one page or several."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss(None)", "close"),
        Binding("right,tab", "turn(1)", "next page"),
        Binding("left,shift+tab", "turn(-1)", show=False),
    ]

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        self._at = 0

    def compose(self) -> ComposeResult:
        """Yield the names of the pages over the one that is shown."""
        with Vertical(id="report"):
            yield Lines(id="names")
            with VerticalScroll(id="page", can_focus=False):
                yield Lines(id="rows")

    def on_resize(self, _event: Resize) -> None:
        """Draw the page for its width."""
        self.call_after_refresh(self._draw)

    def on_click(self, event: Click) -> None:
        """Turn to the page whose name was clicked."""
        if event.widget is not None and event.widget.id == "names":
            offset, start = event.get_content_offset(event.widget), 0
            for index, name in enumerate(self._report.pages):
                end = start + span_width([(name, "")])
                if offset is not None and start <= offset.x < end:
                    self._turn_to(index)
                start = end + len(_PAGE_GAP)

    def show(self, report: Report) -> None:
        """Replace the report by one with newer figures."""
        self._report = report
        if self.is_mounted:
            self._draw()

    def action_turn(self, step: int) -> None:
        """Turn to the next page, or to the one before."""
        self._turn_to((self._at + step) % len(self._report.pages))

    def _turn_to(self, index: int) -> None:
        self._at = index
        self.scrolled.scroll_to(y=0, animate=False)
        self._draw()

    def _draw(self) -> None:
        box, names, lines = self.query_one("#report"), self.query_one("#names", Lines), self.query_one("#rows", Lines)
        if not lines.size.width:
            return  # before the first layout
        pages = self._report.pages
        several = len(pages) > 1
        box.border_title = Content(self._report.title)  # brackets in a command are no markup
        box.border_subtitle = f"{'← → pages · ' if several else ''}↑ ↓ scroll · esc closes"
        names.display = several or bool(self._report.note)
        named: Row = []
        for index, name in enumerate(pages if several else ()):
            named += [(name, "bold reverse" if index == self._at else MUTED), (_PAGE_GAP, "")]
        names.show_rows([[*named, (self._report.note, MUTED)]])
        drawn = [rows(lines.size.width) for rows in pages.values()]
        lines.styles.height = max(1, *map(len, drawn))  # of the longest, so that the frame stays as it is
        lines.show_rows(drawn[self._at])


# A question, a wait


class QuestionScreen(Dialog[bool]):
    """Confirms an action on a process. The answer that does nothing has the focus.

    Args:
        verb: the action; `question`: the title.
        about: the process, in one line; `effect`: the action's effect on it.
        otherwise: the answer that does nothing.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,q", "dismiss(False)", "no"),
        Binding("y", "dismiss(True)", "yes"),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, verb: str, question: str, about: str, effect: str, otherwise: str = "Leave it") -> None:
        super().__init__()
        self._verb = verb
        self._otherwise = otherwise
        self._question = question
        self._about = about
        self._effect = effect

    def compose(self) -> ComposeResult:
        """Yield the question and two buttons."""
        with Vertical(id="confirm") as box:
            box.border_title = self._question
            yield Static(Content(self._about), id="about")
            yield Static(Content(self._effect), id="effect")
            with Horizontal(id="buttons"):
                yield Button(f"{self._otherwise} (n)", id="no", compact=True)
                yield Button(f"{self._verb} (y)", id="yes", variant="error", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Give back the answer."""
        self.dismiss(event.button.id == "yes")


class WaitingScreen(Dialog[None]):
    """Counts the seconds of a running job. Closing it cancels the job; if the job fails it stays and shows why.

    Args:
        title: the job; `about`: its process, in one line; `effect`: what it does, and what cancelling does.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", "cancel")]

    def __init__(self, title: str, about: str, effect: str) -> None:
        super().__init__()
        self._about = about
        self._effect = effect
        self._doing = title
        self._stage = "waiting"
        self._began_s = time.monotonic()

    def compose(self) -> ComposeResult:
        """Yield three texts."""
        with Vertical(id="confirm", classes="waiting") as box:
            box.border_title = self._doing
            box.border_subtitle = "esc leaves off"
            yield Static(Content(self._about), id="about")
            yield Static(Content(self._effect), id="effect")
            yield Static(self._stage, id="outcome")

    def on_mount(self) -> None:
        """Start the clock of the seconds shown."""
        self._clock = self.set_interval(_TICK_S, self._tick)

    def tell(self, stage: str) -> None:
        """Say how far it is, from any thread; shown with the next second."""
        self._stage = stage

    def fail(self, reason: str) -> None:
        """Say why it came to nothing, until that is read."""
        self._clock.stop()
        self.query_one("#confirm").border_subtitle = "esc closes"
        self.query_one("#effect").display = False
        outcome = self.query_one("#outcome", Static)
        outcome.add_class("failed")
        outcome.update(Content(reason))

    def _tick(self) -> None:
        self.query_one("#outcome", Static).update(f"{self._stage}, {time.monotonic() - self._began_s:.0f} s")
