"""`look`: what memory is made of, in a step of a running process or in a memory snapshot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_tui.cli.watch import SECONDS, does_not_publish, find, following
from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED
from gpumem_tui.report.output import Printer, Progress, complain, is_terminal

if TYPE_CHECKING:
    from gpumem_tui.snapshots.analysis import Analysis
    from gpumem_tui.snapshots.model import MemorySnapshot
    from gpumem_tui.watch.report import By


@click.command
@click.argument("target", metavar="PID|FILE")
@click.option(
    "--by", type=click.Choice(["bucket", "module", "source"]), default="source", show_default=True,
    help="For a process: list modules or source lines after the buckets.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=60.0, show_default=True,
    help="For a process: seconds to wait for a step to end.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--plain", is_flag=True, help="Lines instead of the screen.")
def look(target: str, by: By, timeout_s: float, as_json: bool, plain: bool) -> int:
    """One step's peak of a running process, or any PyTorch memory snapshot.

    For a process (PID): its peak by bucket, by module or source line, and how memory went over the step.

    For a FILE that torch.cuda.memory._dump_snapshot wrote (or its JSON, gzipped or not): memory over time, the
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
    from gpumem_tui.snapshots.printed import SnapshotObject
    from gpumem_tui.snapshots.report import snapshot_lines

    snapshot, analyses = _open(path)
    if on_screen:
        from gpumem_tui.tui.start import open_snapshot

        return open_snapshot(snapshot, analyses)
    Printer(as_json=as_json).show(
        body=lambda: SnapshotObject.of(snapshot, analyses), lines=lambda: snapshot_lines(snapshot, analyses)
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
        raise SystemExit(complain(f"{error}; `gpumem-tui manual snapshots`", EXIT_BAD_INPUT)) from error
    finally:
        progress.clear()


def _look_at_process(pid: int, by: By, timeout_s: float, *, as_json: bool) -> int:
    from gpumem_tui.watch import report
    from gpumem_tui.watch.printed import LookLine
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
        body=lambda: LookLine.of(process, answer), lines=lambda: report.look_lines(process, answer, by)
    )
    return 0 if answer.devices else EXIT_FAILED
