"""The command line: parses, then calls one function. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpumem_tui import __version__
from gpumem_tui.formula.recipe import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, SHARDINGS
from gpumem_tui.memory import GIB, KIB, MIB, Unknown, format_bytes

if TYPE_CHECKING:
    from gpumem_tui.options import WorkloadOptions
    from gpumem_tui.search.runner import Predicted, SearchConfig

EXIT_BAD_INPUT = 2
EXIT_FAILED = 4
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


def main() -> None:
    """Entry point: every error a user can cause is one line on stderr and an exit code."""
    from gpumem_tui.options import OptionError

    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        code = _complain(error.format_message(), EXIT_BAD_INPUT)
    except OptionError as error:
        code = _complain(str(error), EXIT_BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code or 0)


class _Size(click.ParamType[int]):
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


_AT_LEAST_ONE = click.IntRange(min=1)

_WORKLOAD_OPTIONS = [
    click.option("--model", metavar="NAME", help="A model of the catalog (default: gpt2)."),
    click.option("--config", metavar="CONFIG_JSON", help="A Hugging Face config.json instead."),
    click.option("--workload", metavar="FILE[:NAME]", help="Your own step: build, make_batch and train_step."),
    click.option("--layers", type=_AT_LEAST_ONE, help="Change the model: layers."),
    click.option("--hidden", type=_AT_LEAST_ONE, help="Width of the residual stream."),
    click.option("--heads", type=_AT_LEAST_ONE, help="Attention heads."),
    click.option("--kv-heads", type=_AT_LEAST_ONE, help="Key/value heads."),
    click.option("--ffn", type=_AT_LEAST_ONE, help="Inner width of the feed-forward network."),
    click.option("--vocab", type=_AT_LEAST_ONE, help="Vocabulary size."),
    click.option("--seq-len", type=_AT_LEAST_ONE, help="Sequence length to train at."),
    click.option("--image-size", type=_AT_LEAST_ONE, help="Pixels a side."),
    click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True),
    click.option("--recompute", type=click.Choice(RECOMPUTES), default="none", show_default=True),
    click.option("--attention", type=click.Choice(ATTENTIONS), default="auto", show_default=True),
    click.option("--sharding", type=click.Choice(SHARDINGS), default="none", show_default=True),
    click.option("--gpus", type=_AT_LEAST_ONE, default=1, show_default=True, help="GPUs to shard over."),
]
_DEVICE_OPTIONS = [
    click.option("--gpu", metavar="DEVICE", help="0, a UUID or sim:NAME (default: a free GPU, else sim:a100-80gb)."),
    click.option("--limit", "limit_bytes", type=_Size(), help="Never reserve more than this, e.g. 20GiB."),
    click.option("--share", is_flag=True, help="Use a GPU that other processes use, in what they leave."),
    click.option(
        "--headroom", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True,
        help="Share of the GPU that the formula leaves free.",
    ),
    click.option("--target-batch", type=_AT_LEAST_ONE, help="Wanted global batch size: says the accumulation steps."),
    click.option("--python", metavar="PATH", help="Interpreter that has torch (default: this one)."),
    click.option("--steps", type=_AT_LEAST_ONE, default=3, show_default=True, help="Training steps a trial."),
]  # fmt: skip


def _with_options(*groups: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, package_name="gpumem-tui")
@click.pass_context
def cli(context: click.Context) -> int | None:
    """Where GPU memory goes while a neural network trains, how large a batch fits, and what would help."""
    if context.invoked_subcommand is not None:
        return None
    if not _is_terminal():
        raise click.UsageError("no terminal to draw on; `gpumem-tui search --plain` and `--json` need none")
    options, config = _configure({})
    return _open_screen(options, config, autostart=False)


@cli.command()
@_with_options(_WORKLOAD_OPTIONS, _DEVICE_OPTIONS)
@click.option(
    "--strategy", type=click.Choice(["guided", "ramp", "double", "binary"]), default="guided", show_default=True
)
@click.option("--step", "ramp_step", type=_AT_LEAST_ONE, help="Step of the ramp (default: suits the prediction).")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=300.0, show_default=True,
    help="Seconds of silence after which a trial counts as hung.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="JSON lines: one a trial, then the result.")
@click.option("--plain", is_flag=True, help="Log lines instead of the screen.")
def search(as_json: bool, plain: bool, **values: Any) -> int:
    """Ramp a real training step until it is out of memory, with the prediction beside it."""
    if as_json and plain:
        raise click.UsageError("--json and --plain: give only one of them")
    target_batch = values.pop("target_batch")
    options, config = _configure(values)
    _refuse_sharding(config)
    if not as_json and not plain and _is_terminal():
        return _open_screen(options, config, autostart=True)
    from gpumem_tui.search.headless import run

    return run(config, as_json=as_json, target_batch=target_batch)


@cli.command()
@_with_options(_WORKLOAD_OPTIONS, _DEVICE_OPTIONS)
@click.option("--batch-size", type=_AT_LEAST_ONE, required=True, help="Batch size to predict.")
@click.option(
    "--by", type=click.Choice(["module", "operator", "source"]), help="Also list what holds the traced peak, by place."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def predict(batch_size: int, by: str | None, as_json: bool, **values: Any) -> int:
    """Predict one batch size by formula and by tracing the real step; needs no GPU."""
    from gpumem_tui.formula.plan import accumulation
    from gpumem_tui.search import report
    from gpumem_tui.search.prediction import Traced

    target_batch = values.pop("target_batch")
    _, config = _configure({**values, "share": True})
    predicted = _predict(config)
    prediction = predicted.prediction
    body = report.prediction_json(config, prediction, batch_size)
    steps = None
    if target_batch is not None:
        steps = accumulation(target_batch, batch_size, config.workload.recipe.gpus)
        body["accumulation"] = report.accumulation_json(steps)
    if as_json:
        click.echo(json.dumps(body))
        return 0
    click.echo(report.workload_line(config.workload))
    click.echo(f"on {report.device_line(config.device)}, torch {predicted.ready.torch_version}")
    click.echo(report.predicted_line(prediction))
    for line in report.ledger_lines(config, prediction, None, batch_size):
        click.echo(line)
    if isinstance(prediction.traced, Traced):
        click.echo(report.fits_line(prediction.traced, batch_size))
        for line in report.assumed_lines(prediction.traced):
            click.echo(line)
    if by is not None and isinstance(prediction.traced, Traced):
        click.echo(f"\nthe traced peak by {by}")
        for line in report.composition_lines(prediction.traced, batch_size, by):
            click.echo(line)
    if steps is not None:
        click.echo(report.accumulation_line(config.workload, steps))
    return 0


def _configure(values: dict[str, Any]) -> tuple[WorkloadOptions, SearchConfig]:
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


def _refuse_sharding(config: SearchConfig) -> None:
    recipe = config.workload.recipe
    if recipe.sharding != "none":
        raise click.UsageError(
            f"--sharding {recipe.sharding}: a search runs the step of one GPU; `gpumem-tui predict` covers sharding"
        )


def _predict(config: SearchConfig) -> Predicted:
    from gpumem_tui.search.process import ChildDied
    from gpumem_tui.search.runner import Unusable, predict

    try:
        return predict(config)
    except Unusable as error:
        raise SystemExit(_complain(str(error), error.exit_code)) from error
    except ChildDied as error:
        raise SystemExit(_complain(f"tracing failed: {error}", EXIT_FAILED)) from error


def _open_screen(options: WorkloadOptions, config: SearchConfig, *, autostart: bool) -> int:
    from gpumem_tui.search import report
    from gpumem_tui.tui.app import run

    return run(config, options, report.device_line(config.device), autostart)


def _is_terminal() -> bool:
    """Textual draws on stderr and reads stdin; all three must be the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()


def _complain(message: str, code: int) -> int:
    click.echo(f"gpumem-tui: {' '.join(message.split())}", err=True)
    return code
