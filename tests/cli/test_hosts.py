"""`gpumem-tui --host …`: one line for what cannot be, and the settings' lists of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_tui.errors import EXIT_BAD_INPUT
from gpumem_tui.settings import SettingsError, parse
from tests.cli.conftest import Program


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--host", "-oProxyCommand=x"), "is no host; write HOST, USER@HOST or USER@HOST:PORT"),
        (("--host", "node[3-1]"), "3-1 is no range"),
        (("--hosts", "missing"), "missing: cannot be read: No such file or directory"),
        (("--host", "a", "monitor"), "hosts are watched without a command: leave out monitor"),
        (("--host", "a", "search"), "`ssh -t HOST gpumem-tui search …` runs it on another machine"),
        (("search", "--host", "a"), "`ssh -t HOST gpumem-tui search …` runs it on another machine"),
        (("run", "--host", "a", "--", "x"), "`ssh -t HOST gpumem-tui run …` runs it on another machine"),
        (("--remote-command", "x"), "--remote-command is for other hosts"),
        (("--allow-signals",), "--allow-signals is for other hosts"),
        (("--interval", "2"), "--interval is for other hosts"),
        (("--metrics",), "--metrics is for other hosts"),
        (("--host", "a", "--metrics", "x"), "'x' is not HOST:PORT"),
        (("--host", "a", "--interval", "0"), "--interval"),
        (("--slurm", "x"), "is no Slurm job"),
        (("--host", "a"), "no terminal to draw on"),
    ],
)
def test_what_cannot_be_is_one_line(program: Program, arguments: tuple[str, ...], says: str) -> None:
    done = program(*arguments)
    assert done.code == EXIT_BAD_INPUT
    assert says in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_hosts_are_not_in_the_way_of_commands(program: Program) -> None:
    assert program("gpus").code == 0
    assert "--host HOST" in program("--help").out


def test_lists_of_hosts_in_the_settings() -> None:
    text = 'remote_command = "~/bin/gpumem-tui"\n[hosts]\nlab = ["a", "me@b:2222"]\nnodes = ["node[01-16]"]\n'
    settings = parse(text)
    assert settings.hosts == {"lab": ("a", "me@b:2222"), "nodes": ("node[01-16]",)}
    assert settings.remote_command == "~/bin/gpumem-tui"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('hosts = "a"', 'settings.toml:1: hosts must be a table, not "a"'),
        (
            '[hosts]\nlab = "a"',
            'settings.toml:2: hosts.lab must be a list of hosts such as ["a", "me@b:2222"], not "a"',
        ),
        ("[hosts]\nlab = [1]", "settings.toml:2: hosts.lab must be a list of hosts"),
    ],
)
def test_a_mistake_in_them_is_named(text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert str(caught.value).startswith(said)


def test_a_file_without_a_host(program: Program, tmp_path: Path) -> None:
    empty = tmp_path / "hosts"
    empty.write_text("# nobody yet\n")
    assert "it names no host" in program("--hosts", str(empty)).err


def test_signals_where_the_settings_forbid_them(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "gpumem-tui"
    folder.mkdir()
    (folder / "settings.toml").write_text("read_only = true\n")
    done = program("--host", "a", "--allow-signals", env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert done.code == EXIT_BAD_INPUT
    assert "the settings file has read_only = true" in done.err
