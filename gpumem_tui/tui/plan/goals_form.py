"""What a plan is for, typed: nothing of it changes what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static

from gpumem_tui.errors import OptionError
from gpumem_tui.options.typed import norm_from, tokens_from
from gpumem_tui.plan.goals import USUAL_MULTIPLE, Goals
from gpumem_tui.plan.plan import Plan

Value = TypeVar("Value")
_FIELDS = (
    ("tokens", "Tokens", "to train on, such as 2B; says hours and cost"),
    ("price", "Price", "of one GPU for an hour, in any currency"),
    ("batch_multiple", "Multiple", f"of micro-batches; {USUAL_MULTIPLE}"),
    ("reference_batch", "Known batch", "a global batch, in samples, whose learning rate you know"),
    ("reference_rate", "its rate", "such as 3e-4"),
    ("norms", "Norms", "the gradient's at two batch sizes: 8=2.1 64=1.3"),
)


class GoalsScreen(ModalScreen[Goals | None]):
    """Gives back the goals that were typed; None for none."""

    CSS_PATH = "goals_form.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "cancel"),
        Binding("up", "app.focus_previous", show=False),
        Binding("down", "app.focus_next", show=False),
    ]

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._goals = plan.goals
        self._has_tokens = bool(plan.shape.seq_len)

    def compose(self) -> ComposeResult:
        """A row a field."""
        with Vertical(id="goals") as box:
            box.border_title = "Goals"
            box.border_subtitle = "↑↓ · enter applies · esc leaves"
            for name, label, means in _FIELDS:
                with Horizontal():
                    yield Label(label)
                    yield Input(goal_text(self._goals, name), placeholder=means, compact=True, id=name)
            yield Static(id="wrong")

    @on(Input.Submitted)
    def _submitted(self) -> None:
        """Give back what was typed, or say what is wrong with it."""
        typed = {name: self.query_one(f"#{name}", Input).value.strip() for name, _, _ in _FIELDS}
        try:
            goals = goals_from_text(typed)
            goals.check(has_tokens=self._has_tokens)
        except OptionError as error:
            self.query_one("#wrong", Static).update(Content(str(error)))
        else:
            self.dismiss(goals)


def goal_text(goals: Goals, name: str) -> str:
    """A goal as it is typed; nothing where it is not said."""
    if name == "norms":
        return " ".join(f"{one.batch_size}={one.norm:g}" for one in goals.norms)
    value = getattr(goals, name)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def goals_from_text(typed: dict[str, str]) -> Goals:
    """The goals behind what was typed.

    Raises:
        OptionError: something is not what its field holds; names the option of the command line.
    """
    return Goals(
        tokens=_read(typed, "tokens", "--tokens", tokens_from),
        price=_read(typed, "price", "--price", float),
        batch_multiple=_read(typed, "batch_multiple", "--batch-multiple", int) or USUAL_MULTIPLE,
        reference_batch=_read(typed, "reference_batch", "--reference-batch", int),
        reference_rate=_read(typed, "reference_rate", "--reference-rate", float),
        norms=tuple(norm for word in typed["norms"].split() if (norm := _value(word, "--gradient-norm", norm_from))),
    )


def _read(typed: dict[str, str], name: str, option: str, reader: Callable[[str], Value]) -> Value | None:
    return _value(typed[name], option, reader) if typed[name] else None


def _value(text: str, option: str, reader: Callable[[str], Value]) -> Value:
    try:
        return reader(text)
    except ValueError as error:
        said = str(error) if reader not in (int, float) else f"{text!r} is not a number"
        raise OptionError(f"{option}: {said}") from error
