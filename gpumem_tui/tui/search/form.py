"""The form: what to train, on which GPU, and how to search. Nothing invalid leaves it."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Select, Static

from gpumem_tui.catalog.loader import DEFAULT_MODEL, gpus, models
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.formula.recipe import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, SHARDINGS
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import RealGpu, list_gpus
from gpumem_tui.options.configuration import Options, check_searchable, interpreter, limit_from
from gpumem_tui.options.typed import rows_from
from gpumem_tui.options.workload import (
    ModelChanges,
    WorkloadOptions,
    choose_device,
    share_limit_bytes,
    simulated_device,
    visible_gpus,
)
from gpumem_tui.search import strategy
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.search.form_fields import (
    FIELD_OF_OPTION,
    FIELDS,
    KINDS,
    NO,
    SHAPE_FIELDS,
    YES,
    ChoiceField,
    FormField,
    Kind,
    belongs,
    size_text,
)
from gpumem_tui.tui.search.workload import workload_summary
from gpumem_tui.workload.command import BATCH, Command, Proposal

Word = TypeVar("Word", bound=str)
EXAMPLE = f"python train.py --batch-size {BATCH}"
OPTION_OF_FIELD = {field.name: field.option for field in FIELDS}
_DEFAULTS = Options()
_OWN = "own"
"""The value of a model or a GPU that is in no catalog: a configuration file's, the machine's."""
_SIMULATED = "sim:"
_RESTRICT = {"count": "[0-9]*", "number": "[0-9.]*", "text": ".*"}
_LONGEST = {"count": 8, "number": 10, "text": 0}


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
        self._gpus: tuple[RealGpu, ...] = ()
        self._limit = size_text(now.config.limit_bytes)
        own = given.options.config is not None and now.options.config == given.options.config
        self._model = _OWN if own else now.options.model or DEFAULT_MODEL
        self._proposal: Proposal | None = None

    def compose(self) -> ComposeResult:
        """A row a field, a preview, two buttons."""
        with VerticalScroll(id="form", can_focus=False) as form:
            form.border_title = "Workload"
            form.border_subtitle = "tab next · enter opens · ctrl+s applies · esc leaves"
            for field in FIELDS:
                error = Static(id=f"{field.name}-error", classes="error", markup=False)
                with Horizontal(classes="field -long" if field.is_long else "field", id=f"{field.name}-field"):
                    yield Label(field.label)
                    yield self._control(field)
                    if not field.is_long:
                        yield error
                if field.is_long:
                    yield error.add_class("below")
                if field.name == "command":
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
        self.run_worker(self._list_gpus())

    async def _list_gpus(self) -> None:
        """The GPUs of this machine are offered as soon as the driver has named them."""
        found = await in_daemon_thread(list_gpus)
        if isinstance(found, Unknown) or not self.is_mounted:
            return
        self._gpus = visible_gpus(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
        select = self.query_one("#gpu", ChoiceField)
        before = self._chosen("gpu")
        with self.prevent(Select.Changed):
            select.set_options([(label, key) for key, label in self._gpu_choices()])
            select.value = str(before)

    @on(Select.Changed, "#model")
    def _model_changed(self) -> None:
        """The changes of its shape were meant for the model that was; the sequence length may be for this one too."""
        if self._chosen("model") != self._model:
            self._model = str(self._chosen("model"))
            for name in SHAPE_FIELDS:
                if name != "seq_len":
                    self.query_one(f"#{name}", Input).value = ""

    @on(ChoiceField.Refused)
    def _refused(self, message: ChoiceField.Refused) -> None:
        """Beside the choice, until something changes."""
        self.query_one(f"#{message.field.id}-error", Static).update(message.reason)

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

    def _control(self, field: FormField) -> ChoiceField | Input:
        if field.holds == "choice":
            choices, value = self._choices(field)
            options = [(label, key) for key, label in choices]
            return ChoiceField(options, value=value, allow_blank=False, id=field.name, compact=True)
        return Input(
            self._text(field.name),
            placeholder=field.empty,
            id=field.name,
            compact=True,
            select_on_focus=False,
            restrict=_RESTRICT[field.holds],
            max_length=_LONGEST[field.holds],
        )

    def _text(self, name: str) -> str:
        """What a field that is typed into begins with."""
        options, given, config = self._options, self._given.options, self._config
        if name in SHAPE_FIELDS:
            return _shown(getattr(options.changes, name))
        texts = {
            "config": options.config or "",
            "file": options.workload or given.workload or "",
            "command": Command(options.command or given.command, "").text,
            "gpus": _shown(options.gpus, unless=1),
            "ramp_step": _shown(config.ramp_step),
            "target_batch": _shown(config.target_batch),
            "headroom": _shown(config.headroom, unless=DEFAULT_HEADROOM),
            "limit": self._limit,
            "steps": _shown(config.steps, unless=_DEFAULTS.steps),
            "timeout": _shown(config.timeout_s, unless=_DEFAULTS.timeout_s),
            "python": config.python if config.python != sys.executable else "",
            "assumed_rows": " ".join(f"{place}={share:g}" if place else f"{share:g}" for place, share in
                                     options.assumed_rows),
        }  # fmt: skip
        return texts[name]

    def _choices(self, field: FormField) -> tuple[list[tuple[str, str]], str]:
        """(value, label) pairs, and the value that is set."""
        options, config = self._options, self._config
        match field.name:
            case "kind":
                return list(KINDS.items()), self._kind(options)
            case "model":
                return self._model_choices(), self._model
            case "gpu":
                set_now = f"{_SIMULATED}{config.device.gpu.name}" if config.device.simulated else _OWN
                return self._gpu_choices(), set_now
            case "strategy":
                value: str = config.strategy
            case "share":
                value = YES if config.device.others_bytes else NO
            case "dequantize":
                value = YES if options.dequantize else NO
            case name:
                value = getattr(options, name)
        return [(choice, choice) for choice in field.among], value

    def _model_choices(self) -> list[tuple[str, str]]:
        own = self._given.options.config
        listed = [(_OWN, os.path.basename(own))] if own is not None else []
        return [*listed, *((model, model) for model in models())]

    def _gpu_choices(self) -> list[tuple[str, str]]:
        device = self._given.config.device
        here = [] if device.simulated else [(_OWN, device.gpu.title)]
        here += [(str(gpu.index), f"{gpu.index}: {gpu.name}") for gpu in self._gpus if gpu.uuid != device.uuid]
        return [*here, *((f"{_SIMULATED}{gpu}", f"{_SIMULATED}{gpu}") for gpu in gpus())]

    def _kind(self, options: WorkloadOptions) -> Kind:
        """A configuration that the program was started with stands among the models."""
        if options.config is not None and options.config != self._given.options.config:
            return "config"
        return _kind(options)

    # Checking

    def _check(self) -> None:
        errors: dict[str, str] = {}
        kind = self._chosen_kind
        try:
            self._good = self._read()
        except OptionError as error:
            self._good = None
            option, _, said = str(error).partition(": ")
            wrong = FIELD_OF_OPTION.get(option) or FIELD_OF_OPTION.get(option.split(" ")[0], kind)
            errors[wrong] = said or option
        shape = models().get(str(self._chosen("model"))) if kind == "model" else None
        for field in FIELDS:
            typed = "" if field.holds == "choice" else self._typed(field.name)
            shown, said = belongs(field, kind, shape, typed), errors.get(field.name, "")
            self.query_one(f"#{field.name}-field").display = shown
            self.query_one(f"#{field.name}-error", Static).update(said)
            self.query_one(f"#{field.name}-error").display = shown and (bool(said) or not field.is_long)
        button = self.query_one("#proposal", Button)
        button.display = self._proposal is not None
        if self._proposal is not None:
            button.label = Content(f"{self._proposal.proposed} instead of {self._proposal.given}")
        self.query_one("#apply", Button).disabled = self._good is None
        if self._good is not None:
            self.query_one("#preview", Static).update("\n".join(_preview(self._good.config)))

    @property
    def _chosen_kind(self) -> Kind:
        return self._chosen_of("kind", tuple(KINDS))

    def _read(self) -> Edited:
        """The form's values.

        Raises:
            OptionError: they do not go together.
        """
        self._proposal = None
        options = self._read_options()
        device = self._read_device(str(self._chosen("gpu")))
        python = self._read_python()
        config = replace(
            self._config,
            workload=options.spec(python),
            device=device,
            limit_bytes=self._limit_bytes(device),
            strategy=self._chosen_of("strategy", strategy.NAMES),
            python=python,
            ramp_step=self._count("ramp_step", 1),
            target_batch=self._count("target_batch", 1),
            headroom=self._number("headroom", DEFAULT_HEADROOM, 0, 0.99),
            steps=self._count("steps", 1, 10_000) or _DEFAULTS.steps,
            timeout_s=self._number("timeout", _DEFAULTS.timeout_s, 1, 1e6),
        )
        check_searchable(config.workload)
        return Edited(options, config)

    def _read_python(self) -> str:
        """As it was where nothing else was typed; else a program that can be run."""
        typed = self._typed("python")
        if typed == self._text("python"):
            return self._config.python
        return interpreter(os.path.expanduser(typed) or None) or sys.executable

    def _count(self, name: str, least: int, most: int = 1_000_000_000) -> int | None:
        """A whole number of a range; None for an empty field."""
        typed = self._typed(name)
        if typed and not least <= int(typed) <= most:
            raise OptionError(f"{OPTION_OF_FIELD[name]}: must be from {least:,} to {most:,}, not {int(typed):,}")
        return int(typed) if typed else None

    def _number(self, name: str, default: float, least: float, most: float) -> float:
        typed = self._typed(name)
        try:
            found = float(typed) if typed else default
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise OptionError(f"{OPTION_OF_FIELD[name]}: must be a number from {least:g} to {most:g}, not {typed}")
        return found

    def _read_options(self) -> WorkloadOptions:
        match self._chosen_kind:
            case "file":
                path = os.path.expanduser(self._typed("file"))
                return WorkloadOptions(workload=path, assumed_rows=self._assumed_rows())
            case "command":
                return self._read_command()
            case "config":
                path = os.path.expanduser(self._typed("config"))
                dequantize = self._chosen("dequantize") == YES
                return self._with_recipe(WorkloadOptions(config=path, dequantize=dequantize))
            case "model":
                return self._with_recipe(self._read_model())

    def _assumed_rows(self) -> tuple[tuple[str, float], ...]:
        try:
            return tuple(rows_from(word) for word in self._typed("assumed_rows").split())
        except ValueError as error:
            raise OptionError(f"--assume-rows: {error}") from error

    def _read_command(self) -> WorkloadOptions:
        words, ranks = _split(self._typed("command")), self._typed("gpus")
        command = Command(words, os.getcwd())
        if shutil.which(words[0]) is None:
            raise OptionError(f"-- COMMAND: there is no program {words[0]!r} that can be run; check the path")
        if not command.takes_batch:
            self._proposal = command.proposal
            raise OptionError(f"-- COMMAND: write {BATCH} where the batch size goes")
        return WorkloadOptions(command=words, gpus=int(ranks or 1), assumed_rows=self._assumed_rows())

    def _read_model(self) -> WorkloadOptions:
        model = str(self._chosen("model"))
        if model == _OWN:
            return WorkloadOptions(config=self._given.options.config, dequantize=self._given.options.dequantize)
        old = self._options if self._kind(self._options) == "model" else WorkloadOptions()
        keeps_default = old.model is None and old.config is None and model == DEFAULT_MODEL
        return WorkloadOptions(model=None if keeps_default else model)

    def _with_recipe(self, options: WorkloadOptions) -> WorkloadOptions:
        """What is said of a network besides which it is."""
        ranks = self._typed("gpus")
        changes = ModelChanges(**{name: self._count(name, 1) for name in SHAPE_FIELDS})
        return replace(
            options,
            changes=changes,
            precision=self._chosen_of("precision", PRECISIONS),
            optimizer=self._chosen_of("optimizer", OPTIMIZERS),
            recompute=self._chosen_of("recompute", RECOMPUTES),
            attention=self._chosen_of("attention", ATTENTIONS),
            sharding=self._chosen_of("sharding", SHARDINGS),
            gpus=int(ranks or 1),
        )

    def _chosen(self, name: str) -> object:
        return self.query_one(f"#{name}", Select).value

    def _chosen_of(self, name: str, choices: tuple[Word, ...]) -> Word:
        return next(choice for choice in choices if choice == self._chosen(name))

    def _typed(self, name: str) -> str:
        return self.query_one(f"#{name}", Input).value.strip()

    def _limit_bytes(self, device: Device) -> int | None:
        """What was typed; where nothing was, the cap that came with the device, which may protect others on it, else
        the present one where it is one."""
        typed = self._typed("limit")
        if typed != self._limit:
            return limit_from(typed, device.gpu.total_bytes) if typed else share_limit_bytes(device)
        for config in (self._config, self._given.config):
            if config.device is device:
                return config.limit_bytes
        limit_bytes = self._config.limit_bytes
        return limit_bytes if limit_bytes is not None and limit_bytes < device.gpu.total_bytes else None

    def _read_device(self, wanted: str) -> Device:
        share = self._chosen("share") == YES
        for device in (self._config.device, self._given.config.device):
            if wanted == (f"{_SIMULATED}{device.gpu.name}" if device.simulated else _OWN):
                known = any(gpu.uuid == device.uuid for gpu in self._gpus)
                if device.simulated or not known or share == bool(device.others_bytes):
                    return device
                return choose_device(device.uuid, self._gpus, share=share)
        if not wanted.startswith(_SIMULATED):
            return choose_device(wanted, self._gpus, share=share)
        return simulated_device(wanted.removeprefix(_SIMULATED))


def _shown(value: float | None, unless: float | None = None) -> str:
    """A number as it is typed; nothing for the one that an empty field means."""
    return "" if value is None or value == unless else f"{value:g}" if isinstance(value, float) else str(value)


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
        raise OptionError(f"-- COMMAND: type what starts your training, such as {EXAMPLE}")
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
