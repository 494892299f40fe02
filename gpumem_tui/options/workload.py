"""Turns a user's options, from the command line or a form, into the program's own values."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from gpumem_tui.catalog.config_file import (
    ConfigFile,
    Quantization,
    looks_like_path,
    quantization_of,
    read_config_file,
)
from gpumem_tui.catalog.hub import hub_model
from gpumem_tui.catalog.huggingface import CONFIGS
from gpumem_tui.catalog.loader import (
    DEFAULT_GPU,
    DEFAULT_MODEL,
    NoClosedFormError,
    find_gpu,
    find_model,
    is_same_product,
    shape_from_hf_config,
)
from gpumem_tui.catalog.shapes import CatalogError, Gpu, ModelShape
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.checks import check_adapters, check_recipe, counts_blocks, fault
from gpumem_tui.formula.recipe import (
    ALL_BUT_HEAD,
    NOTHING_FROZEN,
    Recipe,
)
from gpumem_tui.memory import MIB, Unknown, format_bytes
from gpumem_tui.monitor.devices import Candidate, RealGpu, visible_devices
from gpumem_tui.monitor.vendors import vendor
from gpumem_tui.plan.plan import MOST_GPUS, SHAPE_LIMITS
from gpumem_tui.search.config import Device
from gpumem_tui.workload import as_transformers
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import HuggingFaceModel, Through, WorkloadSpec, split_file

_LIMITS = {**SHAPE_LIMITS, "gpus": MOST_GPUS}
_BESIDE_THE_ALLOCATOR_BYTES = 1024 * MIB
"""Left to the CUDA context, kernels and libraries, and as a margin, when a GPU is shared."""


@dataclass(frozen=True)
class WorkloadOptions(Recipe):
    """A recipe, and what it trains: ``--model`` (with changes), ``--config``, ``--workload`` or a command.

    Attributes:
        model: a name of the catalog, or the path of a configuration, as `config`.
        changes: of fields of the model's shape, by name.
        dequantize: train the weights of a quantized configuration as if they were not.
        offline: never ask the hub for a configuration.
        command: the words after ``--``; empty for none.
        torch_version: to trace as; None for the torch that traces.
    """

    model: str | None = None
    config: str | None = None
    workload: str | None = None
    command: tuple[str, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    assumed_rows: tuple[tuple[str, float], ...] = ()
    dequantize: bool = False
    offline: bool = False
    longest: int | None = None
    rank: int = 0
    through: Through = "steps"
    resume: bool = False
    torch_version: str | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.config is None and looks_like_path(self.model):
            object.__setattr__(self, "config", self.model)
            object.__setattr__(self, "model", None)

    def spec(self, python: str = sys.executable) -> WorkloadSpec:
        """Work out the workload that these options describe, and as which torch it is traced.

        Args:
            python: the interpreter whose transformers builds what has no closed form.

        Raises:
            OptionError: contradicting options, an unknown model, an impossible shape, an unreadable file, no version.
        """
        asked = self.torch_version or ""
        if self.torch_version is not None and not re.fullmatch(r"\d+\.\d+(\.\d+)?([+.]\w+)*", asked):
            raise OptionError(f"--torch-version {asked}: is no version of torch; write one such as 2.0")
        return replace(self._spec(python), as_torch=asked)

    def _spec(self, python: str) -> WorkloadSpec:
        """Work out what is trained.

        Args:
            python: the interpreter whose transformers builds what has no closed form.

        Raises:
            OptionError: contradicting options, an unknown model, an impossible shape, an unreadable file.
        """
        named = [f"--{name}" for name in ("model", "config", "workload") if getattr(self, name) is not None]
        if self.command:
            named.append("-- COMMAND")
        if len(named) > 1:
            raise OptionError(f"{' and '.join(named)}: give only one of them")
        for name in ("config", "workload"):
            if getattr(self, name) == "":
                raise OptionError(f"--{name}: give the path of a file")
        if self.gpus < 1:
            raise OptionError(f"--gpus: give at least 1, not {self.gpus}")
        for name, value in {**self.changes, "gpus": self.gpus}.items():
            if value > _LIMITS[name]:
                raise OptionError(f"--{name.replace('_', '-')}: must be at most {_LIMITS[name]:,}")
        if self.dequantize and self.config is None:
            raise OptionError("--dequantize: is for a config.json whose weights are quantized; give --config FILE")
        if self.offline and self.config is None:
            raise OptionError("--offline: is for a model of the Hugging Face hub; give --model OWNER/NAME")
        if self.command:
            told = {name: getattr(self, name) for name in ("assumed_rows", "longest", "rank", "through", "resume")}
            return replace(self._command_spec(), **told)
        if self.rank:
            raise OptionError(
                f"--rank {self.rank}: is for a command of several ranks; give it after `--`, or leave the option out"
            )
        if self.through != "steps":
            raise OptionError(f"--through {self.through}: is for a command; leave it out for a model of the catalog")
        if self.resume:
            raise OptionError("--resume: is for a command; leave it out for a model of the catalog")
        if self.longest is not None:
            raise OptionError("--longest: is for a command; of a model of the catalog, give --seq-len or --image-size")
        recipe = self._recipe()
        if self.sharding != "none" and recipe.sharded_over == 1:
            gpus = 2 * recipe.model_parallel
            raise OptionError(
                f"--sharding {self.sharding}: needs more than one GPU to shard over; add --gpus {gpus} or more"
            )
        if self.workload is not None:
            return replace(self._file_spec(recipe), assumed_rows=self.assumed_rows)
        if self.assumed_rows:
            raise OptionError("--assume-rows: is for a --workload file or a command; the catalog's models need none")
        if self.config is not None:
            return self._config_spec(self.config, recipe, python)
        try:
            return self._shape_spec(find_model(DEFAULT_MODEL if self.model is None else self.model), recipe)
        except CatalogError as error:
            raise OptionError(f"--model: {error} (a model of the Hugging Face hub is OWNER/NAME)") from error

    def _recipe(self) -> Recipe:
        """Return the recipe, with as many GPUs as one copy of the network takes where their number is not given."""
        recipe = Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})
        return replace(recipe, gpus=recipe.least_gpus) if self.gpus == 1 else recipe

    def _shape_spec(self, shape: ModelShape, recipe: Recipe) -> WorkloadSpec:
        shape = shape.overridden(**self.changes)
        check_adapters(shape, recipe)
        if wrong := fault(shape, recipe):
            raise OptionError(": ".join(wrong))
        return WorkloadSpec(recipe, shape=shape)

    def _config_spec(self, path: str, recipe: Recipe, python: str) -> WorkloadSpec:
        """Describe a configuration: by closed form where there is one, else as transformers builds it."""
        try:
            file = read_config_file(path, offline=self.offline)
            quantized = quantization_of(file.values)
            if quantized is not None and not self.dequantize:
                return self._quantized_spec(file, quantized, recipe, python)
            shape = shape_from_hf_config(file.values, file.name)
            made = self._shape_spec(shape, recipe)
            assert made.shape is not None
            read = as_transformers.model_file(file, shape, dequantize=self.dequantize)
            return as_transformers.of_config(made.shape, made.recipe, read, python)
        except NoClosedFormError as error:
            return self._hugging_face_spec(file, str(error), recipe, python)
        except CatalogError as error:
            raise OptionError(f"{_option_of(path)}: {error}") from error

    def _quantized_spec(self, file: ConfigFile, quantized: Quantization, recipe: Recipe, python: str) -> WorkloadSpec:
        """Describe adapters over a quantized base, which stays as it is.

        Raises:
            OptionError: all weights would be trained, or transformers' quantizer is not run for the format.
        """
        base = quantized.base
        option = _option_of(self.config or "")
        words = f"{option}: the weights of {file.name} are quantized ({quantized.words})"
        if not base or not recipe.has_adapters:
            do = "train them with --adapter lora" if base else "give that step as your command after -- or --workload"
            raise OptionError(
                f"{words}: such a base stays as it is, and adapters (LoRA) are trained on it; {do}, or train all "
                "weights unquantized with --dequantize"
            )
        if recipe.base_quantization not in ("none", base):
            raise OptionError(f"--base-quantization: {words.removeprefix(f'{option}: ')}; leave it out")
        no_form = f"quantized by the file itself: --dequantize --base-quantization {base} has the formula, if one has"
        return self._hugging_face_spec(file, no_form, replace(recipe, base_quantization=base), python)

    def _hugging_face_spec(self, file: ConfigFile, no_form: str, recipe: Recipe, python: str) -> WorkloadSpec:
        if file.model_type not in CONFIGS:
            no_form = f"no formula for {file.model_type} models"
        given = self.changes
        for name in given.keys() - {"seq_len", "image_size"}:
            raise OptionError(
                f"--{name.replace('_', '-')}: {file.name} has no closed form; leave it out, and change {file.path}"
            )
        if self.gpus > 1:
            raise OptionError(
                f"--gpus: {file.name} has no closed form, and its step is one GPU's: for several give your command "
                "after --"
            )
        if recipe.recompute == "selective":
            raise OptionError("--recompute selective: transformers has gradient checkpointing only; use full or none")
        if recipe.has_frozen_layers and recipe.freeze != ALL_BUT_HEAD and not counts_blocks(recipe.freeze):
            raise OptionError(
                f"--freeze: write {NOTHING_FROZEN}, {ALL_BUT_HEAD} or how many blocks, not {recipe.freeze}"
            )
        check_recipe(recipe)
        seq_len = given.get("seq_len", file.usual_seq_len)
        command = as_transformers.program(file.path, recipe, python, seq_len, given.get("image_size", 0))
        model = HuggingFaceModel(
            name=file.name,
            model_type=file.model_type,
            architecture=file.architecture,
            no_formula=no_form,
            seq_len=seq_len,
            is_text_alone=file.takes_more_than_text,
        )
        return WorkloadSpec(recipe, command=command, hugging_face=model)

    def _command_spec(self) -> WorkloadSpec:
        if self.changes:
            option = next(iter(self.changes)).replace("_", "-")
            raise OptionError(
                f"--{option}: a command builds its own model; leave it out, and change the model in your script"
            )
        recipe = Recipe(gpus=self.gpus)
        if self._recipe() != replace(recipe, gpus=self._recipe().gpus):
            raise OptionError(
                "-- COMMAND: it decides precision, optimizer and the rest itself; leave those options out"
            )
        command = Command(self.command, os.getcwd())
        return WorkloadSpec(replace(recipe, gpus=max(self.gpus, command.processes)), command=command)

    def _file_spec(self, recipe: Recipe) -> WorkloadSpec:
        assert self.workload is not None
        if self.changes:
            option = next(iter(self.changes)).replace("_", "-")
            raise OptionError(
                f"--{option}: a workload file builds its own model; leave it out, and change the model in that file"
            )
        if recipe != Recipe():
            raise OptionError("--workload: the file decides precision, optimizer and the rest; leave those options out")
        path, name = split_file(self.workload)
        try:
            is_file = path.is_file()
        except OSError as error:  # a name that is too long
            raise OptionError(f"--workload: {path}: {error.strerror}; check the path") from error
        if not is_file:
            raise OptionError(f"--workload: there is no file {path}; check the path")
        absolute = str(path.resolve())
        return WorkloadSpec(recipe, file=f"{absolute}:{name}" if name else absolute)


def _option_of(path: str) -> str:
    """Return the option that a configuration was given by: a model on the hub is one by its name."""
    return "--model" if hub_model(path) is not None and not os.path.exists(path) else "--config"


def simulated_device(name: str, reason: str = "") -> Device:
    """Return the device behind ``sim:NAME`` (given without the prefix).

    Raises:
        OptionError: no such GPU in the catalog.
    """
    try:
        return Device(find_gpu(name), simulated=True, reason=reason)
    except CatalogError as error:
        raise OptionError(f"--gpu: {error}") from error


def choose_device(wanted: str | None, gpus: tuple[RealGpu, ...] | Unknown, *, share: bool) -> Device:
    """Return the device for ``--gpu WANTED``: an index, a UUID, a name or ``sim:NAME``; None for the first free one.

    A name is one of this machine's GPUs where there is such a one, else it is simulated.

    Raises:
        OptionError: no such device, or one that others use and `share` is False.
    """
    if wanted is not None and wanted.startswith("sim:"):
        return simulated_device(wanted.removeprefix("sim:"))
    if wanted is None:
        return _first_free(gpus, share=share)
    here = () if isinstance(gpus, Unknown) else gpus
    found = [gpu for gpu in here if wanted in (str(gpu.index), gpu.uuid)]
    if not found:
        named = _named(wanted, gpus)
        found = [gpu for gpu in here if is_same_product(gpu.name, gpu.total_bytes, named)]
        found.sort(key=lambda gpu: not gpu.is_free)
        if not found:
            return Device(named, simulated=True, reason=f"no {named.title} on this machine")
    gpu = found[0]
    if not gpu.is_free and not share:
        raise OptionError(f"--gpu: {_in_use(gpu)}; --share searches within the memory they leave")
    return _real(gpu, share=share)


def _named(wanted: str, gpus: tuple[RealGpu, ...] | Unknown) -> Gpu:
    """Return the GPU of the catalog that is called so.

    Raises:
        OptionError: none is; the line shows what is here.
    """
    try:
        return find_gpu(wanted)
    except CatalogError as error:
        if not _NUMBER_OR_UUID.match(wanted):
            raise OptionError(f"--gpu: {error}") from error
        if isinstance(gpus, Unknown):
            why = f"{wanted!r} is not available: {gpus.reason}; --gpu sim:{DEFAULT_GPU} simulates one"
        else:
            known = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus) or "none"
            why = f"there is no GPU {wanted!r} here; there are {known}, and sim:NAME simulates one"
        raise OptionError(f"--gpu: {why}") from error


_NUMBER_OR_UUID = re.compile(r"$|\d{1,2}$|(GPU|MIG)-")


def _first_free(gpus: tuple[RealGpu, ...] | Unknown, *, share: bool) -> Device:
    if isinstance(gpus, Unknown):
        return simulated_device(DEFAULT_GPU, reason=gpus.reason)
    if not gpus:
        return simulated_device(DEFAULT_GPU, reason=f"no {vendor().brand} GPU on this machine")
    free = [gpu for gpu in gpus if gpu.is_free]
    if free:
        return _real(free[0], share=False)
    if share:
        return _real(min(gpus, key=lambda gpu: gpu.used_bytes), share=True)
    return simulated_device(DEFAULT_GPU, reason=f"no free GPU: {_in_use(gpus[0])}")


def _real(gpu: RealGpu, *, share: bool) -> Device:
    shared = share and not gpu.is_free
    others = gpu.used_bytes if shared else 0
    return Device(gpu.describe(shared=shared), simulated=False, uuid=gpu.uuid, others_bytes=others)


def with_ranks(device: Device, ranks: int, gpus: tuple[RealGpu, ...] | Unknown, *, share: bool) -> Device:
    """Return a device with as many further GPUs as a command starts ranks on this machine; a simulated one needs none.

    Raises:
        OptionError: there are fewer here, or others use one of them and `share` is False.
    """
    if device.simulated or ranks == 1 or isinstance(gpus, Unknown):
        return device
    further = [gpu for gpu in gpus if gpu.uuid != device.uuid][: ranks - 1]
    if len(further) < ranks - 1:
        here = f"{len(gpus)} GPUs are here"
        raise OptionError(f"-- COMMAND: starts {ranks} ranks, and {here}; --gpu sim:NAME simulates them")
    busy = [gpu for gpu in further if not gpu.is_free]
    if busy and not share:
        raise OptionError(f"-- COMMAND: {_in_use(busy[0])}; --share searches within the memory they leave")
    others = max([device.others_bytes, *(gpu.used_bytes for gpu in busy)])
    return replace(device, more_uuids=tuple(gpu.uuid for gpu in further), others_bytes=others)


def share_limit_bytes(device: Device) -> int | None:
    """Return the cap that keeps a search within what others leave, or will, on a real GPU; None without any."""
    if not device.others_bytes and (device.simulated or device.gpu.engine is None):
        return None
    return max(1, device.gpu.cuda_total_bytes - _BESIDE_THE_ALLOCATOR_BYTES)


def visible_gpus(gpus: tuple[RealGpu, ...], variable: str | None) -> tuple[RealGpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` lets this user see, in its order; an index is NVML's."""
    if variable is None:
        return gpus
    environ = {"CUDA_VISIBLE_DEVICES": variable, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    seen = visible_devices([Candidate(gpu.index, gpu.uuid, gpu.name) for gpu in gpus], environ)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    return () if isinstance(seen, Unknown) else tuple(by_uuid[uuid] for uuid in seen)


def _in_use(gpu: RealGpu) -> str:
    by = f" by process {', '.join(map(str, gpu.pids))}" if gpu.pids else ""
    return f"GPU {gpu.index} ({gpu.name}) has {format_bytes(gpu.used_bytes)} in use{by}"
