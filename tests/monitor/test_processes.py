"""Processes: the right one behind each pid, or none; and ended only if it is still that one."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.processes import CannotSignal, HostProcesses, kill, terminate
from gpumem_tui.monitor.sampler import HostReader
from gpumem_tui.monitor.snapshot import HostProcess
from tests.waiting import wait_until

Start = Callable[..., subprocess.Popen[bytes]]
_NO_PID = 2**22 + 1  # beyond the kernel's largest


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that do not outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*command: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command or ["sleep", "600"], stdin=subprocess.DEVNULL))
        child = psutil.Process(started[-1].pid)
        with contextlib.suppress(psutil.ZombieProcess):  # it is done already
            wait_until(child.cmdline)  # the kernel lets go of the parent before the command line is in its place
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def _look(processes: HostProcesses, pid: int) -> HostProcess:
    found = processes.look([pid])[pid]
    assert isinstance(found, HostProcess)
    return found


def test_what_is_known_of_a_process(start: Start) -> None:
    child = start()
    found = _look(HostProcesses(), child.pid)
    assert (found.pid, found.parent_pid, found.name) == (child.pid, os.getpid(), "sleep")
    assert (found.user, found.command) == (getpass.getuser(), "sleep 600")
    assert abs(found.start_time_s - psutil.Process(child.pid).create_time()) < 60
    assert isinstance(found.resident_bytes, int)
    assert found.resident_bytes > 0
    assert found.cpu_percent == Unknown("needs a second look")


def test_cpu_percent_is_of_the_time_between_looks(start: Start) -> None:
    idle, busy = start(), start(sys.executable, "-c", "while True: pass")
    processes = HostProcesses()
    processes.look([idle.pid, busy.pid])

    def percent() -> float:
        found = _look(processes, busy.pid).cpu_percent
        return found if isinstance(found, float) else 0.0

    assert 0 < wait_until(percent, every_s=0.3) < 130
    assert _look(processes, idle.pid).cpu_percent == 0.0


def test_two_gpus_share_one_look(start: Start) -> None:
    child = start()
    processes = HostProcesses()
    assert _look(processes, child.pid) is _look(processes, child.pid)


def test_no_process(start: Start) -> None:
    assert HostProcesses().look([_NO_PID, 2**32 - 1, 0]) == {
        pid: Unknown("no such process here") for pid in (_NO_PID, 2**32 - 1, 0)
    }
    child = start()
    processes = HostProcesses()
    _look(processes, child.pid)
    child.kill()
    child.wait()
    assert processes.look([child.pid])[child.pid] == Unknown("no such process here")


def test_a_dead_process_that_nobody_waited_for(start: Start) -> None:
    child = start("true")
    zombie = psutil.Process(child.pid)
    wait_until(lambda: zombie.status() == psutil.STATUS_ZOMBIE)
    assert _look(HostProcesses(), child.pid).command == "[true]"


def test_control_characters_in_a_command_do_not_reach_the_screen(start: Start) -> None:
    child = start(sys.executable, "-c", "import time; time.sleep(600)", "a\x1b[31mb\nc")
    wait_until(lambda: "time.sleep" in str(_look(HostProcesses(), child.pid).command))
    assert str(_look(HostProcesses(), child.pid).command).endswith("a [31mb c")


def test_bytes_of_a_user_s_or_a_host_s_name_that_are_no_text_can_be_written(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C gives names as bytes, and Python makes a lone surrogate of one that is no UTF-8."""
    strange = os.fsdecode(b"ad\xe9")
    monkeypatch.setattr(psutil.Process, "username", lambda _: strange)
    monkeypatch.setattr(socket, "gethostname", lambda: strange)
    user, host = _look(HostProcesses(), start().pid).user, HostReader().reading.name
    assert (user, host) == ("ad ", "ad ")
    assert f"{user}{host}".encode()


def test_control_characters_in_a_name_do_not_either(start: Start) -> None:
    """Anyone may give his process one."""
    named = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a\\x1b[31mb', 0, 0, 0); time.sleep(600)"
    child = start(sys.executable, "-c", named)
    wait_until(lambda: not _look(HostProcesses(), child.pid).name.startswith("python"))
    assert _look(HostProcesses(), child.pid).name == "a [31mb"


@pytest.mark.parametrize(
    ("cgroup", "hint"),
    [
        ("0::/user.slice/user-1000.slice/session-1.scope", ""),
        ("12:devices:/docker/3f2a91" + "0" * 58, "docker 3f2a91"),
        ("0::/system.slice/docker-3f2a91" + "0" * 58 + ".scope", "docker 3f2a91"),
        ("0::/user.slice/user-1.slice/user@1.service/user.slice/libpod-ab12cd" + "0" * 58 + ".scope", "podman ab12cd"),
        ("11:memory:/kubepods/burstable/pod2f1b0c11-22aa-33bb/" + "1" * 64, "pod 2f1b0c11"),
        ("0::/kubepods.slice/kubepods-pod2f1b0c11_22aa.slice/cri-containerd-" + "1" * 64 + ".scope", "pod 2f1b0c11"),
        ("9:freezer:/slurm/uid_1000/job_1234/step_0/task_1", "slurm 1234"),
        ("0::/system.slice/slurmstepd.scope/job_77/step_batch/user/task_0", "slurm 77"),
        ("0::/lxc.payload.web/init.scope", "lxc web"),
        ("8:cpu:/lxc/db", "lxc db"),
        ("8:cpu:/lxc/d\x1b[31mb", "lxc d [31mb"),
        ("0::/system.slice/nerdctl-aa11bb" + "0" * 58 + ".scope", "containerd aa11bb"),
    ],
)
def test_the_container_by_the_control_group(start: Start, tmp_path: Path, cgroup: str, hint: str) -> None:
    child = start()
    folder = tmp_path / str(child.pid)
    folder.mkdir()
    (folder / "cgroup").write_text(f"1:name=systemd:/\n{cgroup}\n")
    assert _look(HostProcesses(tmp_path), child.pid).container == hint


_ID = "0123456789ab" + "c" * 52
_UID = "2f1b0c11-22aa-33bb-44cc-0123456789ab"


@pytest.mark.parametrize(
    ("cgroup", "container_id", "pod_uid", "slurm_job"),
    [
        ("0::/user.slice/user-1000.slice/session-1.scope", "", "", ""),
        (f"0::/system.slice/docker-{_ID}.scope", _ID[:12], "", ""),
        (f"12:devices:/docker/{_ID}", _ID[:12], "", ""),
        (f"11:memory:/kubepods/burstable/pod{_UID}/{_ID}", _ID[:12], _UID, ""),
        (
            f"0::/kubepods.slice/kubepods-pod{_UID.replace('-', '_')}.slice/cri-containerd-{_ID}.scope",
            _ID[:12], _UID, "",
        ),
        (f"0::/kubepods.slice/kubepods-pod{'0f' * 16}.slice/crio-{_ID}.scope", _ID[:12], "0f" * 16, ""),
        (f"0::/docker/{'9' * 64}/kubelet/kubepods/pod{_UID}/{_ID}", _ID[:12], _UID, ""),
        ("9:freezer:/slurm/uid_1000/job_1234/step_0/task_1", "", "", "1234"),
        ("9:freezer:/slurm_node7/uid_1000/job_1234/step_0", "", "", "1234"),
        ("0::/system.slice/slurmstepd.scope/job_77/step_batch/user/task_0", "", "", "77"),
        ("0::/system.slice/node7_slurmstepd.scope/job_78/step_0/user/task_0", "", "", "78"),
        (f"0::/system.slice/slurmstepd.scope/job_79/step_0/user/task_0/docker/{_ID}", _ID[:12], "", "79"),
        ("0::/user.slice/job_5/slurmfan", "", "", ""),
    ],
)  # fmt: skip
def test_container_pod_and_job_by_the_control_group(
    start: Start, tmp_path: Path, cgroup: str, container_id: str, pod_uid: str, slurm_job: str
) -> None:
    child = start()
    folder = tmp_path / str(child.pid)
    folder.mkdir()
    (folder / "cgroup").write_text(f"1:name=systemd:/\n{cgroup}\n")
    found = _look(HostProcesses(tmp_path), child.pid)
    assert (found.container_id, found.pod_uid, found.slurm_job) == (container_id, pod_uid, slurm_job)


class TestNamespaces:
    """Seen from a container, a pid that NVML reports may be another process here."""

    @pytest.fixture
    def proc(self, tmp_path: Path) -> Path:
        (tmp_path / "self/ns").mkdir(parents=True)
        (tmp_path / "self/ns/pid").symlink_to("pid:[4026532000]")
        return tmp_path

    def _open_files(self, proc: Path, pid: int, *targets: str) -> None:
        folder = proc / str(pid) / "fd"
        folder.mkdir(parents=True)
        for number, target in enumerate(targets):
            (folder / str(number)).symlink_to(target)

    def test_one_that_uses_no_gpu_is_not_taken_for_it(self, start: Start, proc: Path) -> None:
        child = start()
        self._open_files(proc, child.pid, "/dev/null", "socket:[1]", "/dev/nvme0")
        assert HostProcesses(proc).look([child.pid])[child.pid] == Unknown(f"pid {child.pid} is of another namespace")

    @pytest.mark.parametrize("device", ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu"])
    def test_one_that_uses_a_gpu_is(self, start: Start, proc: Path, device: str) -> None:
        child = start()
        self._open_files(proc, child.pid, "/dev/null", device)
        assert _look(HostProcesses(proc), child.pid).name == "sleep"

    def test_files_that_are_closed_meanwhile_hide_no_gpu(self, start: Start, proc: Path) -> None:
        child = start()
        self._open_files(proc, child.pid, "/dev/nvidia0")
        for number in range(1, 30):
            (proc / str(child.pid) / "fd" / str(number)).touch()  # as one that is closed: it cannot be followed
        assert _look(HostProcesses(proc), child.pid).name == "sleep"

    def test_one_that_opens_the_gpu_later_is_found_then(self, start: Start, proc: Path) -> None:
        child = start()
        self._open_files(proc, child.pid)
        processes = HostProcesses(proc)
        assert isinstance(processes.look([child.pid])[child.pid], Unknown)
        (proc / str(child.pid) / "fd/3").symlink_to("/dev/nvidia-uvm")
        assert _look(processes, child.pid).name == "sleep"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_one_that_may_not_be_looked_into_is_accepted(self, start: Start, proc: Path) -> None:
        child = start()
        self._open_files(proc, child.pid)
        (proc / str(child.pid) / "fd").chmod(0)
        assert _look(HostProcesses(proc), child.pid).name == "sleep"

    def test_a_pid_that_is_not_here_is_of_another_namespace(self, proc: Path) -> None:
        assert HostProcesses(proc).look([_NO_PID])[_NO_PID] == Unknown(f"pid {_NO_PID} is of another namespace")

    def test_on_the_host_nothing_is_doubted(self, start: Start, proc: Path) -> None:
        (proc / "self/ns/pid").unlink()
        (proc / "self/ns/pid").symlink_to("pid:[4026531836]")
        child = start()
        self._open_files(proc, child.pid)
        assert _look(HostProcesses(proc), child.pid).name == "sleep"


class TestSignals:
    @pytest.mark.parametrize(("send", "number"), [(terminate, signal.SIGTERM), (kill, signal.SIGKILL)])
    def test_it_ends(self, start: Start, send: Callable[[HostProcess], None], number: int) -> None:
        child = start()
        send(_look(HostProcesses(), child.pid))
        assert child.wait(30) == -number

    def test_another_process_of_that_pid_is_spared(self, start: Start) -> None:
        child = start()
        earlier = replace(_look(HostProcesses(), child.pid), start_time_s=time.time() - 3600, name="python")
        with pytest.raises(CannotSignal, match=f"pid {child.pid} is another process now; python has ended"):
            kill(earlier)
        assert child.poll() is None

    def test_one_that_has_ended(self, start: Start) -> None:
        child = start()
        found = _look(HostProcesses(), child.pid)
        child.kill()
        child.wait()
        with pytest.raises(CannotSignal, match=rf"pid {child.pid} \(sleep\) has ended already"):
            terminate(found)

    def test_another_users(self) -> None:
        code = (
            "import os, sys\n"
            "from gpumem_tui.monitor.processes import CannotSignal, HostProcesses, kill\n"
            "pid = os.getppid()\n"
            "found = HostProcesses().look([pid])[pid]\n"
            "os.setuid(65534) if os.getuid() == 0 else None\n"
            "try: kill(found) if os.getuid() == 65534 else sys.exit('no other user')\n"
            "except CannotSignal as error: print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        if "no other user" in done.stderr:
            pytest.skip("needs root to become another user")
        assert (
            done.stdout
            == f"no permission to signal pid {os.getpid()} of user {getpass.getuser()}; `sudo kill {os.getpid()}` can\n"
        )
