"""Every command by name: parses, then calls one function. A command's module is imported when it is asked for."""

from __future__ import annotations

import errno
import sys
from importlib import import_module
from pathlib import Path

import click

from gpumem_tui import __version__
from gpumem_tui.cli.common import complain, drop_output
from gpumem_tui.cli.groups import with_options
from gpumem_tui.cli.hosts import HOSTS_OPTIONS
from gpumem_tui.cli.metrics import metrics_option
from gpumem_tui.cli.numbers import Finite
from gpumem_tui.exit_codes import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED

_COMMANDS = {
    "search": "gpumem_tui.cli.search:search",
    "predict": "gpumem_tui.cli.search:predict",
    "plan": "gpumem_tui.cli.plan:plan",
    "noise-scale": "gpumem_tui.cli.goals:noise_scale_command",
    "monitor": "gpumem_tui.cli.monitor:monitor",
    "serve": "gpumem_tui.cli.serve:serve",
    "models": "gpumem_tui.cli.catalog:models",
    "gpus": "gpumem_tui.cli.catalog:gpus",
    "doctor": "gpumem_tui.cli.monitor:doctor",
    "settings": "gpumem_tui.cli.monitor:settings_file",
    "grafana": "gpumem_tui.cli.monitor:grafana",
    "run": "gpumem_tui.cli.watch:run",
    "attach": "gpumem_tui.cli.watch:attach",
    "watch": "gpumem_tui.cli.watch:watch",
    "look": "gpumem_tui.cli.look:look",
}
"""Where each command is, in the order of the help."""
_FOR_PROGRAMS = {
    "search-for-viewer": "gpumem_tui.cli.hosts:search_for_viewer",
    "run-for-viewer": "gpumem_tui.cli.watch:run_for_viewer",
}
"""Called by this program on another machine."""


class _Commands(click.Group):
    """Knows its commands by name only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        where = {**_COMMANDS, **_FOR_PROGRAMS}.get(cmd_name)
        if where is None:
            return None
        module, _, attribute = where.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Who reads the output may have enough of it (``| head -1``): not an error, though click would make it one."""
        try:
            result: object = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            drop_output()
            return 0
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            drop_output()
            return complain(f"the output cannot be written: {error.strerror}", EXIT_FAILED)
        return result


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, package_name="gpumem-tui")
@with_options(HOSTS_OPTIONS)
@click.option("--interval", "interval_s", type=Finite(0.2, 3600), metavar="S", help="Seconds between hosts' readings.")
@click.option("--allow-signals", is_flag=True, help="Offer to end processes on hosts, by kill over ssh; asks first.")
@metrics_option
@click.pass_context
def cli(
    context: click.Context,
    hosts: tuple[str, ...],
    hosts_file: Path | None,
    slurm_job: str | None,
    remote_command: str | None,
    interval_s: float | None,
    allow_signals: bool,
    address: tuple[str, int] | None,
) -> int:
    """Where GPU memory goes while a neural network trains, how large a batch fits, and what would help.

    Without a command the program opens: on the Monitor where there is a GPU, else on a search on a simulated one; with
    --host, --hosts or --slurm on the Monitors of other machines.
    """
    names_hosts = bool(hosts or hosts_file or slurm_job)
    of_hosts = {
        "--remote-command": remote_command,
        "--interval": interval_s,
        "--allow-signals": allow_signals or None,
        "--metrics": address,
    }
    alone = next((name for name, value in of_hosts.items() if value is not None and not names_hosts), "")
    if context.invoked_subcommand is not None:
        if names_hosts or alone:
            raise click.UsageError(f"hosts are watched without a command: leave out {context.invoked_subcommand}")
        return 0
    if alone:
        here = "; of this machine: `gpumem-tui monitor --metrics`" if address is not None else ""
        raise click.UsageError(f"{alone} is for other hosts: name them with --host, --hosts or --slurm{here}")
    from gpumem_tui.cli.hosts import watch_hosts

    return watch_hosts(
        hosts, hosts_file, slurm_job or "", remote_command, interval_s, address, allow_signals=allow_signals
    )


def run() -> int:
    """Run the command that was typed and return the exit code.

    Raises:
        OptionError: an invalid option.
    """
    try:
        code = cli.main(prog_name="gpumem-tui", standalone_mode=False)
    except click.ClickException as error:
        return complain(error.format_message(), EXIT_BAD_INPUT)
    except click.Abort:
        return EXIT_INTERRUPTED
    return code or 0
