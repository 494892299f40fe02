"""`plan`: what-if, on the screen or as text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.common import is_terminal, predict_or_exit
from gpumem_tui.cli.goals import GOAL_OPTIONS, goals_from, refuse_goals
from gpumem_tui.cli.groups import with_options
from gpumem_tui.cli.numbers import Finite
from gpumem_tui.cli.search import predicted_size
from gpumem_tui.cli.workload import (
    AT_LEAST_ONE,
    DEVICE_OPTIONS,
    WORKLOAD_OPTIONS,
    TakesCommand,
    configured,
    trained_command,
)
from gpumem_tui.formula.extras import EXTRAS, Extras, why_not
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.injected import NAMES
from gpumem_tui.plan.quantities import QUANTITIES, TRACE_LIMIT_S, Quantity

if TYPE_CHECKING:
    from gpumem_tui.options.workload import WorkloadOptions
    from gpumem_tui.plan.goals import Goals
    from gpumem_tui.plan.plan import Plan
    from gpumem_tui.search.config import SearchConfig
    from gpumem_tui.search.prediction import Traced

_OF_A_SEARCH = frozenset({"limit_bytes", "share"})
"""Device options that a plan does not take: it has the whole GPU."""

_USUAL_BATCH_SIZE = 8
"""What ``{batch}`` of a command is where nothing is said: its one trace answers for every other size, too."""


@click.command(cls=TakesCommand, short_help="What fits, what would make more fit, and what it costs.")
@with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS)
@click.option(
    "--batch-size", type=AT_LEAST_ONE, help="Samples of one pass on one GPU (default: 1; of {batch} in a command, 8)."
)
@click.option("--accumulation", type=AT_LEAST_ONE, help="Passes of an optimizer step, instead of --target-batch.")
@click.option(
    "--solve",
    type=click.Choice(QUANTITIES),
    help="Of a model: how far this number can go with the others as they are; says that alone.",
)
@click.option(
    "--extra", "extras", type=click.Choice(EXTRAS), multiple=True, help="A technique that only the formula knows."
)
@with_options(GOAL_OPTIONS)
@click.option(
    "--what-if", "what_ifs", type=click.Choice(NAMES), multiple=True,
    help="Of a command: run it with this change only, not with all that apply.",
)  # fmt: skip
@click.option("--no-what-if", is_flag=True, help="Of a command: run it as it is only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--markdown",
    "--plain",
    "markdown",
    is_flag=True,
    help="Markdown instead of the screen; the default where stdout is not a terminal.",
)
@click.option("--no-trace", is_flag=True, help="Formula only: answer at once, without torch.")
@click.option(
    "--trace-limit",
    type=Finite(min=0),
    default=TRACE_LIMIT_S,
    show_default=True,
    help="Without the screen, of a model: seconds that traces may take; then the formula answers.",
)
@click.option("--quiet", is_flag=True, help="Do not show what a command prints.")
def plan(as_json: bool, markdown: bool, **values: Any) -> int:
    """What fits, what would make more fit, and what it costs: every what-if on one screen.

    The step is a catalog model's (--model) or your own command's, unchanged, after `--`: `gpumem-tui plan -- python
    train.py --batch-size 8`. A command is run for every what-if, with the change made to it.
    """
    solve, limit_s = values.pop("solve"), values.pop("trace_limit")
    if as_json and markdown:
        raise click.UsageError("--json and --markdown: give only one of them")
    on_screen = not (as_json or markdown or solve) and is_terminal()
    no_trace, quiet, passes = values.pop("no_trace"), values.pop("quiet"), values.pop("accumulation")
    what_ifs, none = values.pop("what_ifs"), values.pop("no_what_if")
    size, extras = values.pop("batch_size"), frozenset(values.pop("extras"))
    goals = goals_from(values)
    if trained_command() and no_trace:
        raise click.UsageError("--no-trace: a command has no closed form, only a trace; leave it out")
    if solve == "gpus":
        values["gpus"] = max(values["gpus"], _fewest(values))
    options, config = configured(values, share=True)
    if config.workload.command is not None:
        if no_trace:
            raise click.UsageError(f"--no-trace: {config.workload.name} has no closed form, only a trace; leave it out")
        refuse_goals(goals)
        if solve or passes:
            option = "--solve" if solve else "--accumulation"
            raise click.UsageError(f"{option}: is for models with a closed form; `gpumem-tui search` finds the batch")
        wanted_changes = _what_ifs(config, what_ifs, extras, none=none)
        return _plan_traced(options, config, size, wanted_changes, as_json=as_json, on_screen=on_screen, quiet=quiet)
    for option, given in (("--what-if", what_ifs), ("--no-what-if", none)):
        if given:
            raise click.UsageError(f"{option}: is about a command; write one after `--`")
    config = _accumulated(config, size or 1, passes, solve)
    wanted = _planned(config, size or 1, extras, goals)
    if solve:
        limit_s = 0.0 if no_trace else limit_s
        return _solved(solve, wanted, config, passes, limit_s, as_json=as_json, markdown=markdown)
    if on_screen:
        from gpumem_tui.tui.start import open_plan

        return open_plan(wanted, config)
    return _shown(wanted, config, 0.0 if no_trace else limit_s, as_json=as_json, no_trace=no_trace)


plan.params = [option for option in plan.params if option.name not in _OF_A_SEARCH]


def _shown(wanted: Plan, config: SearchConfig, limit_s: float, *, as_json: bool, no_trace: bool) -> int:
    """The plan as text. It and what would help are traced, as far as the time reaches."""
    from gpumem_tui.plan.export import plan_json
    from gpumem_tui.plan.markdown import plan_markdown
    from gpumem_tui.plan.solving import Solver
    from gpumem_tui.plan.tracing import TraceOptions

    began = time.monotonic()
    traced = Unknown("not asked for (--no-trace)") if no_trace else _traced(wanted, config, limit_s)
    left_s = max(0.0, limit_s - (time.monotonic() - began))
    solver = Solver(TraceOptions.of(config), limit_s, _say, ends=time.monotonic() + left_s)
    if as_json:
        click.echo(json.dumps(plan_json(wanted, traced, config.device, solver.answer)))
    else:
        click.echo(plan_markdown(wanted, traced, solver.answer), nl=False)
    return 0


def _say(line: str) -> None:
    """On stderr, while something takes its time; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        click.echo(f"{line} …", err=True)


def _planned(config: SearchConfig, batch_size: int, extras: Extras, goals: Goals) -> Plan:
    """The plan of a model with a closed form."""
    from gpumem_tui.plan.controls import check
    from gpumem_tui.plan.plan import Plan

    shape, recipe = config.workload.shape, config.workload.recipe
    if shape is None:
        raise click.UsageError("--workload: a plan needs a model's shape; `gpumem-tui predict` traces a file")
    for extra in sorted(extras):
        reason = why_not(extra, shape, recipe)
        if reason is not None:
            raise click.UsageError(f"--extra {extra}: {reason}")
    goals.check(has_tokens=bool(shape.seq_len))
    wanted = Plan(
        shape,
        recipe,
        config.device.gpu,
        batch_size,
        config.headroom,
        config.target_batch,
        extras,
        goals,
        config.workload.model_file,
    )
    check(wanted)
    return wanted


def _what_ifs(config: SearchConfig, what_ifs: tuple[str, ...], extras: Extras, *, none: bool) -> tuple[str, ...] | None:
    """The changes to run: empty for all that apply, None for none."""
    if extras:
        what = "a command" if config.workload.hugging_face is None else "what has no closed form"
        raise click.UsageError(f"--extra {min(extras)}: is for models of the catalog; of {what} see --what-if")
    if what_ifs and none:
        raise click.UsageError("--what-if and --no-what-if: give only one of them")
    return None if none else what_ifs


def _plan_traced(
    options: WorkloadOptions,
    config: SearchConfig,
    given: int | None,
    what_ifs: tuple[str, ...] | None,
    *,
    as_json: bool,
    on_screen: bool,
    quiet: bool,
) -> int:
    """The plan of what only a trace knows: on the screen, as JSON or as Markdown."""
    if config.workload.hugging_face is not None:
        given = given or 1
    command = config.workload.command
    if given is None and command is not None and command.takes_batch:
        given = _USUAL_BATCH_SIZE
        if not (on_screen or quiet):
            click.echo(f"gpumem-tui: planning for batch {given}; --batch-size takes another", err=True)
    size = predicted_size(config, given)
    if on_screen:
        from gpumem_tui.tui.start import open_command_plan

        return open_command_plan(options, config, size, what_ifs or (), run_all=what_ifs is not None)
    from gpumem_tui.plan.command_headless import show

    return show(config, size, what_ifs, as_json=as_json, quiet=quiet)


@contextmanager
def _said(line: str) -> Iterator[None]:
    """A line on stderr while something takes its time; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    click.echo(f"{line} …", nl=False, err=True)
    try:
        yield
    finally:
        click.echo("\r\x1b[K", nl=False, err=True)


def _traced(wanted: Plan, config: SearchConfig, limit_s: float) -> Traced | Unknown:
    """The trace of a plan, or why there is none."""
    from gpumem_tui.plan.solving import too_long
    from gpumem_tui.plan.tracing import trace_key
    from gpumem_tui.search.control import Cancelled

    key = trace_key(wanted)
    if isinstance(key, Unknown):
        return key
    with _said(f"tracing one step of {wanted.shape.name} without a GPU: {limit_s:g} s at most"):
        try:
            return predict_or_exit(config, wanted.batch_size, limit_s=limit_s)[0].traced
        except Cancelled:
            return too_long(limit_s)


def _fewest(values: dict[str, Any]) -> int:
    """GPUs that the options need at least, where their number is what is asked for."""
    copies = 1 if values["sharding"] == "none" else 2
    cuts: list[int] = [values[f"{cut}_parallel"] for cut in ("tensor", "context", "pipeline")]
    return copies * prod(cuts)


def _accumulated(config: SearchConfig, size: int, passes: int | None, solve: str | None) -> SearchConfig:
    """The target batch that so many passes of a step make."""
    if passes is None:
        return config
    if solve == "accumulation":
        raise click.UsageError("--accumulation: is what is solved for; leave it out")
    if solve == "gpus":
        return config
    if config.target_batch is not None:
        raise click.UsageError("--accumulation and --target-batch: give only one of them")
    return replace(config, target_batch=size * config.workload.recipe.data_parallel * passes)


def _solved(
    quantity: Quantity,
    wanted: Plan,
    config: SearchConfig,
    passes: int | None,
    limit_s: float,
    *,
    as_json: bool,
    markdown: bool,
) -> int:
    """The answer, and how it is known; 3 where no value will do."""
    from gpumem_tui.exit_codes import EXIT_NOTHING_FITS
    from gpumem_tui.plan.limit_report import limit_json, limit_lines, limit_markdown
    from gpumem_tui.plan.solving import Solver
    from gpumem_tui.plan.tracing import TraceOptions

    found = Solver(TraceOptions.of(config), limit_s, _say).solve(quantity, wanted, passes)
    if as_json:
        click.echo(json.dumps(limit_json(wanted, found)))
    elif markdown:
        click.echo(limit_markdown(wanted, found), nl=False)
    else:
        click.echo("\n".join(limit_lines(wanted, found)))
    return EXIT_NOTHING_FITS if found.value is None else 0
