"""Every command in the README, the manual, the help and the messages is understood; and their Python runs."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

import gpumem_tui
from gpumem_tui.cli.commands import cli
from gpumem_tui.manual import TOPICS, text
from tests.cli.conftest import Program

PACKAGE = Path(gpumem_tui.__file__).parent
README = (PACKAGE.parent / "README.md").read_text()
GUIDE = "\n".join([README, *(text(topic) for topic in TOPICS)])
"""The README and every topic of the manual."""
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`", re.DOTALL)
_PLACES = {"PID": "1", "FILE": "run.pickle", "PATH": "python", "CMD": "python train.py", "TOPIC": "plan"}
"""Placeholders in a text, and an example of each kind."""


def _blocks(kind: str) -> list[str]:
    return [text for found, text in _FENCED.findall(GUIDE) if found == kind]


def _inline(text: str) -> list[str]:
    """Code within a paragraph, which may continue in the next line."""
    return [" ".join(code.split()) for code in _INLINE.findall(_FENCED.sub("", text))]


def _commands(lines: list[str]) -> Iterator[list[str]]:
    """The arguments of each call of the program in lines of a shell."""
    for line in lines:
        for part in re.split(r"&&|\|\||[|;&]", line):
            words = shlex.split(part, comments=True)
            if words[:1] == ["gpumem-tui"]:
                yield [word for given in words[1:] for word in shlex.split(_PLACES.get(given, given))]


def guide_commands() -> list[list[str]]:
    """Return the arguments of every call that the README or the manual shows."""
    lines = [line for block in _blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return list(_commands(lines + [code for code in _inline(GUIDE) if code.startswith("gpumem-tui")]))


def _help_commands() -> list[list[str]]:
    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    texts = [f"{command.help} {command.epilog}" for command in commands if command is not None]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip().startswith("gpumem-tui ")]
    return list(_commands(lines + [code for text in [str(cli.help), *texts] for code in _inline(text)]))


def _messages() -> Iterator[str]:
    """Every text in the program, with 1 in place of what it puts in."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _message_commands() -> list[list[str]]:
    told = {
        code for text in _messages() if "`gpumem-tui " in text and text.count("`") % 2 == 0 for code in _inline(text)
    }
    return list(_commands(sorted(code for code in told if code.startswith("gpumem-tui ") and "…" not in code)))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the texts name."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("train.py", "snapshot.pickle", "run.pickle"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("told", [guide_commands, _help_commands, _message_commands], ids=["guide", "help", "messages"])
def test_every_command_that_is_told_is_understood(told: object, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(told)
    monkeypatch.chdir(project)
    commands: list[list[str]] = told()
    assert len(commands) > 2
    for arguments in commands:
        if not arguments or arguments[0].startswith(("1", "…")):  # the program by its name, or a command that is put in
            continue
        try:
            context = cli.make_context("gpumem-tui", list(arguments))
        except click.exceptions.Exit:  # an option that prints something, such as the help
            continue
        if arguments[0].startswith("-"):  # the program's own options, which the context has read
            continue
        name, command, rest = cli.resolve_command(context, list(arguments))
        assert command is not None, arguments
        try:
            command.make_context(name, rest, parent=context)
        except click.MissingParameter:
            assert not rest, arguments  # else it is a command that is spoken of
        except click.UsageError as error:
            pytest.fail(f"gpumem-tui {shlex.join(arguments)}: {error.format_message()}")


def test_modules_and_tests_that_the_guide_names_are_there() -> None:
    for code in [*_inline(GUIDE), *(line for block in _blocks("sh") for line in block.splitlines())]:
        for module in re.findall(r"python -m ((?:tests|gpumem_tui)[\w.]*)", code):
            assert find_spec(module) is not None, code
        for path in re.findall(r"\b((?:tests|screenshots)/[\w/.]+)", code):
            assert (PACKAGE.parent / path).exists(), code


def test_the_guides_python_runs(tmp_path: Path) -> None:
    """The calls as they are written, and a workload's file; each in one process, as torch takes seconds to load."""
    calls = [code for code in _inline(GUIDE) if code.startswith(("import gpumem_tui", "gpumem_tui."))]
    assert "import gpumem_tui; gpumem_tui.attach()" in calls
    callback = "gpumem_tui.probe.callbacks.hugging_face()"
    assert callback in calls
    assert "`.lightning()`" in GUIDE
    calls.append(callback.replace("hugging_face", "lightning"))
    for line in calls:
        assert "import gpumem_tui" in line or line.startswith("gpumem_tui."), line
    (tmp_path / "lightning").mkdir()
    stand_ins = {"transformers.py": "class TrainerCallback: ...\n", "lightning/__init__.py": "",
                 "lightning/pytorch.py": "class Callback: ...\n"}  # fmt: skip
    for path, source in stand_ins.items():  # the libraries themselves load for many seconds
        (tmp_path / path).write_text(source)
    program = "import gpumem_tui\n" + "\n".join([*calls, *_blocks("python")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={
            "PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}",
            "GPUMEM_TUI_DIR": str(tmp_path / "published"),
            "HOME": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr


def test_callbacks_are_there_without_the_libraries() -> None:
    """An attribute of the package as of any other; nothing else is imported for it."""
    program = "import sys, gpumem_tui; gpumem_tui.probe.callbacks; print('torch' in sys.modules)\n"
    program += "for thing in (gpumem_tui, gpumem_tui.probe):\n    print(hasattr(thing, 'nothing'))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


@pytest.mark.parametrize("command", ["settings", "doctor"])
def test_commands_of_the_guide_that_need_nothing_run(command: str, program: Program) -> None:
    assert [command] in guide_commands()
    done = program(command)
    assert "Traceback" not in done.err
    assert done.out
