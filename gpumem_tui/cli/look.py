"""`look`: what memory is made of, in a step of a running process or in a memory snapshot."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.against import OPTIONS, compare_with_trace, given_options
from gpumem_tui.cli.common import complain, is_terminal
from gpumem_tui.cli.watch import SECONDS, does_not_publish, find, following
from gpumem_tui.cli.workload import AT_LEAST_ONE, TakesCommand, trained_command
from gpumem_tui.exit_codes import EXIT_BAD_INPUT, EXIT_FAILED

if TYPE_CHECKING:
    from gpumem_tui.snapshots.analysis import Analysis
    from gpumem_tui.snapshots.model import MemorySnapshot
    from gpumem_tui.watch.report import By

_STEP_S = 60.0


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
def look(
    target: str,
    by: By,
    timeout_s: float | None,
    as_json: bool,
    plain: bool,
    against: bool,
    batch_size: int | None,
    **values: Any,
) -> int:
    """One step's peak of a running process, or any PyTorch memory snapshot.

    Of a process (PID): its peak by bucket, by module or source line, and how memory went over the step.

    Of a FILE that torch.cuda.memory._dump_snapshot wrote (or the same as JSON, gzipped or not): memory over time, the
    peak by category, source line and stack, the segments, and why a request found no room. Nothing in the file is
    executed. With --against the first event that differs from a trace, and what every difference sums to:
    `gpumem-tui look snapshot.pickle --against -- python train.py`.
    """
    if as_json and plain:
        raise click.UsageError("--json and --plain: give only one of them")
    command = trained_command()
    typed = [*given_options(click.get_current_context()), *["--"] * bool(command), *["--batch-size"] * bool(batch_size)]
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


look.params += OPTIONS


def _look_against(path: Path, values: dict[str, Any], batch_size: int | None, *, as_json: bool) -> int:
    from gpumem_tui.snapshots.report import comparison_json, comparison_lines, snapshot_json, snapshot_lines

    opened = _open(path)
    if isinstance(opened, int):
        return opened
    snapshot, analyses = opened
    first = analyses[0]
    comparison, traced_peak = compare_with_trace(snapshot, first, values, batch_size)
    if as_json:
        compared = {**comparison_json(comparison), "traced_peak_bytes": traced_peak, "device": first.device}
        click.echo(json.dumps({**snapshot_json(snapshot, analyses), "against": compared}))
        return 0
    click.echo(next(snapshot_lines(snapshot, analyses)))
    for line in comparison_lines(comparison, first.peak_allocated_bytes, traced_peak):
        click.echo(line)
    return 0


def _look_at_file(path: Path, *, as_json: bool, on_screen: bool) -> int:
    from gpumem_tui.snapshots.report import snapshot_json, snapshot_lines

    opened = _open(path)
    if isinstance(opened, int):
        return opened
    snapshot, analyses = opened
    if on_screen:
        from gpumem_tui.tui.start import open_snapshot

        return open_snapshot(snapshot, analyses)
    if as_json:
        click.echo(json.dumps(snapshot_json(snapshot, analyses)))
    else:
        for line in snapshot_lines(snapshot, analyses):
            click.echo(line)
    return 0


def _open(path: Path) -> tuple[MemorySnapshot, list[Analysis]] | int:
    """A snapshot and its devices, taken apart; or the exit code once it has been said why there is none."""
    from gpumem_tui.snapshots.analysis import analyse
    from gpumem_tui.snapshots.model import SnapshotError
    from gpumem_tui.snapshots.read import read_snapshot

    said = _Progress()
    try:
        snapshot = read_snapshot(path, said.reading)
        return snapshot, [analyse(snapshot, device, said.analysing) for device in snapshot.devices]
    except SnapshotError as error:
        said.clear()
        return complain(str(error), EXIT_BAD_INPUT)
    finally:
        said.clear()


class _Progress:
    """Progress on stderr, where stderr is a terminal."""

    def __init__(self) -> None:
        self._is_watched = sys.stderr is not None and sys.stderr.isatty()
        self._last = ""

    def reading(self, share: float) -> None:
        """A file is read."""
        self._say(f"reading {share:.0%}")

    def analysing(self, share: float) -> None:
        """A device is taken apart."""
        self._say(f"analysing {share:.0%}")

    def doing(self, stage: str) -> None:
        """A step is waited for, or recorded."""
        self._say(stage)

    def clear(self) -> None:
        """Nothing is under way any more."""
        if self._last:
            self._say("")

    def _say(self, line: str) -> None:
        if self._is_watched and line != self._last:
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)
            self._last = line


def _look_at_process(pid: int, by: By, timeout_s: float, *, as_json: bool) -> int:
    from gpumem_tui.watch import report
    from gpumem_tui.watch.requests import NoAnswer, await_kept, await_look, request_look

    process = find(following(pid), pid, ended=True)
    if process is None:
        return does_not_publish(pid)
    if not process.is_running:
        return complain(f"{process.title} has ended: `gpumem-tui watch {pid}` shows its last sample", EXIT_FAILED)
    said = _Progress()
    started = time.monotonic()
    try:
        answer = await_look(process, request_look(process), timeout_s, say=said.doing)
        if answer.devices:
            said.doing("following two more steps, to see what a step leaves behind")
        answer = await_kept(process, answer, timeout_s - (time.monotonic() - started))
    except NoAnswer as error:
        said.clear()
        return complain(str(error), EXIT_FAILED)
    said.clear()
    if as_json:
        body: dict[str, Any] = report.look_json(process, answer)
        click.echo(json.dumps(body))
    else:
        for line in report.look_lines(process, answer, by):
            click.echo(line)
    return 0 if answer.devices else EXIT_FAILED
