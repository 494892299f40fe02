"""The call at the other end of ssh: in any login shell, where the program is installed, or what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.ssh import SshOptions, explained
from tests.waiting import DEADLINE_S

SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed here"))
    for name in ("sh", "bash", "dash", "ksh", "mksh", "zsh", "fish", "csh", "tcsh")
]
"""As the user's login shell there: each takes the words of the command line in its own way."""


class Home:
    """A user's home on a host, with programs that say what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "bin"
        self.local = folder / ".local" / "bin"
        for each in (self.path, self.local):
            each.mkdir(parents=True)
        self.shell = folder / "shell"
        self.login_says("")

    def login_says(self, found: str) -> None:
        """The output of a login shell there, after its greeting."""
        self.shell.write_text(f'#!/bin/sh\necho Welcome\n[ "$1" = -lc ] && echo "{found}"\n')
        self.shell.chmod(0o755)

    def program(self, path: Path) -> None:
        path.write_text('#!/bin/sh\necho "$0 $*"\n')
        path.chmod(0o755)

    def call(self, shell: str = "sh") -> subprocess.CompletedProcess[str]:
        *_, there = SshOptions().command(parse_host("a"))
        tools = os.pathsep.join({str(Path(shutil.which(name) or "").parent) for name in ("sh", "tail", shell)})
        environment = {"HOME": str(self.folder), "PATH": f"{self.path}:{tools}", "SHELL": str(self.shell)}
        command = [shutil.which(shell) or shell, "-c", there]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False,
            timeout=DEADLINE_S,
        )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Home:
    if shutil.which("uvx", path="/usr/bin:/bin") or shutil.which("gpumem-tui", path="/usr/bin:/bin"):
        pytest.skip("what is looked for is installed for the whole machine")
    return Home(tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_program_in_path_comes_first(home: Home, shell: str) -> None:
    home.program(home.path / "gpumem-tui")
    home.program(home.local / "gpumem-tui")
    assert home.call(shell).stdout == f"{home.path}/gpumem-tui monitor --wire --interval 1\n"


def test_then_where_users_install_it(home: Home) -> None:
    home.program(home.local / "gpumem-tui")
    assert home.call().stdout == f"{home.local}/gpumem-tui monitor --wire --interval 1\n"


def test_then_the_path_of_a_login_shell_whatever_that_prints_before(home: Home, tmp_path: Path) -> None:
    hidden = tmp_path / "gpumem-tui"
    home.program(hidden)
    home.login_says(str(hidden))
    assert home.call().stdout == f"{hidden} monitor --wire --interval 1\n"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("where", "named"), [("path", "pipx"), ("local", "~/.local/bin/pipx")])
def test_without_it_what_could_run_it_is_named_and_not_run(home: Home, shell: str, where: str, named: str) -> None:
    home.program((home.path if where == "path" else home.local) / "pipx")
    done = home.call(shell)
    assert done.returncode == 127
    assert done.stdout == ""
    assert done.stderr.strip() == f"gpumem-tui is offered by: {named}"


def test_with_nothing_at_all_it_is_not_found(home: Home) -> None:
    done = home.call()
    assert (done.returncode, done.stdout, done.stderr) == (127, "", "")


def test_a_connection_that_the_host_closed_is_told_as_ssh_does() -> None:
    errors = ["Connection to 192.0.2.7 closed by remote host."]
    assert explained(255, errors, parse_host("a"), SshOptions()) == (errors[0], False)
    quiet = ["Connection to 192.0.2.7 closed."]
    assert explained(255, quiet, parse_host("a"), SshOptions()) == ("ssh failed and printed no reason", False)


def test_what_the_user_says_is_called_as_it_is() -> None:
    assert SshOptions("uvx gpumem-tui").command(parse_host("a"))[-1] == "uvx gpumem-tui monitor --wire --interval 1"
