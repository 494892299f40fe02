"""`look`: what memory is made of, in a step of a running process or in a memory snapshot."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_tui.cli.watch import SECONDS, does_not_publish, find, following
from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED
from gpumem_tui.report.output import Printer, Progress, complain, is_terminal, note

if TYPE_CHECKING:
    from gpumem_tui.snapshots.analysis import Analysis
    from gpumem_tui.snapshots.model import MemorySnapshot
    from gpumem_tui.watch.report import By


@click.command
@click.argument("targets", metavar="PID|FILE [FILE]", nargs=-1, required=True)
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
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE",
    help="For files: write a page that opens in any browser without a network.",
)  # fmt: skip
def look(targets: tuple[str, ...], by: By, timeout_s: float, as_json: bool, plain: bool, html: Path | None) -> int:
    """One step's peak of a running process, or any PyTorch memory snapshot.

    For a process (PID): its peak by bucket, by module or source line, and how memory went over the step.

    For a FILE that torch.cuda.memory._dump_snapshot wrote (or its JSON, packed or not): memory over time, the
    peak by category, source line and stack, the segments, and why a request found no room. With two FILEs: what
    grew from the first to the second, and what was freed. Nothing in a file is executed.
    """
    if as_json and plain:
        raise click.UsageError("--json and --plain: give only one of them")
    if len(targets) > 2:
        raise click.UsageError("give one FILE, or two to compare: `gpumem-tui look BEFORE AFTER`")
    paths = [Path(target) for target in targets]
    if len(paths) == 1 and targets[0].isdecimal() and int(targets[0]) and not paths[0].exists():
        if html is not None:
            raise click.UsageError("--html is for files: leave it out for a process")
        return _look_at_process(int(targets[0]), by, timeout_s, as_json=as_json)
    if html is None and not as_json:
        if not plain and is_terminal():
            return _show(paths)
        plain = True
    if len(paths) == 2:
        return _look_at_two(*paths, html=html, as_json=as_json, plain=plain)
    return _look_at_file(paths[0], html=html, as_json=as_json, plain=plain)


def _show(paths: list[Path]) -> int:
    """Open the screen of a file, or of two compared."""
    from gpumem_tui.snapshots.comparison import compare
    from gpumem_tui.tui.start import open_comparison, open_snapshot

    opened = [_open(path) for path in paths]
    if len(opened) == 1:
        return open_snapshot(*opened[0])
    return open_comparison(opened[0][0], opened[1][0], compare(*opened))


def _look_at_file(path: Path, *, html: Path | None, as_json: bool, plain: bool) -> int:
    from gpumem_tui.snapshots.printed import SnapshotObject
    from gpumem_tui.snapshots.report import snapshot_lines

    snapshot, analyses = _open(path)
    if html is not None:
        from gpumem_tui.snapshots.page import snapshot_page

        _write(html, snapshot_page(snapshot, analyses))
    Printer(as_json=as_json).show(
        body=lambda: SnapshotObject.of(snapshot, analyses),
        lines=lambda: islice(snapshot_lines(snapshot, analyses), None if plain else len(analyses)),
    )
    return 0


def _look_at_two(before: Path, after: Path, *, html: Path | None, as_json: bool, plain: bool) -> int:
    from gpumem_tui.snapshots.comparison import compare
    from gpumem_tui.snapshots.printed import ComparisonObject
    from gpumem_tui.snapshots.report import comparison_lines

    one, other = _open(before), _open(after)
    found = compare(one, other)
    if html is not None:
        from gpumem_tui.snapshots.page import comparison_page

        _write(html, comparison_page(one[0], other[0], found))
    Printer(as_json=as_json).show(
        body=lambda: ComparisonObject.of(one[0], other[0], found),
        lines=lambda: islice(comparison_lines(one[0], other[0], found), None if plain else len(found)),
    )
    return 0


def _write(path: Path, page: str) -> None:
    """Write a page; ends with a complaint where that fails."""
    from gpumem_tui.system import replacing

    try:
        with replacing(path) as file:
            file.write(page.encode())
    except OSError as error:
        reason = error.strerror or "cannot be written"
        raise SystemExit(complain(f"--html: {path}: {reason}; give another name", EXIT_BAD_INPUT)) from error
    note(f"{path}: a page of {len(page.encode()) >> 10:,} KiB, open it in a browser")


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
