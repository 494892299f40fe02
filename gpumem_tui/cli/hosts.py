"""`gpumem-tui --host A --host B`: the Monitors of other machines, over the user's own ssh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gpumem_tui.cli.common import is_terminal
from gpumem_tui.errors import OptionError


def watch_hosts(
    written: tuple[str, ...],
    file: Path | None,
    slurm_job: str,
    remote_command: str | None,
    interval_s: float | None,
    *,
    allow_signals: bool = False,
) -> int:
    """Open on the hosts that were named and return the exit code; the command line goes before the settings.

    Args:
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
    hosts = hosts_of(written, file=file, groups=dict(settings.hosts), slurm_job=slurm_job)
    if not is_terminal():
        raise OptionError("no terminal to draw on; `ssh HOST gpumem-tui monitor --json` needs none")
    return open_hosts(
        Fleet(hosts, SshOptions(settings.remote_command, settings.interval_s)), settings, allow_signals=allow_signals
    )
