"""What the form's fields hold: as a search has it, and as it is read from them. No widgets."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from gpumem_tui.catalog.loader import DEFAULT_GPU, DEFAULT_MODEL, gpus, models
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.predict import DEFAULT_HEADROOM
from gpumem_tui.formula.recipe import (
    ADAPTER_DTYPES,
    ADAPTERS,
    ALL_LINEAR,
    ATTENTIONS,
    BASE_QUANTIZATIONS,
    DEFAULT_LORA_RANK,
    NOTHING_FROZEN,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    SHARDINGS,
)
from gpumem_tui.monitor.devices import RealGpu
from gpumem_tui.options.configuration import (
    Options,
    allocator_settings,
    check_searchable,
    interpreter,
    limit_from,
)
from gpumem_tui.options.typed import rows_from, size_from
from gpumem_tui.options.workload import (
    ModelChanges,
    WorkloadOptions,
    choose_device,
    share_limit_bytes,
    simulated_device,
)
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.search import strategy
from gpumem_tui.search.config import Device
from gpumem_tui.tui.search.form_fields import (
    FIELDS,
    KINDS,
    NO,
    SHAPE_FIELDS,
    YES,
    FormField,
    Kind,
    size_text,
)
from gpumem_tui.tui.search.host_request import Edited, HostRequest
from gpumem_tui.workload.command import BATCH, Command, Proposal

Word = TypeVar("Word", bound=str)
EXAMPLE = f"python train.py --batch-size {BATCH}"
OPTION_OF_FIELD = {field.name: field.option for field in FIELDS}
_DEFAULTS = Options()
_OWN = "own"
"""The value of a model or a GPU that is in no catalog: a configuration file's, the machine's."""
_SIMULATED = "sim:"
_FREE = "free"
"""The value of another machine's first free GPU."""
_MOST_GPUS = 16
"""Of another machine, so many are offered by their index."""


class FormValues:
    """What the form's fields begin with, and what they come to.

    Args:
        now: what is set.
        given: what the program was started with.
        ssh: how other machines are reached; None: as the one that the program was started with.

    Attributes:
        gpus: the GPUs of this machine, as far as the driver has named them.
        proposal: how to give a command its batch size, where it was last read without one.
    """

    def __init__(self, now: Edited, given: Edited, ssh: SshOptions | None = None) -> None:
        self.gpus: tuple[RealGpu, ...] = ()
        self.proposal: Proposal | None = None
        self._options = now.options
        self._config = now.config
        self._given = given
        self._there = now.there
        self._ssh = ssh or (None if given.there is None else given.there.ssh)
        self._limit = size_text(now.config.limit_bytes if now.there is None else now.there.asked.limit_bytes)
        self._values: Mapping[str, str] = {}

    @property
    def model(self) -> str:
        """What the choice of a model begins with."""
        options = self._options
        own = self._given.options.config is not None and options.config == self._given.options.config
        return _OWN if own else options.model or DEFAULT_MODEL

    def text(self, name: str) -> str:
        """What a field that is typed into begins with."""
        options, given, config = self._options, self._given.options, self._config
        if name in SHAPE_FIELDS:
            return _shown(getattr(options.changes, name))
        texts = {
            "config": options.config or "",
            "file": options.workload or given.workload or "",
            "command": Command(options.command or given.command, "").text,
            "gpus": _shown(options.gpus, unless=1),
            "freeze": options.freeze if options.freeze != NOTHING_FROZEN else "",
            "lora_rank": _shown(options.lora_rank, unless=DEFAULT_LORA_RANK),
            "lora_targets": options.lora_targets if options.lora_targets != ALL_LINEAR else "",
            "ramp_step": _shown(config.ramp_step),
            "target_batch": _shown(config.target_batch),
            "headroom": _shown(config.headroom, unless=DEFAULT_HEADROOM),
            "limit": self._limit,
            "steps": _shown(config.steps, unless=_DEFAULTS.steps),
            "timeout": _shown(config.timeout_s, unless=_DEFAULTS.timeout_s),
            "python": self._python,
            "host": "" if self._there is None else self._there.host.name,
            "remote_directory": "" if self._there is None else self._there.directory,
            "assumed_rows": " ".join(f"{place}={share:g}" if place else f"{share:g}" for place, share in
                                     options.assumed_rows),
        }  # fmt: skip
        return texts[name]

    def choices(self, field: FormField) -> tuple[list[tuple[str, str]], str]:
        """(value, label) pairs, and the value that is set."""
        options, config = self._options, self._config
        match field.name:
            case "kind":
                return list(KINDS.items()), self._kind(options)
            case "model":
                return self._model_choices(), self.model
            case "gpu":
                return self.gpu_choices(on_host=self._there is not None)
            case "strategy":
                value: str = config.strategy
            case "share":
                shares = bool(config.device.others_bytes) if self._there is None else self._there.asked.share
                value = YES if shares else NO
            case "dequantize":
                value = YES if options.dequantize else NO
            case name:
                value = getattr(options, name)
        return [(choice, choice) for choice in field.among], value

    def _model_choices(self) -> list[tuple[str, str]]:
        own = self._given.options.config
        listed = [(_OWN, os.path.basename(own))] if own is not None else []
        return [*listed, *((model, model) for model in models())]

    @property
    def _python(self) -> str:
        if self._there is not None:
            return self._there.asked.python or ""
        return self._config.python if self._config.python != sys.executable else ""

    def gpu_choices(self, *, on_host: bool) -> tuple[list[tuple[str, str]], str]:
        """(value, label) pairs, those of the machine and then those of the catalog; and the value to begin with."""
        simulated = [(f"{_SIMULATED}{gpu}", f"{_SIMULATED}{gpu}") for gpu in gpus()]
        if on_host:
            asked = None if self._there is None else self._there.asked.gpu
            numbers = dict.fromkeys(map(str, range(_MOST_GPUS)))
            own = [] if asked is None or asked in numbers or asked.startswith(_SIMULATED) else [(asked, asked)]
            listed = [(_FREE, "the first free one"), *own, *((number, f"GPU {number}") for number in numbers)]
            return [*listed, *simulated], asked or _FREE
        now, given = self._config.device, self._given.config.device
        owned = next((device for device in (now, given) if not device.simulated and not device.host), None)
        here = [] if owned is None else [(_OWN, owned.gpu.title)]
        uuid = None if owned is None else owned.uuid
        here += [(str(gpu.index), f"{gpu.index}: {gpu.name}") for gpu in self.gpus if gpu.uuid != uuid]
        if now.host:  # of another machine
            return [*here, *simulated], f"{_SIMULATED}{DEFAULT_GPU}"
        return [*here, *simulated], f"{_SIMULATED}{now.gpu.name}" if now.simulated else _OWN

    def _kind(self, options: WorkloadOptions) -> Kind:
        """A configuration that the program was started with stands among the models."""
        if options.config is not None and options.config != self._given.options.config:
            return "config"
        return _kind(options)

    # Reading

    def read(self, values: Mapping[str, str]) -> Edited | HostRequest:
        """What the fields hold, by name, as a search; for another machine, as what to ask it.

        Raises:
            OptionError: they do not go together.
        """
        self.proposal, self._values = None, values
        options = self._read_options()
        if values["host"]:
            return self._read_request(options)
        device = self._read_device(values["gpu"])
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
            allocator=allocator_settings() if self._config.device.host else self._config.allocator,
        )
        check_searchable(config)
        return Edited(options, config)

    def _read_request(self, options: WorkloadOptions) -> HostRequest:
        """Its GPUs, files and programs are not known here: it reads and checks them itself."""
        values, gpu = self._values, self._values["gpu"]
        try:
            limit_bytes = size_from(values["limit"]) if values["limit"] else None
        except ValueError as error:
            raise OptionError(f"--limit: {error}") from error
        asked = Options(
            options,
            gpu=None if gpu == _FREE else gpu,
            share=values["share"] == YES,
            python=values["python"] or None,
            limit_bytes=limit_bytes,
            headroom=self._number("headroom", DEFAULT_HEADROOM, 0, 0.99),
            target_batch=self._count("target_batch", 1),
            timeout_s=self._number("timeout", _DEFAULTS.timeout_s, 1, 1e6),
            steps=self._count("steps", 1, 10_000) or _DEFAULTS.steps,
            strategy=self._chosen_of("strategy", strategy.NAMES),
            ramp_step=self._count("ramp_step", 1),
        )
        return HostRequest(values["host"], values["remote_directory"], asked, self._ssh)

    def _path(self, name: str) -> str:
        """A path as it was typed, of this machine with the home in the place of ~."""
        typed = self._values[name]
        return typed if self._values["host"] else os.path.expanduser(typed)

    def _read_python(self) -> str:
        """As it was where nothing else was typed; else a program that can be run."""
        typed = self._values["python"]
        if typed == self._python and self._there is None:
            return self._config.python
        return interpreter(os.path.expanduser(typed) or None) or sys.executable

    def _count(self, name: str, least: int, most: int = 1_000_000_000) -> int | None:
        """A whole number of a range; None for an empty field."""
        typed = self._values[name]
        if typed and not least <= int(typed) <= most:
            raise OptionError(f"{OPTION_OF_FIELD[name]}: must be from {least:,} to {most:,}, not {int(typed):,}")
        return int(typed) if typed else None

    def _number(self, name: str, default: float, least: float, most: float) -> float:
        typed = self._values[name]
        try:
            found = float(typed) if typed else default
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise OptionError(f"{OPTION_OF_FIELD[name]}: must be a number from {least:g} to {most:g}, not {typed}")
        return found

    def _read_options(self) -> WorkloadOptions:
        match self._chosen_of("kind", tuple(KINDS)):
            case "file":
                return WorkloadOptions(workload=self._path("file"), assumed_rows=self._assumed_rows())
            case "command":
                return self._read_command()
            case "config":
                dequantize = self._values["dequantize"] == YES
                return self._with_recipe(WorkloadOptions(config=self._path("config"), dequantize=dequantize))
            case "model":
                return self._with_recipe(self._read_model())

    def _assumed_rows(self) -> tuple[tuple[str, float], ...]:
        try:
            return tuple(rows_from(word) for word in self._values["assumed_rows"].split())
        except ValueError as error:
            raise OptionError(f"--assume-rows: {error}") from error

    def _read_command(self) -> WorkloadOptions:
        words, ranks = command_words(self._values["command"]), self._values["gpus"]
        command = Command(words, os.getcwd())
        if not self._values["host"] and shutil.which(words[0]) is None:
            raise OptionError(f"-- COMMAND: there is no program {words[0]!r} that can be run; check the path")
        if not command.takes_batch:
            self.proposal = command.proposal
            raise OptionError(f"-- COMMAND: write {BATCH} where the batch size goes")
        return WorkloadOptions(command=words, gpus=int(ranks or 1), assumed_rows=self._assumed_rows())

    def _read_model(self) -> WorkloadOptions:
        model = self._values["model"]
        if model == _OWN:
            return WorkloadOptions(config=self._given.options.config, dequantize=self._given.options.dequantize)
        old = self._options if self._kind(self._options) == "model" else WorkloadOptions()
        keeps_default = old.model is None and old.config is None and model == DEFAULT_MODEL
        return WorkloadOptions(model=None if keeps_default else model)

    def _with_recipe(self, options: WorkloadOptions) -> WorkloadOptions:
        """What is said of a network besides which it is."""
        ranks = self._values["gpus"]
        changes = ModelChanges(**{name: self._count(name, 1) for name in SHAPE_FIELDS})
        return replace(
            options,
            changes=changes,
            precision=self._chosen_of("precision", PRECISIONS),
            optimizer=self._chosen_of("optimizer", OPTIMIZERS),
            recompute=self._chosen_of("recompute", RECOMPUTES),
            attention=self._chosen_of("attention", ATTENTIONS),
            sharding=self._chosen_of("sharding", SHARDINGS),
            freeze=self._values["freeze"] or NOTHING_FROZEN,
            adapter=self._chosen_of("adapter", ADAPTERS),
            lora_rank=self._count("lora_rank", 1) or DEFAULT_LORA_RANK,
            lora_targets=self._values["lora_targets"] or ALL_LINEAR,
            adapter_dtype=self._chosen_of("adapter_dtype", ADAPTER_DTYPES),
            base_quantization=self._chosen_of("base_quantization", BASE_QUANTIZATIONS),
            gpus=int(ranks or 1),
        )

    def _chosen_of(self, name: str, choices: tuple[Word, ...]) -> Word:
        return next(choice for choice in choices if choice == self._values[name])

    def _limit_bytes(self, device: Device) -> int | None:
        """What was typed; where nothing was, the cap that came with the device, which may protect others on it, else
        the present one where it is one."""
        typed = self._values["limit"]
        if typed != self._limit or self._there is not None:
            return limit_from(typed, device.gpu.total_bytes) if typed else share_limit_bytes(device)
        for config in (self._config, self._given.config):
            if config.device is device:
                return config.limit_bytes
        limit_bytes = self._config.limit_bytes
        return limit_bytes if limit_bytes is not None and limit_bytes < device.gpu.total_bytes else None

    def _read_device(self, wanted: str) -> Device:
        share = self._values["share"] == YES
        for device in (self._config.device, self._given.config.device):
            if device.host:
                continue
            if wanted == (f"{_SIMULATED}{device.gpu.name}" if device.simulated else _OWN):
                known = any(gpu.uuid == device.uuid for gpu in self.gpus)
                if device.simulated or not known or share == bool(device.others_bytes):
                    return device
                return choose_device(device.uuid, self.gpus, share=share)
        if not wanted.startswith(_SIMULATED):
            return choose_device(wanted, self.gpus, share=share)
        return simulated_device(wanted.removeprefix(_SIMULATED))


def _shown(value: float | None, unless: float | None = None) -> str:
    """A number as it is typed; nothing for the one that an empty field means."""
    return "" if value is None or value == unless else f"{value:g}" if isinstance(value, float) else str(value)


def _kind(options: WorkloadOptions) -> Kind:
    return "command" if options.command else "file" if options.workload is not None else "model"


def command_words(line: str) -> tuple[str, ...]:
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


def with_proposal(command: Command, proposal: Proposal) -> Command:
    """The command with its batch size replaced by the placeholder."""
    given, proposed, words = proposal.given.split(" "), proposal.proposed.split(" "), list(command.words)
    at = next(index for index in range(len(words)) if words[index : index + len(given)] == given)
    words[at : at + len(given)] = proposed
    return replace(command, words=tuple(words))
