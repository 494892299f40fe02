"""`fit`: makes a command fit the GPU at hand, then runs it so under the probe."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.parameters import TakesCommand, as_click, asked, configured, from_table, trained_command
from gpumem_tui.cli.sections import sectioned
from gpumem_tui.cli.types import Typed, with_options
from gpumem_tui.cli.watch import leave, run_command
from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from gpumem_tui.memory import Unknown
from gpumem_tui.options.table import OPTIONS
from gpumem_tui.report.output import Printer, complain, interrupts, is_terminal

if TYPE_CHECKING:
    from gpumem_tui.plan.fitting import Fitted
    from gpumem_tui.search.config import SearchConfig
    from gpumem_tui.watch.records import ProbedProcess

_TAKEN = (
    "target_batch", "gpu", "memory_bytes", "arch", "beside", "share", "gpus", "batch_multiple", "assumed_rows",
    "longest", "steps", "timeout_s",
)  # fmt: skip
"""Options of a search that are taken."""


def _changes_from(text: str) -> tuple[str, ...]:
    """Read changes with commas between.

    Raises:
        ValueError: one is none.
    """
    from gpumem_tui.plan.fitting import ALIASES, ALLOWED

    found = [ALIASES.get(word, word) for word in filter(None, map(str.strip, text.split(",")))]
    for word in found:
        if word not in ALLOWED:
            raise ValueError(f"{word!r} is none of {', '.join((*ALLOWED, *ALIASES))}; correct it")
    return tuple(dict.fromkeys(found))


@click.command(cls=TakesCommand)
@with_options(from_table(OPTIONS[name] for name in _TAKEN))
@as_click(replace(OPTIONS["headroom"], default=0.0))
@sectioned(
    "--allow", "allowed", section="What to run", is_common=True, metavar="CHANGES", default="",
    type=Typed("changes", _changes_from),
    help="May be made where needed: checkpointing,8-bit-optimizer,lora",
)  # fmt: skip
@sectioned("--dry-run", section="Output", is_common=True, is_flag=True, help="Print the command; do not train.")
@sectioned(
    "--tui", "on_screen", section="Output", is_common=True, is_flag=True, help="Train on a screen, as `run --tui`."
)
@sectioned("--json", "as_json", section="Output", is_common=True, is_flag=True, help="With --dry-run: one JSON object.")
def fit(allowed: tuple[str, ...], dry_run: bool, on_screen: bool, as_json: bool, **values: Any) -> int:
    """Make a command fit the GPU at hand, and train.

    \b
    gpumem-tui fit -- python train.py --batch-size {batch}
    gpumem-tui fit --target-batch 64 -- CMD --bs {batch} --accum {accumulation}

    Predicts the safe batch, adds what costs nothing, tries it for a few steps on the GPU, prints it in a line, and runs
    the command with it as `run` does: its output, its signals, its exit code. {accumulation} is what reaches
    --target-batch. Exit codes before that: 2 bad input, 3 nothing fits, 4 failed, 130 interrupted.
    """
    if as_json and not dry_run:
        raise click.UsageError("--json: add --dry-run; without it the output is the command's own")
    if on_screen and not is_terminal() and not dry_run:
        return complain("--tui: there is no terminal to draw on; leave it out", EXIT_BAD_INPUT)
    if not trained_command():
        raise click.UsageError("no command to fit: write it as `-- python train.py --batch-size {batch}`")
    flags = {"--dry-run": dry_run, "--json": as_json, "--tui": on_screen}
    own = ["--allow", ",".join(allowed)] if allowed else []
    config = _config(values, [*(flag for flag, is_on in flags.items() if is_on), *own])
    if config.device.simulated and not dry_run:
        return complain(
            f"{_nothing_trains(config)}: `{_typed(config, '--dry-run')}` prints the command", EXIT_BAD_INPUT
        )
    found = _fitted(config, allowed)
    if isinstance(found, int):
        return found
    complain(found.words, 0)
    if dry_run:
        from gpumem_tui.plan.printed import FitObject

        Printer(as_json=as_json).show(body=lambda: FitObject.of(found), lines=lambda: [found.line])
        return 0
    return _train(found, config, on_screen=on_screen)


def _config(values: dict[str, Any], own: Sequence[str]) -> SearchConfig:
    """Return what is to fit.

    Args:
        own: options of this verb alone, as they were typed.

    Raises:
        OptionError: the options are wrong, or the command has no ``{batch}``.
    """
    from gpumem_tui.options.configuration import check_searchable, typed_words

    _, config = configured(values)
    typed = typed_words(asked(values), set(_TAKEN) - {"share"})
    roomy = ("--headroom", repr(config.headroom)) if config.headroom else ()
    config = replace(config, typed=(*typed, *roomy, *own))
    check_searchable(config, "fit")
    return config


def _nothing_trains(config: SearchConfig) -> str:
    device = config.device
    return device.reason or f"{device.gpu.title} is simulated, and nothing trains there"


def _typed(config: SearchConfig, *options: str) -> str:
    """Return the line that was typed, with an option more, or with another value of one."""
    typed = list(config.typed)
    if options[0] in typed:
        place = typed.index(options[0])
        del typed[place : place + len(options)]
    gpu = () if "--gpu" in config.typed or not config.device.simulated else ("--gpu", "sim:rtx-4090")
    return shlex.join(["gpumem-tui", "fit", *options, *gpu, *typed, "--", *trained_command()])


def _fitted(config: SearchConfig, allowed: tuple[str, ...]) -> Fitted | int:
    """Return the command as it is to be run, or the exit code where the user has ended that.

    Raises:
        RunError: nothing fits, or the command cannot be followed.
    """
    from gpumem_tui.plan.fitting import Fitted, fitting
    from gpumem_tui.run.children import ChildDied, side_effects
    from gpumem_tui.run.control import Cancelled, Control, Unusable
    from gpumem_tui.run.events import Sample
    from gpumem_tui.search.headless import CommandLog, run_error
    from gpumem_tui.search.predicting import TraceProgress
    from gpumem_tui.search.runner import TrialProgress
    from gpumem_tui.search.words import how_far

    control, printer = Control(), Printer(as_json=False)
    progress = printer.progress
    log = CommandLog(config, quiet=True, progress=progress)
    complain(side_effects(config.steps, then_on_gpu=not config.device.simulated), 0)
    found: Fitted | None = None
    try:
        with interrupts(control.cancel):
            progress.say(f"starting PyTorch for {config.workload.name} …")
            for event in fitting(config, allowed, control):
                if isinstance(event, Fitted):
                    found = event
                elif isinstance(event, str):
                    progress.clear()
                    complain(event, 0)
                elif isinstance(event, TraceProgress):
                    log.show(event)
                elif isinstance(event, TrialProgress):
                    far = f", {how_far(event.sample)}" if isinstance(event.sample, Sample) else " …"
                    progress.say(f"trying batch {event.batch_size:,} on {config.where}{far}")
    except Cancelled:
        return EXIT_INTERRUPTED
    except (Unusable, ChildDied) as error:
        raise run_error(config, error) from error
    finally:
        progress.clear()
    assert found is not None, "fitting ends with a result or an error"
    return found


def _train(found: Fitted, config: SearchConfig, *, on_screen: bool) -> int:
    """Run the command as it fits, under the probe, and end as it does."""
    from gpumem_tui.attach.launch import CannotRun
    from gpumem_tui.run.interpreters import close_idle
    from gpumem_tui.run.supervised import open_program

    close_idle()  # each holds torch
    os.environ.update(found.environment)
    try:
        with ExitStack() as held:
            words = held.enter_context(found.command.written(found.batch_size, found.config.passes))
            if (program := open_program(words, held)) is not None:
                os.dup2(program, 0)
            ended = run_command(words, on_screen=on_screen, why_out=lambda process: _why_out(process, found, config))
    except CannotRun as error:
        return complain(str(error), error.code)
    except OSError as error:
        return complain(f"{error.filename}: cannot be written: {error.strerror}; free space there", EXIT_FAILED)
    return leave(ended)


def _why_out(process: ProbedProcess, found: Fitted, config: SearchConfig) -> Iterator[str]:
    """Say what grew since the trial in a process that ran out of memory, and what leaves more free."""
    from gpumem_tui.probe.files import WireError
    from gpumem_tui.watch.postmortem import Confirmed, grown_words, growth_lines, open_case

    try:
        case = open_case(process)
    except WireError as error:
        yield str(error)
        return
    result, traced = found.result, found.traced
    breakdown = None if result is None else result.breakdown
    if breakdown is None and not isinstance(traced, Unknown):
        breakdown = traced.at(found.batch_size).breakdown
    if case is None or result is None or breakdown is None:
        return
    if words := grown_words(case, Confirmed(breakdown, result.peak_reserved_bytes, result.device_used_bytes)):
        yield words
    yield from growth_lines(case)
    yield f"to leave more free: `{_typed(config, '--headroom', f'{config.headroom + 0.1:.2g}')}`"
