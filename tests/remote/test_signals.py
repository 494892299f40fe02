"""A process of a host is signalled if it is still the one that was shown, and one line gives the reason it was not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.ssh import NotSignalled, send_signal
from tests.remote.standins import DENIED, Ssh

HERE = 'exec sh -c "$1"'


@pytest.fixture
def ssh(tmp_path: Path) -> Ssh:
    return Ssh(tmp_path)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def shown(pid: int) -> HostProcess:
    """As the host's reading has it."""
    started_s = psutil.Process(pid).create_time()
    return HostProcess(pid, 1, "ada", "sleep", "sleep 1000", started_s, 0.0, 0)


def send(ssh: Ssh, process: HostProcess) -> None:
    send_signal(parse_host("a"), ssh.options, process, "TERM")


def test_it_is_asked_to_end(ssh: Ssh, sleeper: subprocess.Popen[bytes]) -> None:
    ssh.host("a", HERE)
    send(ssh, shown(sleeper.pid))
    assert sleeper.wait() == -15


def test_another_process_with_its_pid_is_left_alone(ssh: Ssh, sleeper: subprocess.Popen[bytes]) -> None:
    ssh.host("a", HERE)
    before = shown(sleeper.pid)
    with pytest.raises(NotSignalled, match=f"pid {sleeper.pid} on a is another process by now: not signalled"):
        send(ssh, replace(before, start_time_s=before.start_time_s - 5))
    assert sleeper.poll() is None


def test_one_that_has_ended(ssh: Ssh, sleeper: subprocess.Popen[bytes]) -> None:
    ssh.host("a", HERE)
    process = shown(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(NotSignalled, match="is not there any more"):
        send(ssh, process)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'sh: 1: kill: Operation not permitted' >&2; exit 83",
            "of ada was not signalled: sh: 1: kill: Operation",
        ),
        (f"echo '{DENIED}' >&2; exit 255", "was not signalled: no key is accepted"),
    ],
)
def test_why_it_was_not(ssh: Ssh, sleeper: subprocess.Popen[bytes], script: str, said: str) -> None:
    ssh.host("a", script)
    with pytest.raises(NotSignalled, match=said) as caught:
        send(ssh, shown(sleeper.pid))
    assert "\n" not in str(caught.value)
