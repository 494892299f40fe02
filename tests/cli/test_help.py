"""What the program says of itself, and what it tells a shell."""

from __future__ import annotations

import click
import pytest

from gpumem_tui.cli.commands import cli
from tests.cli.conftest import Program

_COMMANDS = cli.list_commands(click.Context(cli))


def test_no_command_is_described_by_half_a_sentence(program: Program) -> None:
    said = program("--help").out
    commands = said[said.index("Commands:") :]
    assert "..." not in commands
    assert all(f"  {name} " in commands for name in _COMMANDS)


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    silent = [option.name for option in command.params if isinstance(option, click.Option) and not option.help]
    assert silent == []


def test_a_shell_completes_commands_and_options(program: Program) -> None:
    script = program(env={"_GPUMEM_TUI_COMPLETE": "bash_source"})
    assert (script.code, "complete" in script.out) == (0, True)
    asked = {"_GPUMEM_TUI_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    assert program(env={**asked, "COMP_WORDS": "gpumem-tui mo"}).out.split() == ["plain,monitor", "plain,models"]
    options = program(env={**asked, "COMP_WORDS": "gpumem-tui search --prec", "COMP_CWORD": "2"})
    assert options.out.split() == ["plain,--precision"]
