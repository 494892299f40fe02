"""`monitor`: what the GPUs hold now, of this machine, of others, or as it was recorded."""

from __future__ import annotations

from pathlib import Path

import click

from gpumem_tui.cli.asked import AskedMonitor
from gpumem_tui.cli.here import monitor_here
from gpumem_tui.cli.hosts import HOSTS_OPTIONS, metrics_option, print_hosts, timeout_option, watch_hosts
from gpumem_tui.cli.types import Finite, with_options

_FILE = click.Path(path_type=Path)


@click.command
@click.option("--once", is_flag=True, help="Print one reading and end.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines, one a reading; with --once a single object.")
@click.option("--wire", is_flag=True, help="For a viewer elsewhere: JSON lines of a whole snapshot, then of changes.")
@click.option("--csv", "as_csv", is_flag=True, help="For hosts: one line per GPU and reading.")
@click.option("--interval", "interval_s", type=Finite(0.2, 3600), metavar="S", help="Seconds between readings.")
@click.option("--record", type=_FILE, metavar="FILE", help="Also keep every reading in a new file.")
@click.option("--quiet", is_flag=True, help="With --record or --metrics: no screen and no lines.")
@click.option("--replay", type=_FILE, metavar="FILE", help="Show a recording instead of this machine.")
@click.option("--speed", type=Finite(0.01, 1000), metavar="X", help="Play it X times as fast on the screen.")
@metrics_option
@click.option("--read-only", is_flag=True, help="Only watch: end no process, attach to none, search nothing.")
@click.option("--mine", is_flag=True, help="List only your own processes and training jobs.")
@click.option("--bell", is_flag=True, help="Ring the terminal's bell when an alert begins.")
@click.option("--settings", "settings_path", type=_FILE, metavar="FILE", help="Instead of the user's settings file.")
@with_options([*HOSTS_OPTIONS, timeout_option])
def monitor(**values: object) -> int:
    """Every GPU's memory as one ledger, live: on the screen, as lines, as JSON, as metrics.

    With --host, --hosts or --slurm the GPUs of other machines. A recording of several hosts is one file; while it is
    played [ and ] go a minute back and on, / to a time (/03:12), a to an alert.
    """
    typed = {f"--{name.removesuffix('_s').removeprefix('as_')}": value for name, value in values.items()}
    typed["--metrics"] = values["address"]
    asked = AskedMonitor.of(values)
    if asked.wire and (asked.are_named or asked.as_json or asked.once or asked.replay):
        raise click.UsageError("--wire: is of this machine as it is now, without --json and --once")
    if asked.quiet:
        loud = [option for option in ("--once", "--json", "--csv", "--wire", "--replay") if typed[option]]
        if loud:
            raise click.UsageError(f"--quiet and {loud[0]}: give only one of them")
        if asked.record is None and asked.address is None:
            raise click.UsageError("--quiet: with --record FILE or --metrics, else nothing is left to do")
    if asked.are_named:
        for option in ("--replay", "--speed"):
            if typed[option]:
                raise click.UsageError(f"{option} is of a recording, which has its hosts: leave out --host")
        printed = [option for option in ("--once", "--json", "--csv") if typed[option]]
        for option in ("--record", "--metrics") if printed else ():
            if typed[option]:
                raise click.UsageError(f"{printed[0]} and {option}: give only one of them")
        if printed:
            return print_hosts(asked, once=asked.once, as_json=asked.as_json, as_csv=asked.as_csv)
        return watch_hosts(asked)
    if asked.as_csv:
        raise click.UsageError("--csv is of hosts: name them with --host, --hosts or --slurm")
    for option, value in (("--remote-command", asked.remote_command), ("--timeout", asked.timeout_s)):
        if value is not None:
            raise click.UsageError(f"{option} is for other hosts: name them with --host, --hosts or --slurm")
    for one, other in (("--once", "--record"), ("--once", "--metrics"), ("--replay", "--record"),
                       ("--replay", "--metrics"), ("--replay", "--interval")):  # fmt: skip
        if typed[one] and typed[other]:
            raise click.UsageError(f"{one} and {other}: give only one of them")
    if asked.speed is not None and asked.replay is None:
        raise click.UsageError("--speed sets how fast --replay plays; give both")
    return monitor_here(asked)
