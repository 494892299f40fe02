"""`search` and `predict`: how large a batch fits, tried and predicted."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpumem_tui.cli.parameters import (
    DEVICE_OPTIONS,
    SIZE,
    WORKLOAD_OPTIONS,
    TakesCommand,
    asked,
    configured,
    from_table,
    typed_with,
)
from gpumem_tui.cli.sections import sectioned
from gpumem_tui.cli.types import Percent, Whole, with_options
from gpumem_tui.errors import EXIT_FAILED, OptionError, RunError
from gpumem_tui.formula.kv_cache import KV_BITS
from gpumem_tui.options.table import SEARCH
from gpumem_tui.report.output import complain, is_terminal, note
from gpumem_tui.search.strategy import MAX_BATCH_SIZE

if TYPE_CHECKING:
    from gpumem_tui.run.events import Ready
    from gpumem_tui.search.config import SearchConfig
    from gpumem_tui.search.prediction import Prediction


@click.command(cls=TakesCommand)
@with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS, from_table(SEARCH))
@sectioned(
    "--json",
    "as_json",
    section="Output",
    is_common=True,
    is_flag=True,
    help="JSON lines: one a trial, then the result.",
)
@sectioned("--plain", section="Output", is_common=True, is_flag=True, help="Log lines instead of the screen.")
@sectioned("--quiet", section="Output", is_flag=True, help="Do not show what a command prints.")
def search(as_json: bool, plain: bool, quiet: bool, **values: Any) -> int:
    """Find the largest batch: run larger ones until memory is out.

    \b
    gpumem-tui search -- python train.py --batch-size {batch}   # your own command
    gpumem-tui search --model gpt2                              # a catalog model

    The GPU may be a simulated one. {accumulation} is replaced by what reaches --target-batch. Exit codes: 0 done, 2 bad
    input, 3 nothing fits, 4 failed, 5 the data ends before memory does, 130 interrupted.
    """
    if as_json and plain:
        raise click.UsageError("--json and --plain: give only one of them")
    on_screen = not as_json and not plain and is_terminal()
    from gpumem_tui.options.configuration import check_searchable

    options, config = configured(values)
    check_searchable(config)
    if on_screen:
        from gpumem_tui.tui.start import open_search

        return open_search(options, config, autostart=True)
    from gpumem_tui.plan.advice import best_and_lines
    from gpumem_tui.search.headless import run

    return run(config, best_and_lines, as_json=as_json, quiet=quiet)


_GATE_OPTIONS = [
    sectioned(
        "--budget", section="CI", is_common=True, type=SIZE, help="Exit with 3 if the GPU may hold more than this."
    ),
    sectioned(
        "--baseline",
        section="CI",
        is_common=True,
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Exit with 3 if figures grew; a new FILE is written.",
    ),
    sectioned(
        "--tolerance",
        section="CI",
        type=Percent(0, 1000),
        default=1.0,
        show_default=True,
        metavar="PERCENT",
        help="By how much the figures of --baseline may grow.",
    ),
    sectioned(
        "--markdown",
        section="CI",
        is_flag=True,
        help="Print the result of --budget and --baseline as a comment for a pull request.",
    ),
]


_SERVE_OPTIONS = [
    sectioned(
        "--serve", section="What to run", is_common=True, is_flag=True,
        help="A model's weights and KV cache in an inference engine.",
    ),
    sectioned(
        "--context", section="What to run", type=Whole(1, 1 << 30), metavar="TOKENS",
        help="Tokens of a sequence under --serve (default: the longest that the model takes).",
    ),
    sectioned(
        "--concurrency", section="What to run", type=Whole(1, 1 << 20), metavar="N",
        help="Sequences at once under --serve (default: 1).",
    ),
    sectioned(
        "--kv-cache-dtype", section="What to run", type=click.Choice(tuple(KV_BITS)),
        help="Type of the KV cache under --serve (default: the weights').",
    ),
]  # fmt: skip


@click.command(cls=TakesCommand)
@with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS, _SERVE_OPTIONS)
@sectioned(
    "--batch-size",
    section="What to run",
    is_common=True,
    type=Whole(1, MAX_BATCH_SIZE),
    help="Batch size to predict; a command names its own.",
)
@sectioned(
    "--by",
    section="Output",
    is_common=True,
    type=click.Choice(["module", "operator", "source"]),
    help="List the peak's memory by module, operator or source.",
)
@sectioned(
    "--explain", section="Output", is_flag=True,
    help="Also print what the figures rest on: ranges, sources, workspaces, scratch that is not included.",
)  # fmt: skip
@sectioned(
    "--snapshot", section="Output", metavar="FILE", type=click.Path(path_type=Path),
    help="Also write the simulated run as a PyTorch memory snapshot, for pytorch.org/memory_viz or `look`.",
)  # fmt: skip
@with_options(_GATE_OPTIONS)
@sectioned("--json", "as_json", section="Output", is_common=True, is_flag=True, help="One JSON object.")
@sectioned("--quiet", section="Output", is_flag=True, help="Do not show what a command prints.")
def predict(
    batch_size: int | None,
    by: str | None,
    explain: bool,
    snapshot: Path | None,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> int:
    """Predict what one batch size takes, without a GPU.

    \b
    gpumem-tui predict -- python train.py --batch-size 32   # your own command
    gpumem-tui predict --model gpt2 --batch-size 32         # a catalog model
    """
    if _is_serving(values):
        return _serve(values, as_json=as_json)
    from gpumem_tui.options.configuration import check_gpus_are_used, predicted_size
    from gpumem_tui.search.budget import GateTerms
    from gpumem_tui.search.headless import gate_or_exit, show_prediction

    markdown = values.pop("markdown")
    terms = GateTerms(*(values.pop(name) for name in ("budget", "baseline", "tolerance")))
    if as_json and markdown:
        raise click.UsageError("--json and --markdown: give only one of them")
    for option, target in (("--snapshot", snapshot), ("--baseline", terms.baseline)):
        if target is not None:
            _check_target(option, target)
    _, config = configured(values, share=True)
    check_gpus_are_used(config.workload)
    size = predicted_size(config, batch_size, typed_with("--batch-size", "8"))
    prediction, ready = predict_aloud(config, size, quiet=quiet)
    gate = gate_or_exit(config, prediction, size, terms) if terms.is_any or markdown else None
    if gate is not None and markdown:
        click.echo(gate.markdown(), nl=False)
    else:
        show_prediction(config, prediction, ready, size, by, explain=explain, as_json=as_json, gate=gate)
    written = 0 if snapshot is None else _write_prediction(prediction, size, snapshot)
    return written or (0 if gate is None else gate.exit_code)


_SERVE = ("context", "concurrency", "kv_cache_dtype")
_NOT_SERVED = ("batch_size", "by", "explain", "snapshot", "budget", "baseline", "markdown")


def _is_serving(values: dict[str, Any]) -> bool:
    """Take ``--serve`` out of what was typed, and the options with it where it was not.

    Raises:
        UsageError: options that do not go together.
    """
    context = click.get_current_context()
    is_serving = values.pop("serve")
    for option in predict.params:
        if option.name in (_NOT_SERVED if is_serving else _SERVE):
            if context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
                why = "--serve follows no training step; leave it out" if is_serving else "is for --serve; add that"
                raise click.UsageError(f"{option.opts[0]}: {why}")
            if not is_serving:
                values.pop(option.name or "")
    return bool(is_serving)


def _serve(values: dict[str, Any], *, as_json: bool) -> int:
    """Print what an inference engine holds of a model; the exit code."""
    from gpumem_tui.options.serving import ServeTerms, served
    from gpumem_tui.report.output import Printer
    from gpumem_tui.search.serving import ServeObject, serving_lines

    typed, sequences, kv_type = (values.pop(name) for name in _SERVE)
    for option in ("budget", "baseline", "tolerance", "markdown"):
        values.pop(option)
    source = click.get_current_context().get_parameter_source("precision")
    is_wide = source is ParameterSource.COMMANDLINE and values["precision"] == "fp32"
    terms = ServeTerms(typed, sequences or 1, kv_type, 32 if is_wide else 16)
    found = served(asked(values, share=True), terms)
    Printer(as_json=as_json).show(body=lambda: ServeObject.of(found), lines=lambda: serving_lines(found))
    return 0


def predict_aloud(
    config: SearchConfig, batch_size: int, *, quiet: bool = False, limit_s: float | None = None
) -> tuple[Prediction, Ready | None]:
    """Return both predictions and the tracer, and show on stderr what happens meanwhile.

    Args:
        quiet: do not show what a command prints.
        limit_s: seconds that the trace may take; None for as long as it takes.

    Raises:
        RunError: no prediction is possible.
        Cancelled: the trace took longer.
    """
    from gpumem_tui.run.control import Control
    from gpumem_tui.search.headless import CommandLog, predicted

    control, log = Control(), CommandLog(config, quiet=quiet, batch_size=batch_size)
    try:
        with control.within(limit_s), log.following():
            return predicted(config, batch_size, control, log.show)
    except RunError as error:
        if words := _with_rows(str(error)):
            note(words)
        raise


def _with_rows(reason: str) -> str:
    """Return the line that was typed with fewer of the rows that a reason assumes, or with a number that it lacks.

    Empty where it does neither.
    """
    place = re.search(r" at (\S+:\d+) \(--assume-rows( \S+=NUMBER)?", reason)
    if place is None or "--" not in sys.argv:
        return ""
    words, number = ("to assume 1,024 there", 1024) if place[2] else ("to assume that half is kept there", 0.5)
    return f"{words}:\n  {typed_with('--assume-rows', f'{place[1]}={number}')}"


def _check_target(option: str, path: Path) -> None:
    """Check that what an option asks for can be written there, before a trace that takes minutes.

    Raises:
        OptionError: it cannot.
    """
    folder = path.parent
    if path.is_dir():
        raise OptionError(f"{option} {path}: is a folder; give the name of a file in it")
    if not folder.is_dir():
        raise OptionError(f"{option} {path}: there is no folder {folder}; make it with `mkdir -p {folder}`")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{option} {path}: no permission to write in {folder}; name a file elsewhere")


def _write_prediction(prediction: Prediction, batch_size: int, path: Path) -> int:
    """Write the traced run at a batch size, and say so on stderr; the exit code."""
    from gpumem_tui.memory import Unknown, format_bytes
    from gpumem_tui.snapshots.recording import write_snapshot

    traced = prediction.traced
    if isinstance(traced, Unknown):
        return complain(f"--snapshot: there is no trace to write: {traced.reason}", EXIT_FAILED)
    recording = traced.recorded(batch_size)
    try:
        write_snapshot(recording, path)
    except OSError as error:
        return complain(f"--snapshot {path}: cannot be written: {error.strerror}; name a file elsewhere", EXIT_FAILED)
    end = "" if recording.fits else f", up to where {format_bytes(recording.events.sizes[-1])} no longer fit"
    return complain(f"{path}: {len(recording.events):,} events of the simulated run{end}; `gpumem-tui look {path}`", 0)
