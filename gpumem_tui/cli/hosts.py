"""Other machines over the user's own ssh: their Monitors, a search or a run on one of them."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpumem_tui.cli.common import complain, is_terminal
from gpumem_tui.cli.metrics import serve_metrics
from gpumem_tui.errors import OptionError
from gpumem_tui.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from gpumem_tui.text import shortened

if TYPE_CHECKING:
    from gpumem_tui.monitor.marks import Mark
    from gpumem_tui.monitor.metrics import Machine
    from gpumem_tui.options.configuration import Options
    from gpumem_tui.remote.fleet import Fleet
    from gpumem_tui.remote.hosts import RemoteHost
    from gpumem_tui.remote.ssh import SshOptions
    from gpumem_tui.settings import Settings

LAST_LINES = 24
"""Of a command's output that was on a screen of ours, these stay on the terminal."""
HOST_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--host", metavar="HOST", help="Run it there, over ssh: HOST, USER@HOST:PORT. Nothing is copied."),
    click.option(
        "--remote-directory", metavar="DIR", help="Directory on the host to run in (default: the login's home)."
    ),
    click.option(
        "--remote-command", metavar="COMMAND", help="Command that runs gpumem-tui there (default: the one in PATH)."
    ),
]

HOSTS_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--host", "hosts", multiple=True, metavar="HOST",
        help="Watch this host over ssh: HOST, USER@HOST:PORT, node[01-16], or a list's name in the settings. May be "
        "given several times.",
    ),
    click.option(
        "--hosts", "hosts_file", type=click.Path(path_type=Path), metavar="FILE",
        help="Watch the hosts of a file, one a line.",
    ),
    click.option("--slurm", "slurm_job", metavar="JOBID", help="Watch the nodes of a Slurm job."),
    click.option(
        "--remote-command", metavar="COMMAND", help="Command that runs gpumem-tui there (default: the one in PATH)."
    ),
]  # fmt: skip


def watch_hosts(
    written: tuple[str, ...],
    file: Path | None,
    slurm_job: str,
    remote_command: str | None,
    interval_s: float | None,
    address: tuple[str, int] | None = None,
    record: Path | None = None,
    *,
    allow_signals: bool = False,
) -> int:
    """Open on the hosts that were named and return the exit code; the command line goes before the settings.

    Args:
        record: also keep how they stand in this new file; without a terminal nothing else is done.
        address: where metrics of all of them are served; then no terminal is needed.
        allow_signals: offer to end processes there.

    Raises:
        OptionError: no host, one that is none, Slurm says no, the settings are invalid, there is no terminal.
    """
    from gpumem_tui.remote.fleet import Fleet
    from gpumem_tui.remote.hosts import hosts_of
    from gpumem_tui.remote.ssh import SshOptions
    from gpumem_tui.settings import load
    from gpumem_tui.tui.start import open_hosts

    settings = load()
    settings = dataclasses.replace(
        settings,
        interval_s=interval_s or settings.interval_s,
        remote_command=remote_command or settings.remote_command,
    )
    if allow_signals and settings.read_only:
        raise OptionError("--allow-signals: the settings file has read_only = true, by which no process is ended")
    hosts = hosts_of(written, file=file, groups=dict(settings.hosts), slurm_job=slurm_job)
    if not is_terminal() and address is None and record is None:
        raise OptionError("no terminal to draw on; `ssh HOST gpumem-tui monitor --json` needs none")
    fleet = Fleet(hosts, SshOptions(settings.remote_command, settings.interval_s))
    with ExitStack() as stack:
        if address is not None:
            notice = serve_metrics(stack, partial(_machines, fleet), *address)
            complain(f"{notice}, of {len(hosts)} host{'s' * (len(hosts) > 1)}", 0)
        if record is not None:
            return _record_hosts(fleet, record, settings, allow_signals=allow_signals)
        if is_terminal():
            return open_hosts(fleet, settings, allow_signals=allow_signals)
        stack.callback(fleet.stop)
        fleet.start()
        _say_who_is_away(fleet, settings.interval_s)
    return 0


def _say_who_is_away(fleet: Fleet, interval_s: float) -> None:
    """Until a signal ends it."""
    from gpumem_tui.remote.away import AwayMarks

    stopped, away = threading.Event(), AwayMarks()
    for number in (signal.SIGTERM, signal.SIGHUP):  # ctrl+c ends it anyway
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.wait(interval_s):
        _complain_of(away.new(time.time(), fleet.statuses))


def _complain_of(marks: Sequence[Mark]) -> None:
    for mark in marks:
        complain(f"{mark.who}: {mark.message}", 0)


def _machines(fleet: Fleet) -> Iterator[Machine]:
    """What each host said last."""
    from gpumem_tui.monitor.metrics import Machine
    from gpumem_tui.monitor.probes import ProbeReport

    for status in fleet.statuses:
        report = status.report
        if report is None:
            yield Machine(status.host.name, None)
        else:
            probes = ProbeReport(listed={place: dict(said) for place, said in report.probes.items()})
            yield Machine(status.host.name, report.snapshot, probes, is_up=not status.problem)


def _record_hosts(fleet: Fleet, path: Path, settings: Settings, *, allow_signals: bool) -> int:
    """Record hosts, on the screen if there is one; else print the alerts that begin and who is away, a line each."""
    from gpumem_tui.monitor.recording_file import RecordingError
    from gpumem_tui.remote.recording import HostsRecorder, RecordedHosts
    from gpumem_tui.tui.start import open_hosts

    try:
        recorder = HostsRecorder(path)
    except RecordingError as error:
        raise OptionError(f"--record: {error}") from error
    on_screen, code = is_terminal(), 0

    def tell(marks: Sequence[Mark]) -> None:
        for mark in () if on_screen else marks:
            click.echo(mark_line(mark))

    def tell_away(marks: Sequence[Mark]) -> None:
        _complain_of(() if on_screen else marks)

    recorded = RecordedHosts(lambda: fleet.statuses, recorder, settings.interval_s, tell, tell_away)
    recorded.start()
    try:
        if on_screen:
            code = open_hosts(fleet, settings, allow_signals=allow_signals)
        else:
            fleet.start()
            names = ", ".join(fleet.connections)
            complain(f"recording {shortened(names)} to {path}; ctrl+c ends it", 0)
            recorded.wait()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        fleet.stop()
        recorded.stop()
    return complain(recorded.notice, EXIT_FAILED) if recorded.notice else code


def mark_line(mark: Mark) -> str:
    """An alert that began, with its time."""
    from gpumem_tui.monitor.recording_file import when

    return f"{when(mark.time_s)}  {mark.severity.value:<8}  {f'{mark.who}: ' if mark.who else ''}{mark.message}"


def single_host(
    host: str | None, remote_directory: str | None, remote_command: str | None
) -> tuple[RemoteHost, SshOptions, Settings] | None:
    """The one host that `HOST_OPTIONS` name, and how it is reached; None for this machine.

    Raises:
        OptionError: it is none, or several, or the settings are invalid.
    """
    if host is None:
        of_hosts = {"--remote-directory": remote_directory, "--remote-command": remote_command}
        if alone := next((name for name, value in of_hosts.items() if value is not None), ""):
            raise click.UsageError(f"{alone} is for another machine: name it with --host")
        return None
    from gpumem_tui.remote.hosts import one_host
    from gpumem_tui.remote.ssh import SshOptions
    from gpumem_tui.settings import load

    settings = load()
    return (
        one_host(host, dict(settings.hosts)),
        SshOptions(remote_command or settings.remote_command, settings.interval_s),
        settings,
    )


def search_on_host(
    host: RemoteHost,
    ssh: SshOptions,
    directory: str,
    asked: Options,
    settings: Settings,
    *,
    as_json: bool,
    quiet: bool,
    on_screen: bool,
) -> int:
    """Search there, show it here, and return the exit code.

    Raises:
        OptionError: the options are wrong there, or the program there is of another version.
    """
    from gpumem_tui.plan.advice import advice_lines
    from gpumem_tui.remote.link import LinkLost
    from gpumem_tui.remote.searching import RemoteSearch
    from gpumem_tui.search.headless import run

    there = RemoteSearch(host, ssh, directory, asked)
    try:
        if on_screen:
            print(f"connecting to {host.name} …", end="\r", file=sys.stderr, flush=True)
        found = there.configure()
        if on_screen:
            from gpumem_tui.tui.start import open_search_on_host

            return open_search_on_host(there, found, asked.trained, ssh, settings)
        if not quiet:
            print(f"gpumem-tui: on {host.name} in {found.directory}", file=sys.stderr)
        return run(found.config, advice_lines, as_json=as_json, quiet=quiet, search_function=there.search)
    except LinkLost as lost:
        return complain(f"{host.name}: {lost}", EXIT_FAILED)
    finally:
        there.end()


def run_on_host(
    host: RemoteHost, ssh: SshOptions, settings: Settings, directory: str, command: tuple[str, ...], *, on_screen: bool
) -> int:
    """Run a command there under the probe: its output, its terminal if there is one here, and its exit code.

    Args:
        on_screen: on a screen of ours, beside that machine's Monitor.
    """
    from gpumem_tui.remote import running
    from gpumem_tui.remote.link import LinkLost

    terminal = on_screen or is_terminal()
    try:
        running.check_host(host, ssh)
        words = running.remote_words(host, ssh, directory, command, terminal=terminal)
        if on_screen:
            return _run_on_screen(host, ssh, settings, words, shlex.join(command))
        if terminal:
            running.become(words)
        code = running.follow(words)
    except LinkLost as lost:
        return complain(f"{host.name}: {lost}", EXIT_FAILED)
    if code == running.LOST:
        complain(f"{host.name}: the connection was lost, and the command there is ended", code)
    return code


def _run_on_screen(host: RemoteHost, ssh: SshOptions, settings: Settings, words: list[str], command: str) -> int:
    from gpumem_tui.attach.launch import CannotRun, start_in_terminal
    from gpumem_tui.remote.connection import Connection
    from gpumem_tui.tui.start import open_run

    try:
        started = start_in_terminal(words)
    except CannotRun as error:
        return complain(str(error), EXIT_FAILED)
    code, lines = open_run(started, f"{command} (on {host.name})", settings, Connection(host, ssh))
    for line in lines[-LAST_LINES:]:
        click.echo(line)
    return code


@click.command("search-for-viewer", hidden=True)
def search_for_viewer() -> int:
    """Search for a gpumem-tui on another machine, which speaks through stdin and stdout."""
    from gpumem_tui.remote.serving import serve

    return serve()
