"""The form: what to train, on which GPU, and how to search. Nothing invalid leaves it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, Static

from gpumem_tui.catalog.custom import CUSTOM, custom_name, is_custom
from gpumem_tui.catalog.hub import HOW_TO_ASK, HubModel, configuration, hub_model
from gpumem_tui.catalog.loader import DEFAULT_MODEL, gpus, models
from gpumem_tui.catalog.shapes import CatalogError, ModelShape
from gpumem_tui.catalog.tables import changed
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import RealGpu, list_gpus
from gpumem_tui.options.configuration import (
    Options,
    asked_by,
    check_searchable,
    interpreter,
    limit_from,
)
from gpumem_tui.options.table import BY_FLAG, NO, OPTIONS, SHAPE, YES, OptionRow
from gpumem_tui.options.workload import (
    WorkloadOptions,
    choose_device,
    share_limit_bytes,
    simulated_device,
    visible_gpus,
)
from gpumem_tui.search.beside import beside
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.choice import ChoiceField
from gpumem_tui.tui.kit.dialogs import Modal
from gpumem_tui.tui.search.panels import workload_summary
from gpumem_tui.workload.command import BATCH, Command, Proposal

_KINDS = {"model": "a model", "config": "a config.json", "file": "a file", "command": "a command"}
_KIND = OptionRow(name="kind", group="workload", holds="choice", choices=tuple(_KINDS), label="Train")
_ORDER = (
    "kind", "model", "config", "workload", "command", "gpus", "gpu", "memory_bytes", "arch", "precision",
    "optimizer", "recompute", "compile", "attention", "seq_len", "strategy", "ramp_step", "batch_multiple",
    "target_batch", "target_tokens", "headroom", "limit_bytes", "context_bytes", "calibration", "share",
    "beside", "steps", "timeout_s", "python", "sharding", "freeze", "adapter", "lora_rank", "adapter_dtype",
    "base_quantization", "lora_targets", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "image_size",
    "channels_last", "dequantize", "assumed_rows", "longest", "rank", "through", "resume", "torch_version",
)  # fmt: skip
FIELDS = tuple(OPTIONS.get(name, _KIND) for name in _ORDER)
"""The options that have a field, from top to bottom, and what is trained before them."""
_LISTED = ("kind", "model", "gpu")
"""Options whose values are listed here: the catalog's, the machine's."""
_SHAPE = frozenset(option.name for option in SHAPE)
_RESTRICT = {"count": "[0-9]*", "number": "[0-9.]*"}
_LONGEST = {"count": 8, "number": 10}
EXAMPLE = f"python train.py --batch-size {BATCH}"
_OWN = "own"
"""The value of a model or a GPU that is in no catalog: a configuration file's, the machine's."""
_SIMULATED = "sim:"
_CUSTOM_GPU, _OF_CUSTOM = f"{_SIMULATED}{CUSTOM}", ("memory_bytes", "arch")
"""A GPU that the catalog lacks, and the fields that describe it."""


@dataclass(frozen=True)
class Edited:
    """The message with what the form gives back: always a valid workload."""

    options: WorkloadOptions
    config: SearchConfig


def is_choice(option: OptionRow) -> bool:
    """Return whether an option's value is chosen, not typed."""
    return option.holds in ("choice", "flag") or option.name in _LISTED


def is_long(option: OptionRow) -> bool:
    """Return whether an option's field is as wide as the form, with what is wrong below it."""
    return option.holds in ("text", "size", "tokens", "rows") and not is_choice(option)


def belongs(option: OptionRow, kind: str, shape: ModelShape | None, typed: str) -> bool:
    """Return whether the form shows an option: of a model's shape only those that it has, or that hold something."""
    if option.trained and kind not in option.trained:
        return False
    return option.name not in _SHAPE or shape is None or bool(typed) or option.name in shape.record.fields


class FormValues:
    """The values that the form's fields begin with, and what they come to. No widgets.

    Args:
        now: what is set.
        given: what the program was started with.

    Attributes:
        gpus: the GPUs of this machine, as far as the driver has named them.
        proposal: how to give a command its batch size, where it was last read without one.
    """

    def __init__(self, now: Edited, given: Edited) -> None:
        self.gpus: tuple[RealGpu, ...] = ()
        self.proposal: Proposal | None = None
        self._options = now.options
        self._config = now.config
        self._given = given
        self._limit = self.begins(OPTIONS["limit_bytes"])

    @property
    def model(self) -> str:
        """The model that is set."""
        options = self._options
        own = self._given.options.config is not None and options.config == self._given.options.config
        return _OWN if own else options.model or DEFAULT_MODEL

    def begins(self, option: OptionRow) -> str:
        """Return what an option's field begins with."""
        options, given = self._options, self._given.options
        context, engine = self._config.device.gpu.context, self._config.device.gpu.engine
        values: dict[str, object] = {field.name: getattr(self._config, field.name) for field in fields(self._config)}
        values |= {field.name: getattr(options, field.name) for field in fields(options)}
        values |= options.changes
        values |= {
            "workload": options.workload or given.workload,
            "command": Command(options.command or given.command, "").text,
            "python": self._config.python if self._config.python != sys.executable else None,
            "share": bool(self._config.device.others_bytes),
            "context_bytes": context.typed_bytes if context else None,
            "beside": engine.typed if engine else None,
        }
        return option.text(values.get(option.name))

    def choices(self, option: OptionRow) -> tuple[list[tuple[str, str]], str]:
        """Return (value, label) pairs, and the value that is set."""
        match option.name:
            case "kind":
                return list(_KINDS.items()), self._kind(self._options)
            case "model":
                own = self._given.options.config
                listed = [(_OWN, os.path.basename(own))] if own is not None else []
                return [*listed, *((model, model) for model in models())], self.model
            case "gpu":
                return self.gpu_choices()
            case _:
                return [(choice, choice) for choice in option.choices or (NO, YES)], self.begins(option)

    def gpu_choices(self) -> tuple[list[tuple[str, str]], str]:
        """Return (value, label) pairs, the machine's GPUs before the catalog's; and the value to begin with."""
        now, given = self._config.device, self._given.config.device
        named = dict.fromkeys(
            [*(device.gpu.name for device in (now, given) if device.simulated and is_custom(device.gpu)), *gpus()]
        )
        simulated = [(f"{_SIMULATED}{name}", f"{_SIMULATED}{name}") for name in (*named, CUSTOM)]
        owned = next((device for device in (now, given) if not device.simulated), None)
        here = [] if owned is None else [(_OWN, owned.gpu.title)]
        uuid = None if owned is None else owned.uuid
        here += [(str(gpu.index), f"{gpu.index}: {gpu.name}") for gpu in self.gpus if gpu.uuid != uuid]
        return [*here, *simulated], f"{_SIMULATED}{now.gpu.name}" if now.simulated else _OWN

    def _kind(self, options: WorkloadOptions) -> str:
        """Return what is trained; a configuration that the program was started with is among the models."""
        if options.config is not None and options.config != self._given.options.config:
            return "config"
        return "command" if options.command else "file" if options.workload is not None else "model"

    # Reading

    def read(self, values: Mapping[str, str]) -> Edited:
        """Return what the fields hold, by name, as a search.

        Raises:
            OptionError: they do not go together.
        """
        self.proposal = None
        asked = self._asked(values)
        device = self._read_device(_described(values["gpu"], asked), share=asked.share)
        python = self._read_python(values["python"])
        offline = asked.trained.config is not None  # each letter that is typed comes here
        workload = replace(asked.trained, offline=offline).spec(python)
        wanted = _with_engine(asked, _with_context(asked, replace(device, gpu=device.gpu.whole)))
        limit_bytes = self._limit_bytes(device, values["limit_bytes"])
        if wanted.gpu.engine != device.gpu.engine and values["limit_bytes"] == self._limit:
            limit_bytes = share_limit_bytes(wanted) or limit_bytes
        config = replace(
            changed(self._config, asked.terms_of(workload)),
            workload=workload,
            device=wanted,
            python=python,
            limit_bytes=limit_bytes,
        )
        check_searchable(config)
        return Edited(asked.trained, config)

    def _asked(self, values: Mapping[str, str]) -> Options:
        """Read every option that belongs to what is trained."""
        kind = values["kind"]
        read: dict[str, object] = {}
        for option in FIELDS:
            if option.name not in _LISTED and kind in (option.trained or _KINDS):
                typed = values[option.name]  # of its GPUs what is trained knows the bounds
                read[option.name] = int(typed or 1) if option.name == "gpus" else option.read(typed)
        for name in read.keys() & {"config", "workload"}:
            read[name] = os.path.expanduser(values[name])
        if kind == "command":
            read["command"] = self._read_command(values["command"])
        if kind == "model":
            read |= self._read_model(values["model"])
        if values["limit_bytes"] == self._limit:
            del read["limit_bytes"]  # of a device that is no longer meant, perhaps
        return asked_by(read)

    def _read_command(self, line: str) -> tuple[str, ...]:
        words = command_words(line)
        command = Command(words, os.getcwd())
        if shutil.which(words[0]) is None:
            raise OptionError(f"-- COMMAND: there is no program {words[0]!r} that can be run; check the path")
        if not command.takes_batch:
            self.proposal = command.proposal
            raise OptionError(f"-- COMMAND: write {BATCH} where the batch size goes")
        return words

    def _read_model(self, model: str) -> dict[str, object]:
        if model == _OWN:
            return {"config": self._given.options.config, "dequantize": self._given.options.dequantize}
        old = self._options if self._kind(self._options) == "model" else WorkloadOptions()
        keeps_default = old.model is None and old.config is None and model == DEFAULT_MODEL
        return {"model": None if keeps_default else model}

    def _read_python(self, typed: str) -> str:
        """Return the interpreter: as it was where nothing else was typed; else a program that can be run."""
        if typed == self.begins(OPTIONS["python"]):
            return self._config.python
        return interpreter(os.path.expanduser(typed) or None) or sys.executable

    def _limit_bytes(self, device: Device, typed: str) -> int | None:
        """Return the cap that was typed, or where none was that of the device, which may protect others on it.

        For another device it is the present cap, where that is less than the device.
        """
        if typed != self._limit:
            return limit_from(typed, device.gpu.total_bytes) if typed else share_limit_bytes(device)
        for config in (self._config, self._given.config):
            if config.device is device:
                return config.limit_bytes
        limit_bytes = self._config.limit_bytes
        return limit_bytes if limit_bytes is not None and limit_bytes < device.gpu.total_bytes else None

    def _read_device(self, wanted: str, *, share: bool) -> Device:
        for device in (self._config.device, self._given.config.device):
            if wanted == (f"{_SIMULATED}{device.gpu.name}" if device.simulated else _OWN):
                known = any(gpu.uuid == device.uuid for gpu in self.gpus)
                if device.simulated or not known or share == bool(device.others_bytes):
                    return device
                return choose_device(device.uuid, self.gpus, share=share)
        if not wanted.startswith(_SIMULATED):
            return choose_device(wanted, self.gpus, share=share)
        return simulated_device(wanted.removeprefix(_SIMULATED))


def _described(gpu: str, asked: Options) -> str:
    """Return the GPU that was chosen; of one that the catalog lacks, the name that states memory and architecture.

    Raises:
        OptionError: it has no memory.
    """
    if gpu != _CUSTOM_GPU:
        return gpu
    if asked.memory_bytes is None:
        raise OptionError("--memory: give the total that nvidia-smi reports, such as 20GiB")
    return f"{_SIMULATED}{custom_name(asked.memory_bytes, asked.arch)}"


def command_words(line: str) -> tuple[str, ...]:
    """Return the words of a command line.

    Raises:
        OptionError: none exist, or a quote is left open.
    """
    try:
        words = tuple(shlex.split(line))
    except ValueError as error:
        raise OptionError(f"-- COMMAND: {str(error).lower()}; check quotes and backslashes") from error
    if not words:
        raise OptionError(f"-- COMMAND: type what starts your training, such as {EXAMPLE}")
    return words


def with_proposal(command: Command, proposal: Proposal) -> Command:
    """Return the command with its batch size replaced by the placeholder."""
    given, proposed, words = proposal.given.split(" "), proposal.proposed.split(" "), list(command.words)
    at = next(index for index in range(len(words)) if words[index : index + len(given)] == given)
    words[at : at + len(given)] = proposed
    return replace(command, words=tuple(words))


def _with_context(asked: Options, device: Device) -> Device:
    """Return a device with what was typed of its context; what was measured of it before stays where nothing was."""
    kept = device.gpu.context
    stays = kept is not None and kept.typed_bytes is None and asked.context_bytes is None and not asked.calibration
    return device if stays else asked.with_context(device)


def _with_engine(asked: Options, device: Device) -> Device:
    """Return a device less what the inference engine takes that was typed."""
    return device if asked.beside is None else replace(device, gpu=beside(device.gpu, asked.beside))


class EditScreen(Modal[Edited | None]):
    """Checks every change at once; an error is next to its control, and the preview keeps the last good values.

    Args:
        now: what is set.
        given: what the program was started with: the user's own configuration, file, command or GPU can be chosen
            again after another was tried.
    """

    CSS_PATH = Path(__file__).with_name("form.tcss")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "cancel"),
        Binding("ctrl+s", "apply", "apply", priority=True),
        Binding("up", "app.focus_previous", show=False, priority=True),
        Binding("down", "app.focus_next", show=False, priority=True),
    ]

    def __init__(self, now: Edited, given: Edited) -> None:
        super().__init__()
        self._good: Edited | None = now
        self._values = FormValues(now, given)
        self._model = self._values.model

    def compose(self) -> ComposeResult:
        """Yield a row a field, a preview, two buttons."""
        with VerticalScroll(id="form", can_focus=False) as form:
            form.border_title = "Workload"
            form.border_subtitle = "↑↓ field · ←→ choice · enter lists · ctrl+s applies · esc leaves"
            for option in FIELDS:
                long = is_long(option)
                error = Static(id=f"{option.name}-error", classes="error below" if long else "error", markup=False)
                with Horizontal(classes="field -long" if long else "field", id=f"{option.name}-field"):
                    yield Label(option.label)
                    yield self._control(option)
                    if not long:
                        yield error
                if long:
                    yield error
                if option.name == "command":
                    yield Button("", id="proposal", compact=True)
            with Vertical(id="foot"):
                yield Static(id="preview")
                with Horizontal(id="buttons"):
                    yield Button("Apply", id="apply", variant="primary", compact=True)
                    yield Button("Cancel", id="leave", compact=True)

    def on_mount(self) -> None:
        """Show the preview of what is set now, with the cursor where the training is chosen."""
        self._check()
        kind = self._chosen("kind")
        self.query_one(f"#{'workload' if kind == 'file' else kind}").focus()
        self.run_worker(self._list_gpus())

    async def _list_gpus(self) -> None:
        """Offer the GPUs of this machine as soon as the driver has named them."""
        found = await in_daemon_thread(list_gpus)
        if isinstance(found, Unknown) or not self.is_mounted:
            return
        self._values.gpus = visible_gpus(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
        field, chosen = self.query_one("#gpu", ChoiceField), self._chosen("gpu")
        field.offer(dict(self._values.gpu_choices()[0]))
        field.value = chosen

    @on(ChoiceField.Changed, "#model")
    def _model_changed(self) -> None:
        """Drop the changes of the shape, meant for the old model; the sequence length may be for this one too."""
        if self._chosen("model") != self._model:
            self._model = self._chosen("model")
            for name in _SHAPE - {"seq_len"}:
                self.query_one(f"#{name}", Input).value = ""

    @on(ChoiceField.Refused)
    def _refused(self, message: ChoiceField.Refused) -> None:
        """Say why next to the choice, until something changes."""
        self.query_one(f"#{message.field.id}-error", Static).update(message.reason)

    @on(Input.Submitted)
    async def _entered(self, event: Input.Submitted) -> None:
        """Give back the values, or read the configuration of a model that the hub's cache has not got."""
        model = hub_model(event.value.strip()) if event.input.id == "config" else None
        if self._good is not None or model is None or model.cached is not None:
            self.action_apply()
        else:
            await self._ask_the_hub(model)

    async def _ask_the_hub(self, model: HubModel) -> None:
        self.query_one("#config-error", Static).update(f"asking the hub for {model.name}")
        try:
            await in_daemon_thread(partial(configuration, model))
        except CatalogError as error:
            self.query_one("#config-error", Static).update(str(error))
        else:
            self._check()

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
        field, proposal = self.query_one("#command", Input), self._values.proposal
        if proposal is not None:
            command = Command(command_words(field.value), os.getcwd())
            field.value = with_proposal(command, proposal).text
            field.focus()

    def _control(self, option: OptionRow) -> ChoiceField | Input:
        if is_choice(option):
            choices, value = self._values.choices(option)
            return ChoiceField(option.label, dict(choices), value, id=option.name)
        return Input(
            self._values.begins(option),
            placeholder=option.empty,
            id=option.name,
            compact=True,
            select_on_focus=False,
            restrict=_RESTRICT.get(option.holds, ".*"),
            max_length=_LONGEST.get(option.holds, 0),
        )

    # Checking

    @on(ChoiceField.Changed)
    @on(Input.Changed)
    def _check(self) -> None:
        errors: dict[str, str] = {}
        kind = self._chosen("kind")
        try:
            self._good = self._values.read(self._held())
        except OptionError as error:
            self._good = None
            said = str(error).replace(HOW_TO_ASK, "enter asks the hub")
            wrong, complaint = _place(said, "workload" if kind == "file" else kind)
            errors["config" if (wrong, kind) == ("model", "config") else wrong] = complaint
        shape = models().get(self._chosen("model")) if kind == "model" else None
        describes_gpu = self._chosen("gpu") == _CUSTOM_GPU
        for option in FIELDS:
            typed = "" if is_choice(option) else self._typed(option.name)
            shown = belongs(option, kind, shape, typed) and (option.name not in _OF_CUSTOM or describes_gpu)
            complaint = errors.get(option.name, "")
            self.query_one(f"#{option.name}-field").display = shown
            self.query_one(f"#{option.name}-error", Static).update(complaint)
            self.query_one(f"#{option.name}-error").display = shown and (bool(complaint) or not is_long(option))
        button, proposal = self.query_one("#proposal", Button), self._values.proposal
        button.display = proposal is not None
        if proposal is not None:
            button.label = Content(f"{proposal.proposed} instead of {proposal.given}")
        self.query_one("#apply", Button).disabled = self._good is None
        if self._good is not None:
            self.query_one("#preview", Static).update("\n".join(_preview(self._good)))

    def _chosen(self, name: str) -> str:
        return self.query_one(f"#{name}", ChoiceField).value

    def _held(self) -> dict[str, str]:
        """Return what is in every field, by name."""
        return {o.name: self._chosen(o.name) if is_choice(o) else self._typed(o.name) for o in FIELDS}

    def _typed(self, name: str) -> str:
        return self.query_one(f"#{name}", Input).value.strip()


def _place(error: str, otherwise: str) -> tuple[str, str]:
    """Return the field that an error is about, and what it states."""
    flag, _, complaint = error.partition(": ")
    option = BY_FLAG.get(flag) or BY_FLAG.get(flag.split(" ")[0])
    return (option.name, complaint) if option in FIELDS and option is not None and complaint else (otherwise, error)


def _preview(good: Edited) -> Iterator[str]:
    config = good.config
    yield workload_summary(config)
    if config.workload.shape is None and config.workload.hugging_face is None:
        command = config.workload.command
        what = "the file" if command is None else f"it runs in {command.cwd}, and"
        yield f"{what} decides precision, optimizer and the rest"
    predicted = config.formula.max_batch_size
    largest = predicted.reason if isinstance(predicted, Unknown) else f"the formula's largest batch is {predicted:,}"
    yield f"{config.device.gpu.title}: {largest}"
