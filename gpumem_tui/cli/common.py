"""What several commands share: options, the configuration they describe, and how a complaint is made."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpumem_tui.formula.recipe import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, SHARDINGS
from gpumem_tui.memory import GIB, KIB, MIB, Unknown, format_bytes

if TYPE_CHECKING:
    from gpumem_tui.options import WorkloadOptions
    from gpumem_tui.search.runner import SearchConfig

EXIT_BAD_INPUT = 2
EXIT_FAILED = 4
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


class Size(click.ParamType[int]):
    """A memory size: a number of bytes, or with a unit (20GiB, 512MiB; GB and G mean GiB)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(i?B)?", str(value), re.IGNORECASE)
        size_bytes = 0
        if match is not None:
            unit = {"": 1, "K": KIB, "M": MIB, "G": GIB}[match[2].upper()]
            size_bytes = int(float(match[1]) * unit)
        if size_bytes <= 0:
            self.fail(f"{value!r} is not a size such as 20GiB or 512MiB", param, ctx)
        return size_bytes


AT_LEAST_ONE = click.IntRange(min=1)

WORKLOAD_OPTIONS = [
    click.option("--model", metavar="NAME", help="A model of the catalog (default: gpt2)."),
    click.option("--config", metavar="CONFIG_JSON", help="A Hugging Face config.json instead."),
    click.option("--workload", metavar="FILE[:NAME]", help="Your own step: build, make_batch and train_step."),
    click.option("--layers", type=AT_LEAST_ONE, help="Change the model: layers."),
    click.option("--hidden", type=AT_LEAST_ONE, help="Width of the residual stream."),
    click.option("--heads", type=AT_LEAST_ONE, help="Attention heads."),
    click.option("--kv-heads", type=AT_LEAST_ONE, help="Key/value heads."),
    click.option("--ffn", type=AT_LEAST_ONE, help="Inner width of the feed-forward network."),
    click.option("--vocab", type=AT_LEAST_ONE, help="Vocabulary size."),
    click.option("--seq-len", type=AT_LEAST_ONE, help="Sequence length to train at."),
    click.option("--image-size", type=AT_LEAST_ONE, help="Pixels a side."),
    click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True),
    click.option("--recompute", type=click.Choice(RECOMPUTES), default="none", show_default=True),
    click.option("--attention", type=click.Choice(ATTENTIONS), default="auto", show_default=True),
    click.option("--sharding", type=click.Choice(SHARDINGS), default="none", show_default=True),
    click.option("--gpus", type=AT_LEAST_ONE, default=1, show_default=True, help="GPUs to shard over."),
]
DEVICE_OPTIONS = [
    click.option("--gpu", metavar="DEVICE", help="0, a UUID or sim:NAME (default: a free GPU, else sim:a100-80gb)."),
    click.option("--limit", "limit_bytes", type=Size(), help="Never reserve more than this, e.g. 20GiB."),
    click.option("--share", is_flag=True, help="Use a GPU that other processes use, in what they leave."),
    click.option(
        "--headroom", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True,
        help="Share of the GPU that the formula leaves free.",
    ),
    click.option("--target-batch", type=AT_LEAST_ONE, help="Wanted global batch size: says the accumulation steps."),
    click.option("--python", metavar="PATH", help="Interpreter that has torch (default: this one)."),
    click.option("--steps", type=AT_LEAST_ONE, default=3, show_default=True, help="Training steps a trial."),
]  # fmt: skip


def with_options(*groups: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """Decorates a command with groups of options, in their order."""

    def decorate(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def configure(values: dict[str, Any]) -> tuple[WorkloadOptions, SearchConfig]:
    """Options and search configuration from the command line's values; a value not given takes its default."""
    from gpumem_tui.monitor.devices import list_gpus
    from gpumem_tui.options import (
        ModelChanges,
        OptionError,
        WorkloadOptions,
        choose_device,
        share_limit_bytes,
        visible_gpus,
    )
    from gpumem_tui.search.process import default_python
    from gpumem_tui.search.runner import SearchConfig
    from gpumem_tui.simulator.settings import AllocatorSettings, SettingsError

    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "image_size")
    changes = ModelChanges(**{name: values.pop(name, None) for name in names})
    recipe = ("model", "config", "workload", "precision", "optimizer", "recompute", "attention", "sharding", "gpus")
    options = WorkloadOptions(changes=changes, **{name: values.pop(name) for name in recipe if name in values})
    workload = options.spec()
    python = _interpreter(values.pop("python", None)) or default_python()
    gpus = list_gpus()
    if not isinstance(gpus, Unknown):
        gpus = visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    device = choose_device(values.pop("gpu", None), gpus, share=values.pop("share", False))
    values["limit_bytes"] = values.get("limit_bytes") or share_limit_bytes(device)
    if (values["limit_bytes"] or 0) > device.gpu.total_bytes:
        raise OptionError(f"--limit: the device has only {format_bytes(device.gpu.total_bytes)}")
    try:
        allocator = AllocatorSettings.from_environment()
    except SettingsError as error:
        raise OptionError(str(error)) from error
    return options, SearchConfig(workload=workload, device=device, python=python, allocator=allocator, **values)


def _interpreter(path: str | None) -> str | None:
    if path is None:
        return None
    found = shutil.which(os.path.expanduser(path))
    if found is None:
        raise click.UsageError(f"--python: {path} is no program that can be run; give the path of a Python with torch")
    return found


def open_screen(options: WorkloadOptions, config: SearchConfig, *, autostart: bool) -> int:
    """Open the terminal program on the Search screen and return the exit code."""
    from gpumem_tui.search import report
    from gpumem_tui.tui.app import GpuMemApp, run_app
    from gpumem_tui.tui.glyphs import wants_ascii
    from gpumem_tui.tui.screens.main import MainScreen
    from gpumem_tui.tui.screens.search import SearchScreen

    notice = report.device_line(config.device)

    def search_screen() -> MainScreen:
        return SearchScreen(config, options, notice, autostart=autostart)

    return run_app(GpuMemApp({"search": search_screen}, "search", ascii_only=wants_ascii(os.environ)))


def is_terminal() -> bool:
    """Textual draws on stderr and reads stdin; all three must be the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()


def complain(message: str, code: int) -> int:
    """One line on stderr; returns the exit code."""
    click.echo(f"gpumem-tui: {' '.join(message.split())}", err=True)
    return code
