"""The form: what to train, on which GPU, and how to search. Nothing invalid leaves it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Select, Static

from gpumem_tui.catalog.loader import DEFAULT_MODEL, gpus, models
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.recipe import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES
from gpumem_tui.memory import Unknown
from gpumem_tui.options.workload import ModelChanges, WorkloadOptions, simulated_device
from gpumem_tui.search import strategy
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.tui.search.workload import workload_summary
from gpumem_tui.workload.command import BATCH, Command, Proposal

Kind = Literal["model", "file", "command"]
Word = TypeVar("Word", bound=str)
_KINDS: dict[Kind, str] = {"model": "a model", "file": "a file", "command": "a command"}

_OWN = "own"
"""The value of a model or a GPU that is in no catalog: a configuration file's, the machine's."""

_SIMULATED = "sim:"
_RECIPE = ("precision", "optimizer", "recompute", "attention")
_FIELD_OF_OPTION = {
    "--seq-len": "seq_len", "--gpu": "gpu", "--gpus": "gpus", "--workload": "file", "-- COMMAND": "command",
}  # fmt: skip
_LABELS = {
    "kind": "Train", "model": "Model", "file": "File", "command": "Command", "gpus": "Ranks", "gpu": "GPU",
    "precision": "Precision", "optimizer": "Optimizer", "recompute": "Recompute", "attention": "Attention",
    "seq_len": "Sequence", "strategy": "Strategy",
}  # fmt: skip
_LONG = ("file", "command")
"""Fields as wide as the form, with what is wrong below them."""
_FIELDS_OF: dict[Kind, tuple[str, ...]] = {
    "model": ("model", *_RECIPE, "seq_len"), "file": ("file",), "command": ("command", "gpus"),
}  # fmt: skip
_EXAMPLE = f"python train.py --batch-size {BATCH}"


@dataclass(frozen=True)
class Edited:
    """What the form gives back: always a valid workload."""

    options: WorkloadOptions
    config: SearchConfig


class EditScreen(ModalScreen[Edited | None]):
    """Checks every change at once; an error stands beside its control, and the preview keeps the last good values.

    Args:
        now: what is set.
        given: what the program was started with: the user's own configuration, file, command or GPU can be chosen
            again after another was tried.
    """

    CSS_PATH = "form.tcss"
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
        self._proposal: Proposal | None = None

    def compose(self) -> ComposeResult:
        """A row a field, a preview, two buttons."""
        with VerticalScroll(id="form", can_focus=False) as form:
            form.border_title = "Workload"
            form.border_subtitle = "tab next · enter opens · ctrl+s applies · esc leaves"
            for name, label in _LABELS.items():
                with Horizontal(classes="field -long" if name in _LONG else "field", id=f"{name}-field"):
                    yield Label(label)
                    yield self._control(name)
                    if name not in _LONG:
                        yield Static(id=f"{name}-error", classes="error", markup=False)
                if name in _LONG:
                    yield Static(id=f"{name}-error", classes="error below", markup=False)
                if name == "command":
                    yield Button("", id="proposal", compact=True)
            with Vertical(id="foot"):
                yield Static(id="preview")
                with Horizontal(id="buttons"):
                    yield Button("Apply", id="apply", variant="primary", compact=True)
                    yield Button("Cancel", id="leave", compact=True)

    def on_mount(self) -> None:
        """The preview of what is set now, and the cursor where it is said what to train."""
        self._check()
        self.query_one(f"#{self._chosen_kind}").focus()

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

    @on(Button.Pressed, "#proposal")
    def _take_proposal(self) -> None:
        """Write {batch} where the batch size seems to be given."""
        field, proposal = self.query_one("#command", Input), self._proposal
        if proposal is not None:
            command = Command(_split(field.value), os.getcwd())
            field.value = _with_proposal(command, proposal).text
            field.focus()

    def _control(self, name: str) -> Select[str] | Input:
        options, given = self._options, self._given.options
        numbers: dict[str, Any] = {"restrict": "[0-9]*", "max_length": 8}
        match name:
            case "seq_len":
                return self._input(name, str(options.changes.seq_len or ""), "the model's own", **numbers)
            case "gpus":
                return self._input(name, str(options.gpus) if options.gpus > 1 else "", "the launcher's", **numbers)
            case "file":
                return self._input(name, options.workload or given.workload or "", "train.py")
            case "command":
                return self._input(name, Command(options.command or given.command, "").text, _EXAMPLE)
        choices, value = self._choices(name)
        return Select([(label, key) for key, label in choices], value=value, allow_blank=False, id=name, compact=True)

    @staticmethod
    def _input(name: str, value: str, placeholder: str, **limits: Any) -> Input:
        return Input(value, placeholder=placeholder, id=name, compact=True, select_on_focus=False, **limits)

    def _choices(self, name: str) -> tuple[list[tuple[str, str]], str]:
        """(value, label) pairs, and the value that is set."""
        options, config = self._options, self._config
        if name == "kind":
            return list(_KINDS.items()), _kind(options)
        if name == "model":
            own = self._given.options.config
            listed = [(_OWN, os.path.basename(own))] if own is not None else []
            listed += [(model, model) for model in models()]
            return listed, _OWN if options.config else options.model or DEFAULT_MODEL
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
        kind = self._chosen_kind
        try:
            self._good = self._read()
        except OptionError as error:
            self._good = None
            option, _, said = str(error).partition(": ")
            errors[_FIELD_OF_OPTION.get(option, kind)] = said or option
        for name in _LABELS:
            belongs = all(name not in fields for fields in _FIELDS_OF.values()) or name in _FIELDS_OF[kind]
            said = errors.get(name, "")
            self.query_one(f"#{name}-field").display = belongs
            self.query_one(f"#{name}-error", Static).update(said)
            self.query_one(f"#{name}-error").display = belongs and (bool(said) or name not in _LONG)
        button = self.query_one("#proposal", Button)
        button.display = self._proposal is not None
        if self._proposal is not None:
            button.label = Content(f"{self._proposal.proposed} instead of {self._proposal.given}")
        self.query_one("#apply", Button).disabled = self._good is None
        if self._good is not None:
            self.query_one("#preview", Static).update("\n".join(_preview(self._good.config)))

    @property
    def _chosen_kind(self) -> Kind:
        return self._chosen_of("kind", tuple(_KINDS))

    def _read(self) -> Edited:
        """The form's values.

        Raises:
            OptionError: they do not go together.
        """
        self._proposal = None
        options = self._read_options()
        device = self._read_device(str(self._chosen("gpu")))
        config = replace(
            self._config,
            workload=options.spec(self._config.python),
            device=device,
            limit_bytes=self._limit_bytes(device),
            strategy=self._chosen_of("strategy", strategy.NAMES),
        )
        return Edited(options, config)

    def _read_options(self) -> WorkloadOptions:
        match self._chosen_kind:
            case "file":
                return WorkloadOptions(workload=os.path.expanduser(self._typed("file")))
            case "command":
                return self._read_command()
            case "model":
                return self._read_model()

    def _read_command(self) -> WorkloadOptions:
        words, ranks = _split(self._typed("command")), self._typed("gpus")
        command = Command(words, os.getcwd())
        if shutil.which(words[0]) is None:
            raise OptionError(f"-- COMMAND: there is no program {words[0]!r} that can be run; check the path")
        if not command.takes_batch:
            self._proposal = command.proposal
            raise OptionError(f"-- COMMAND: write {BATCH} where the batch size goes")
        return WorkloadOptions(command=words, gpus=int(ranks or 1))

    def _read_model(self) -> WorkloadOptions:
        given, model = self._given.options, str(self._chosen("model"))
        old = next((options for options in (self._options, given) if _kind(options) == "model"), WorkloadOptions())
        typed = self._typed("seq_len")
        seq_len = int(typed) if typed else None
        if model == _OWN:
            old = replace(given, changes=old.changes if old.config else given.changes)
        same = not old.config and model == (old.model or DEFAULT_MODEL)
        if model == _OWN or same:
            old = replace(old, changes=replace(old.changes, seq_len=seq_len))
        else:  # the other changes were meant for the model that was
            old = replace(old, model=model, config=None, changes=ModelChanges(seq_len=seq_len))
        return replace(
            old,
            precision=self._chosen_of("precision", PRECISIONS),
            optimizer=self._chosen_of("optimizer", OPTIMIZERS),
            recompute=self._chosen_of("recompute", RECOMPUTES),
            attention=self._chosen_of("attention", ATTENTIONS),
        )

    def _chosen(self, name: str) -> object:
        return self.query_one(f"#{name}", Select).value

    def _chosen_of(self, name: str, choices: tuple[Word, ...]) -> Word:
        return next(choice for choice in choices if choice == self._chosen(name))

    def _typed(self, name: str) -> str:
        return self.query_one(f"#{name}", Input).value.strip()

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


def _kind(options: WorkloadOptions) -> Kind:
    return "command" if options.command else "file" if options.workload is not None else "model"


def _split(line: str) -> tuple[str, ...]:
    """The words of a command line.

    Raises:
        OptionError: there are none, or a quote is left open.
    """
    try:
        words = tuple(shlex.split(line))
    except ValueError as error:
        raise OptionError(f"-- COMMAND: {str(error).lower()}; check quotes and backslashes") from error
    if not words:
        raise OptionError(f"-- COMMAND: type what starts your training, such as {_EXAMPLE}")
    return words


def _with_proposal(command: Command, proposal: Proposal) -> Command:
    """The command with its batch size replaced by the placeholder."""
    given, proposed, words = proposal.given.split(" "), proposal.proposed.split(" "), list(command.words)
    at = next(index for index in range(len(words)) if words[index : index + len(given)] == given)
    words[at : at + len(given)] = proposed
    return replace(command, words=tuple(words))


def _preview(config: SearchConfig) -> Iterator[str]:
    yield workload_summary(config)
    if config.workload.shape is None and config.workload.hugging_face is None:
        command = config.workload.command
        what = "the file" if command is None else f"it runs in {command.cwd}, and"
        yield f"{what} decides precision, optimizer and the rest"
    predicted = config.formula.max_batch_size
    said = predicted.reason if isinstance(predicted, Unknown) else f"the formula's largest batch is {predicted:,}"
    yield f"{config.device.gpu.title}: {said}"
