"""`gpumem-tui --host A --host B`: the Monitors of other machines, over the user's own ssh."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_tui.cli.common import complain, is_terminal
from gpumem_tui.cli.metrics import serve_metrics
from gpumem_tui.errors import OptionError

if TYPE_CHECKING:
    from gpumem_tui.monitor.metrics import Machine
    from gpumem_tui.remote.fleet import Fleet


def watch_hosts(
    written: tuple[str, ...],
    file: Path | None,
    slurm_job: str,
    remote_command: str | None,
    interval_s: float | None,
    address: tuple[str, int] | None,
    *,
    allow_signals: bool = False,
) -> int:
    """Open on the hosts that were named and return the exit code; the command line goes before the settings.

    Args:
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
    if not is_terminal() and address is None:
        raise OptionError("no terminal to draw on; `ssh HOST gpumem-tui monitor --json` needs none")
    fleet = Fleet(hosts, SshOptions(settings.remote_command, settings.interval_s))
    with ExitStack() as stack:
        if address is not None:
            notice = serve_metrics(stack, partial(_machines, fleet), *address)
            complain(f"{notice}, of {len(hosts)} host{'s' * (len(hosts) > 1)}", 0)
        if is_terminal():
            return open_hosts(fleet, settings, allow_signals=allow_signals)
        stack.callback(fleet.stop)
        fleet.start()
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGHUP):  # ctrl+c ends it anyway
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()
    return 0


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
