"""What the program says of itself, and what it tells a shell."""

from __future__ import annotations

import click
import pytest

from gpumem_tui.cli.commands import cli
from gpumem_tui.options.table import OPTIONS, SECTIONS
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


TRAINS = ("predict", "search", "plan")


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_help_of_a_command_fits_a_screen(program: Program, name: str) -> None:
    lines = program(name, "--help", env={"COLUMNS": "80"}, alone=False).out.splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("name", TRAINS)
def test_the_longer_help_has_every_option_in_its_section(program: Program, name: str) -> None:
    short, every = program(name, "--help").out, program(name, "--help-all").out
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    flags = [option.opts[0] for option in command.params if isinstance(option, click.Option)]
    assert [flag for flag in flags if f"  {flag}" not in every] == []
    common = [flag for flag in flags if f"  {flag}" in short]
    assert 10 <= len(common) <= 21 < len(flags)
    assert f"All {len(flags)} options:" in short
    headings = [line.removesuffix(":") for line in every.splitlines() if line[:1].isupper() and line.endswith(":")]
    assert headings == [title for title in SECTIONS if title in headings]
    assert {"What to run", "Which GPU", "The model", "Several GPUs", "Output"} <= {*headings}


@pytest.mark.parametrize("name", TRAINS)
def test_the_help_for_a_command_leaves_out_what_does_nothing_for_one(program: Program, name: str) -> None:
    said = program(name, "--help-all", "--", "python", "train.py").out
    assert "--longest" in said
    for flag in ("--model", "--optimizer", "--tensor-parallel", "--layers"):
        assert f"  {flag} " not in said


_VALUES = {"choice": "", "count": "3", "text": "all-but-head", "tokens": "1M"}


def test_what_does_nothing_for_a_command_is_refused_in_one_line(program: Program) -> None:
    (program.folder / "train.py").write_text("")
    for row in OPTIONS.values():
        if row.is_of_commands or row.group in ("search", "device"):
            continue
        value = next((choice for choice in row.choices if choice != row.default), _VALUES.get(row.holds, ""))
        words = (row.flag,) if row.holds == "flag" else (row.flag, value)
        done = program("predict", *words, "--", "python", "train.py")
        assert (done.code, done.err.count("\n")) == (2, 1), (row.flag, done.err)


def test_a_command_without_the_two_dashes_is_told_where_they_go(program: Program) -> None:
    done = program("predict", "--gpu", "sim:h100-80gb", "python", "train.py", "--lr", "3")
    assert done.code == 2
    assert "`gpumem-tui predict --gpu sim:h100-80gb -- python train.py --lr 3`" in done.err
    assert "torchrun: write -- before" in program("plan", "torchrun", "train.py").err
    assert "write --" not in program("predict", "--workload", "train.py", "--nope").err
