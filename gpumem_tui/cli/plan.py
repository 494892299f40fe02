"""`plan`: what-if, on the screen or as text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpumem_tui.cli.parameters import (
    TOKENS,
    WORKLOAD_OPTIONS,
    TakesCommand,
    configured,
    from_table,
    trained_command,
    typed_with,
)
from gpumem_tui.cli.search import predict_aloud
from gpumem_tui.cli.sections import sectioned
from gpumem_tui.cli.types import AT_LEAST_ONE, Finite, with_options
from gpumem_tui.formula.recipe import EXTRAS, Extra, Extras
from gpumem_tui.formula.techniques import CHANGES, EVERY_CHANGE, changes_named, why_not
from gpumem_tui.memory import Unknown
from gpumem_tui.options.table import DEVICE
from gpumem_tui.plan.goals import QUANTITIES, TRACE_LIMIT_S, Quantity
from gpumem_tui.report.output import Progress, is_terminal, note
from gpumem_tui.settings import load

if TYPE_CHECKING:
    from gpumem_tui.options.configuration import Options
    from gpumem_tui.plan.goals import Goals
    from gpumem_tui.plan.headless import Solver
    from gpumem_tui.plan.plan import Plan
    from gpumem_tui.search.config import SearchConfig
    from gpumem_tui.search.prediction import Traced

_OF_A_SEARCH = frozenset({"limit_bytes", "share"})
"""Device options that a plan does not take: it has the whole GPU."""

_CUTS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
_USUAL_BATCH_SIZE = 8
"""The value of ``{batch}`` where none is asked for: one trace answers for every other size, too."""


@dataclass(frozen=True)
class _Asked:
    """The options that were typed for the plan itself, by name; the others say what is planned."""

    as_json: bool
    markdown: bool
    solve: Quantity | None
    trace_limit: float
    no_trace: bool
    quiet: bool
    accumulation: int | None
    what_ifs: tuple[str, ...]
    no_what_if: bool
    batch_size: int | None
    extras: tuple[Extra, ...]

    @property
    def on_screen(self) -> bool:
        return not (self.as_json or self.markdown or self.solve) and is_terminal()

    @property
    def limit_s(self) -> float:
        return 0.0 if self.no_trace else self.trace_limit


@click.command(cls=TakesCommand)
@with_options(WORKLOAD_OPTIONS, from_table(row for row in DEVICE if row.name not in _OF_A_SEARCH))
@sectioned(
    "--batch-size",
    section="What to run",
    is_common=True,
    type=AT_LEAST_ONE,
    help="Samples a pass and GPU (1; {batch} in a command: 8).",
)
@sectioned(
    "--accumulation",
    section="What to run",
    type=AT_LEAST_ONE,
    help="Passes of an optimizer step, instead of --target-batch.",
)
@sectioned(
    "--solve",
    section="What to run",
    is_common=True,
    type=click.Choice(QUANTITIES),
    help="For a model: how far can this number go?",
)
@sectioned(
    "--extra",
    "extras",
    section="The model",
    type=click.Choice(EXTRAS),
    multiple=True,
    help="A technique that only the formula knows.",
)
@sectioned(
    "--tokens", section="What to run", type=TOKENS, help="To train on, e.g. 2B: prints hours, with --price the cost."
)
@sectioned("--price", section="Which GPU", type=Finite(min=0), help="US dollars an hour for one GPU.")
@sectioned(
    "--batch-multiple",
    section="What to run",
    type=AT_LEAST_ONE,
    default=8,
    show_default=True,
    help="Micro-batches in multiples of it.",
)
@sectioned(
    "--node-gpus", section="Several GPUs", type=AT_LEAST_ONE, default=8, show_default=True,
    help="GPUs of one machine: --solve gpus answers in whole machines beyond one.",
)  # fmt: skip
@sectioned(
    "--what-if", "what_ifs", section="What to run", is_common=True, multiple=True,
    type=click.Choice((*CHANGES, EVERY_CHANGE)), metavar="CHANGE",
    help="Run a command with this change only, or with all.",
)  # fmt: skip
@sectioned("--no-what-if", section="What to run", is_flag=True, help="For a command: run it only as it is.")
@sectioned("--json", "as_json", section="Output", is_common=True, is_flag=True, help="One JSON object.")
@sectioned(
    "--markdown",
    "--plain",
    "markdown",
    section="Output",
    is_common=True,
    is_flag=True,
    help="Markdown instead of the screen.",
)
@sectioned("--no-trace", section="What to run", is_flag=True, help="Formula only: answer at once, without torch.")
@sectioned(
    "--trace-limit",
    section="What to run",
    type=Finite(min=0),
    default=TRACE_LIMIT_S,
    show_default=True,
    help="Without the screen, of a model: seconds that traces may take; then the formula answers.",
)
@sectioned("--quiet", section="Output", is_flag=True, help="Do not show what a command prints.")
def plan(**values: Any) -> int:
    """Say what fits, what would make more fit, and what that costs.

    \b
    gpumem-tui plan -- python train.py --batch-size 8   # your own command
    gpumem-tui plan --model gpt2                        # a catalog model
    """
    asked = _Asked(**{field.name: values.pop(field.name) for field in fields(_Asked)})
    goals = _goals(values)
    if asked.as_json and asked.markdown:
        raise click.UsageError("--json and --markdown: give only one of them")
    if trained_command():
        _refuse(_INSTEAD_OF_A_FORM, "a command has no closed form, only a trace")
    if asked.solve == "gpus":
        values["gpus"] = max(values["gpus"], _fewest(values))
    options, config = configured(values, share=True)
    workload = config.workload
    if workload.shape is None and workload.command is not None:
        _refuse(_INSTEAD_OF_A_FORM, f"{workload.name} has no closed form, only a trace")
        return _plan_runs(options, config, asked)
    _refuse(_INSTEAD_OF_RUNS, "is about a command, which is written after `--`")
    return _plan_formula(options, config, asked, goals)


_INSTEAD_OF_A_FORM = {
    "no_trace": "--no-what-if runs it once, as it is, and nothing else",
    "solve": "`gpumem-tui search` finds its largest batch",
    "extras": "--what-if chunked-loss runs it with that change, --what-if all with each",
    "tokens": "`gpumem-tui plan --model NAME --tokens …` prints the hours, for a model of the catalog",
    "price": "`gpumem-tui plan --model NAME --price …` prints the cost, for a model of the catalog",
    "batch_multiple": "`gpumem-tui search --batch-multiple 8` tries multiples",
    "node_gpus": "--gpus N plans it over N GPUs",
}
"""Options that ask for what a closed form alone knows, and what a command has instead."""
_INSTEAD_OF_RUNS = dict.fromkeys(("what_ifs", "no_what_if"), "leave it out: every change to a model is judged at once")
"""Options about runs with a change made; a closed form judges every change at once."""


def _refuse(instead: Mapping[str, str], why: str) -> None:
    """Refuse options that ask for what there is not, and say what there is instead.

    Raises:
        UsageError: one was typed.
    """
    context = click.get_current_context()
    for option in plan.params:
        if option.name in instead and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]}: {why}; {instead[option.name]}")


def _goals(values: dict[str, Any]) -> Goals:
    """Take the goals out of what was typed, with the prices of the user's settings; `Goals.check` comes later.

    Raises:
        SettingsError: the settings cannot be read.
    """
    from gpumem_tui.plan.goals import Goals

    given = {field.name: values.pop(field.name) for field in fields(Goals) if field.name in values}
    return Goals(**given, prices=tuple(load().prices.items()))


# Only for a model with a closed form


def _plan_formula(options: Options, config: SearchConfig, asked: _Asked, goals: Goals) -> int:
    if config.workload.as_torch:
        raise click.UsageError("--torch-version: only `predict` and `search` trace a model as another torch")
    config = _accumulated(config, asked, asked.batch_size or 1)
    wanted = _planned(options, config, asked.batch_size or 1, frozenset(asked.extras), goals)
    if asked.on_screen:
        from gpumem_tui.tui.start import open_plan

        return open_plan(wanted, config)
    from gpumem_tui.plan.headless import Solver, show_limit, show_plan
    from gpumem_tui.plan.tracing import TraceOptions

    solver = Solver(TraceOptions.of(config), asked.limit_s, Progress())
    if asked.solve is not None:
        found = solver.solve(asked.solve, wanted, asked.accumulation)
        return show_limit(wanted, found, as_json=asked.as_json, markdown=asked.markdown)
    solver.ends = time.monotonic() + asked.limit_s
    traced = Unknown("not asked for (--no-trace)") if asked.no_trace else _traced(wanted, config, asked.limit_s, solver)
    return show_plan(wanted, traced, solver, config.device, as_json=asked.as_json)


def _planned(options: Options, config: SearchConfig, batch_size: int, extras: Extras, goals: Goals) -> Plan:
    """Return the plan of a model with a closed form."""
    from gpumem_tui.options.configuration import HOW, typed_words
    from gpumem_tui.plan.controls import check
    from gpumem_tui.plan.plan import Plan

    shape, recipe, gpu = config.workload.shape, config.workload.recipe, config.device.gpu
    if shape is None:
        raise click.UsageError("--workload: a plan needs a model's shape; `gpumem-tui predict` traces a file")
    for extra in sorted(extras):
        reason = why_not(extra, shape, recipe)
        if reason is not None:
            raise click.UsageError(f"--extra {extra}: {reason}")
    goals.check(has_tokens=bool(shape.seq_len))
    file = config.workload.model_file
    how = typed_words(options, HOW)
    wanted = Plan(shape, recipe, gpu, batch_size, config.headroom, config.target_batch, extras, goals, file, how)
    check(wanted)
    return wanted


def _accumulated(config: SearchConfig, asked: _Asked, batch_size: int) -> SearchConfig:
    """Set the target batch that so many passes of a step make."""
    passes = asked.accumulation
    if passes is None:
        return config
    if asked.solve == "accumulation":
        raise click.UsageError("--accumulation: is what is solved for; leave it out")
    if asked.solve == "gpus":
        return config
    if config.target_batch is not None:
        raise click.UsageError("--accumulation and --target-batch: give only one of them")
    return replace(config, target_batch=batch_size * config.workload.recipe.pass_micro_batches * passes)


def _fewest(values: dict[str, Any]) -> int:
    """Return the GPUs that the options need at least, where their number is what is asked for."""
    tensor, pipeline, context, experts = (values[cut] for cut in _CUTS)
    copies = 1 if values["sharding"] == "none" or experts > 1 else 2
    return copies * int(tensor * pipeline * lcm(context, experts))


def _traced(wanted: Plan, config: SearchConfig, limit_s: float, solver: Solver) -> Traced | Unknown:
    """Return the trace of a plan, or why it is missing; the solver traces next to it what every GPU asks for."""
    from gpumem_tui.plan.headless import too_long
    from gpumem_tui.plan.tracing import trace_key
    from gpumem_tui.run.control import Cancelled

    if isinstance(key := trace_key(wanted), Unknown):
        return key
    try:
        line = f"tracing one step of {wanted.shape.name} without a GPU, for {limit_s:g} s at most …"
        with Progress().during(line), solver.beside(wanted):
            return predict_aloud(config, wanted.batch_size, limit_s=limit_s)[0].traced
    except Cancelled:
        return too_long(limit_s)


# Only known from runs: a command, and a model that transformers builds


def _plan_runs(options: Options, config: SearchConfig, asked: _Asked) -> int:
    workload, given = config.workload, asked.batch_size
    if asked.what_ifs and asked.no_what_if:
        raise click.UsageError("--what-if and --no-what-if: give only one of them")
    if workload.hugging_face is not None:
        given = given or 1
    if given is None and workload.command is not None and workload.command.takes_batch:
        given = _USUAL_BATCH_SIZE
        if not (asked.on_screen or asked.quiet):
            note(f"gpumem-tui: planning for batch {given}; --batch-size takes another")
    from gpumem_tui.options.configuration import predicted_size

    size = predicted_size(config, given, typed_with("--batch-size", "8"))
    config = _accumulated(config, asked, size)
    if asked.on_screen:
        from gpumem_tui.tui.start import open_command_plan

        return open_command_plan(options, config, size, asked.what_ifs, run_all=not asked.no_what_if)
    from gpumem_tui.plan.headless import show_command_plan

    wanted = None if asked.no_what_if else changes_named(asked.what_ifs)
    return show_command_plan(config, size, wanted, as_json=asked.as_json, quiet=asked.quiet)
