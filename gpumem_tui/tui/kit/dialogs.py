"""Dialogues over any screen: a list to pick from, a name to type, a text to read or take along, the help."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option as ListOption

from gpumem_tui.plan.control import Option
from gpumem_tui.tui.kit.acts import Act, permitted, refused
from gpumem_tui.tui.kit.figures import MUTED, Row, Span
from gpumem_tui.tui.kit.lines import assembled

_HELP_NAME_WIDTH = 11


class PickScreen(ModalScreen[str | None]):
    """Gives back the value that was picked; None for none.

    Args:
        title: what is picked. `current`: the value to begin on.
        complaints: lines about what could not be listed.
        delete: removes one of the `deletable` values; returns why it could not, "" if it did.
    """

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "cancel"),
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("down", "move(1)", show=False, priority=True),
        Binding("pageup", "move(-10)", show=False, priority=True),
        Binding("pagedown", "move(10)", show=False, priority=True),
        Binding("enter", "pick", show=False, priority=True),
        Binding("ctrl+d", "delete", "delete", show=False, priority=True),
    ]

    def __init__(
        self,
        title: str,
        options: Sequence[Option],
        current: str = "",
        complaints: Sequence[str] = (),
        delete: Callable[[str], str] | None = None,
        deletable: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._about = title
        self._options = list(options)
        self._current = current
        self._complaints = complaints
        self._delete = delete
        self._deletable = deletable
        self._doomed = ""

    def compose(self) -> ComposeResult:
        """A filter over the list."""
        with Vertical(classes="dialog") as box:
            box.border_title = self._about
            deletes = "ctrl+d deletes · " if self._delete is not None else ""
            box.border_subtitle = f"type to filter · ↑↓ · enter picks · {deletes}esc leaves"
            yield Input(placeholder="filter", compact=True, id="filter")
            yield OptionList(id="options", compact=True)
            yield Static(id="complaints")

    def on_mount(self) -> None:
        """Everything, with the cursor on what is set now."""
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
        """Up or down in the list, while the keys type into the filter."""
        options = self.query_one(OptionList)
        if options.option_count:
            options.highlighted = min(max(0, (options.highlighted or 0) + steps), options.option_count - 1)

    def action_pick(self) -> None:
        """Give back the one under the cursor."""
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            self.dismiss(options.get_option_at_index(options.highlighted).id)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only from a list that says so can something be deleted."""
        return self._delete is not None if action == "delete" else True

    def action_delete(self) -> None:
        """Remove the one under the cursor, asked for twice."""
        options = self.query_one(OptionList)
        if self._delete is None or options.highlighted is None:
            return
        name = options.get_option_at_index(options.highlighted).id or ""
        if name not in self._deletable:
            self._complain(f"{name} is not saved: there is nothing to delete")
        elif name != self._doomed:
            self._doomed = name
            self._complain(f"ctrl+d again deletes {name} for good")
        elif complaint := self._delete(name):
            self._complain(complaint)
        else:
            self._options = [option for option in self._options if option.value != name]
            self._complain(*self._complaints)
            self._list(self.query_one("#filter", Input).value)

    def _complain(self, *lines: str) -> None:
        said = self.query_one("#complaints", Static)
        said.display = bool(lines)
        said.update(Content("\n".join(lines)))

    def _list(self, wanted: str) -> None:
        words = wanted.lower().split()
        found = [o for o in self._options if all(word in f"{o.value} {o.note}".lower() for word in words)]
        width = max((len(option.value) for option in self._options), default=0) + 2
        options = self.query_one(OptionList)
        options.set_options(
            ListOption(Content.assemble(f"{option.value:<{width}}", (option.note, MUTED)), id=option.value)
            for option in found
        )
        values = [option.value for option in found]
        if values:
            options.highlighted = values.index(self._current) if self._current in values and not words else 0
            self.call_after_refresh(
                options.scroll_to_highlight
            )  # there is nothing to scroll before the list has a size


class NameScreen(ModalScreen[str | None]):
    """Gives back the name under which something was saved; None for nothing saved.

    Args:
        name: to begin with.
        save: saves under a name; returns why it could not, "" if it did.
    """

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "do not save")]

    def __init__(self, title: str, name: str, save: Callable[[str], str]) -> None:
        super().__init__()
        self._about = title
        self._begin = name
        self._save = save

    def compose(self) -> ComposeResult:
        """One field."""
        with Vertical(classes="dialog") as box:
            box.border_title = self._about
            box.border_subtitle = "enter saves · esc leaves"
            yield Input(self._begin, placeholder="name", compact=True, id="name")
            yield Static(id="complaints")

    @on(Input.Submitted, "#name")
    def _submitted(self, event: Input.Submitted) -> None:
        name = event.value.strip()
        complaint = self._save(name)
        if complaint:
            self.query_one("#complaints", Static).update(Content(complaint))
        else:
            self.dismiss(name)


class TextScreen(ModalScreen[None]):
    """A text to read; with `plain`, the same to copy or to keep.

    Args:
        lines: as they are drawn. `plain`: as it is copied or written; "" for neither.
        file_name: where it is written, in the folder the program was started in.
    """

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,h,question_mark", "dismiss", "close"),
        Binding("y", "copy", "copy"),
        Binding("w", "write", "write"),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown", "scroll(10)", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Sequence[Span]], plain: str = "", file_name: str = "") -> None:
        super().__init__()
        self._about = title
        self._lines = lines
        self._plain = plain
        self._file_name = file_name

    def compose(self) -> ComposeResult:
        """One scrollable text."""
        with VerticalScroll(classes="dialog", can_focus=False) as box:
            box.border_title = self._about
            writes = f"w writes {self._file_name} · " if permitted(self, Act.WRITE) else ""
            keeps = f"y copies · {writes}" if self._plain else ""
            box.border_subtitle = f"{keeps}esc closes"
            yield Static(assembled(self._lines))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only what is there to take can be taken."""
        return bool(self._plain) if action in ("copy", "write") else True

    def action_copy(self) -> None:
        """To the clipboard."""
        copy_to_clipboard(self, self._plain)

    def action_write(self) -> None:
        """To a file in the folder that the program was started in; never over one that is there."""
        if refused(self, Act.WRITE):
            return
        path = Path(self._file_name)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self._plain)
        except FileExistsError:
            self.notify(f"{path} is there already: move it away first", severity="warning")
        except OSError as error:
            self.notify(f"cannot write {path}: {error.strerror}", severity="error")
        else:
            self.notify(f"wrote {path.resolve()}")

    def action_scroll(self, lines: int) -> None:
        """Up or down."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class HelpScreen(TextScreen):
    """A screen's help, over it."""

    def __init__(self, lines: Sequence[Row]) -> None:
        super().__init__("Help", lines)


def copy_to_clipboard(screen: Screen[Any], text: str) -> None:
    """To the terminal's clipboard (OSC 52), over SSH too where the terminal allows it; and say what was copied."""
    screen.app.copy_to_clipboard(text)
    what = text if "\n" not in text else f"{text.count(chr(10))} lines"
    screen.notify(f"copied, if the terminal lets programs do that: {what}", markup=False)


def help_heading(text: str) -> Row:
    """Above a group of entries of a help."""
    return [(text, "bold $primary")]


def help_entry(name: str, what: str) -> Row:
    """A key, a column or a mark, and what it means."""
    return [(f"{name:<{_HELP_NAME_WIDTH}}", "bold"), (what, "")]
