"""A choice on one line of a form: the arrows turn it, a digit picks by place, Enter lists all there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Key
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.control import Option, by_digit
from gpumem_tui.tui.kit.dialogs import PickScreen

_OPENS = "▾"
_TURN = "The choice before, the next one"


class ChoiceField(Widget, can_focus=True):
    """A field to choose in, of one widget where Textual's `Select` has five: a form of twenty opens four times sooner.

    Args:
        title: what is chosen.
        labels: what may be chosen, and as what each is shown.
        value: to begin with.
    """

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "turn(-1)", show=False, tooltip=_TURN),
        Binding("right", "turn(1)", show=False, tooltip=_TURN),
        Binding("enter,space", "list", show=False, tooltip="All there is to choose from"),
    ]
    DEFAULT_CSS = """
    ChoiceField { height: 1; background: $surface; color: $foreground; }
    ChoiceField:focus { background: $block-cursor-background; color: $block-cursor-foreground; text-style: bold; }
    """

    value: reactive[str] = reactive("", init=False)

    @dataclass
    class OfField(Message):
        """Something about a choice."""

        field: ChoiceField

        @property
        def control(self) -> ChoiceField:
            """The field that states it."""
            return self.field

    class Changed(OfField):
        """Another value was chosen."""

    @dataclass
    class Refused(OfField):
        """A digit picks nothing; `reason` gives the reason."""

        reason: str

    def __init__(self, title: str, labels: Mapping[str, str], value: str, *, id: str) -> None:  # noqa: A002  Textual's
        super().__init__(id=id)
        self._title = title
        self._labels = dict(labels)
        self.set_reactive(ChoiceField.value, value)

    def offer(self, labels: Mapping[str, str]) -> None:
        """Other values to choose from; the one that is chosen is among them."""
        self._labels = dict(labels)
        self.refresh()

    def render(self) -> Content:
        """Return the value, and at the right the sign for a list."""
        width = self.content_size.width
        label = self._labels[self.value]
        return Content(f"{label[: width - 2]:<{width - 2}} {_OPENS}")

    def watch_value(self) -> None:
        """Tell the screen that another value was chosen."""
        self.post_message(self.Changed(self))

    def on_key(self, event: Key) -> None:
        """Pick the value at the place of a digit."""
        if event.character is None or event.character not in "0123456789":
            return
        event.stop()
        values = {label: value for value, label in self._labels.items()}
        found = by_digit(tuple(values), int(event.character))
        if isinstance(found, Unknown):
            self.post_message(self.Refused(self, found.reason))
        else:
            self.value = values[found]

    def action_turn(self, way: int) -> None:
        """Choose the value before or after this one; none exists before the first nor after the last."""
        values = list(self._labels)
        self.value = values[min(max(0, values.index(self.value) + way), len(values) - 1)]

    def action_list(self) -> None:
        """List all choices, with a filter."""
        values = {label: value for value, label in self._labels.items()}

        def picked(label: str | None) -> None:
            if label is not None:
                self.value = values[label]

        options = [Option(label) for label in values]
        self.app.push_screen(PickScreen(self._title, options, self._labels[self.value]), picked)

    def on_click(self) -> None:
        """Open the list."""
        self.action_list()
