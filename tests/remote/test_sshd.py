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
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

import gpumem_tui
from gpumem_tui.memory import GIB
from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.remote.connection import Connection
from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.ssh import NotSignalled, SshOptions
from gpumem_tui.remote.status import HostPhase, HostStatus
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, Scenario
from tests.waiting import wait_until

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
SSHD = shutil.which("sshd", path=SBIN)
TOOLS = all(map(shutil.which, ("ssh", "ssh-keygen")))


_SLOW_LINE = """
import queue, socket, sys, threading, time
port, delay_s = int(sys.argv[1]), float(sys.argv[2])
line = socket.create_connection(("127.0.0.1", port))

def carry(read, write):
    waiting = queue.Queue()

    def late():
        while True:
            when_s, data = waiting.get()
            time.sleep(max(0.0, when_s - time.monotonic()))
            if not data:
                return
            write(data)

    threading.Thread(target=late).start()
    while True:
        data = read(65536)
        waiting.put((time.monotonic() + delay_s, data))
        if not data:
            return

def out(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()

threading.Thread(target=carry, args=(sys.stdin.buffer.read1, line.sendall), daemon=True).start()
carry(line.recv, out)
"""
"""A line to the server on which everything arrives later, as ssh's ProxyCommand."""


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
        self.home = folder / "home"
        self.home.mkdir()
        self._configuration = folder / "sshd_config"
        self._configuration.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nPermitRootLogin yes\nLogLevel VERBOSE\n"
            f"SetEnv HOME={self.home}\n"
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
        """The server of the open connections."""
        return psutil.Process(self._process.pid).children(recursive=True)

    @property
    def clients(self) -> set[psutil.Process]:
        """Its processes, one for each connection."""
        return set(psutil.Process(self._process.pid).children())

    @property
    def host(self) -> str:
        """As a user writes it."""
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"

    def connection(self, options: SshOptions, **keys: Any) -> Connection:
        """A connection as a user with such keys has it."""
        return Connection(
            parse_host(self.host), SshOptions(options.remote_command, options.interval_s, self.ssh(**keys))
        )

    def ssh(self, *, identity: str = "user", known: str = "known", latency_s: float = 0.0) -> str:
        """The ssh of such a user; `latency_s`: there and back."""
        configuration = self.folder / f"{identity}-{known}-{latency_s}"
        (self.folder / "slow.py").write_text(_SLOW_LINE)
        slow = f"{sys.executable} {self.folder}/slow.py {self.port} {latency_s / 2}"
        proxy = f"  ProxyCommand {slow}\n" if latency_s else ""
        configuration.write_text(
            f"Host *\n  IdentityFile {self.folder}/{identity}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.folder}/{known}\n  StrictHostKeyChecking ask\n{proxy}"
        )
        return f"ssh -F {configuration}"

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
def program_there(fake_machine: FakeMachine) -> str:
    """The call on the host: the program by its whole path, which finds two GPUs."""
    fake_machine.show(Scenario(gpus=[FakeGpu(used_bytes=5 * GIB), FakeGpu(used_bytes=7 * GIB)]))
    package = Path(gpumem_tui.__file__).parent.parent
    words = {**fake_machine.environment, "PYTHONPATH": str(package)}
    return " ".join(["env", *(f"{name}={value}" for name, value in words.items()), sys.executable, "-m", "gpumem_tui"])


@pytest.fixture
def connect(sshd: Sshd, program_there: str) -> Iterator[Connect]:
    """Connections that are ended with the test."""
    made: list[Connection] = []

    def connect(command: str = program_there, **keys: Any) -> Connection:
        made.append(sshd.connection(SshOptions(command, 0.2), **keys))
        made[-1].start()
        return made[-1]

    yield connect
    for each in made:
        each.stop()


def becomes(connection: Connection, phase: HostPhase) -> HostStatus:
    wait_until(lambda: connection.status.phase is phase, f"{phase}, not {connection.status.problem}")
    return connection.status


def test_readings_of_the_real_program_over_the_real_ssh(connect: Connect, sshd: Sshd) -> None:
    connection = connect()
    becomes(connection, HostPhase.LIVE)
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
    becomes(connection, HostPhase.LIVE)
    for each in sshd.sessions:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    assert becomes(connection, HostPhase.AWAY).report is not None
    becomes(connection, HostPhase.LIVE)


def test_a_key_that_is_not_accepted(connect: Connect) -> None:
    assert "no key is accepted" in becomes(connect(identity="stranger"), HostPhase.AWAY).problem


def test_a_host_that_is_not_known(connect: Connect) -> None:
    assert "its host key is not known" in becomes(connect(known="nobody"), HostPhase.AWAY).problem


def test_a_host_without_the_program(connect: Connect) -> None:
    assert "is not in its PATH" in becomes(connect("no-such-program"), HostPhase.AWAY).problem


@pytest.mark.skipif(not os.environ.get("SHELL", "bash").endswith("bash"), reason="this user's login shell is no bash")
def test_a_bashrc_that_prints_a_windows_title(connect: Connect, sshd: Sshd) -> None:
    bashrc = sshd.home / ".bashrc"
    bashrc.write_text("printf '\\033]0;%s\\007Loading modules … ' me@host\n")
    try:
        connection = connect()
        status = becomes(connection, HostPhase.LIVE)
        assert status.note == "its shell prints “Loading modules …”: passed over"
        hears(connection)
    finally:
        bashrc.unlink()


def test_a_program_whose_python_is_gone(connect: Connect, tmp_path: Path) -> None:
    program = tmp_path / "gpumem-tui"
    program.write_text("#!/opt/no/such/python\n")
    program.chmod(0o755)
    problem = becomes(connect(str(program)), HostPhase.AWAY).problem
    assert ", which is gone: install gpumem-tui" in problem or "the Python of its first line is not" in problem


def test_a_python_without_the_program_and_one_that_is_too_old(connect: Connect) -> None:
    bare = f"env -u PYTHONPATH {sys.executable} -S -I -m gpumem_tui"
    assert f"{sys.executable} has no gpumem-tui: install it" in becomes(connect(bare), HostPhase.AWAY).problem
    old = "import sys, runpy; sys.version_info = (3, 8, 10); runpy.run_module('gpumem_tui', run_name='__main__')"
    package = Path(gpumem_tui.__file__).parent.parent
    problem = becomes(connect(f'PYTHONPATH={package} {sys.executable} -c "{old}"'), HostPhase.AWAY).problem
    assert problem.startswith(f"needs Python 3.10 or later, and {sys.executable} is 3.8.10: install it with a newer")


@pytest.mark.skipif(not Path("/usr/sbin/nologin").exists(), reason="no nologin here")
def test_a_user_without_a_shell(connect: Connect) -> None:
    problem = becomes(connect("/usr/sbin/nologin #"), HostPhase.AWAY).problem
    assert problem.startswith("its login shell prints “This account is currently not available.” and ends: name a user")


def hears(connection: Connection, readings: int = 3) -> None:
    """Wait until so many more have come."""
    for _ in range(readings):
        received_s = connection.status.received_s
        wait_until(lambda received_s=received_s: connection.status.received_s != received_s)  # type: ignore[misc]


def test_over_a_slow_line(connect: Connect) -> None:
    far = connect(latency_s=0.2)
    becomes(far, HostPhase.LIVE)
    hears(far)
    assert far.status.phase is HostPhase.LIVE, far.status.problem


def test_a_host_that_stands_still_grows_old_while_others_go_on(connect: Connect, sshd: Sshd) -> None:
    before = sshd.clients
    still = connect()
    becomes(still, HostPhase.LIVE)
    serving = sshd.clients - before
    other = connect()
    becomes(other, HostPhase.LIVE)
    for each in serving:
        each.suspend()
    try:

        def is_silent() -> bool:
            last_s = still.status.received_s
            hears(other)
            return still.status.received_s == last_s

        wait_until(is_silent, "no reading of the host that is stopped")
        assert still.status.received_s is not None
        assert still.status.late(still.status.received_s + 11) == "no answer for 11 s"
    finally:
        for each in serving:
            each.resume()
    hears(still)
    assert becomes(still, HostPhase.LIVE).problem == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [("yes garbage #", "which is no reading"), ("tr '\\0' x </dev/zero #", "a line of more than 4 MiB")],
)
def test_garbage_and_a_flood_over_the_real_ssh_harm_no_other(connect: Connect, command: str, said: str) -> None:
    good, bad = connect(), connect(command)
    assert said in becomes(bad, HostPhase.AWAY).problem
    becomes(good, HostPhase.LIVE)
    hears(good)
    assert good.status.phase is HostPhase.LIVE, good.status.problem


def test_a_process_is_signalled_through_the_real_ssh(connect: Connect) -> None:
    connection = connect("true")
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        started_s = psutil.Process(sleeper.pid).create_time()
        process = HostProcess(sleeper.pid, 1, getpass.getuser(), "sleep", "sleep 1000", started_s, 0.0, 0)
        with pytest.raises(NotSignalled, match="is another process by now"):
            connection.signal(replace(process, start_time_s=started_s - 60), "KILL")
        assert sleeper.poll() is None
        connection.signal(process, "TERM")
        assert sleeper.wait() == -signal.SIGTERM
    finally:
        sleeper.kill()
        sleeper.wait()
