"""The form: what to train, on which GPU, and how to search. Nothing invalid leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Select, Static

from gpumem_tui.catalog.loader import DEFAULT_MODEL, gpus, models
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.recipe import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES
from gpumem_tui.memory import Unknown
from gpumem_tui.options import ModelChanges, WorkloadOptions, simulated_device
from gpumem_tui.search import strategy
from gpumem_tui.search.runner import Device, SearchConfig
from gpumem_tui.tui.views.workload import workload_summary

_OWN = "own"
"""The value of a model or a GPU that is in no catalog: the user's file, the machine's GPU."""

_SIMULATED = "sim:"
_RECIPE = ("precision", "optimizer", "recompute", "attention")
_FIELD_OF_OPTION = {"--seq-len": "seq_len", "--gpu": "gpu"}
_LABELS = {
    "model": "Model", "gpu": "GPU", "precision": "Precision", "optimizer": "Optimizer", "recompute": "Recompute",
    "attention": "Attention", "seq_len": "Sequence", "strategy": "Strategy",
}  # fmt: skip


@dataclass(frozen=True)
class Edited:
    """What the form gives back: always a valid workload."""

    options: WorkloadOptions
    config: SearchConfig


class EditScreen(ModalScreen[Edited | None]):
    """Checks every change at once; an error stands beside its control, and the preview keeps the last good values.

    Args:
        now: what is set.
        given: what the program was started with: the user's own file or GPU stays to be had after another was tried.
    """

    CSS_PATH = "edit.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "leave as it was"),
        Binding("ctrl+s", "apply", "apply", priority=True),
    ]

    def __init__(self, now: Edited, given: Edited) -> None:
        super().__init__()
        self._options = now.options
        self._config = now.config
        self._given = given
        self._good: Edited | None = now

    def compose(self) -> ComposeResult:
        """A row a field, a preview, two buttons."""
        with VerticalScroll(id="form", can_focus=False) as form:
            form.border_title = "Workload"
            form.border_subtitle = "tab next · enter opens · ctrl+s applies · esc leaves"
            for name, label in _LABELS.items():
                with Horizontal(classes="field"):
                    yield Label(label)
                    yield self._control(name)
                    yield Static(id=f"{name}-error", classes="error")
            with Vertical(id="foot"):
                yield Static(id="preview")
                with Horizontal(id="buttons"):
                    yield Button("Apply", id="apply", variant="primary", compact=True)
                    yield Button("Cancel", id="leave", compact=True)

    def on_mount(self) -> None:
        """The preview of what is set now."""
        self._check()

    @on(Select.Changed)
    @on(Input.Changed)
    def _changed(self) -> None:
        self._check()

    @on(Input.Submitted)
    @on(Button.Pressed, "#apply")
    def action_apply(self) -> None:
        """Give back the values, if they are good."""
        self._check()
        if self._good is not None:
            self.dismiss(self._good)

    @on(Button.Pressed, "#leave")
    def _leave(self) -> None:
        self.dismiss(None)

    def _control(self, name: str) -> Select[str] | Input:
        if name == "seq_len":
            given = self._options.changes.seq_len
            return Input(
                "" if given is None else str(given),
                placeholder="the model's own",
                restrict="[0-9]*",
                max_length=8,
                id=name,
                compact=True,
            )
        choices, value = self._choices(name)
        return Select([(label, key) for key, label in choices], value=value, allow_blank=False, id=name, compact=True)

    def _choices(self, name: str) -> tuple[list[tuple[str, str]], str]:
        """(value, label) pairs, and the value that is set."""
        options, config = self._options, self._config
        if name == "model":
            own = self._given.options.workload or self._given.options.config
            listed = [(_OWN, Path(own).name)] if own is not None else []
            listed += [(model, model) for model in models()]
            return listed, _OWN if options.workload or options.config else options.model or DEFAULT_MODEL
        if name == "gpu":
            device = self._given.config.device
            offered = [] if device.simulated else [(_OWN, device.gpu.title)]
            offered += [(f"{_SIMULATED}{gpu}", f"{_SIMULATED}{gpu}") for gpu in gpus()]
            return offered, f"{_SIMULATED}{config.device.gpu.name}" if config.device.simulated else _OWN
        names: dict[str, tuple[str, ...]] = {
            "precision": PRECISIONS,
            "optimizer": OPTIMIZERS,
            "recompute": RECOMPUTES,
            "attention": ATTENTIONS,
            "strategy": strategy.NAMES,
        }
        value = config.strategy if name == "strategy" else getattr(options, name)
        return [(choice, choice) for choice in names[name]], value

    # Checking

    def _check(self) -> None:
        errors: dict[str, str] = {}
        try:
            self._good = self._read()
        except OptionError as error:
            self._good = None
            option, _, said = str(error).partition(": ")
            errors[_FIELD_OF_OPTION.get(option, "model")] = said or option
        by_file = self.query_one("#model", Select).value == _OWN and self._given.options.workload is not None
        for name in (*_RECIPE, "seq_len"):
            self.query_one(f"#{name}").disabled = by_file  # the file decides
        for name in _LABELS:
            self.query_one(f"#{name}-error", Static).update(errors.get(name, ""))
        self.query_one("#apply", Button).disabled = self._good is None
        if self._good is not None:
            self.query_one("#preview", Static).update("\n".join(_preview(self._good.config)))

    def _read(self) -> Edited:
        """The form's values.

        Raises:
            OptionError: they do not go together.
        """
        values = {select.id: select.value for select in self.query(Select) if select.id is not None}
        options = self._read_options(values)
        device = self._read_device(str(values["gpu"]))
        config = replace(
            self._config,
            workload=options.spec(),
            device=device,
            limit_bytes=self._limit_bytes(device),
            strategy=values["strategy"],  # type: ignore[arg-type]  # a Select's value is one of its choices
        )
        return Edited(options, config)

    def _read_options(self, values: dict[str, Any]) -> WorkloadOptions:
        old, given = self._options, self._given.options
        typed = self.query_one("#seq_len", Input).value
        seq_len = int(typed) if typed else None
        recipe = {name: values[name] for name in _RECIPE}
        model = values["model"]
        if model == _OWN:
            if given.workload is not None:
                return given
            old = replace(given, changes=old.changes if old.config else given.changes)
        same = not (old.workload or old.config) and model == (old.model or DEFAULT_MODEL)
        if model == _OWN or same:
            return replace(old, changes=replace(old.changes, seq_len=seq_len), **recipe)
        changes = ModelChanges(seq_len=seq_len)  # the others were meant for the model that was
        return replace(old, model=model, config=None, workload=None, changes=changes, **recipe)

    def _limit_bytes(self, device: Device) -> int | None:
        """The cap that came with the device, which may protect others on it; else the present one where it is one."""
        for config in (self._config, self._given.config):
            if config.device is device:
                return config.limit_bytes
        limit_bytes = self._config.limit_bytes
        return limit_bytes if limit_bytes is not None and limit_bytes < device.gpu.total_bytes else None

    def _read_device(self, wanted: str) -> Device:
        for device in (self._config.device, self._given.config.device):
            if wanted == (f"{_SIMULATED}{device.gpu.name}" if device.simulated else _OWN):
                return device
        return simulated_device(wanted.removeprefix(_SIMULATED))


def _preview(config: SearchConfig) -> Iterator[str]:
    yield workload_summary(config)
    if config.workload.file is not None:
        yield "the file decides precision, optimizer and the rest"
    foretold = config.formula.max_batch_size
    said = foretold.reason if isinstance(foretold, Unknown) else f"the formula's largest batch is {foretold:,}"
    yield f"{config.device.gpu.title}: {said}"
