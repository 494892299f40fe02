"""From what a user asked for to what is searched, predicted or planned: the command line and the screens share it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import msgspec

from gpumem_tui.catalog.calibration import calibrated
from gpumem_tui.catalog.calibration import load as load_calibrations
from gpumem_tui.catalog.custom import CUSTOM, custom_name
from gpumem_tui.catalog.loader import models
from gpumem_tui.catalog.shapes import TYPED_CONTEXT, CatalogError, Context, Gpu
from gpumem_tui.catalog.tables import changed
from gpumem_tui.decoding import decodable
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.checks import why_formula_only
from gpumem_tui.memory import GIB, MIB, Unknown, format_bytes, size_from
from gpumem_tui.monitor.devices import RealGpu, list_gpus
from gpumem_tui.options.table import DEVICE, OPTIONS, SEARCH, SHAPE, WORKLOAD, OptionRow
from gpumem_tui.options.workload import (
    WorkloadOptions,
    choose_device,
    share_limit_bytes,
    visible_gpus,
    with_ranks,
)
from gpumem_tui.plan.plan import Plan, device_option, draft_of
from gpumem_tui.search.beside import beside
from gpumem_tui.search.config import Device, SearchConfig, SearchTerms
from gpumem_tui.search.frameworks import line_for_any_batch
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.workload.spec import WorkloadSpec


@dataclass(frozen=True)
class Options(SearchTerms):
    """The options of a search, a prediction or a plan, by their names in the table of options.

    Attributes:
        trained: what is trained, and how.
        gpu: an index, a UUID, a name or ``sim:NAME``; None for the first free one.
        share: use a GPU that others use.
        python: the interpreter that has torch; None for this one.
        target_tokens: `target_batch` in tokens; None for none.
        context_bytes: what a process holds outside the allocator; None for the measured or catalogued value.
        calibration: a file with what was measured; None for the user's.
        `beside`: memory of an inference engine in the GPU, as typed; None without one.
        memory_bytes, arch: of the GPU ``custom``, whose name then states both; None of any other.
    """

    trained: WorkloadOptions = field(default_factory=WorkloadOptions)
    gpu: str | None = None
    share: bool = False
    python: str | None = None
    target_tokens: int | None = None
    context_bytes: int | None = None
    calibration: str | None = None
    beside: str | None = None
    memory_bytes: int | None = None
    arch: str | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.gpu in (CUSTOM, f"sim:{CUSTOM}"):
            object.__setattr__(self, "gpu", f"sim:{custom_name(self.memory_bytes, self.arch)}")
            object.__setattr__(self, "memory_bytes", None)
            object.__setattr__(self, "arch", None)

    def check_custom(self) -> None:
        """Check that a GPU is described as a whole, and no other one named.

        Raises:
            OptionError: it is not.
        """
        for flag, value in (("--memory", self.memory_bytes), ("--arch", self.arch)):
            if value is not None:
                whole = "--gpu sim:custom --memory 24GiB --arch sm_89"
                raise OptionError(f"{flag}: describes a GPU that the catalog lacks; write {whole}")

    def with_context(self, device: Device) -> Device:
        """Return a device whose GPU has the context that was typed, else measured on one of its kind.

        Raises:
            OptionError: the file of measurements cannot be read.
        """
        if self.context_bytes is not None:
            said = Context(self.context_bytes, self.context_bytes, self.context_bytes, TYPED_CONTEXT)
            return replace(device, gpu=replace(device.gpu, context=said))
        try:
            measured = load_calibrations(Path(self.calibration) if self.calibration else None)
        except CatalogError as error:
            raise OptionError(f"--calibration: {error}") from error
        return replace(device, gpu=calibrated(replace(device.gpu, context=None), measured))

    def on(self, device: Device) -> Device:
        """Return a device with its context, less what an inference engine takes of it.

        Raises:
            OptionError: as `with_context`, or the engine takes more than there is.
        """
        found = self.with_context(device)
        return found if self.beside is None else replace(found, gpu=beside(found.gpu, self.beside))

    def terms_of(self, workload: WorkloadSpec) -> dict[str, object]:
        """Return how the workload is to be searched, by name, with a target in tokens as the nearest in samples.

        Raises:
            OptionError: a target in tokens of what has no sequence known, or in samples too.
        """
        if self.target_tokens is None:
            return self.search_terms
        if self.target_batch is not None:
            raise OptionError("--target-tokens and --target-batch: give only one of them")
        length = 0 if workload.shape is None else workload.shape.seq_len
        if not length:
            why = (
                f"{workload.name} has no tokens"
                if workload.shape
                else f"tokens of a sample of {workload.name} are not known"
            )
            raise OptionError(f"--target-tokens: {why}; give --target-batch, in samples")
        return {**self.search_terms, "target_batch": max(1, round(self.target_tokens / length))}


def asked_by(values: Mapping[str, object]) -> Options:
    """Return what was asked for, by name of each option of the table; those that are left out take their defaults."""
    left = dict(values)

    def named(kind: type[WorkloadOptions | Options]) -> dict[str, object]:
        return {field.name: left.pop(field.name) for field in fields(kind) if field.name in left}

    changes = {option.name: left.pop(option.name, None) for option in SHAPE}
    given = {name: value for name, value in changes.items() if value is not None}
    trained = {"changes": given, **named(WorkloadOptions)}
    options = msgspec.convert({"trained": trained, **named(Options)}, decodable(Options))
    assert not left, f"no option takes {sorted(left)}"
    return options


HOW = ("calibration", "python", "timeout_s", "steps")
"""Options that say how a plan is traced, which is no part of it."""
_OF_A_SEARCH = ("limit_bytes", "share")
"""Options of a device that a plan does not take."""


_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (1, "B"))


def typed_words(options: Options, names: Iterable[str]) -> tuple[str, ...]:
    """Return options as they are typed, those at their default left out: the inverse of `asked_by`."""
    words: list[str] = []
    for row in (*WORKLOAD, *DEVICE):
        trained = options.trained
        value = trained.changes.get(row.name) if row in SHAPE else getattr(trained, row.name, None)
        value = getattr(options, row.name) if row in DEVICE else value
        if row.name in names and value != row.default:
            words += _words(row, value)
    return tuple(words)


def _words(row: OptionRow, value: object) -> list[str]:
    """Return an option and its value; a float and bytes to the last digit, which a form shortens."""
    if row.holds == "flag":
        return [row.flag]
    if row.holds == "rows" and isinstance(value, tuple):
        shares = (f"{place}={share!r}" if place else repr(share) for place, share in value)
        return [word for share in shares for word in (row.flag, share)]
    if row.holds == "size" and isinstance(value, int):
        size, unit = next((size, unit) for size, unit in _UNITS if value % size == 0)
        return [row.flag, f"{value // size}{unit}"]
    return [row.flag, repr(value) if isinstance(value, float) else str(value)]


def command_plan_line(
    options: Options, config: SearchConfig, batch_size: int, gpu: Gpu, *, what_ifs: Sequence[str], run_all: bool
) -> str | Unknown:
    """Return the line that opens a command's plan again, with what was typed, for the GPU it is planned for now.

    Args:
        options: as they were typed; `config`, of a command or a model that transformers builds, was made of them.
        gpu: that it is planned for now.
        what_ifs: the changes that were asked for, as they were typed; `run_all`: try changes at once.
    """
    device, typed = device_option(gpu), None if gpu.context is None else gpu.context.typed_bytes
    if isinstance(device, Unknown):
        return device
    asked = replace(options, gpu=device, context_bytes=typed, target_batch=config.target_batch, target_tokens=None)
    words = ["gpumem-tui", "plan", *typed_words(asked, OPTIONS.keys() - _OF_A_SEARCH)]
    if config.workload.takes_batch:
        words += ["--batch-size", str(batch_size)]
    words += [word for name in what_ifs for word in ("--what-if", name)]
    words += [] if run_all else ["--no-what-if"]
    command = options.trained.command
    return shlex.join([*words, *(("--", *command) if command else ())])


def options_of(plan: Plan, python: str | None = None) -> Options:
    """Return what to search with a plan's settings.

    Raises:
        OptionError: a model or a GPU that only this plan has.
    """
    draft = draft_of(plan)
    file = draft.model_file if draft.model_file is not None and draft.model_file.shape == draft.shape else None
    if file is None and models().get(draft.shape.name) != draft.shape:
        raise OptionError("the model is none of the catalog's: search it with --config")
    device = device_option(plan.gpu)
    if isinstance(device, Unknown):
        raise OptionError(device.reason)
    trained = WorkloadOptions(
        model=draft.shape.name if file is None else None,
        config=None if file is None else file.path,
        dequantize=file is not None and file.dequantize,
        changes=draft.changes,
        **asdict(plan.recipe),
    )
    typed = None if plan.gpu.context is None else plan.gpu.context.typed_bytes
    return Options(
        trained,
        device,
        python=python,
        headroom=plan.headroom,
        target_batch=plan.target_batch,
        context_bytes=typed,
        beside=None if plan.gpu.engine is None else plan.gpu.engine.typed,
    )


def configure(options: Options) -> SearchConfig:
    """Work out what to search. Asks the driver for the GPUs: that may take a while, or for ever where it hangs.

    Raises:
        OptionError: the options are wrong, or do not go together.
    """
    options.check_custom()
    python = interpreter(options.python) or sys.executable
    workload = options.trained.spec(python)
    gpus = _seen_gpus()
    device = choose_device(options.gpu, gpus, share=options.share)
    if workload.command is not None:
        device = with_ranks(device, workload.command.processes, gpus, share=options.share)
    device = options.on(device)
    limit_bytes = options.limit_bytes or share_limit_bytes(device)
    _check_limit(limit_bytes, device.gpu.total_bytes)
    terms = {**options.terms_of(workload), "limit_bytes": limit_bytes}
    typed = typed_words(options, OPTIONS.keys() - {"share", *(row.name for row in SEARCH)})
    config = SearchConfig(workload, device, python, AllocatorSettings.from_environment(), typed=typed)
    return changed(config, terms)


def _seen_gpus() -> tuple[RealGpu, ...] | Unknown:
    gpus = list_gpus()
    return gpus if isinstance(gpus, Unknown) else visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def device_of(options: Options, *, engine: bool = True) -> Device:
    """Return the device alone, for what no process of a command runs on.

    Args:
        engine: leave out what an inference engine takes of it.

    Raises:
        OptionError: no such device, or a wrong description of one.
    """
    options.check_custom()
    device = choose_device(options.gpu, _seen_gpus(), share=options.share)
    return options.on(device) if engine else options.with_context(device)


def limit_from(text: str, total_bytes: int) -> int:
    """Return a cap on the allocator as it is typed, in bytes.

    Raises:
        OptionError: no size, or more than the device has.
    """
    try:
        limit_bytes = size_from(text)
    except ValueError as error:
        raise OptionError(f"--limit: {error}") from error
    _check_limit(limit_bytes, total_bytes)
    return limit_bytes


def _check_limit(limit_bytes: int | None, total_bytes: int) -> None:
    if (limit_bytes or 0) > total_bytes:
        raise OptionError(f"--limit: the device has only {format_bytes(total_bytes)}; give less")


def check_searchable(config: SearchConfig, verb: str = "search") -> None:
    """Check that a search can run the step.

    Args:
        verb: that is typed for it.

    Raises:
        OptionError: a GPU of this machine would run one of several ranks alone, which only a simulated one can; only
            the formula knows the recipe; the GPUs have nothing to do; or a command's batch size cannot be set.
    """
    command = config.workload.command
    if command is not None and not command.takes_batch:
        raise OptionError(f"-- COMMAND: has no {{batch}}: {line_for_any_batch(config, verb)}")
    if config.workload.as_torch and not config.device.simulated:
        raise OptionError(
            f"--torch-version {config.workload.as_torch}: a GPU of this machine runs the torch that is installed; give "
            "--gpu sim:NAME"
        )
    if config.workload.rank and not config.device.simulated:
        raise OptionError("--rank: a GPU of this machine runs what the command starts; give --gpu sim:NAME")
    if (config.workload.resume or config.workload.through in ("save", "all")) and not config.device.simulated:
        option = "--resume" if config.workload.resume else f"--through {config.workload.through}"
        raise OptionError(f"{option}: on a GPU of this machine checkpoints are written and read; give --gpu sim:NAME")
    recipe = config.workload.recipe
    if config.workload.shape is not None and (reason := why_formula_only(config.workload.shape, recipe)):
        raise OptionError(f"{reason}; `gpumem-tui predict` answers")
    if (recipe.sharding != "none" or recipe.tensor_parallel > 1) and not config.device.simulated:
        is_cut = recipe.sharding == "none"
        option = f"--tensor-parallel {recipe.tensor_parallel}" if is_cut else f"--sharding {recipe.sharding}"
        raise OptionError(
            f"{option}: a search on a GPU of this machine runs the step of one GPU; --gpu sim:NAME simulates one rank "
            "of several"
        )
    check_gpus_are_used(config.workload)


def check_gpus_are_used(workload: WorkloadSpec) -> None:
    """Check that several GPUs have something to divide among them.

    Raises:
        OptionError: they have not.
    """
    recipe = workload.recipe
    alone = recipe.sharding == "none" and recipe.model_parallel == recipe.expert_parallel == 1
    if recipe.gpus > 1 and alone and workload.command is None:
        raise OptionError(f"--gpus {recipe.gpus}: is how many to shard over; add --sharding zero1, zero2 or zero3")


def predicted_size(config: SearchConfig, given: int | None, line: str) -> int:
    """Return the batch size that a prediction is about; of a command without ``{batch}``, the one that it has.

    Args:
        line: what to type to give one.

    Raises:
        OptionError: none was given, or one that the command has no place for.
    """
    command = config.workload.command
    if command is None or command.takes_batch:
        if given is None and command is not None:
            raise OptionError(f"{{batch}} has no number: `{line}`")
        if given is None:
            own = "your own script: `gpumem-tui predict -- python train.py --batch-size 32`"
            raise OptionError(f"--batch-size is missing: `{line}`; {own}")
        return given
    proposal = command.proposal
    if given is not None:
        proposed = f": {proposal.proposed}" if proposal is not None else ""
        raise OptionError(f"--batch-size: the command has no {{batch}} to put it in; write it there{proposed}")
    return 1 if proposal is None else proposal.batch_size


def interpreter(path: str | None) -> str | None:
    """Return the program behind ``--python``; None for none given.

    Raises:
        OptionError: it cannot be run.
    """
    if path is None:
        return None
    found = shutil.which(os.path.expanduser(path))
    if found is None:
        raise OptionError(
            f"--python: {path or 'nothing'} is not a program that can be run; give the path of a Python with torch"
        )
    return found
