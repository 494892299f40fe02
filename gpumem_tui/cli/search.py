"""`search` and `predict`: how large a batch fits, tried and foretold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.common import is_terminal, predict_or_exit
from gpumem_tui.cli.numbers import Finite
from gpumem_tui.cli.workload import AT_LEAST_ONE, DEVICE_OPTIONS, WORKLOAD_OPTIONS, choice, with_options
from gpumem_tui.configuration import configure
from gpumem_tui.search.strategy import MAX_BATCH_SIZE, NAMES

if TYPE_CHECKING:
    from gpumem_tui.search.runner import SearchConfig


@click.command(short_help="Find the largest batch: ramp a real step until out of memory.")
@with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS)
@choice("--strategy", NAMES, "Next size: from the prediction, in even steps, doubled, or halving a range.")
@click.option("--step", "ramp_step", type=AT_LEAST_ONE, help="Step of the ramp (default: suits the prediction).")
@click.option(
    "--timeout", "timeout_s", type=Finite(min=1), default=300.0, show_default=True,
    help="Seconds of silence after which a trial counts as hung.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="JSON lines: one a trial, then the result.")
@click.option("--plain", is_flag=True, help="Log lines instead of the screen.")
def search(as_json: bool, plain: bool, **values: Any) -> int:
    """Ramp a real training step until it is out of memory, with the prediction beside it."""
    if as_json and plain:
        raise click.UsageError("--json and --plain: give only one of them")
    options, config = configure(values)
    _refuse_sharding(config)
    _refuse_idle_gpus(config)
    if not as_json and not plain and is_terminal():
        from gpumem_tui.tui.start import open_search

        return open_search(options, config, autostart=True)
    from gpumem_tui.search.headless import run

    return run(config, as_json=as_json)


@click.command(short_help="Predict one batch size by formula and by tracing the step.")
@with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS)
@click.option("--batch-size", type=click.IntRange(1, MAX_BATCH_SIZE), required=True, help="Batch size to predict.")
@click.option(
    "--by", type=click.Choice(["module", "operator", "source"]), help="Also list what holds the traced peak, by place."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def predict(batch_size: int, by: str | None, as_json: bool, **values: Any) -> int:
    """Predict one batch size by formula and by tracing the real step; needs no GPU."""
    from gpumem_tui.search.headless import show_prediction

    _, config = configure({**values, "share": True})
    _refuse_idle_gpus(config)
    show_prediction(config, predict_or_exit(config, batch_size), batch_size, by, as_json=as_json)
    return 0


def _refuse_idle_gpus(config: SearchConfig) -> None:
    recipe = config.workload.recipe
    if recipe.gpus > 1 and recipe.sharding == "none":
        raise click.UsageError(f"--gpus {recipe.gpus}: is how many to shard over; add --sharding zero1, zero2 or zero3")


def _refuse_sharding(config: SearchConfig) -> None:
    recipe = config.workload.recipe
    if recipe.sharding != "none":
        raise click.UsageError(
            f"--sharding {recipe.sharding}: a search runs the step of one GPU; `gpumem-tui predict` covers sharding"
        )
