"""The doctor: what is missing and not needed is skipped, what is there and broken has failed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.doctor import checks as doctor
from gpumem_tui.doctor.checks import Check, Status, System
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading
from tests.monitor.snapshots import gpu, machine, process

_NO_DRIVER = machine(problem="no NVIDIA driver on this machine: install it")


@pytest.fixture
def system(tmp_path: Path) -> System:
    """A machine with an empty file system and a good terminal."""
    return System(
        root=tmp_path,
        environ={"TERM": "xterm-256color", "COLORTERM": "truecolor"},
        uid=1000,
        machine="x86_64",
        is_terminal=True,
        size=(120, 40),
        encoding="utf-8",
    )


def _write(system: System, path: str, text: str) -> None:
    file = system.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _outcome(check: Check) -> tuple[Status, str]:
    return check.status, check.found


class TestDriver:
    def test_it_answers(self, system: System) -> None:
        assert _outcome(doctor.driver_check(system, machine())) == (Status.OK, "driver 550.54.14, CUDA 12.4")

    def test_no_gpu_is_no_fault(self, system: System) -> None:
        _write(system, "sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086\n")
        assert doctor.driver_check(system, _NO_DRIVER).status is Status.SKIP

    def test_a_library_without_a_driver_is_no_fault_either(self, system: System) -> None:
        not_loaded = machine(problem="the NVIDIA driver is not loaded: load it with `sudo modprobe nvidia`, or reboot")
        assert doctor.driver_check(system, not_loaded).status is Status.SKIP

    def test_a_driver_that_does_not_start_is_one_wherever_its_gpu_hangs(self, system: System) -> None:
        """Under WSL, on Tegra and in some containers no GPU is to be seen on the bus."""
        mismatch = machine(problem="NVIDIA driver and library versions differ: reboot, or reload the driver")
        check = doctor.driver_check(system, mismatch)
        differ = "NVIDIA driver and library versions differ"
        assert check == Check("driver", Status.FAIL, differ, "reboot, or reload the driver")

    def test_a_gpu_without_a_driver_is(self, system: System) -> None:
        _write(system, "sys/bus/pci/devices/0000:00:01.0/vendor", "0x10de\n")
        _write(system, "sys/bus/pci/devices/0000:00:01.0/class", "0x030200\n")
        check = doctor.driver_check(system, _NO_DRIVER)
        assert check == Check("driver", Status.FAIL, "no NVIDIA driver on this machine", "install it")

    def test_silence(self, system: System) -> None:
        assert doctor.driver_check(system, None).status is Status.FAIL


class TestGpus:
    def test_all_answer(self) -> None:
        gpus = [gpu(0), gpu(1), gpu(2, name="NVIDIA T4")]
        assert _outcome(doctor.gpus_check(gpus)) == (Status.OK, "2 × NVIDIA A100-SXM4-80GB, 1 × NVIDIA T4")

    def test_one_does_not(self) -> None:
        check = doctor.gpus_check([gpu(0), gpu(1, state=DeviceState.LOST, state_reason="GPU is lost")])
        assert check.status is Status.FAIL
        assert check.found.endswith("GPU 1 is lost: GPU is lost")

    def test_none(self) -> None:
        assert doctor.gpus_check([]).status is Status.WARN

    @pytest.mark.parametrize(
        ("reading", "status", "found"),
        [
            (gpu(), Status.OK, "1, each with its memory"),
            (gpu(processes=()), Status.OK, "none now; the lists can be read"),
            (gpu(processes=Unknown("no permission")), Status.WARN, "no process list on GPU 0: no permission"),
            (
                gpu(processes=(process(9, 1, host=Unknown("pid 9 is of another namespace")),)),
                Status.WARN,
                "1 not found here: pid 9 is of another namespace",
            ),
            (
                gpu(processes=(process(9, Unknown("not available")),)),
                Status.WARN,
                "the driver does not report memory by process (WSL, MIG or vGPU)",
            ),
        ],
    )
    def test_processes(self, reading: GpuReading, status: Status, found: str) -> None:
        assert _outcome(doctor.processes_check([reading])) == (status, found)

    def test_processes_of_a_gpu_that_is_lost_need_no_root(self) -> None:
        lost = gpu(1, state=DeviceState.LOST, processes=Unknown("GPU is lost"))
        assert _outcome(doctor.processes_check([gpu(0), lost])) == (Status.OK, "1, each with its memory")
        assert _outcome(doctor.processes_check([lost])) == (Status.SKIP, "no GPU answers")


class TestDeviceFiles:
    def test_none(self, system: System) -> None:
        assert doctor.device_files_check(system).status is Status.SKIP

    def test_open(self, system: System) -> None:
        for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
            _write(system, f"dev/{name}", "")
        assert _outcome(doctor.device_files_check(system)) == (Status.OK, "3 can be opened")

    def test_closed(self, system: System) -> None:
        _write(system, "dev/nvidia0", "")
        (system.root / "dev/nvidia0").unlink()
        (system.root / "dev/nvidia0").symlink_to("nowhere")
        check = doctor.device_files_check(system)
        assert _outcome(check) == (Status.FAIL, "no permission to open /dev/nvidia0")


@pytest.mark.parametrize(
    ("marked", "environ", "status"),
    [
        (False, {}, Status.SKIP),
        (True, {}, Status.OK),
        (True, {"NVIDIA_DRIVER_CAPABILITIES": "all"}, Status.OK),
        (True, {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}, Status.OK),
        (True, {"NVIDIA_DRIVER_CAPABILITIES": "compute"}, Status.FAIL),
        (False, {"container": "podman", "NVIDIA_DRIVER_CAPABILITIES": ""}, Status.FAIL),
    ],
)
def test_container(system: System, marked: bool, environ: dict[str, str], status: Status) -> None:
    if marked:
        _write(system, ".dockerenv", "")
    assert doctor.container_check(replace(system, environ=environ)).status is status


@pytest.mark.parametrize(
    ("changes", "status", "found"),
    [
        ({}, Status.OK, "120×40, xterm-256color, 16 million colours, utf-8"),
        ({"is_terminal": False}, Status.SKIP, "none: the screen needs one; `gpumem-tui monitor --once` does not"),
        ({"size": (60, 20)}, Status.WARN, "60×20, xterm-256color, 16 million colours, utf-8"),
        ({"size": (0, 0)}, Status.OK, "size unknown, xterm-256color, 16 million colours, utf-8"),
        ({"encoding": "ANSI_X3.4-1968"}, Status.WARN, "120×40, xterm-256color, 16 million colours, ANSI_X3.4-1968"),
        ({"encoding": "ascii", "chose_ascii": True}, Status.OK,
         "120×40, xterm-256color, 16 million colours, ASCII as you chose"),
        ({"environ": {"TERM": "screen", "TMUX": "x"}}, Status.WARN, "120×40, screen in tmux, 16 colours, utf-8"),
        ({"environ": {"TERM": "tmux-256color"}}, Status.OK, "120×40, tmux-256color, 256 colours, utf-8"),
        ({"environ": {"TERM": "xterm", "NO_COLOR": "1"}}, Status.OK, "120×40, xterm, no colours (NO_COLOR), utf-8"),
        ({"environ": {}}, Status.FAIL, "120×40, TERM unset, 16 colours, utf-8"),
    ],
)  # fmt: skip
def test_terminal(system: System, changes: dict[str, object], status: Status, found: str) -> None:
    changed = replace(system, **changes)  # type: ignore[arg-type]
    assert _outcome(doctor.terminal_check(changed)) == (status, found)


@pytest.mark.parametrize(
    ("uid", "scope", "capabilities", "machine_name", "status"),
    [
        (1000, "0", "0", "x86_64", Status.OK),
        (1000, None, "0", "x86_64", Status.OK),
        (1000, "1", "0", "x86_64", Status.WARN),
        (0, "1", "000001ffffffffff", "x86_64", Status.OK),
        (0, "0", "00000000a80425fb", "x86_64", Status.WARN),  # root in a container, as docker makes it
        (0, "3", "000001ffffffffff", "x86_64", Status.WARN),
        (1000, "0", "0", "aarch64", Status.WARN),
    ],
)
def test_attach(
    system: System, uid: int, scope: str | None, capabilities: str, machine_name: str, status: Status
) -> None:
    if scope is not None:
        _write(system, "proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
    _write(system, "proc/self/status", f"Name:\tx\nCapEff:\t{capabilities}\n")
    check = doctor.attach_check(replace(system, uid=uid, machine=machine_name))
    assert check.status is status
    assert bool(check.remedy) is (status is not Status.OK)


def test_probe_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "probes"
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(folder))
    assert doctor.probe_directory_check().status is Status.OK
    folder.mkdir(mode=0o700)
    assert _outcome(doctor.probe_directory_check()) == (Status.OK, str(folder))
    folder.chmod(0o755)
    assert doctor.probe_directory_check().status is Status.FAIL
    monkeypatch.setenv("GPUMEM_TUI_DIR", "/proc/nope")
    assert doctor.probe_directory_check().status is Status.FAIL
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(file))
    check = doctor.probe_directory_check()
    assert (check.status, check.found) == (Status.FAIL, f"{file} is not a directory")
    assert check.remedy == "`export GPUMEM_TUI_DIR=FOLDER` where you train and where you watch", (
        "not to remove what may be precious"
    )


def test_a_full_probe_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(tmp_path))
    found = os.statvfs_result((4096, 4096, 100, 0, 0, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: found)
    check = doctor.probe_directory_check()
    assert check.status is Status.FAIL
    assert f"{tmp_path} is full (0 B free" in check.found


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "gpumem-tui/settings.toml"
    assert _outcome(doctor.settings_check()) == (Status.OK, f"none ({path} would be read)")
    path.parent.mkdir()
    path.write_text("bel = true")
    check = doctor.settings_check()
    assert check.status is Status.FAIL
    assert check.found == "settings.toml:1: unknown key 'bel'; did you mean bell?"
    path.write_text('[gpus.h100-80gb]\nmemory = "20GiB"\n')
    gpus.cache_clear()
    check = doctor.settings_check()
    gpus.cache_clear()
    assert check.found == "[gpus.h100-80gb] in the settings: the catalog has a GPU of this name; choose another"


class TestTorch:
    @pytest.fixture
    def fake(self, tmp_path: Path) -> Path:
        """An interpreter whose torch is the text of torch.py."""
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        program.chmod(0o755)
        return program

    def _torch(self, fake: Path, cuda: str | None, *, usable: bool, version: str = "2.13.0") -> None:
        (fake.parent / "torch.py").write_text(
            "import types, sys\n"
            f"__version__ = {version!r}\n"
            f"version = types.SimpleNamespace(cuda={cuda!r})\n"
            f"cuda = types.SimpleNamespace(is_available=lambda: {usable})\n"
            "print('a greeting')\n"
        )

    @pytest.mark.parametrize(
        ("cuda", "usable", "has_gpu", "status", "found"),
        [
            ("12.8", True, True, Status.OK, "2.13.0, Python {python}, CUDA 12.8"),
            (None, False, False, Status.OK, "2.13.0, Python {python}, no GPU to use: steps run on the simulated one"),
            (None, False, True, Status.FAIL, "2.13.0, Python {python}, built without CUDA"),
            ("12.8", False, True, Status.FAIL, "2.13.0, Python {python}, CUDA 12.8: cannot use a GPU"),
        ],
    )
    def test_what_it_says(
        self, fake: Path, cuda: str | None, usable: bool, has_gpu: bool, status: Status, found: str
    ) -> None:
        self._torch(fake, cuda, usable=usable)
        python = ".".join(map(str, sys.version_info[:3]))
        check = doctor.torch_check(str(fake), has_gpu=has_gpu)
        assert _outcome(check) == (status, found.format(python=python))

    @pytest.mark.parametrize("version", ["2.4.1", "2.5.1+cu124"])
    @pytest.mark.parametrize(("usable", "status"), [(True, Status.WARN), (False, Status.FAIL)])
    def test_one_that_is_too_old_to_be_simulated(self, fake: Path, version: str, usable: bool, status: Status) -> None:
        self._torch(fake, "12.8", usable=usable, version=version)
        check = doctor.torch_check(str(fake), has_gpu=usable)
        assert check.status is status
        assert "is too old to simulate a GPU: 2.6 or newer is needed; in an environment that has" in check.found
        assert "; with this one `run`, `attach`" in check.found
        assert "pip install --upgrade torch" in check.remedy

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
            ("raise RuntimeError('no luck')", "`import torch` fails: RuntimeError: no luck"),
            ("import os, signal; os.kill(os.getpid(), 11)", "`import torch` fails: exit code -11"),
        ],
    )
    def test_one_that_is_broken(self, fake: Path, text: str, found: str) -> None:
        (fake.parent / "torch.py").write_text(text)
        assert _outcome(doctor.torch_check(str(fake), has_gpu=True)) == (Status.FAIL, f"{fake}: {found}")

    def test_no_interpreter(self) -> None:
        check = doctor.torch_check("/no/python", has_gpu=False)
        assert check.found == "/no/python: cannot be run: No such file or directory"
