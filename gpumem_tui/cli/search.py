"""`search` and `predict`: how large a batch fits, tried and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.common import is_terminal, predict_or_exit
from gpumem_tui.cli.groups import with_options
from gpumem_tui.cli.hosts import HOST_OPTIONS, search_on_host, single_host
from gpumem_tui.cli.numbers import Whole
from gpumem_tui.cli.workload import (
    AT_LEAST_ONE,
    DEVICE_OPTIONS,
    WORKLOAD_OPTIONS,
    TakesCommand,
    asked,
    choice,
    configured,
)
from gpumem_tui.search.strategy import MAX_BATCH_SIZE, NAMES

if TYPE_CHECKING:
    from gpumem_tui.search.config import SearchConfig


@click.command(cls=TakesCommand, short_help="Find the largest batch: ramp a real step until out of memory.")
@with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS)
@choice("--strategy", NAMES, "Next size: from the prediction, in even steps, doubled, or halving a range.")
@click.option("--step", "ramp_step", type=AT_LEAST_ONE, help="Step of the ramp (default: suits the prediction).")
@click.option("--json", "as_json", is_flag=True, help="JSON lines: one a trial, then the result.")
@click.option("--plain", is_flag=True, help="Log lines instead of the screen.")
@click.option("--quiet", is_flag=True, help="Do not show what a command prints.")
@with_options(HOST_OPTIONS)
def search(
    as_json: bool,
    plain: bool,
    quiet: bool,
    host: str | None,
    remote_directory: str | None,
    remote_command: str | None,
    **values: Any,
) -> int:
    """Ramp a real training step until it is out of memory, with the prediction beside it.

    The step is a catalog model's (--model), your file's (--workload), or your own command's, unchanged, after `--`:
    `gpumem-tui search -- python train.py --batch-size {batch}`. {accumulation} is replaced by what reaches
    --target-batch. With --host it runs on another machine that has gpumem-tui too; GPU, interpreter and files are
    those there.
    """
    if as_json and plain:
        raise click.UsageError("--json and --plain: give only one of them")
    on_screen = not as_json and not plain and is_terminal()
    if there := single_host(host, remote_directory, remote_command):
        remote, ssh, settings = there
        wanted = asked(values)
        return search_on_host(
            remote, ssh, remote_directory or "", wanted, settings, as_json=as_json, quiet=quiet, on_screen=on_screen
        )
    from gpumem_tui.options.configuration import check_searchable

    options, config = configured(values)
    check_searchable(config)
    if on_screen:
        from gpumem_tui.tui.start import open_search

        return open_search(options, config, autostart=True)
    from gpumem_tui.plan.advice import advice_lines
    from gpumem_tui.search.headless import run

    return run(config, advice_lines, as_json=as_json, quiet=quiet)


@click.command(cls=TakesCommand, short_help="Predict one batch size by formula and by tracing the step.")
@with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS)
@click.option("--batch-size", type=Whole(1, MAX_BATCH_SIZE), help="Batch size to predict.")
@click.option(
    "--by", type=click.Choice(["module", "operator", "source"]), help="Also list what holds the traced peak, by place."
)
@click.option(
    "--snapshot", metavar="FILE", type=click.Path(path_type=Path),
    help="Also write the simulated run as a PyTorch memory snapshot, for pytorch.org/memory_viz or `look`.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--quiet", is_flag=True, help="Do not show what a command prints.")
def predict(
    batch_size: int | None, by: str | None, snapshot: Path | None, as_json: bool, quiet: bool, **values: Any
) -> int:
    """Predict one batch size by formula and by tracing the real step; needs no GPU.

    The step is a catalog model's (--model), your file's (--workload), or your own command's, unchanged, after `--`:
    `gpumem-tui predict -- python train.py --batch-size 32`.
    """
    from gpumem_tui.cli.snapshot import check_target, write_prediction
    from gpumem_tui.options.configuration import check_gpus_are_used
    from gpumem_tui.search.headless import show_prediction

    if snapshot is not None:
        check_target(snapshot)
    _, config = configured(values, share=True)
    check_gpus_are_used(config.workload)
    size = predicted_size(config, batch_size)
    prediction, ready = predict_or_exit(config, size, quiet=quiet)
    show_prediction(config, prediction, ready, size, by, as_json=as_json)
    return 0 if snapshot is None else write_prediction(prediction, size, snapshot)


def predicted_size(config: SearchConfig, given: int | None) -> int:
    """The batch size that a prediction is about; of a command without ``{batch}``, the one that it has."""
    command = config.workload.command
    if command is None or command.takes_batch:
        if given is None:
            raise click.UsageError("--batch-size: say which batch size to predict")
        return given
    proposal = command.proposal
    if given is not None:
        proposed = f": write {proposal.proposed}" if proposal is not None else ""
        raise click.UsageError(f"--batch-size: the command has no {{batch}} to put it in{proposed}")
    return 1 if proposal is None else proposal.batch_size
