"""A command on a host: its output and exit code come here, signals go there, and it does not outlive us."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpumem_tui import __version__
from gpumem_tui.errors import EXIT_BAD_INPUT, EXIT_FAILED
from tests.remote.standins import DENIED, UNKNOWN_KEY, Ssh
from tests.remote.test_ssh import SHELLS
from tests.waiting import wait_until, wait_until_gone

THERE = f"{shlex.quote(sys.executable)} -m gpumem_tui"


class Box:
    """A host whose shell is our own."""

    def __init__(self, ssh: Ssh) -> None:
        self.ssh = ssh
        self.started: list[subprocess.Popen[str]] = []
        ssh.host("box", "echo Welcome >&2", 'exec sh -c "$1"')

    def start(self, *command: str, directory: str = "", there: str = THERE) -> subprocess.Popen[str]:
        """`gpumem-tui run --host box` without a terminal."""
        where = ["--remote-directory", directory] if directory else []
        words = [sys.executable, "-m", "gpumem_tui", "run", "--host", "box", "--remote-command", there, *where, "--"]
        path = {"PATH": f"{self.ssh.folder}:/usr/bin:/bin", "HOME": str(self.ssh.folder)}
        pipe = subprocess.PIPE
        self.started.append(
            subprocess.Popen(
                [*words, *command], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=path,
                cwd=Path(__file__).parents[2],
            )
        )  # fmt: skip
        return self.started[-1]

    def run(self, *command: str, directory: str = "", there: str = THERE) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        process = self.start(*command, directory=directory, there=there)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(Ssh(tmp_path))
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def test_output_and_exit_code_come_here(box: Box, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    script = "echo out; echo err >&2; pwd; cat; printf '%s\\n' \"$@\"; exit 7"
    code, out, err = box.run("sh", "-c", script, "sh", "{batch}", "it's!", "$HOME", "\\\\", directory="~/a b")
    assert code == 7
    assert out.splitlines() == ["out", str(tmp_path / "a b"), "{batch}", "it's!", "$HOME", "\\\\"]
    assert "err" in err.splitlines()


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_leaves_the_command_as_it_is(box: Box, shell: str) -> None:
    box.ssh.host("box", f'exec {shell} -c "$1"')
    words = ["it's", "x!y", "!!", "two\\\\", "\\'", "{batch}", "*", "~", "", '"é"', "line\nbreak", "=ls", "%1", "^a"]
    script = "import json, sys; print(json.dumps(sys.argv[1:]))"
    code, out, err = box.run(sys.executable, "-c", script, *words)
    assert code == 0, err
    assert json.loads(out) == words


def test_what_cannot_be_run_there(box: Box) -> None:
    code, _, err = box.run("no-such-command")
    assert code == 127
    assert "there is no command no-such-command in PATH" in err
    code, _, err = box.run("true", directory="missing")
    assert code == EXIT_BAD_INPUT
    assert "--remote-directory missing: No such file or directory" in err


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"echo '{UNKNOWN_KEY}' >&2; exit 255", "box: its host key is not known: `ssh box` once"),
        (f"echo '{DENIED}' >&2; exit 255", "box: no key is accepted, and a password cannot be asked for"),
        ("exit 127", "is not in its PATH: install it there, or say where with --remote-command"),
        ("echo Hello; echo 'gpumem-tui, version 0.0'", f"its gpumem-tui is 0.0, the one here {__version__}: install"),
        ("echo Hello", "its gpumem-tui says no version"),
    ],
)
def test_one_line_says_why_it_cannot_run_there(box: Box, script: str, said: str) -> None:
    box.ssh.host("box", script)
    code, out, err = box.run("true", there="gpumem-tui")
    assert code == EXIT_FAILED
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_connection_that_is_lost_is_said(box: Box) -> None:
    version = f"gpumem-tui, version {__version__}"
    box.ssh.host("box", f'case "$1" in *--version) echo "{version}";; *) echo begun; exit 255;; esac')
    code, out, err = box.run("true")
    assert code == 255
    assert out == "begun\n"
    assert "box: the connection was lost, and the command there is ended" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_command(box: Box, number: signal.Signals) -> None:
    traps = "trap 'echo interrupted; exit 3' INT; trap 'echo terminated; exit 4' TERM"
    script = f"{traps}; echo $$; while :; do sleep 0.1; done"
    process = box.start("sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdecimal()
    wait_until(lambda: psutil.Process(process.pid).children())
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    expected = {signal.SIGINT: ("interrupted", 3), signal.SIGTERM: ("terminated", 4)}[number]
    assert (out.strip(), process.returncode) == expected


@pytest.mark.slow
def test_nothing_stays_on_the_host_when_we_are_killed(box: Box) -> None:
    script = "trap '' TERM HUP; setsid sleep 1000 & echo $$ $!; while :; do sleep 1; done"
    process = box.start("sh", "-c", script)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    wait_until_gone(pids)


def test_what_the_command_leaves_behind_ends_with_it(box: Box) -> None:
    code, out, _ = box.run("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!")
    assert code == 0
    wait_until_gone([int(out)])


@pytest.mark.usefixtures("box")
def test_options_for_a_host_need_one() -> None:
    words = [sys.executable, "-m", "gpumem_tui", "run", "--remote-directory", "x", "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_BAD_INPUT
    assert "--remote-directory is for another machine: name it with --host" in done.stderr
