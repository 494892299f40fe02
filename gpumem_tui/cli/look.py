"""`look`: what memory is made of, in a step of a running process or in a memory snapshot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.common import complain, is_terminal
from gpumem_tui.cli.watch import SECONDS, does_not_publish, find, following
from gpumem_tui.exit_codes import EXIT_BAD_INPUT, EXIT_FAILED

if TYPE_CHECKING:
    from gpumem_tui.watch.report import By


@click.command(short_help="One step's peak of a running process; or any PyTorch memory snapshot.")
@click.argument("target", metavar="PID|FILE")
@click.option(
    "--by", type=click.Choice(["bucket", "module", "source"]), default="source", show_default=True,
    help="Of a process: what to list after the buckets.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=60.0, show_default=True,
    help="Of a process: seconds to wait for a step to end.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--plain", is_flag=True, help="Lines instead of the screen.")
def look(target: str, by: By, timeout_s: float, as_json: bool, plain: bool) -> int:
    """One step's peak of a running process, or any PyTorch memory snapshot.

    Of a process (PID): its peak by bucket, by module or source line, and how memory went over the step.

    Of a FILE that torch.cuda.memory._dump_snapshot wrote (or the same as JSON, gzipped or not): memory over time, the
    peak by category, source line and stack, the segments, and why a request found no room. Nothing in the file is
    executed.
    """
    if as_json and plain:
        raise click.UsageError("--json and --plain: give only one of them")
    path = Path(target)
    if target.isdecimal() and int(target) and not path.exists():
        return _look_at_process(int(target), by, timeout_s, as_json=as_json)
    return _look_at_file(path, as_json=as_json, on_screen=not as_json and not plain and is_terminal())


def _look_at_file(path: Path, *, as_json: bool, on_screen: bool) -> int:
    from gpumem_tui.snapshots.analysis import analyse
    from gpumem_tui.snapshots.model import SnapshotError
    from gpumem_tui.snapshots.read import read_snapshot
    from gpumem_tui.snapshots.report import snapshot_json, snapshot_lines

    said = _Progress()
    try:
        snapshot = read_snapshot(path, said.reading)
        analyses = [analyse(snapshot, device, said.analysing) for device in snapshot.devices]
    except SnapshotError as error:
        said.clear()
        return complain(str(error), EXIT_BAD_INPUT)
    said.clear()
    if on_screen:
        from gpumem_tui.tui.start import open_snapshot

        return open_snapshot(snapshot, analyses)
    if as_json:
        click.echo(json.dumps(snapshot_json(snapshot, analyses)))
    else:
        for line in snapshot_lines(snapshot, analyses):
            click.echo(line)
    return 0


class _Progress:
    """How far it is, on stderr, where somebody watches."""

    def __init__(self) -> None:
        self._is_watched = sys.stderr is not None and sys.stderr.isatty()
        self._last = ""

    def reading(self, share: float) -> None:
        """A file is read."""
        self._say(f"reading {share:.0%}")

    def analysing(self, share: float) -> None:
        """A device is taken apart."""
        self._say(f"analysing {share:.0%}")

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
    from gpumem_tui.watch.requests import NoAnswer, await_look, request_look

    process = find(following(pid), pid, ended=True)
    if process is None:
        return does_not_publish(pid)
    if not process.is_running:
        return complain(f"{process.title} has ended: `gpumem-tui watch {pid}` shows its last sample", EXIT_FAILED)
    try:
        answer = await_look(process, request_look(process), timeout_s)
    except NoAnswer as error:
        return complain(str(error), EXIT_FAILED)
    if as_json:
        body: dict[str, Any] = report.look_json(process, answer)
        click.echo(json.dumps(body))
    else:
        for line in report.look_lines(process, answer, by):
            click.echo(line)
    return 0 if answer.devices else EXIT_FAILED
