"""`look`: what memory is made of, in a step of a running process or in a memory snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpumem_tui.cli.parameters import DEVICE_OPTIONS, WORKLOAD_OPTIONS, TakesCommand, configured, trained_command
from gpumem_tui.cli.search import predict_or_exit, predicted_size
from gpumem_tui.cli.types import AT_LEAST_ONE, with_options
from gpumem_tui.cli.watch import SECONDS, does_not_publish, find, following
from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED
from gpumem_tui.report.output import Printer, Progress, complain, is_terminal

if TYPE_CHECKING:
    from gpumem_tui.snapshots.against import Comparison
    from gpumem_tui.snapshots.analysis import Analysis
    from gpumem_tui.snapshots.model import MemorySnapshot
    from gpumem_tui.watch.report import By

_STEP_S = 60.0


def _options() -> list[Any]:
    """Return the options of what is traced and on what: a snapshot has its own batch size, and nothing is searched."""

    @with_options(WORKLOAD_OPTIONS, DEVICE_OPTIONS)
    def holder() -> None:
        """Carry the options that click makes of the table."""

    unused = {"timeout_s", "share", "headroom", "target_batch", "target_tokens", "limit_bytes"}
    return [option for option in reversed(holder.__click_params__) if option.name not in unused]  # type: ignore[attr-defined]


_OPTIONS: list[click.Option] = _options()


def _given_options(context: click.Context) -> list[str]:
    """Return the options of `_OPTIONS` that were typed."""
    return [
        option.opts[0]
        for option in _OPTIONS
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]


@click.command(cls=TakesCommand, short_help="One step's peak of a running process; or any PyTorch memory snapshot.")
@click.argument("target", metavar="PID|FILE")
@click.option(
    "--by", type=click.Choice(["bucket", "module", "source"]), default="source", show_default=True,
    help="Of a process: what to list after the buckets.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=None,
    help="Of a process: seconds to wait for a step to end (60); of a command: seconds of silence (300).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--plain", is_flag=True, help="Lines instead of the screen.")
@click.option(
    "--against",
    is_flag=True,
    help="Of a file: hold it against the trace of the step that the following options, or a command, name.",
)
@click.option("--batch-size", type=AT_LEAST_ONE, help="Batch size of that step.")
def look(target: str, as_json: bool, plain: bool, against: bool, **values: Any) -> int:
    """One step's peak of a running process, or any PyTorch memory snapshot.

    Of a process (PID): its peak by bucket, by module or source line, and how memory went over the step.

    Of a FILE that torch.cuda.memory._dump_snapshot wrote (or the same as JSON, gzipped or not): memory over time, the
    peak by category, source line and stack, the segments, and why a request found no room. Nothing in the file is
    executed. With --against the first event that differs from a trace, and what every difference sums to:
    `gpumem-tui look snapshot.pickle --against -- python train.py`.
    """
    by, timeout_s, batch_size = (values.pop(name) for name in ("by", "timeout_s", "batch_size"))
    if as_json and plain:
        raise click.UsageError("--json and --plain: give only one of them")
    command = trained_command()
    typed = _given_options(click.get_current_context())
    typed += ["--"] * bool(command) + ["--batch-size"] * bool(batch_size)
    if typed and not against:
        raise click.UsageError(f"{typed[0]}: says what to trace; add --against")
    path = Path(target)
    if target.isdecimal() and int(target) and not path.exists():
        if against:
            raise click.UsageError("--against: is about a file")
        return _look_at_process(int(target), by, timeout_s or _STEP_S, as_json=as_json)
    if against:
        silence = {} if timeout_s is None else {"timeout_s": timeout_s}
        return _look_against(path, {**values, **silence, "command": command}, batch_size, as_json=as_json)
    return _look_at_file(path, as_json=as_json, on_screen=not as_json and not plain and is_terminal())


look.params += _OPTIONS


def _look_against(path: Path, values: dict[str, Any], batch_size: int | None, *, as_json: bool) -> int:
    from gpumem_tui.snapshots.report import comparison_json, comparison_lines, snapshot_json, snapshot_lines

    snapshot, analyses = _open(path)
    first = analyses[0]
    comparison, traced_peak = _compare_with_trace(snapshot, first, values, batch_size)

    def body() -> dict[str, Any]:
        compared = {**comparison_json(comparison), "traced_peak_bytes": traced_peak, "device": first.device}
        return {**snapshot_json(snapshot, analyses), "against": compared}

    def lines() -> Iterator[str]:
        yield next(snapshot_lines(snapshot, analyses))
        yield from comparison_lines(comparison, first.peak_allocated_bytes, traced_peak)

    Printer(as_json=as_json).show(body=body, lines=lines)
    return 0


def _compare_with_trace(
    snapshot: MemorySnapshot, analysis: Analysis, values: dict[str, Any], batch_size: int | None
) -> tuple[Comparison, int]:
    """Trace the step that the options name, and hold the snapshot against it; the trace's peak in bytes too.

    Raises:
        OptionError, click.UsageError: the options name no step.
        SystemExit: it cannot be traced; the reason has been said.
    """
    from gpumem_tui.memory import Unknown
    from gpumem_tui.snapshots import against

    _, config = configured(values, share=True)
    size = predicted_size(config, batch_size)
    traced = predict_or_exit(config, size, quiet=True)[0].traced
    if isinstance(traced, Unknown):
        raise SystemExit(complain(f"--against: there is no trace: {traced.reason}", EXIT_FAILED))
    recording = traced.recorded(size)
    comparison = against.compare(
        against.requests_of_snapshot(snapshot, analysis.device),
        against.requests_of_recording(recording),
        is_whole=not analysis.timeline[0].allocated_bytes,
    )
    return comparison, traced.at(size).peak_allocated_bytes


def _look_at_file(path: Path, *, as_json: bool, on_screen: bool) -> int:
    from gpumem_tui.snapshots.report import snapshot_json, snapshot_lines

    snapshot, analyses = _open(path)
    if on_screen:
        from gpumem_tui.tui.start import open_snapshot

        return open_snapshot(snapshot, analyses)
    Printer(as_json=as_json).show(
        body=lambda: snapshot_json(snapshot, analyses), lines=lambda: snapshot_lines(snapshot, analyses)
    )
    return 0


def _open(path: Path) -> tuple[MemorySnapshot, list[Analysis]]:
    """Read a snapshot and take its devices apart; ends with a complaint where that fails."""
    from gpumem_tui.snapshots.analysis import analyse
    from gpumem_tui.snapshots.model import SnapshotError
    from gpumem_tui.snapshots.read import read_snapshot

    progress = Progress()
    try:
        snapshot = read_snapshot(path, lambda share: progress.say(f"reading {share:.0%}"))
        return snapshot, [
            analyse(snapshot, device, lambda share: progress.say(f"analysing {share:.0%}"))
            for device in snapshot.devices
        ]
    except SnapshotError as error:
        progress.clear()
        raise SystemExit(complain(str(error), EXIT_BAD_INPUT)) from error
    finally:
        progress.clear()


def _look_at_process(pid: int, by: By, timeout_s: float, *, as_json: bool) -> int:
    from gpumem_tui.watch import report
    from gpumem_tui.watch.requests import NoAnswer, await_kept, await_look, request_look

    process = find(following(pid), pid, ended=True)
    if process is None:
        return does_not_publish(pid)
    if not process.is_running:
        return complain(f"{process.title} has ended: `gpumem-tui watch {pid}` shows its last sample", EXIT_FAILED)
    progress = Progress()
    started = time.monotonic()
    try:
        answer = await_look(process, request_look(process), timeout_s, say=progress.say)
        if answer.devices:
            progress.say("following two more steps, to see what a step leaves behind")
        answer = await_kept(process, answer, timeout_s - (time.monotonic() - started))
    except NoAnswer as error:
        progress.clear()
        return complain(str(error), EXIT_FAILED)
    progress.clear()
    Printer(as_json=as_json).show(
        body=lambda: report.look_json(process, answer), lines=lambda: report.look_lines(process, answer, by)
    )
    return 0 if answer.devices else EXIT_FAILED
