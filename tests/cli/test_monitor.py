"""`monitor`, `doctor` and `settings` as a user runs them, on the fake NVML."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpumem_tui.cli import _MONITOR_FLAGS
from gpumem_tui.cli.monitor import monitor
from gpumem_tui.errors import EXIT_INTERRUPTED
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.monitor.report import snapshot_json
from gpumem_tui.monitor.wire import ReportReader
from gpumem_tui.recording.recording import GpuRecorder
from gpumem_tui.settings import Settings, parse
from tests.cli.conftest import Finished, Program
from tests.monitor.schema import MONITOR
from tests.monitor.snapshots import printed
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import LIBRARY_MISMATCH, Calls, FakeGpu, FakeProcess, Scenario
from tests.waiting import wait_until

_SCHEMA = jsonschema.Draft202012Validator(MONITOR)
_NO_PID = 2**22 + 1
_BUSY = FakeGpu(
    used_bytes=30 * GIB,
    utilization_percent=97,
    memory_utilization_percent=41,
    temperature_c=65,
    power_w=312.5,
    processes=[FakeProcess(os.getpid(), 20 * GIB, sm_percent=60), FakeProcess(_NO_PID, 9 * GIB)],
)
_FORBIDDEN = FakeGpu(power_w=None, calls=Calls(errors={"nvmlDeviceGetComputeRunningProcesses_v3": 4}))


@pytest.fixture
def environment(fake_machine: FakeMachine, tmp_path: Path) -> dict[str, str]:
    """The environment in which the program meets the fake machine and no settings of ours."""
    fake_machine.show(Scenario(gpus=[_BUSY, _FORBIDDEN]))
    return {**fake_machine.environment, "PATH": os.environ["PATH"], "XDG_CONFIG_HOME": str(tmp_path)}


_UNNEEDED = (
    "click",
    "textual",
    "rich",
    "gpumem_tui.formula",
    "gpumem_tui.tui",
    "gpumem_tui.remote",
    "gpumem_tui.options",
)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_one_reading_loads_nothing_that_only_options_and_screens_need(
    environment: dict[str, str], flags: tuple[str, ...]
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "gpumem_tui", "monitor", "--once", *flags]
    env = {**environment, "GPUMEM_TUI_DIR": environment["XDG_CONFIG_HOME"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gpumem_tui.monitor.sampler" in loaded
    assert not loaded & set(_UNNEEDED)


def test_what_begins_without_click_is_an_option_of_it() -> None:
    flags = {option: each.name for each in monitor.params for option in each.opts if getattr(each, "is_flag", False)}
    assert flags.items() >= _MONITOR_FLAGS.items()


def test_who_reads_no_more_is_noticed_long_before_the_next_reading(environment: dict[str, str]) -> None:
    with _running(environment, "monitor", "--json", "--interval", "3600") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["gpus"]
        process.stdout.close()
        process.wait(30)


@pytest.mark.parametrize("wire", [True, False])
def test_what_writes_to_a_viewer_ends_with_its_stdin_long_before_the_next_reading(
    wire: bool, environment: dict[str, str]
) -> None:
    which = ("--wire", "--interval", "3600") if wire else ("--json", "--interval", "0.2")
    ours, held = os.pipe()
    with _running(environment, "monitor", *which, stdin=ours) as process:
        os.close(ours)
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["full"]["snapshot"] if wire else first)["gpus"]
        os.close(held)
        if wire:
            assert process.wait(30) == 0
        else:
            assert [json.loads(process.stdout.readline())["schema"] for _ in range(3)] == [1, 1, 1]


@contextmanager
def _running(
    environment: dict[str, str], *arguments: str, stdin: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """The program while it runs, its output in pipes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpumem_tui", *arguments],
        env={**os.environ, **environment},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Exit code and stderr after a signal."""
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    return process.returncode, err


def _only(done: Finished) -> dict[str, Any]:
    (line,) = done.out.splitlines()
    body: dict[str, Any] = json.loads(line)
    _SCHEMA.validate(body)
    return body


def test_once_json_has_the_machines_numbers(program: Program, environment: dict[str, str]) -> None:
    done = program("monitor", "--once", "--json", env=environment)
    assert (done.code, done.err) == (0, "")
    body = _only(done)
    busy, forbidden = body["gpus"]
    assert (body["driver_version"], body["cuda_version"]) == ("550.54.14", "12.4")
    assert (busy["total_bytes"], busy["reserved_bytes"]) == (80 * GIB, 606 * MIB)
    assert (busy["used_bytes"], busy["free_bytes"]) == (30 * GIB, 50 * GIB - 606 * MIB)
    assert busy["ledger"] == {
        "driver_reserved": 606 * MIB,
        "process": 29 * GIB,
        "unaccounted": GIB,
        "free": 50 * GIB - 606 * MIB,
    }
    figures = ("utilization_percent", "memory_utilization_percent", "temperature_c", "power_w", "power_limit_w")
    assert [busy[key] for key in figures] == [97, 41, 65, 312.5, 400.0]
    rates = dict.fromkeys(("nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s"), "needs a second look")
    assert busy["unavailable"] == {"fan_percent": "not supported", **rates}
    ours, foreign = sorted(busy["processes"], key=lambda process: int(process["pid"]))
    assert (ours["pid"], ours["used_bytes"], ours["sm_percent"]) == (os.getpid(), 20 * GIB, 60)
    assert "python" in ours["command"]
    assert (foreign["pid"], foreign["used_bytes"], foreign["user"]) == (_NO_PID, 9 * GIB, None)
    assert foreign["unavailable"]["user"] == "no such process here"
    assert forbidden["processes"] is None
    assert forbidden["ledger"]["process"] is None
    assert forbidden["unavailable"]["processes"] == "no permission"
    assert forbidden["unavailable"]["power_w"] == "not supported"


def test_only_mine_leaves_the_memory_whole(program: Program, environment: dict[str, str]) -> None:
    for options in (("--once", "--json"), ("--json", "--interval", "0.2")):
        with _running(environment, "monitor", *options, "--mine") as process:
            assert process.stdout is not None
            body = json.loads(process.stdout.readline())
        assert [process["pid"] for process in body["gpus"][0]["processes"]] == [os.getpid()]
        assert body["gpus"][0]["ledger"]["process"] == 29 * GIB
    done = program("monitor", "--once", "--mine", env=environment)
    assert "(no such process here)" not in done.out


def test_what_a_viewer_reads_is_what_the_json_says(environment: dict[str, str]) -> None:
    reader = ReportReader()
    with _running(environment, "monitor", "--wire", "--interval", "0.2") as process:
        assert process.stdout is not None
        first, second = (reader.read(process.stdout.readline().encode()) for _ in range(2))
    assert second.snapshot.time_s > first.snapshot.time_s
    body = printed(snapshot_json(second.with_ledgers, second.alerts))
    _SCHEMA.validate(body)
    assert body["gpus"][0]["ledger"]["process"] == 29 * GIB


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_viewer_reads_every_text_whatever_the_locale_of_the_host(
    encoding: str, environment: dict[str, str], fake_machine: FakeMachine
) -> None:
    fake_machine.show(Scenario(gpus=[FakeGpu(name="Zwölf Äpfel")]))
    with _running({**environment, "PYTHONIOENCODING": encoding}, "monitor", "--wire", "--interval", "60") as process:
        assert isinstance(process.stdout, TextIOWrapper)
        report = ReportReader().read(process.stdout.buffer.readline())
    assert [gpu.name for gpu in report.snapshot.gpus] == ["Zwölf Äpfel"]


def test_once_is_a_table_of_80_columns(program: Program, environment: dict[str, str]) -> None:
    done = program("monitor", "--once", env={**environment, "COLUMNS": "80"})
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "  0  NVIDIA A100-SXM4-80GB     30.00 / 80.00 GiB    97 %   65 °C  312 / 400 W" in lines
    assert "     processes: no permission; power: not supported" in lines
    assert any(f"{_NO_PID}  –" in line and "(no such process" in line for line in lines)


def test_what_goes_into_a_pipe_is_not_cut(program: Program, environment: dict[str, str]) -> None:
    done = program("monitor", "--once", env={**environment, "COLUMNS": ""})
    assert any(line.endswith("(no such process here)") for line in done.out.splitlines())


def test_a_terminal_that_cannot_show_every_character(program: Program, environment: dict[str, str]) -> None:
    done = program("monitor", "--once", env={**environment, "PYTHONIOENCODING": "ascii"})
    assert (done.code, done.err) == (0, "")
    assert "  65 C   312 / 400 W" in done.out


def test_without_a_driver_the_remedy_and_4(program: Program, tmp_path: Path) -> None:
    for arguments in (["--once"], ["--once", "--json"]):
        done = program("monitor", *arguments, env={"XDG_CONFIG_HOME": str(tmp_path)})
        assert done.code == 4
        assert done.err.startswith("gpumem-tui: no NVIDIA driver on this machine: install it")
        assert done.err.count("\n") == 1
    body = _only(done)
    assert body["gpus"] == []
    assert body["problem"].startswith("no NVIDIA driver")
    assert body["alerts"][0]["kind"] == "no_driver"


def test_a_driver_that_does_not_fit_is_told_as_such(
    program: Program, environment: dict[str, str], fake_machine: FakeMachine
) -> None:
    fake_machine.show(Scenario(init=LIBRARY_MISMATCH))
    done = program("monitor", "--once", env=environment)
    assert done.code == 4
    assert "driver and library versions differ: reboot" in done.err


def test_json_lines_come_at_the_interval_and_end_on_ctrl_c(environment: dict[str, str]) -> None:
    with _running(environment, "monitor", "--json", "--interval", "0.2") as process:
        assert process.stdout is not None
        bodies = [json.loads(process.stdout.readline()) for _ in range(4)]
        code, err = _ended(process, signal.SIGINT)
    assert (code, err) == (130, "")
    for body in bodies:
        _SCHEMA.validate(body)
    times = [body["time_s"] for body in bodies]
    assert times == sorted(set(times))
    assert times[3] - times[0] >= 0.3  # the first may be old when it is printed


def test_a_reader_that_leaves_is_no_error(environment: dict[str, str]) -> None:
    with _running(environment, "monitor", "--json", "--interval", "0.2") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_without_a_terminal_a_line_a_gpu_and_each_new_alert(
    environment: dict[str, str], fake_machine: FakeMachine
) -> None:
    with _running(environment, "monitor", "--interval", "0.2") as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("GPU 0: 30.00 / 80.00 GiB, util 97 %, 65 °C, 312 W, 2 processes\n")
        fake_machine.show(Scenario(gpus=[_BUSY, _FORBIDDEN]).change(0, used_bytes=79 * GIB))
        while "warning" not in (line := process.stdout.readline()):  # one comes each interval, until it ends
            assert " GPU " in line
        assert line.rstrip().endswith("warning: GPU 0: 99 % of memory in use, 0.41 GiB free")


def test_the_first_line_has_what_is_slow_to_read(environment: dict[str, str], fake_machine: FakeMachine) -> None:
    slow = Calls(latency_ms={"nvmlDeviceGetGraphicsRunningProcesses_v3": 400})  # before the temperature is read
    fake_machine.show(Scenario(gpus=[replace(_BUSY, calls=slow)]))
    with _running(environment, "monitor", "--interval", "0.2") as process:
        assert process.stdout is not None
        assert ", 65 °C, " in process.stdout.readline()


def test_an_alert_is_told_by_the_command_of_the_settings_but_not_where_the_json_has_it(
    environment: dict[str, str], fake_machine: FakeMachine, tmp_path: Path
) -> None:
    (tmp_path / "gpumem-tui").mkdir()
    told = tmp_path / "told"
    (tmp_path / "gpumem-tui/settings.toml").write_text(
        f"near_full_percent = 20\n[notify]\ncommand = \"sh -c 'cat >> {told}; echo no network >&2; exit 5'\"\n"
    )
    with _running(environment, "monitor", "--json", "--interval", "0.2") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["alerts"]
    assert not told.exists()
    with _running(environment, "monitor", "--interval", "0.2") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "gpumem-tui: notify: sh ended with exit code 5: no network\n"
    [alert] = map(json.loads, told.read_text().splitlines())
    assert (alert["kind"], alert["severity"]) == ("near_full", "warning")


def test_one_alert_can_be_sent_to_try_who_is_told(program: Program, tmp_path: Path) -> None:
    def tried(text: str) -> Finished:
        (tmp_path / "s.toml").write_text(text)
        return program("alerts", "--try", "--settings", str(tmp_path / "s.toml"))

    assert tried("").code == 2
    done = tried(f'[notify]\ncommand = "tee {tmp_path}/told"')
    assert (done.code, done.out) == (0, "command: tee was run and ended well\n")
    assert json.loads((tmp_path / "told").read_text())["message"] == "a try of [notify]"
    done = tried('[notify]\ncommand = "false"')
    assert (done.code, done.err) == (4, "gpumem-tui: notify: false ended with exit code 1\n")


def test_a_recording_plays_back_what_was_seen(program: Program, environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with _running(environment, "monitor", "--json", "--interval", "0.2", "--record", str(path)) as process:
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline()) for _ in range(3)]
        code, err = _ended(process, signal.SIGINT)
    assert (code, err) == (130, "")
    played = program("monitor", "--replay", str(path), "--json")
    assert (played.code, played.err) == (0, "")
    assert [json.loads(line) for line in played.out.splitlines()][:3] == seen
    last = program("monitor", "--replay", str(path), "--once", "--json")
    assert last.out.splitlines()[0] == played.out.splitlines()[-1]
    again = program("monitor", "--json", "--record", str(path), env=environment)
    assert again.code == 2
    assert "--record: " in again.err
    assert "exists already" in again.err


@pytest.mark.parametrize(
    ("options", "number", "code"), [((), signal.SIGINT, EXIT_INTERRUPTED), (("--quiet",), signal.SIGTERM, 0)]
)
def test_a_recording_alone_prints_no_lines_and_has_an_end(
    options: tuple[str, ...],
    number: signal.Signals,
    code: int,
    program: Program,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """A service that records would fill the log of the system; it is stopped by SIGTERM."""
    path = tmp_path / "night.gpumem"
    with _running(environment, "monitor", "--interval", "0.2", "--record", str(path), *options) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"gpumem-tui: recording to {path}; ctrl+c ends it\n"
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") > 4)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("", "", code)
    played = program("monitor", "--replay", str(path), "--json")
    assert played.out.startswith('{"schema": 1')
    assert not played.err


def test_a_recording_whose_recorder_was_killed_plays_to_its_end(
    program: Program, environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "recording"
    with _running(environment, "monitor", "--json", "--interval", "0.2", "--record", str(path)) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.kill()
        process.communicate()
    played = program("monitor", "--replay", str(path))
    assert played.code == 0
    assert played.out.count("GPU 0: 30.00 / 80.00 GiB") >= 2
    assert played.err.startswith(f"gpumem-tui: {path}: cut off after snapshot ")
    assert played.err.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"], ["--once"]])
def test_a_recording_without_a_reading_is_told_so(program: Program, tmp_path: Path, options: list[str]) -> None:
    GpuRecorder(tmp_path / "empty").close()
    played = program("monitor", "--replay", str(tmp_path / "empty"), *options)
    assert (played.code, played.out) == (2, "")
    assert f"--replay: {tmp_path / 'empty'} has no reading to play" in played.err


def test_a_recording_that_is_cut_off_before_its_first_reading_is_told_so(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    recorder = GpuRecorder(path)
    recorder.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    played = program("monitor", "--replay", str(path), "--json")
    assert (played.code, played.out) == (2, "")
    assert played.err.startswith(f"gpumem-tui: --replay: {path}: cut off before the first snapshot; record one with `")


def test_metrics_beside_the_lines(environment: dict[str, str]) -> None:
    with _running(environment, "monitor", "--json", "--interval", "0.2", "--metrics", "127.0.0.1:0") as process:
        assert process.stderr is not None
        assert process.stdout is not None
        process.stdout.readline()
        ports = _listening(process.pid)
        text = urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=30).read().decode()
        code, err = _ended(process, signal.SIGTERM)
    labels = f'gpu="0",host="{socket.gethostname()}",mig_instance="",name="NVIDIA A100-SXM4-80GB",uuid="GPU-00000000"'
    (value,) = re.findall(rf"^gpumem_gpu_memory_used_bytes{{{labels}}} (\S+)$", text, re.MULTILINE)
    assert float(value) == 30 * GIB
    assert (code, err) == (-signal.SIGTERM, f"gpumem-tui: metrics on 127.0.0.1:{ports[0]}\n")


def test_metrics_alone_print_no_lines_with_quiet(environment: dict[str, str]) -> None:
    with _running(environment, "monitor", "--quiet", "--interval", "0.2", "--metrics", "127.0.0.1:0") as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]

        def scraped() -> str:
            return str(urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read())

        wait_until(lambda: "gpumem_gpu_memory_used_bytes{" in scraped())
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")


def test_an_address_that_others_reach_is_warned_about(environment: dict[str, str]) -> None:
    with _running(environment, "monitor", "--json", "--metrics", "0.0.0.0:0") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        _, err = _ended(process, signal.SIGINT)
    warning, where = err.splitlines()
    assert warning.startswith("gpumem-tui: --metrics: everyone who can reach 0.0.0.0:")
    assert where.startswith("gpumem-tui: metrics on 0.0.0.0:")


def _listening(pid: int) -> list[int]:
    import psutil

    connections = psutil.Process(pid).net_connections("tcp")
    return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--interval", "0"], "'--interval': 0.0 is not in the range"),
        (["--interval", "nan"], "'--interval': nan is not a finite number"),
        (["--quiet"], "--quiet: with --record FILE or --metrics"),
        (["--quiet", "--record", "x", "--json"], "--quiet and --json: give only one of them"),
        (["--once", "--record", "x"], "--once and --record: give only one of them"),
        (["--once", "--metrics"], "--once and --metrics: give only one of them"),
        (["--replay", "x", "--record", "y"], "--replay and --record: give only one of them"),
        (["--replay", "x", "--interval", "2"], "--replay and --interval: give only one of them"),
        (["--speed", "2"], "--speed sets how fast --replay plays"),
        (["--replay", "missing"], "missing cannot be read: No such file or directory"),
        (["--replay", "settings.toml"], "settings.toml is no recording"),
        (["--record", "no/where"], "--record: no/where cannot be written: No such file or directory"),
        (["--metrics", "nonsense"], "'--metrics': 'nonsense' is not HOST:PORT such as 127.0.0.1:9820"),
        (["--metrics", "127.0.0.1:²"], "'--metrics': '127.0.0.1:²' is not HOST:PORT such as 127.0.0.1:9820"),
        (["--metrics", "[::1"], "'--metrics': '[::1' is not HOST:PORT such as 127.0.0.1:9820"),
        (["--metrics", "::1"], "'--metrics': '::1' is not HOST:PORT such as 127.0.0.1:9820"),
        (["--metrics", "127.0..1:1"], "--metrics: 127.0..1:1 cannot be served: "),
        (["--metrics", "192.0.2.1:1"], "--metrics: 192.0.2.1:1 cannot be served: "),
        (["--settings", "missing"], "missing: there is no such file; `gpumem-tui settings` prints one"),
        (["--settings", "settings.toml"], "settings.toml:2: unknown key 'intervall_s'; did you mean interval_s?"),
    ],
)
def test_one_clear_line(program: Program, arguments: list[str], said: str) -> None:
    (program.folder / "settings.toml").write_text("bell = true\nintervall_s = 2\n")
    done = program("monitor", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.startswith("gpumem-tui: ")
    assert done.err.count("\n") == 1


def test_settings_are_obeyed(program: Program, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gpumem-tui").mkdir()
    (tmp_path / "gpumem-tui/settings.toml").write_text("near_full_percent = 20\n")
    assert [alert["kind"] for alert in _only(program("monitor", "--once", "--json", env=environment))["alerts"]] == [
        "near_full"
    ]


def test_the_settings_file_that_is_printed_can_be_read(program: Program, tmp_path: Path) -> None:
    done = program("settings", env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert done.code == 0
    assert done.out.startswith(f"# Save this as {tmp_path}/gpumem-tui/settings.toml\n")
    assert parse(done.out) == Settings()


class TestDoctor:
    def test_a_healthy_machine(self, program: Program, environment: dict[str, str], fake_machine: FakeMachine) -> None:
        fake_machine.show(Scenario(gpus=[FakeGpu()] * 2))
        done = program("doctor", "--json", env=environment)
        checks = {check["name"]: check for check in json.loads(done.out)["checks"]}
        assert done.code == 0
        assert (checks["driver"]["status"], checks["driver"]["found"]) == ("ok", "driver 550.54.14, CUDA 12.4")
        assert checks["GPUs"]["found"] == "2 × NVIDIA A100-SXM4-80GB"
        assert checks["torch"]["status"] in ("ok", "warn")

    def test_something_broken_is_4(self, program: Program, environment: dict[str, str], tmp_path: Path) -> None:
        (tmp_path / "gpumem-tui").mkdir()
        (tmp_path / "gpumem-tui/settings.toml").write_text("bel = true\n")
        done = program("doctor", "--python", "/no/python", env=environment)
        assert done.code == 4
        assert "fail  settings         settings.toml:1: unknown key 'bel'; did you mean bell?" in done.out
        assert "fail  torch            /no/python: cannot be run: No such file or directory" in done.out

    def test_a_laptop_without_a_gpu_is_no_fault(self, program: Program, tmp_path: Path) -> None:
        done = program("doctor", env={"XDG_CONFIG_HOME": str(tmp_path)})
        assert done.code == 0
        assert (
            "skip  driver           no NVIDIA GPU here; `gpumem-tui search --gpu sim:h100-80gb` simulates one"
            in done.out
        )
