"""The command line: parses, then calls one function. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys

import click

from gpumem_tui import __version__
from gpumem_tui.cli.common import EXIT_BAD_INPUT, EXIT_INTERRUPTED, complain, configure, is_terminal, open_screen
from gpumem_tui.cli.search import predict, search


def main() -> None:
    """Entry point: every error a user can cause is one line on stderr and an exit code."""
    from gpumem_tui.options import OptionError

    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        code = complain(error.format_message(), EXIT_BAD_INPUT)
    except OptionError as error:
        code = complain(str(error), EXIT_BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code or 0)


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, package_name="gpumem-tui")
@click.pass_context
def cli(context: click.Context) -> int | None:
    """Where GPU memory goes while a neural network trains, how large a batch fits, and what would help."""
    if context.invoked_subcommand is not None:
        return None
    if not is_terminal():
        raise click.UsageError("no terminal to draw on; `gpumem-tui search --plain` and `--json` need none")
    options, config = configure({})
    return open_screen(options, config, autostart=False)


for command in (search, predict):
    cli.add_command(command)
