"""`run`, `attach` and `watch`: the memory of a training process while it trains."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from gpumem_tui.cli.types import Finite, Whole
from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED
from gpumem_tui.report.output import complain, is_terminal

if TYPE_CHECKING:
    from gpumem_tui.attach.target import Target
    from gpumem_tui.probe.wire import Exit
    from gpumem_tui.watch.reader import Watcher
    from gpumem_tui.watch.records import ProbedProcess

PID = Whole(min=1)
SECONDS = Finite(min=0.05)
_FIRST_SAMPLE_S = 5.0
_POLL_S = 0.1
_LAST_LINES = 24
"""Lines of a command's output that stay on the terminal after our screen is left."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--tui", "on_screen", is_flag=True, help="On a screen: its output, and the Monitor on it.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def run(on_screen: bool, command: tuple[str, ...]) -> int:
    """Train under the probe: any launcher, no change to the code.

    The command keeps its output, its signals and its exit code; 127 if there is no such command, 126 if it cannot be
    run. With --tui it has a terminal of its own: Ctrl-C and what is typed into its pane go to it.
    """
    from gpumem_tui.attach.launch import CannotRun

    try:
        return leave(run_command(command, on_screen=on_screen))
    except CannotRun as error:
        return complain(str(error), error.code)


def leave(ended: Exit | int) -> int:
    """End as a command did: with its exit code, or by the signal that ended it."""
    from gpumem_tui.watch.supervising import leave_as

    return ended if isinstance(ended, int) else leave_as(ended)


def run_command(
    command: tuple[str, ...],
    *,
    on_screen: bool,
    why_out: Callable[[ProbedProcess], Iterable[str]] = lambda _process: (),
) -> Exit | int:
    """Run a command under the probe, and return how it ended; on the screen, its exit code.

    Args:
        why_out: yields lines on a process that ran out of memory.

    Raises:
        CannotRun: there is no such command, or it may not be run.
    """
    from gpumem_tui.attach.launch import RUN_AFTER_S, SilenceNote, silent_below, start, warnings
    from gpumem_tui.cli.report import JobWatch
    from gpumem_tui.probe.files import default_directory
    from gpumem_tui.watch.folders import clean
    from gpumem_tui.watch.reader import Watcher

    if on_screen and not is_terminal():
        return complain("--tui: there is no terminal to draw on; without it `run` needs none", EXIT_BAD_INPUT)
    clean(Watcher().processes())
    for warning in warnings(command, default_directory()):
        complain(warning, 0)
    if on_screen:
        return _run_on_screen(command, why_out)

    def reasons() -> list[str]:
        return silent_below(started.pid, _publishing(Watcher()))

    def tick() -> None:
        note.tick()
        job.tick()

    job = JobWatch()
    note = SilenceNote(RUN_AFTER_S, reasons, lambda line: complain(f"nothing is published yet: {line}", 0))
    started = start(command, tick)
    job.follow(started.pid)
    with _told_afterwards(lambda: started.pids, why_out):
        ended = started.wait()
    if line := job.line():
        complain(line, 0)
    return ended


@click.command
@click.argument("pid", type=PID)
@click.option("--yes", is_flag=True, help="Do not ask first.")
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=30.0, show_default=True,
    help="Seconds to wait for the process to come back to Python.",
)  # fmt: skip
def attach(pid: int, yes: bool, timeout_s: float) -> int:
    """Put the probe into a Python process that is already running."""
    from gpumem_tui.attach.running import StartsLater
    from gpumem_tui.attach.target import NotAttached

    try:
        return _attach(pid, yes, timeout_s)
    except StartsLater as later:
        click.echo(f"{later}; then: `gpumem-tui watch {pid}`")
        return 0
    except NotAttached as error:
        code = complain(str(error), EXIT_FAILED)
        pids = [host.pid for host in error.instead]
    if not pids or not (yes or _is_asked("Attach to that instead?" if len(pids) == 1 else "Attach to those instead?")):
        return code
    return max(_attach_instead(other, timeout_s) for other in pids)


def _attach_instead(pid: int, timeout_s: float) -> int:
    from gpumem_tui.attach.target import NotAttached

    try:
        return _attach(pid, True, timeout_s)
    except NotAttached as error:
        return complain(str(error), EXIT_FAILED)


def _is_asked(question: str) -> bool:
    """Return the answer typed on the terminal; no without one."""
    return sys.stdin is not None and sys.stdin.isatty() and click.confirm(question, err=True)


def _attach(pid: int, yes: bool, timeout_s: float) -> int:
    """Put the probe into one process and say how it went.

    Raises:
        NotAttached: as `running.attach`.
    """
    from gpumem_tui.attach import running
    from gpumem_tui.attach.target import inspect
    from gpumem_tui.memory import Unknown

    watcher = following(pid)
    watched = find(watcher, pid)
    if watched is not None:
        problem = f" ({watched.problem})" if watched.problem else ""
        click.echo(f"{watched.title} publishes already, by {watched.process.entry}{problem}")
        return 0
    target = inspect(pid)
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            return complain(f"there is no terminal to ask on: `gpumem-tui attach {pid} --yes`", EXIT_BAD_INPUT)
        _explain(target)
        if not click.confirm("Attach?", err=True):
            return complain("not attached", EXIT_FAILED)
    attached = running.attach(target, timeout_s)
    pause_s = attached.pause_s
    pause = (
        pause_s.reason if isinstance(pause_s, Unknown) else f"its main thread stood still for {pause_s * 1e3:.1f} ms"
    )
    if attached.was_there:
        click.echo(f"the probe was in {target.host.title} already; {pause}")
    else:
        click.echo(f"attached to {target.host.title} in {attached.seconds:.2f} s; {pause}")
    if not attached.has_torch:
        click.echo("it has not imported torch; once it does and trains, it will publish")
        return 0
    deadline = time.monotonic() + _FIRST_SAMPLE_S
    while (watched := find(watcher, pid)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    click.echo("it publishes" if watched else "it will publish from its next optimizer step on", nl=False)
    click.echo(f": `gpumem-tui watch {pid}`")
    return 0


@click.command
@click.argument("pid", type=PID, required=False)
@click.option("--interval", "interval_s", type=SECONDS, default=1.0, show_default=True, help="Seconds between samples.")
@click.option("--post-mortem", is_flag=True, help="Only: what was there when memory ran out.")
@click.option("--mine", is_flag=True, help="Only your own processes, where you see those of others.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines: one a sample.")
def watch(pid: int | None, interval_s: float, post_mortem: bool, mine: bool, as_json: bool) -> int:
    """The processes that publish, a line a sample; of one that has ended, what its last moments were."""
    from gpumem_tui.attach.launch import WATCH_AFTER_S, SilenceNote, silent_anywhere
    from gpumem_tui.doctor.beside import BesideWatch
    from gpumem_tui.monitor.users import viewer
    from gpumem_tui.probe.files import default_directory
    from gpumem_tui.watch import report
    from gpumem_tui.watch.folders import why_unusable
    from gpumem_tui.watch.records import FOR_MEMORY

    watcher = following(pid)
    watcher.only = viewer() if mine else ""
    process = None if pid is None else find(watcher, pid, ended=True)
    if pid is not None and process is None:
        process = None if post_mortem else _first_step(watcher, pid, interval_s)
        if process is None:
            return does_not_publish(pid)
    if post_mortem:
        return _post_mortem(watcher, process, as_json=as_json)
    if process is None and not default_directory().exists() and (reason := why_unusable(default_directory())):
        complain(f"nothing can be published here: {reason}; set GPUMEM_TUI_DIR to another folder", 0)
    if process is None or process.is_running:
        note = SilenceNote(
            WATCH_AFTER_S, lambda: silent_anywhere(_publishing(watcher)), lambda line: complain(f"silent: {line}", 0)
        )
        shown = None if process is None else process.known_pid
        beside = following(pid)
        beside.only = watcher.only
        whose = None if process is None else {process.files.pid}
        BesideWatch(beside, None if whose is None else lambda: whose, lambda line: complain(line, 0)).start()
        process = report.watch(watcher, shown, interval_s, as_json=as_json, while_silent=note.tick)
    else:
        report.show_last(process, as_json=as_json)
    if process is not None and process.state in FOR_MEMORY:
        return _post_mortem(watcher, process, as_json=as_json)
    return 0


def _first_step(watcher: Watcher, pid: int, interval_s: float) -> ProbedProcess | None:
    """Wait until a process that was attached to publishes; None if it was not, or has ended before."""
    from gpumem_tui.attach.launch import was_attached_to, why_silent
    from gpumem_tui.watch import hosts

    process, said = None, ""
    while process is None and (host := hosts.find(pid)) is not None and host.state != "Z" and was_attached_to(host):
        if (why := why_silent(host)) != said:
            said = why
            complain(f"{host.title}: {why}; waiting for its next step, ctrl+c ends it", 0)
        time.sleep(min(interval_s, 1.0))
        process = find(watcher, pid, ended=True)
    return process or find(watcher, pid, ended=True)


def following(pid: int | None) -> Watcher:
    """Return a reader of what is published, also by a process that publishes elsewhere than usual."""
    from gpumem_tui.watch.reader import Watcher

    watcher = Watcher()
    if pid is not None:
        watcher.follow(pid)
    return watcher


def find(watcher: Watcher, pid: int, *, ended: bool = False) -> ProbedProcess | None:
    """Return the process of that pid that publishes; with `ended`, else the last one that did."""
    processes = watcher.processes()
    running = next((process for process in processes if process.pid == pid), None) or _only_below(processes, pid)
    if running is not None or not ended:
        return running
    return next((process for process in processes if process.pid is None and process.files.pid == pid), None)


def _only_below(processes: Sequence[ProbedProcess], pid: int) -> ProbedProcess | None:
    """Return the one publishing process that a process such as `gpumem-tui run` started; None for several."""
    from gpumem_tui.watch.supervising import is_below

    below = [one for one in processes if one.is_running and one.pid is not None and is_below(one.pid, pid)]
    return below[0] if len(below) == 1 else None


def _publishing(watcher: Watcher) -> set[int]:
    """Return the pids of the processes that publish now."""
    return {process.pid for process in watcher.processes() if process.pid is not None and process.is_running}


def does_not_publish(pid: int) -> int:
    """Say why there is nothing to read of a process; the exit code."""
    from gpumem_tui.attach.launch import why_silent
    from gpumem_tui.attach.target import LIST_LIVING
    from gpumem_tui.watch import hosts

    host = hosts.find(pid)
    if host is None:
        return complain(
            f"there is no process {pid}, and none that ended has left anything; {LIST_LIVING}", EXIT_BAD_INPUT
        )
    children = ", ".join(str(child.pid) for child in hosts.trainers(pid))
    instead = f"; its children that may train: {children}" if children else ""
    return complain(f"{host.title} has no probe yet: {why_silent(host)}{instead}", EXIT_FAILED)


def _run_on_screen(command: tuple[str, ...], why_out: Callable[[ProbedProcess], Iterable[str]]) -> int:
    """Run with `--tui`; afterwards the terminal has the last lines that the command printed.

    Raises:
        CannotRun: there is no such command, or it may not be run.
    """
    from gpumem_tui.attach.launch import start_in_terminal
    from gpumem_tui.settings import load
    from gpumem_tui.tui.start import open_run

    settings = load()
    started = start_in_terminal(command)
    with _told_afterwards(lambda: started.pids, why_out):
        code, lines = open_run(started, shlex.join(command), settings)
        for line in lines[-_LAST_LINES:]:
            click.echo(line)
    return code


@contextmanager
def _told_afterwards(
    pids: Callable[[], Collection[int]], why_out: Callable[[ProbedProcess], Iterable[str]]
) -> Iterator[None]:
    """Say afterwards what a command's processes held outside PyTorch, and how they ended that could not say it."""
    from gpumem_tui.doctor.beside import BesideWatch  # only here: the command does not wait for it
    from gpumem_tui.probe.files import default_directory
    from gpumem_tui.watch.reader import Watcher
    from gpumem_tui.watch.records import FOR_MEMORY, UNEXPLAINED

    offers: list[str] = []
    with BesideWatch(Watcher([default_directory()]), pids, offers.append):
        yield
    for process in Watcher().processes():
        if process.pid is None and process.files.pid in pids() and process.state in UNEXPLAINED:
            again = f"; `gpumem-tui watch {process.files.pid} --post-mortem` shows what it held"
            complain(f"{process.title}: {process.state_words}{again if process.state in FOR_MEMORY else ''}", 0)
            for line in why_out(process) if process.state in FOR_MEMORY else ():
                complain(line, 0)
    for line in offers:
        complain(line, 0)


def _post_mortem(watcher: Watcher, process: ProbedProcess | None, *, as_json: bool) -> int:
    from gpumem_tui.probe.files import WireError
    from gpumem_tui.watch.postmortem import case_json, case_lines, open_case

    processes = watcher.processes() if process is None else (process,)
    shown = 0
    for one in processes:
        try:
            case = open_case(one)
        except WireError as error:
            complain(str(error), EXIT_FAILED)
            continue
        if case is not None:
            click.echo(json.dumps(case_json(case)) if as_json else "\n".join([*[""] * bool(shown), *case_lines(case)]))
            shown += 1
    if shown:
        return 0
    if process is None:
        return complain("no process that was watched has run out of memory", 0)
    ended = "" if process.is_running else f": {process.state_words}"
    return complain(f"{process.title} has not run out of memory{ended}", 0)


def _explain(target: Target) -> None:
    """Print what will happen, before asking whether it should."""
    from gpumem_tui.attach.running import explanation

    version = "" if target.python is None else f", Python {target.python[0]}.{target.python[1]}"
    click.echo(f"{target.host.title}{version}", err=True)
    for line in explanation(target).splitlines():
        click.echo(f"  {line}", err=True)
