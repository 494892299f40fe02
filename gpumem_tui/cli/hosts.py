"""Other machines over the user's own ssh: their Monitors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_tui.cli.asked import AskedHosts, settings_of
from gpumem_tui.cli.types import Decorator, Finite, Typed
from gpumem_tui.errors import EXIT_FAILED, EXIT_INTERRUPTED, OptionError
from gpumem_tui.report.output import Complaints, complain, is_terminal, on_end, sleep_until, written
from gpumem_tui.report.tables import counted
from gpumem_tui.text import shortened

if TYPE_CHECKING:
    from gpumem_tui.monitor.alerts import AlertMark
    from gpumem_tui.monitor.metrics import Machine, Machines
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.remote.connection import Fleet
    from gpumem_tui.remote.status import HostStatus
    from gpumem_tui.settings import Settings

_METRICS = "127.0.0.1:9820"
_LAST_PORT = 65535
HOSTS_OPTIONS: list[Decorator] = [
    click.option(
        "--host", "hosts", multiple=True, metavar="HOST",
        help="Watch a host over ssh, or node[01-16], or a list of yours.",
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
timeout_option = click.option(
    "--timeout", "timeout_s", type=Finite(0.1, 3600), metavar="S",
    help="Seconds to wait for a host's first answer, without a screen (default: 10).",
)  # fmt: skip


def _address(text: str) -> tuple[str, int]:
    """Return HOST and PORT; PORT alone is on this machine only, an IPv6 host is in brackets."""
    from gpumem_tui.addresses import is_address

    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_host = is_address(bare) if set(bare + host) & set("[:]") else True
    if not (is_host and port.isdecimal() and int(port) <= _LAST_PORT):
        raise ValueError(f"{text!r} is not HOST:PORT such as {_METRICS}")
    return bare or "127.0.0.1", int(port)


metrics_option = click.option(
    "--metrics", "address", type=Typed("address", _address), is_flag=False, flag_value=_METRICS,
    metavar="[HOST:PORT]", help=f"Also serve Prometheus metrics ({_METRICS}).",
)  # fmt: skip


def serve_metrics(stack: ExitStack, machines: Machines, host: str, port: int) -> str:
    """Serve metrics until the stack is left. Return where, for the screen to say."""
    from gpumem_tui.addresses import is_loopback
    from gpumem_tui.monitor.metrics import Server

    server = Server(machines, host, port, counts_itself=True)
    stack.callback(server.stop)
    if not is_loopback(host):
        complain(f"--metrics: everyone who can reach {server.address} can read users and process names", 0)
    return f"metrics on {server.address}"


def _fleet_of(asked: AskedHosts) -> tuple[Fleet, Settings]:
    """Return the hosts that were named, and the settings, before which the command line goes.

    Raises:
        OptionError: no host, one that is none, Slurm answers no, the settings are invalid.
    """
    from gpumem_tui.remote.connection import Fleet
    from gpumem_tui.remote.hosts import hosts_of
    from gpumem_tui.remote.ssh import SshOptions

    settings = settings_of(asked, "remote_command")
    hosts = hosts_of(asked.hosts, file=asked.hosts_file, groups=settings.hosts, slurm_job=asked.slurm_job or "")
    return Fleet(hosts, SshOptions(settings.remote_command, settings.interval_s)), settings


@contextmanager
def started_fleet(asked: AskedHosts) -> Iterator[tuple[Fleet, Settings]]:
    """Connect to the hosts that were named as long as the context lasts.

    Raises:
        OptionError: as `_fleet_of`.
    """
    fleet, settings = _fleet_of(asked)
    fleet.start()
    try:
        yield fleet, settings
    finally:
        fleet.stop()


def print_hosts(asked: AskedHosts, *, once: bool, as_json: bool, as_csv: bool) -> int:
    """Print the readings of hosts: one of each, or all as they come; and on stderr which are away.

    Returns:
        The exit code: `EXIT_FAILED` where a host of one reading has none, or of many readings all have none.
    """
    from gpumem_tui.remote.report import HostPrinter
    from gpumem_tui.remote.status import AwayMarks

    marks = AwayMarks()
    first: Sequence[HostStatus] = ()
    with started_fleet(asked) as (fleet, settings):
        printer = HostPrinter(as_json=as_json, as_csv=as_csv, mine=settings.mine)

        def write() -> None:
            nonlocal first
            first = settled(fleet, asked)
            printer.show(first, once=once)
            _complain_of(marks.new(time.time(), first))
            while not once:
                sleep_until(time.monotonic() + settings.interval_s)
                printer.show(fleet.statuses, once=once)
                _complain_of(marks.new(time.time(), fleet.statuses))

        code = written(write)
        answered = [each.report is not None and not (once and each.problem) for each in first]
        return code or (0 if (all(answered) if once else any(answered)) else EXIT_FAILED)


def settled(fleet: Fleet, asked: AskedHosts) -> Sequence[HostStatus]:
    """Wait for the first answer of each host for as long as was asked; return their states."""
    from gpumem_tui.remote.connection import ANSWER_S

    return fleet.settled(asked.timeout_s or ANSWER_S)


def watch_hosts(asked: AskedHosts) -> int:
    """Open on the hosts that were named and return the exit code.

    Raises:
        OptionError: as `_fleet_of`; signals in a program that only watches; there is no terminal.
    """
    from gpumem_tui.tui.start import open_hosts

    fleet, settings = _fleet_of(asked)
    if asked.allow_signals and settings.read_only:
        raise OptionError(
            "--allow-signals: the settings file has read_only = true; remove that line, or leave the option out"
        )
    if not is_terminal() and asked.address is None and asked.record is None:
        raise OptionError("no terminal to draw on; `gpumem-tui monitor --host HOST --json` needs none")
    with ExitStack() as stack:
        if asked.address is not None:
            where = serve_metrics(stack, partial(_machines, fleet), *asked.address)
            complain(f"{where}, of {counted(len(fleet.connections), 'host')}", 0)
        if asked.record is not None:
            return _record_hosts(fleet, asked.record, settings, asked)
        if is_terminal() and not asked.quiet:
            return open_hosts(fleet, settings, allow_signals=asked.allow_signals)
        stack.callback(fleet.stop)
        fleet.start()
        _say_who_is_away(fleet, settings)
    return 0


def _say_who_is_away(fleet: Fleet, settings: Settings) -> None:
    """Print which hosts do not answer any more, and tell of alerts, until a signal ends it."""
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.remote.status import AwayMarks

    stopped, away, notifier = threading.Event(), AwayMarks(), Notifier(settings.notify)
    complaints = Complaints()
    on_end(stopped.set)  # ctrl+c ends it anyway
    while not stopped.wait(settings.interval_s):
        statuses = fleet.statuses
        _complain_of(away.new(time.time(), statuses))
        _tell(notifier, statuses)
        complaints.say(notifier.problem)
    notifier.close()


def _tell(notifier: Notifier, statuses: Sequence[HostStatus]) -> None:
    from gpumem_tui.remote.status import alerts_of

    for status in statuses if notifier.is_wanted else ():
        notifier.update(status.host.name, alerts_of(status, time.time()))


def _complain_of(marks: Sequence[AlertMark]) -> None:
    for mark in marks:
        complain(f"{mark.who}: {mark.message}", 0)


def _machines(fleet: Fleet) -> Iterator[Machine]:
    """Yield what each host reported last."""
    from gpumem_tui.monitor.metrics import Machine
    from gpumem_tui.monitor.probes import ProbeReport

    for status in fleet.statuses:
        report = status.report
        if report is None:
            yield Machine(status.host.name, None)
        else:
            yield Machine(
                status.host.name, report.with_ledgers, ProbeReport(said=report.said), is_up=not status.problem
            )


def _record_hosts(fleet: Fleet, path: Path, settings: Settings, asked: AskedHosts) -> int:
    """Record hosts, on the screen if there is one; else print the alerts that begin and who is away, a line each."""
    from gpumem_tui.monitor.notify import Notifier
    from gpumem_tui.recording.recording import GpuRecorder, record_hosts
    from gpumem_tui.settings import Notify
    from gpumem_tui.tui.start import open_hosts

    recorder = GpuRecorder(path, of_one_machine=False)
    on_screen, code = is_terminal() and not asked.quiet, 0

    def tell(marks: Sequence[AlertMark]) -> None:
        for mark in () if on_screen or asked.quiet else marks:
            click.echo(mark_line(mark))

    def tell_away(marks: Sequence[AlertMark]) -> None:
        _complain_of(() if on_screen else marks)

    notifier = Notifier(Notify() if on_screen else settings.notify)  # the screen tells by itself

    def statuses() -> Sequence[HostStatus]:
        found = fleet.statuses
        _tell(notifier, found)
        complaints.say(notifier.problem)
        return found

    complaints = Complaints()
    recorded = record_hosts(statuses, recorder, settings.interval_s, tell, tell_away)
    recorded.start()
    try:
        if on_screen:
            code = open_hosts(fleet, settings, allow_signals=asked.allow_signals)
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
        notifier.close()
    return complain(recorded.notice, EXIT_FAILED) if recorded.notice else code


def mark_line(mark: AlertMark) -> str:
    """Return an alert that began, with its time."""
    from gpumem_tui.recording.file import when

    return f"{when(mark.time_s)}  {mark.severity.value:<8}  {f'{mark.who}: ' if mark.who else ''}{mark.message}"
