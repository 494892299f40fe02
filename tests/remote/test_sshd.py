"""Against a real sshd on loopback, with keys of its own; the host's GPUs are the fake driver's.

Runs where Debian's openssh-server and openssh-client are installed and this user may start sshd (as root it needs its
own user and /run/sshd).
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import gpumem_tui
from gpumem_tui.memory import GIB
from gpumem_tui.remote.connection import Connection
from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.ssh import SshOptions
from gpumem_tui.remote.status import HostStatus, Phase
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, Scenario
from tests.waiting import wait_until

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
SSHD = shutil.which("sshd", path=SBIN)
TOOLS = all(map(shutil.which, ("ssh", "ssh-keygen")))


class Sshd:
    """A server on a port of its own that takes one key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        for name in ("host", "user", "stranger"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "known").write_text(f"[127.0.0.1]:{self.port} {(folder / 'host.pub').read_text()}")
        (folder / "nobody").write_text("")
        self._configuration = folder / "sshd_config"
        self._configuration.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nPermitRootLogin yes\nLogLevel VERBOSE\n"
        )
        assert SSHD is not None
        tried = subprocess.run([SSHD, "-t", "-f", self._configuration], capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"sshd cannot run here: {tried.stderr.strip()}")
        log = (folder / "log").open("wb")
        self._process = subprocess.Popen([SSHD, "-D", "-e", "-f", self._configuration], stderr=log)
        wait_until(lambda: "Server listening" in (folder / "log").read_text(), "sshd")

    @property
    def sessions(self) -> list[psutil.Process]:
        """What serves the connections that stand."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def connection(self, options: SshOptions, *, identity: str = "user", known: str = "known") -> Connection:
        """A connection as a user with such keys has it."""
        configuration = self.folder / f"{identity}-{known}"
        configuration.write_text(
            f"Host *\n  IdentityFile {self.folder}/{identity}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.folder}/{known}\n  StrictHostKeyChecking ask\n"
        )
        host = parse_host(f"{getpass.getuser()}@127.0.0.1:{self.port}")
        ssh = f"ssh -F {configuration}"
        return Connection(host, SshOptions(options.remote_command, options.interval_s, ssh))

    def end(self) -> None:
        """The server and its sessions."""
        for each in (*self.sessions, psutil.Process(self._process.pid)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if SSHD is None or not TOOLS:
        pytest.skip("no sshd here: install Debian's openssh-server, or what your system calls it")
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.end()


Connect = Callable[..., Connection]


@pytest.fixture
def connect(sshd: Sshd, fake_machine: FakeMachine) -> Iterator[Connect]:
    """Connections that are ended with the test; the program is on the host by its whole path."""
    fake_machine.show(Scenario(gpus=[FakeGpu(used_bytes=5 * GIB), FakeGpu(used_bytes=7 * GIB)]))
    package = Path(gpumem_tui.__file__).parent.parent
    words = {**fake_machine.environment, "PYTHONPATH": str(package)}
    there = " ".join(["env", *(f"{name}={value}" for name, value in words.items()), sys.executable, "-m", "gpumem_tui"])
    made: list[Connection] = []

    def connect(command: str = there, **keys: str) -> Connection:
        made.append(sshd.connection(SshOptions(command, 0.2), **keys))
        made[-1].start()
        return made[-1]

    yield connect
    for each in made:
        each.stop()


def becomes(connection: Connection, phase: Phase) -> HostStatus:
    wait_until(lambda: connection.status.phase is phase, f"{phase}, not {connection.status.problem}")
    return connection.status


def test_readings_of_the_real_program_over_the_real_ssh(connect: Connect, sshd: Sshd) -> None:
    connection = connect()
    becomes(connection, Phase.LIVE)
    wait_until(lambda: (latest := connection.latest()) is not None and len(latest.gpus) == 2)
    first = connection.latest()
    assert connection.wait(first, 60.0) is not first
    connection.stop()
    wait_until(lambda: not any("gpumem_tui" in " ".join(_command(each)) for each in sshd.sessions), "its end there")


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_a_connection_that_is_cut_comes_back(connect: Connect, sshd: Sshd) -> None:
    connection = connect()
    becomes(connection, Phase.LIVE)
    for each in sshd.sessions:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    assert becomes(connection, Phase.AWAY).report is not None
    becomes(connection, Phase.LIVE)


def test_a_key_that_is_not_accepted(connect: Connect) -> None:
    assert "no key is accepted" in becomes(connect(identity="stranger"), Phase.AWAY).problem


def test_a_host_that_is_not_known(connect: Connect) -> None:
    assert "its host key is not known" in becomes(connect(known="nobody"), Phase.AWAY).problem


def test_a_host_without_the_program(connect: Connect) -> None:
    assert "is not in its PATH" in becomes(connect("no-such-program"), Phase.AWAY).problem
