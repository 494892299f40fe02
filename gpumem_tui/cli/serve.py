"""`serve`: the program in a browser."""

from __future__ import annotations

import asyncio
import getpass
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_tui.cli.asked import AskedHosts
from gpumem_tui.cli.hosts import HOSTS_OPTIONS
from gpumem_tui.cli.types import Finite, Whole, with_options
from gpumem_tui.errors import OptionError
from gpumem_tui.report.tables import counted

if TYPE_CHECKING:
    from gpumem_tui.serve.visitor import Hosts

_PORT = 9821
_VISITORS = 4
_MOST_VISITORS = 100


@click.command
@click.option("--bind", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="127.0.0.1 or ::1, no other.")
@click.option(
    "--port", type=Whole(0, 65535), default=_PORT, show_default=True, metavar="N", help="0: any that is free."
)
@click.option(
    "--visitors", type=Whole(1, _MOST_VISITORS), default=_VISITORS, show_default=True, metavar="N",
    help="How many at once; each is a process.",
)  # fmt: skip
@click.option(
    "--read-only/--allow-actions", default=True, show_default=True,
    help="Only watch and plan: end no process, attach to none, look into none, search nothing, write no file.",
)  # fmt: skip
@click.option(
    "--settings", "settings_path", type=click.Path(path_type=Path), metavar="FILE",
    help="Instead of the user's settings file.",
)  # fmt: skip
@click.option("--interval", "interval_s", type=Finite(0.2, 3600), metavar="S", help="Seconds between hosts' readings.")
@with_options(HOSTS_OPTIONS)
def serve(
    bind: str, port: int, visitors: int, read_only: bool, settings_path: Path | None, **hosts: object
) -> int:  # fmt: skip
    """The program in a browser, on this machine's loopback only: this machine's Monitor, or with --host, --hosts or
    --slurm those of others. The URL that it prints has a token in it: whoever knows it comes in. From another machine:
    ssh -L. Ctrl-C ends it, with everything that visitors have started; in a page it copies."""  # noqa: D205, D209
    from gpumem_tui.addresses import is_loopback

    address = "127.0.0.1" if bind == "localhost" else bind
    if not is_loopback(address):
        raise OptionError(
            f"--bind {bind}: only 127.0.0.1 or ::1, as what is typed and shown would cross the network unencrypted; "
            f"from another machine: `{_tunnel('127.0.0.1', port or _PORT, 'THIS-MACHINE')}`, then open the URL there"
        )
    if missing := [name for name in ("textual_serve", "aiohttp") if find_spec(name) is None]:
        remedy = f"{shlex.quote(sys.executable)} -m pip install textual-serve"
        raise OptionError(f"serve needs the package textual-serve ({missing[0]} is not installed): `{remedy}`")
    watched = _hosts(AskedHosts.of({"address": None, **hosts}), settings_path)
    from gpumem_tui.serve.access import new_token
    from gpumem_tui.serve.server import WebServer
    from gpumem_tui.serve.visitor import command

    starts = command(settings_path, read_only=read_only, hosts=watched)
    server = WebServer(starts, new_token(), visitors)

    def announce(url: str) -> None:
        _announce(url, address, visitors, len(watched.names), read_only=read_only)

    asyncio.run(server.run(address, port, announce))
    return 0


def _hosts(asked: AskedHosts, settings_path: Path | None) -> Hosts:
    """Return the hosts that visitors see; errors in them or the settings are reported here, not to each visitor.

    Raises:
        OptionError: no host, one that is none, Slurm answers no, the settings are invalid.
    """
    from gpumem_tui.serve.visitor import Hosts
    from gpumem_tui.settings import load

    settings = load(settings_path)
    if not asked.are_named:
        for option, value in (("--remote-command", asked.remote_command), ("--interval", asked.interval_s)):
            if value is not None:
                raise click.UsageError(f"{option} is for other hosts: name them with --host, --hosts or --slurm")
        return Hosts()
    from gpumem_tui.remote.hosts import hosts_of

    found = hosts_of(asked.hosts, file=asked.hosts_file, groups=settings.hosts, slurm_job=asked.slurm_job or "")
    return Hosts(tuple(host.name for host in found), asked.remote_command or "", asked.interval_s)


def _announce(url: str, address: str, visitors: int, hosts: int, *, read_only: bool) -> None:
    """Print where it is: the first line is the URL alone, for scripts."""
    click.echo(url)
    may = "read-only (--allow-actions permits more)" if read_only else "visitors may end processes and start searches"
    where = f"{counted(hosts, 'host')}; " if hosts else ""
    click.echo(f"{where}{may}; {visitors} visitor{'s' * (visitors > 1)} at once; ctrl+c ends it")
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        port = int(url.partition("/?")[0].rpartition(":")[2])
        click.echo("from your own machine, then open the same URL there:")
        click.echo(f"  {_tunnel(address, port, connection[2], int(connection[3]))}")
    sys.stdout.flush()


def _tunnel(address: str, port: int, host: str, ssh_port: int = 22) -> str:
    """Return the command by which a port of another machine is this server's, so that the same URL holds there."""
    here = f"[{address}]" if ":" in address else address
    towards = f"-p {ssh_port} " if ssh_port != 22 else ""
    return f"ssh -N -L {here}:{port}:{here}:{port} {towards}{_user()}@{host}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return str(os.getuid())
