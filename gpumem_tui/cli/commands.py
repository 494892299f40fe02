"""Every command by name: parses, then calls one function. A command's module is imported when it is asked for."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from gpumem_tui import __version__
from gpumem_tui.cli.asked import AskedHosts
from gpumem_tui.cli.hosts import HOSTS_OPTIONS, metrics_option, watch_hosts
from gpumem_tui.cli.types import Finite, with_options
from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from gpumem_tui.report.output import complain, printed_whole

_COMMANDS = {
    "search": ("gpumem_tui.cli.search:search", "Find the largest batch: run larger ones until memory is out."),
    "predict": ("gpumem_tui.cli.search:predict", "Predict the memory of one batch size, without a GPU."),
    "fit": ("gpumem_tui.cli.fit:fit", "Make a command fit the GPU at hand, and train."),
    "plan": ("gpumem_tui.cli.plan:plan", "Show what fits, which changes make more fit, and their cost."),
    "monitor": ("gpumem_tui.cli.monitor:monitor", "This machine's GPUs: a ledger of memory each, live."),
    "free": ("gpumem_tui.cli.free:free", "Choose free GPUs for a script."),
    "serve": ("gpumem_tui.cli.serve:serve", "The program in a browser, on this machine only."),
    "models": ("gpumem_tui.cli.catalog:models", "List the models that --model knows."),
    "gpus": ("gpumem_tui.cli.catalog:gpus", "List the GPUs that --gpu simulates."),
    "doctor": ("gpumem_tui.cli.catalog:doctor", "Check what works on this machine, and say how to fix the rest."),
    "schema": ("gpumem_tui.cli.schema:schema", "Print the JSON Schema of what --json prints."),
    "settings": ("gpumem_tui.cli.catalog:settings_file", "Print a settings file with every key explained."),
    "grafana": ("gpumem_tui.cli.catalog:grafana", "Print a Grafana dashboard for `monitor --metrics`."),
    "alerts": ("gpumem_tui.cli.catalog:alerts", "Print the alerts as Prometheus' rules, or send one to try."),
    "run": ("gpumem_tui.cli.watch:run", "Train under the probe: any launcher, code unchanged."),
    "attach": ("gpumem_tui.cli.watch:attach", "Put the probe into a Python process that runs already."),
    "watch": ("gpumem_tui.cli.watch:watch", "A line a sample of watched processes; or a post-mortem."),
    "report": ("gpumem_tui.cli.report:report", "Memory and use of a Slurm job's GPUs, next to what it asked for."),
    "look": ("gpumem_tui.cli.look:look", "The peak of a running step, or of a memory snapshot."),
    "mcp": ("gpumem_tui.cli.mcp:mcp", "Serve agents by the Model Context Protocol."),
    "manual": ("gpumem_tui.cli.manual:manual", "Read how everything works, a topic at a time."),
}
"""Where each command is, and what it does, in the order of the help."""


class _Commands(click.Group):
    """Knows its commands by name only."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's protocol
        """Return the commands in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's protocol
        """Import a command; None for an unknown name."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's protocol
        """Write what each does, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; click has another view of a reader that leaves."""
        return printed_whole(lambda: super(_Commands, self).invoke(ctx))


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, package_name="gpumem-tui")
@with_options(HOSTS_OPTIONS)
@click.option("--interval", "interval_s", type=Finite(0.2, 3600), metavar="S", help="Seconds between hosts' readings.")
@click.option("--allow-signals", is_flag=True, help="Offer to end processes there; asks first.")
@metrics_option
@click.pass_context
def cli(context: click.Context, /, **values: object) -> int:
    """Where GPU memory goes while a neural network trains, how large a batch fits, and what would help.

    Without a command the program opens, on the Monitor where there is a GPU; with --host, --hosts or --slurm on the
    Monitors of other machines.
    """
    asked = AskedHosts.of(values)
    of_hosts = {
        "--remote-command": asked.remote_command,
        "--interval": asked.interval_s,
        "--allow-signals": asked.allow_signals or None,
        "--metrics": asked.address,
    }
    alone = next((name for name, value in of_hosts.items() if value is not None and not asked.are_named), "")
    if context.invoked_subcommand is not None:
        if asked.are_named or alone:
            command = context.invoked_subcommand
            raise click.UsageError(f"hosts are watched without a command: leave out {command}; {_run_there(command)}")
        return 0
    if alone:
        here = "; of this machine: `gpumem-tui monitor --metrics`" if asked.address is not None else ""
        raise click.UsageError(f"{alone} is for other hosts: name them with --host, --hosts or --slurm{here}")
    return watch_hosts(asked)


def _run_there(command: str) -> str:
    return f"`ssh -t HOST gpumem-tui {command} …` runs it on another machine"


_MISSING = {
    "run": "`gpumem-tui run -- python train.py`",
    "look": "give the PID that `gpumem-tui monitor --once` lists, or a snapshot's file",
    "attach": "give the PID that `gpumem-tui monitor --once` lists",
}
"""By command, what gives the argument that is missing."""


def _next_step(error: click.ClickException) -> str:
    """Return what to type instead of a line that click itself refuses; empty where its words show that."""
    command = "" if not isinstance(error, click.UsageError) or error.ctx is None else error.ctx.info_name or ""
    match error:
        case click.MissingParameter():
            return _MISSING.get(command, f"`gpumem-tui {command} --help` shows how")
        case click.NoSuchCommand():
            if trains := _training(error.command_name):
                return f"your own script: `{trains}`"
            near = get_close_matches(error.command_name, _COMMANDS, 1)
            return f"did you mean `gpumem-tui {near[0]}`?" if near else "`gpumem-tui --help` lists the commands"
        case click.NoSuchOption(option_name="--host") if command in _COMMANDS:
            return _run_there(command)
        case click.NoSuchOption(possibilities=None | []):
            having = "" if command in _COMMANDS else _command_with(error.option_name)
            return f"write `gpumem-tui {having} {error.option_name}`" if having else f"`{_help_of(command)}` lists them"
    return ""


def _training(first: str) -> str:
    """Return the line that predicts a training command typed without a verb; empty where the word begins none."""
    from gpumem_tui.cli.parameters import begins_training, with_python

    typed = sys.argv[sys.argv.index(first) :] if first in sys.argv else [first]
    return with_python(["gpumem-tui", "predict"], typed) if begins_training([first]) == 0 else ""


def _help_of(command: str) -> str:
    return f"gpumem-tui {command} --help" if command in _COMMANDS else "gpumem-tui --help"


def _command_with(option: str) -> str:
    """Return the command that has this option, the Monitor first; empty for none."""
    for name in ("monitor", *_COMMANDS):
        command = cli.get_command(click.Context(cli), name)
        if command is not None and any(option in param.opts for param in command.params):
            return name
    return ""


@add_completion_class
class _Bash(BashComplete):
    """bash takes ``sim:NAME`` for three words, and replaces the last of them alone."""

    name = "bash"

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before, and what is typed of the last one."""
        words, begun = super().get_completion_args()
        every = [*words, begun, ""] if begun == ":" else [*words, begun]
        is_simulated = every[-3:-1] == ["sim", ":"]
        return (every[:-3], f"sim:{every[-1]}") if is_simulated else (words, begun)

    def format_completion(self, item: CompletionItem) -> str:
        """Return a value without what bash has already."""
        has_colon = ":" in os.environ["COMP_WORDS"].split()
        return super().format_completion(item).replace("sim:", "", 1 if has_colon else 0)


def run() -> int:
    """Run the command that was typed and return the exit code.

    Raises:
        OptionError: an invalid option.
    """
    try:
        code = cli.main(prog_name="gpumem-tui", standalone_mode=False)
    except click.ClickException as error:
        words, suggestion = error.format_message(), _next_step(error)
        return complain(f"{words.removesuffix('.')}: {suggestion}" if suggestion else words, EXIT_BAD_INPUT)
    except click.Abort:
        return EXIT_INTERRUPTED
    return code or 0
