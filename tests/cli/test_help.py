"""The program's help and version, and its shell completion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import gpumem_tui
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


def test_the_exit_codes_of_a_search_are_those_of_its_manual(program: Program) -> None:
    said = " ".join(program("search", "--help").out.split())
    rows = re.findall(r"^\| (\d+) \|", program("manual", "search").out, re.M)
    assert rows == ["0", "2", "3", "4", "5", "130"]
    assert re.findall(r"\b(\d+) \D", said[said.index("Exit codes:") : said.index("rupted.")]) == rows


def test_a_shell_completes_commands_and_options(program: Program) -> None:
    script = program(env={"_GPUMEM_TUI_COMPLETE": "bash_source"})
    assert (script.code, "complete" in script.out) == (0, True)
    asked = {"_GPUMEM_TUI_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    assert program(env={**asked, "COMP_WORDS": "gpumem-tui mo"}).out.split() == ["plain,monitor", "plain,models"]
    options = program(env={**asked, "COMP_WORDS": "gpumem-tui search --prec", "COMP_CWORD": "2"})
    assert options.out.split() == ["plain,--precision"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--gpu sim:rtx-40", "plain,sim:rtx-4090-24gb"),
        ("--gpu sim", "plain,sim:h100-80gb"),
        ("--model llama-3-", "plain,llama-3-8b"),
    ],
)
def test_a_shell_completes_gpus_and_models(program: Program, typed: str, said: str) -> None:
    asked = {"_GPUMEM_TUI_COMPLETE": "bash_complete", "COMP_CWORD": "3", "COMP_WORDS": f"gpumem-tui predict {typed}"}
    found = program(env=asked).out.split()
    assert said in found
    assert all(line.removeprefix("plain,").startswith(typed.split()[1]) for line in found)


SHARE = Path(gpumem_tui.__file__).parent / "cli" / "share"


@pytest.mark.parametrize(
    ("shell", "name"), [("bash", "gpumem-tui.bash"), ("zsh", "_gpumem-tui"), ("fish", "gpumem-tui.fish")]
)
def test_the_completion_that_is_installed_is_the_one_that_is_printed(program: Program, shell: str, name: str) -> None:
    assert (SHARE / name).read_text() == program(env={"_GPUMEM_TUI_COMPLETE": f"{shell}_source"}).out


def test_the_page_of_man_says_what_the_help_does(program: Program) -> None:
    page = (SHARE / "gpumem-tui.1").read_text()
    sections = dict(re.findall(r"(?ms)^\.SH (\w+)$(.*?)(?=^\.SH|^\.PP|\Z)", page))
    said = program("--help").out
    listed = re.findall(r"(?m)^  (\w+) +([A-Z].*)$", said[said.index("Commands:") :])
    options = [option for option in cli.get_params(click.Context(cli)) if isinstance(option, click.Option)]
    named = [
        (" ".join(filter(None, (max(option.opts, key=len), option.metavar))), option.help or "") for option in options
    ]
    for section, rows in (("COMMANDS", listed), ("OPTIONS", named)):
        told = re.findall(r"(?m)^\.TP\n\.B (.+)\n(.+)$", sections[section])
        assert told == [(name, words.replace("`", "")) for name, words in rows]


def test_the_version_is_said_without_parsing_anything() -> None:
    code = "import sys; sys.argv = ['gpumem-tui', '--version']; from gpumem_tui.cli import main; main(); import sys; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print('click' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["gpumem-tui,", "version", gpumem_tui.__version__, "False"]


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
    assert "write --" not in program("predict", "--python", "/usr/bin/python3", "--model", "gpt2", "--nope").err


@pytest.mark.parametrize("begun", ["sim : rtx-40", "sim :"])
def test_bash_is_given_what_comes_after_the_colon(program: Program, begun: str) -> None:
    typed = f"gpumem-tui predict --gpu {begun}"
    place = str(len(typed.split()) - 1)
    asked = {"_GPUMEM_TUI_COMPLETE": "bash_complete", "COMP_CWORD": place, "COMP_WORDS": typed}
    assert "plain,rtx-4090-24gb" in program(env=asked).out.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_a_real_bash_completes_a_simulated_gpu(program: Program, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(program(env={"_GPUMEM_TUI_COMPLETE": "bash_source"}).out)
    words = "COMP_WORDS=(gpumem-tui predict --gpu sim : rtx-409); COMP_CWORD=5; "
    ask = "_gpumem_tui_completion gpumem-tui; echo ${COMPREPLY[@]}"
    program_there = tmp_path / "gpumem-tui"
    program_there.write_text(f"#!/bin/sh\nexec {sys.executable} -m gpumem_tui\n")
    program_there.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", f". {script}; {words}{ask}"], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["rtx-4090-24gb"], done.stderr
