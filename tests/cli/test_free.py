"""`free` and `monitor --host` without a terminal: on the fake NVML, and on stand-ins for hosts."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.cli.free import _answer
from gpumem_tui.memory import GIB
from gpumem_tui.recording.recording import GpuRecorder, HostsPicture
from tests.cli.conftest import Program
from tests.monitor.snapshots import gpu, machine
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import Calls, FakeGpu, FakeInstance, FakeProcess, Scenario
from tests.remote.standins import DENIED, Ssh
from tests.tui.test_tui_hosts import live
from tests.waiting import DEADLINE_S, wait_for_file

_IDLE = FakeGpu()
_BUSY = FakeGpu(used_bytes=30 * GIB, processes=[FakeProcess(os.getpid(), 30 * GIB)])
_HIDDEN = FakeGpu(calls=Calls(errors={"nvmlDeviceGetComputeRunningProcesses_v3": 4}))
_DIVIDED = FakeGpu(mig_mode=1, instances=[FakeInstance("MIG-1")])
_DRAWN_ON = FakeGpu(used_bytes=100 << 20, processes=[FakeProcess(os.getpid(), 100 << 20, kind="G")])
_SCENARIO = Scenario(gpus=[_BUSY, _IDLE, _HIDDEN, _DIVIDED, _DRAWN_ON])


@pytest.mark.parametrize(
    ("arguments", "visible", "out", "code"),
    [
        ((), None, "1,4\n", 0),
        (("--gpus", "1"), None, "1\n", 0),
        (("--gpus", "3"), None, "", 3),
        (("--memory", "20GiB"), None, "0,1,4\n", 0),
        ((), "0,4", "4\n", 0),
        ((), "GPU-00000001", "1\n", 0),
        ((), "", "", 3),
    ],
)
def test_the_free_gpus_of_this_machine(
    arguments: tuple[str, ...], visible: str | None, out: str, code: int, fake_machine: FakeMachine, program: Program
) -> None:
    fake_machine.show(_SCENARIO)
    seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = program("free", *arguments, env={**fake_machine.environment, "PATH": os.environ["PATH"], **seen})
    assert (done.code, done.out) == (code, out), done.err
    assert bool(done.err) is (code != 0)


def test_a_host_that_accepts_and_never_answers_is_a_line_and_a_failure(tmp_path: Path, program: Program) -> None:
    ssh = Ssh(tmp_path)
    ssh.host("silent", "exec sleep 1000")
    ssh.prints("a", [machine([gpu(0, used_bytes=0, processes=())])])
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    hosts = ("--host", "a", "--host", "silent", "--timeout", "1")
    done = program("monitor", "--once", *hosts, env=env, alone=False)
    assert done.code == 4
    assert "Memory used" in done.out
    assert done.err.startswith("gpumem-tui: silent: away: no answer within 1 s: see what `ssh silent` does, or allow")
    assert done.err.count("\n") == 1
    done = program("monitor", "--once", "--json", *hosts, env=env, alone=False)
    assert [json.loads(line).get("problem", "")[:18] for line in done.out.splitlines()] == ["", "no answer within 1"]
    done = program("free", *hosts, env=env, alone=False)
    assert done.code == 0
    assert "silent: no answer within 1 s" in done.err


_TELL = "import os, sys; print({name: os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'CUDA_DEVICE_ORDER')})"


def test_a_command_runs_on_the_free_gpus_and_keeps_its_exit_code(fake_machine: FakeMachine, program: Program) -> None:
    fake_machine.show(_SCENARIO)
    env = {**fake_machine.environment, "PATH": os.environ["PATH"]}
    line = (sys.executable, "-c", f"{_TELL}; sys.exit(7)", "--wait", "--")
    done = program("free", "--gpus", "2", "--exec", "--", *line, env=env)
    assert (done.code, done.out) == (7, "{'CUDA_VISIBLE_DEVICES': '1,4', 'CUDA_DEVICE_ORDER': 'PCI_BUS_ID'}\n")
    assert done.err == "gpumem-tui: CUDA_VISIBLE_DEVICES=1,4 CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
    fake_machine.show(Scenario(gpus=[FakeGpu(name="NVIDIA T4"), _IDLE]))
    done = program("free", "--exec", sys.executable, "-c", _TELL, env=env)
    assert "'GPU-00000000,GPU-00000001', 'CUDA_DEVICE_ORDER': None" in done.out


def test_a_command_that_gets_no_gpu_does_not_run(fake_machine: FakeMachine, program: Program) -> None:
    """With `CUDA_VISIBLE_DEVICES=$(gpumem-tui free …)` it would train on the CPU."""
    fake_machine.show(_SCENARIO)
    env = {**fake_machine.environment, "PATH": os.environ["PATH"]}
    done = program("free", "--gpus", "9", "--exec", "--", "touch", "ran", env=env)
    assert (done.code, done.err) == (3, "gpumem-tui: no machine has 9 GPUs; the most is 5\n")
    assert not (program.folder / "ran").exists()
    done = program("free", "--exec", "--", "no-such-program", env=env)
    assert done.code == 127
    assert done.err.endswith("gpumem-tui: no-such-program cannot be run: No such file or directory\n")


def test_a_command_is_waited_for_and_takes_signals(fake_machine: FakeMachine) -> None:
    fake_machine.show(Scenario(gpus=[_BUSY]))
    told = "import os, signal, sys; print(signal.getsignal(signal.SIGPIPE), flush=True); sys.stdin.read()"
    line = ["free", "--interval", "0.2", "--exec", "--", sys.executable, "-S", "-c", told]
    with subprocess.Popen(
        [sys.executable, "-m", "gpumem_tui", *line],
        env={**os.environ, **fake_machine.environment, "PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as waiting:  # fmt: skip
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("gpumem-tui: waiting for 1 free GPU; `gpumem-tui free --explain`")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
        fake_machine.show(Scenario(gpus=[_IDLE]))
        assert waiting.stdout is not None
        assert waiting.stdout.readline()
        waiting.terminate()
        assert waiting.wait(DEADLINE_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--exec",), "--exec: give the command after --"),
        (("--", "true"), "a command is run with --exec"),
        (("--exec", "--host", "a", "--", "true"), "--exec runs the command on this machine"),
        (("--explain", "--exec", "--", "true"), "--explain and --exec: give only one of them"),
        (("--explain", "--json"), "--explain and --json: give only one of them"),
    ],
)
def test_what_cannot_be_together(arguments: tuple[str, ...], said: str, program: Program) -> None:
    done = program("free", *arguments)
    assert done.code == 2
    assert said in done.err


def test_the_rule_is_explained_gpu_by_gpu(fake_machine: FakeMachine, program: Program) -> None:
    context = FakeGpu(used_bytes=600 << 20, processes=[FakeProcess(os.getpid(), 600 << 20)])
    elsewhere = FakeGpu(used_bytes=300 << 20, utilization_percent=80)
    lying = FakeGpu(used_bytes=900 << 20)
    fake_machine.show(replace(_SCENARIO, gpus=[*_SCENARIO.gpus, context, elsewhere, lying]))
    env = {**fake_machine.environment, "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "0,1,2,3,5,6,7"}
    done = program("free", "--explain", env=env)
    rule, *gpus = done.out.splitlines()
    assert done.code == 0
    assert "has no process that computes, however little that holds, and less than 512 MiB in use" in rule
    whys = [line.partition("): ")[2] for line in gpus]
    assert whys[0].startswith(f"not free: pid {os.getpid()} (")
    assert whys[0].endswith("computes with 30.00 GiB")
    assert whys[1] == "free: 0 B in use"
    assert whys[2] == "not free: its processes are unknown: no permission"
    assert whys[3] == "not free: divided into MIG instances"
    assert whys[4] == "not free: not among those of CUDA_VISIBLE_DEVICES"
    assert whys[5].endswith("computes with 0.59 GiB"), "a context alone"
    assert whys[6] == "not free: busy for 80 % with 0.29 GiB in use by no listed process"
    assert whys[7] == "not free: 0.88 GiB in use by no listed process"
    assert program("free", env=env).out == "1\n"


def test_a_host_that_stands_still_is_gone_by_no_more() -> None:
    still = replace(live("a", 0), interval_s=1.0, received_s=time.monotonic())
    assert not isinstance(_answer(still), str)
    assert _answer(replace(still, received_s=time.monotonic() - 11)) == "no answer for 11 s"


def test_gpus_that_differ_are_told_by_uuid(fake_machine: FakeMachine, program: Program) -> None:
    """CUDA counts the fastest first, the driver by the bus."""
    fake_machine.show(Scenario(gpus=[FakeGpu(name="NVIDIA T4"), _IDLE]))
    done = program("free", env={**fake_machine.environment, "PATH": os.environ["PATH"]})
    assert done.out == "GPU-00000000,GPU-00000001\n"


def test_waiting_ends_when_there_are_enough(fake_machine: FakeMachine) -> None:
    fake_machine.show(Scenario(gpus=[_BUSY, _IDLE]))
    command = [sys.executable, "-m", "gpumem_tui", "free", "--gpus", "2", "--wait", "--interval", "0.2", "--json"]
    with subprocess.Popen(
        command, env={**os.environ, **fake_machine.environment, "PATH": os.environ["PATH"]}, stdout=subprocess.PIPE
    ) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1.5)
        fake_machine.show(Scenario(gpus=[_IDLE, _IDLE]))
        out, _ = waiting.communicate(timeout=60)
    [found] = json.loads(out)["machines"]
    assert [(one["index"], one["uuid"]) for one in found["gpus"]] == [(0, "GPU-00000000"), (1, "GPU-00000001")]
    assert waiting.returncode == 0


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, str]:
    """Host a with a GPU in use and two that are free, b with one, and c that refuses."""
    ssh = Ssh(tmp_path)
    idle: dict[str, Any] = {"used_bytes": 0, "processes": ()}
    ssh.prints("a", [machine([gpu(0, used_bytes=10 * GIB), gpu(1, **idle), gpu(2, **idle)])])
    ssh.prints("b", [machine([gpu(0, **idle)])])
    ssh.host("c", f"echo '{DENIED}' >&2", "exit 255")
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path / "config")}


def test_the_free_gpus_of_hosts(hosts: dict[str, str], program: Program) -> None:
    of_both = ("free", "--host", "b", "--host", "a", "--host", "c")
    done = program(*of_both, env=hosts)
    assert (done.code, done.out) == (0, "b 0\na 1,2\n")
    assert done.err.startswith("gpumem-tui: c: no key is accepted")
    assert program(*of_both, "--gpus", "2", env=hosts).out == "a 1,2\n"
    assert program(*of_both, "--gpus", "3", env=hosts).code == 3
    assert program("free", "--host", "b", env=hosts).out == "0\n"
    assert program("free", "--host", "c", env=hosts).code == 4


def test_hosts_without_a_terminal(hosts: dict[str, str], program: Program) -> None:
    named = ("monitor", "--host", "a", "--host", "c", "--once")
    done = program(*named, "--json", env=hosts)
    a, c = sorted(map(json.loads, done.out.splitlines()), key=lambda line: line["host_name"])
    assert (done.code, a["host_name"], [one["index"] for one in a["gpus"]]) == (4, "a", [0, 1, 2])
    assert (c["host_name"], c["gpus"]) == ("c", None)
    assert c["problem"].startswith("no key is accepted")
    assert done.err.startswith("gpumem-tui: c: away: no key is accepted")
    rows = list(csv.DictReader(program(*named, "--csv", env=hosts).out.splitlines()))
    assert [(row["host"], row["gpu"], int(row["used_bytes"])) for row in rows] == [
        ("a", "0", 10 * GIB), ("a", "1", 0), ("a", "2", 0),
    ]  # fmt: skip
    lines = program(*named, "--host", "b", env=hosts).out.splitlines()
    titles = [place for place, line in enumerate(lines) if line.startswith(("a (", "b ("))]
    assert any("10.00 / 80.00 GiB" in line for line in lines)
    assert (titles[0], lines[titles[1] - 1]) == (0, ""), "each under the name that the user gave"
    assert program("monitor", "--host", "c", "--once", env=hosts).code == 4


def test_what_runs_on_a_host_is_told_that_the_viewer_was_killed(tmp_path: Path) -> None:
    ssh = Ssh(tmp_path)
    ssh.prints("a", [machine([gpu(0)])], then=f"cat; echo so > {tmp_path}/noticed")
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    command = [sys.executable, "-m", "gpumem_tui", "monitor", "--host", "a", "--json"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as viewer:
        assert viewer.stdout is not None
        assert viewer.stdout.readline()
        assert not (tmp_path / "noticed").exists()
        viewer.kill()
    wait_for_file(tmp_path / "noticed")


def test_settings_of_another_file_hold_for_hosts_too(hosts: dict[str, str], tmp_path: Path, program: Program) -> None:
    settings = tmp_path / "other.toml"
    settings.write_text('[hosts]\nlab = ["a", "b"]\n')
    done = program("monitor", "--host", "lab", "--once", "--csv", "--settings", str(settings), env=hosts)
    assert {line.split(",")[1] for line in done.out.splitlines()[1:]} == {"a", "b"}
    done = program("monitor", "--host", "lab", "--once", "--csv", "--settings", str(tmp_path / "none.toml"), env=hosts)
    assert done.code == 2


def test_a_recording_of_hosts_as_json(tmp_path: Path, program: Program) -> None:
    path = tmp_path / "night.rec"
    recorder = GpuRecorder(path, of_one_machine=False)
    recorder.add_hosts(HostsPicture(1_800_000_000.0, (live("a", 10), live("b", 20))), ())
    recorder.close()
    lines = [json.loads(line) for line in program("monitor", "--replay", str(path), "--json").out.splitlines()]
    assert [(line["host_name"], line["gpus"][0]["used_bytes"]) for line in lines] == [("a", 10 * GIB), ("b", 20 * GIB)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", "9"), "no machine has 9 GPUs; the most is 5"),
        (("--gpus", "2", "--memory", "90GiB"), "no machine has 2 GPUs of 90.00 GiB"),
        (("--vendor", "AMD"), "there is no GPU of AMD, only of NVIDIA"),
    ],
)
def test_nobody_waits_for_what_no_machine_has(
    arguments: tuple[str, ...], said: str, fake_machine: FakeMachine, program: Program
) -> None:
    fake_machine.show(_SCENARIO)
    done = program("free", "--wait", *arguments, env={**fake_machine.environment, "PATH": os.environ["PATH"]})
    assert (done.code, done.out, done.err) == (3, "", f"gpumem-tui: {said}\n")


@pytest.mark.parametrize("how", [("--wait",), ("--exec", "--", "true")])
def test_nobody_waits_for_a_driver_that_is_not_there(how: tuple[str, ...], program: Program) -> None:
    done = program("free", "--gpus", "2", *how)
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith("gpumem-tui: no NVIDIA driver on this machine: ")
