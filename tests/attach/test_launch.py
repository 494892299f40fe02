"""`gpumem-tui run`: the command is left as it is, and told where the probe is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_tui.attach.launch import CannotRun, environment, start, warnings
from gpumem_tui.probe.files import SITE_DIRECTORY
from tests.attach import loops
from tests.waiting import wait_until_gone


def run(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpumem_tui", "run", "--", *command],
        env={**os.environ, "GPUMEM_TUI_DIR": str(folder / "probes"), **variables},
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("before", "after"), [({}, ""), ({"PYTHONPATH": ""}, ""), ({"PYTHONPATH": "a:b"}, ":a:b")], ids=str
)
def test_only_the_probes_own_folder_is_added_to_the_path(before: dict[str, str], after: str) -> None:
    """Not the folder that this package is installed in: its other packages are of another environment."""
    assert environment({"HOME": "/h", **before}) == {"HOME": "/h", "PYTHONPATH": f"{SITE_DIRECTORY}{after}"}
    assert {path.name for path in SITE_DIRECTORY.iterdir()} - {"__pycache__"} == {"sitecustomize.py"}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python train.py", ""),
        ("python -u -B train.py -I", ""),
        ("python -I train.py", "I"),
        ("python3.11 -uIB train.py", "I"),
        ("/usr/bin/python3 -W ignore -E train.py", "E"),
        ("env X=1 python -S train.py", "S"),
        ("python -m torch.distributed.run -E train.py", ""),
        ("python -Wignore -c E", ""),
        ("python -X importtime -c E", ""),
        ("torchrun -I train.py", ""),
        ("python", ""),
        ("bash -c true", ""),
    ],
)
def test_options_of_python_that_keep_the_probe_out_are_named(command: str, option: str, tmp_path: Path) -> None:
    found = warnings(command.split(), tmp_path / "probes")
    assert [line.split("`")[1] for line in found] == ([f"python -{option}"] if option else [])


def test_a_folder_that_the_probe_will_refuse_is_named_before(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    instead = "; set GPUMEM_TUI_DIR to another folder"
    assert warnings(["true"], tmp_path) == [
        f"nothing will be published: {tmp_path} is open to other users (mode 755, wanted 700){instead}"
    ]
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "probes"
    assert warnings(["true"], below) == [f"nothing will be published: {below}: Not a directory{instead}"]
    assert warnings(["true"], tmp_path / "new" / "one") == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is made"
    [said] = warnings(["true"], Path("/proc/nope"))
    assert said.startswith("nothing will be published: /proc/nope cannot be made: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_folder_that_cannot_be_made_is_named_before() -> None:
    said = loops.as_nobody(lambda: " ".join(warnings(["true"], Path("/usr/probes"))))
    reason = "/usr/probes cannot be made: Permission denied"
    assert said == f"nothing will be published: {reason}; set GPUMEM_TUI_DIR to another folder"


def test_output_input_and_exit_code_are_the_commands_own(tmp_path: Path) -> None:
    done = run("bash", "-c", "cat; echo out; echo err >&2; exit 7", folder=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("typed\nout\n", "err\n", 7)


def test_a_signal_ends_the_command_as_ever(tmp_path: Path) -> None:
    done = run("bash", "-c", "kill -TERM $$", folder=tmp_path)
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_run_reaches_the_command(number: signal.Signals, tmp_path: Path) -> None:
    trap = f"trap 'echo caught; exit 5' {number.value}; echo ready; while :; do sleep 0.05; done"
    command = [sys.executable, "-m", "gpumem_tui", "run", "bash", "-c", trap]
    environment = {**os.environ, "GPUMEM_TUI_DIR": str(tmp_path / "probes")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        assert program.stdout.read() == "caught\n"
        assert program.wait(60) == 5


def test_the_command_stays_in_the_terminals_process_group() -> None:
    """So Ctrl-C, Ctrl-Z and `fg` are the terminal's own doing."""
    command = [sys.executable, "-m", "gpumem_tui", "run", "bash", "-c", "ps -o pgid= -o sid= $$"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout is not None
        assert [int(word) for word in program.stdout.read().split()] == [program.pid, program.pid]


def test_the_command_ends_with_a_run_that_is_killed() -> None:
    command = [sys.executable, "-m", "gpumem_tui", "run", "bash", "-c", "echo $$; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        program.kill()
        program.wait(60)
        wait_until_gone([pid])


def test_options_after_the_command_are_its_own(tmp_path: Path) -> None:
    assert run("printf", "%s", "--help", folder=tmp_path).stdout == "--help"


def test_no_such_command(tmp_path: Path) -> None:
    done = run("no-such-command", folder=tmp_path)
    assert (done.stderr, done.returncode) == (
        "gpumem-tui: there is no command no-such-command in PATH; write its path, or run `which no-such-command`\n",
        127,
    )


def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="cannot be run") as caught:
        start([str(tmp_path)])
    assert caught.value.code == 126
    with pytest.raises(CannotRun, match="No such file") as caught:
        start([str(tmp_path / "train.py")])
    assert caught.value.code == 127


def test_orphans_of_the_command_are_waited_for(tmp_path: Path) -> None:
    """As the first process of a container, `run` is the parent of every process that loses its own."""
    script = "(setsid sleep 0.2 & ) ; sleep 1; ps -o stat= -o comm= --ppid $PPID"
    if os.geteuid() != 0:
        pytest.skip("only root can make a namespace of pids")
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "gpumem_tui", "run", "bash", "-c"]
    environment = {**os.environ, "GPUMEM_TUI_DIR": str(tmp_path / "probes")}
    done = subprocess.run([*unshare, script], env=environment, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip("no namespace of pids can be made here")
    assert done.returncode == 0
    assert done.stdout.split()[1:] == ["ps"], "bash becomes its last command, and nothing else is left"
