"""Several hosts as a user sees them: the real program in a real terminal; ssh is a stand-in, the program there real."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from gpumem_tui.memory import GIB
from gpumem_tui.recording.file import RecordingFile
from gpumem_tui.recording.recording import GpuRecording
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, Scenario
from tests.remote.standins import UNKNOWN_KEY, Ssh
from tests.terminal.terminal import terminal
from tests.waiting import wait_until


def test_hosts_of_a_list_one_of_them_refused(fake_machine: FakeMachine, tmp_path: Path) -> None:
    fake_machine.show(Scenario(gpus=[FakeGpu(used_bytes=5 * GIB), FakeGpu(used_bytes=70 * GIB)]))
    ssh = Ssh(tmp_path)
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in fake_machine.environment.items())
    here = f"exec env {words} {shlex.quote(sys.executable)} -m"
    ssh.host("n1", "echo Welcome", f'set -- $1; shift; {here} gpumem_tui "$@"')
    ssh.host("n2", f"echo '{UNKNOWN_KEY}' >&2; exit 255")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    typed = ("--host", "n[1-2]", "--remote-command", "gpumem-tui")
    with terminal(*typed, columns=80, lines=24, env=environment) as screen:
        screen.wait_for("2 hosts · 1 live · 1 away", "75.0/160.0", "host key is not known: `ssh n2`", "its Monitor")
        screen.press("x")
        screen.wait_for("GPU 0", "GPU 1", "70.0/80.0")
        screen.press("\r")
        screen.wait_for("esc hosts", "5.00/80.00 GiB", "driver 550")
        screen.press("\x1b")
        screen.wait_for("2 hosts · 1 live")
        screen.press("?")
        screen.wait_for("try the hosts that are away at once")
        screen.press("\x1b")
        screen.wait_for("2 hosts · 1 live")
        screen.press("q")
        assert screen.exit_code() == 0
    assert any("monitor --wire --interval 1" in call for call in ssh.called)


def test_hosts_are_recorded_and_played(fake_machine: FakeMachine, tmp_path: Path) -> None:
    fake_machine.show(Scenario(gpus=[FakeGpu(used_bytes=5 * GIB), FakeGpu(used_bytes=79 * GIB)]))
    ssh, file = Ssh(tmp_path), tmp_path / "night"
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in fake_machine.environment.items())
    here = f"exec env {words} {shlex.quote(sys.executable)} -m"
    ssh.host("n1", f'set -- $1; shift; {here} gpumem_tui "$@"')
    ssh.host("n2", f"echo '{UNKNOWN_KEY}' >&2; exit 255")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    hosts = ("monitor", "--host", "n[1-2]", "--interval", "0.3", "--remote-command", "gpumem-tui")
    with terminal(*hosts, "--record", str(file), columns=80, lines=24, env=environment) as screen:
        screen.wait_for("2 hosts · 1 live · 1 away", "GPU 1:", "host key is not known: `ssh n2`")
        wait_until(lambda: len(list(GpuRecording(RecordingFile(file)).pictures())) > 20, "some readings")
        screen.press("q")
        assert screen.exit_code() == 0
    with terminal("monitor", "--replay", str(file), columns=80, lines=24) as screen:
        screen.wait_for("2 hosts", "recording", "[ −1 min", "a alerts")
        screen.press("a")
        screen.wait_for("Alerts", "n1: GPU 1: ")
        screen.press("\r")
        screen.wait_for("▸ n1", "△ GPU 1:")
        screen.press(" ")
        screen.wait_for("held")
        screen.press("q")
        assert screen.exit_code() == 0
