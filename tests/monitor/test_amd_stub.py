"""The fake library is what amdsmi declares: struct sizes, and every value back through the real functions."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gpumem_tui.memory import GIB, MIB, Unknown
from gpumem_tui.monitor.backend import Gone, NoSuchGpu, StartFault
from gpumem_tui.monitor.readings import READINGS
from gpumem_tui.monitor.snapshot import Memory
from gpumem_tui.monitor.vendors.amd import calls
from gpumem_tui.monitor.vendors.amd.backend import AmdSmi
from tests.amdsmi_stub.machine import (
    BUSY,
    DRIVER_NOT_LOADED,
    NO_PERMISSION,
    AmdGpu,
    AmdMachine,
    Calls,
    machine_of,
)
from tests.nvml_stub.scenario import FakeProcess

_BUSY_GPU = AmdGpu(
    uuid="f6ff74a1-0000-1000-80dd-b9a7e4c0e4b6",
    bus_id="0000:c1:00.0",
    used_bytes=12 * GIB,
    processes=[FakeProcess(10, 7 * GIB, sm_percent=152), FakeProcess(11, 5 * GIB, sm_percent=0)],
    utilization_percent=93,
    memory_utilization_percent=41,
    power_w=612.0,
    temperature_c=71,
    fan_percent=40,
    ecc_corrected=3,
    ecc_uncorrected=1,
    throttle=0b00011,
)
_EXPECTED = {
    "utilization_percent": 93,
    "memory_utilization_percent": 41,
    "power_w": 612.0,
    "power_limit_w": 750.0,
    "temperature_c": 71,
    "temperature_limit_c": 100,
    "fan_percent": 40,
    "sm_clock_mhz": 2100,
    "memory_clock_mhz": 1300,
    "pcie_generation": 5,
    "pcie_width": 16,
    "ecc_corrected": 3,
    "ecc_uncorrected": 1,
    "throttle": ("power cap", "hot"),
}
_MORE = ("total_bytes", "slowdown_temperature_c", "compute_units")


@pytest.fixture
def backend(fake_amd: AmdMachine) -> Iterator[AmdSmi]:
    """The backend of a machine with a busy GPU, started."""
    fake_amd.show(machine_of([_BUSY_GPU]))
    opened = AmdSmi(fake_amd.proc)
    opened.start()
    yield opened
    opened.stop()


_TYPES = [
    *("asic_info", "clk_info", "driver_info", "engine_usage", "enumeration_info", "error_count", "kfd_info"),
    *("pcie_info", "power_cap_info", "power_info", "proc_info", "version", "violation_status", "bdf"),
]


@pytest.mark.parametrize("name", _TYPES)
def test_structs_are_as_large_as_the_binding_declares(fake_amd: AmdMachine, backend: AmdSmi, name: str) -> None:
    size = ctypes.CDLL(str(fake_amd.library)).stub_size
    size.argtypes, size.restype = [ctypes.c_char_p], ctypes.c_ulong
    declared: Any = getattr(calls.binding().amdsmi_interface.amdsmi_wrapper, f"amdsmi_{name}_t")
    assert size(f"amdsmi_{name}_t".encode()) == ctypes.sizeof(declared)


def test_what_is_read_is_what_the_driver_says(backend: AmdSmi) -> None:
    gpu = backend.gpu(0)
    known = {
        name: value for name, value in structs.asdict(gpu.read(READINGS)).items() if not isinstance(value, Unknown)
    }
    assert known == _EXPECTED
    named = (gpu.identity.uuid, gpu.identity.name, gpu.identity.bus_id, gpu.identity.partition)
    assert named == ("f6ff74a1-0000-1000-80dd-b9a7e4c0e4b6", "AMD Instinct MI300X", "0000:c1:00.0", "")
    assert gpu.identity.compute_capability == Unknown("not a CUDA device: gfx942")
    reserve = Unknown("AMD's driver counts it as used")
    assert gpu.memory() == Memory(196592 * MIB, reserve, 12 * GIB, 196592 * MIB - 12 * GIB)
    assert backend.driver_version() == "6.14.14"


def test_a_process_has_its_video_memory_and_its_share_of_the_compute_units(backend: AmdSmi) -> None:
    """Its name is not UTF-8, which the binding's own list cannot read."""
    gpu = backend.gpu(0)
    listed = gpu.compute_processes()
    assert not isinstance(listed, Unknown)
    assert [(each.pid, each.used_bytes) for each in listed] == [(10, 7 * GIB), (11, 5 * GIB)]
    assert gpu.process_percents() == {10: 50, 11: 0}


def test_partitions_are_gpus_of_their_own(fake_amd: AmdMachine, backend: AmdSmi) -> None:
    parts = [
        AmdGpu(uuid=f"aa/{part}", partition=part, compute_partition="CPX", memory_partition="NPS4", runtime_index=part)
        for part in range(3)
    ]
    fake_amd.show(machine_of(parts))
    backend.stop()
    backend.start()
    found = [backend.gpu(index).identity for index in range(backend.count())]
    assert [(each.uuid, each.partition, each.runtime_index) for each in found] == [
        ("aa", "CPX/NPS4 0", 0),
        ("aa/1", "CPX/NPS4 1", 1),
        ("aa/2", "CPX/NPS4 2", 2),
    ]


def test_what_is_not_supported_is_no_figure(fake_amd: AmdMachine, backend: AmdSmi) -> None:
    attributes = {field.name for field in fields(AmdGpu)}
    none: dict[str, Any] = {name: None for name in (*_EXPECTED, *_MORE) if name in attributes}
    bare = replace(AmdGpu(processes=[FakeProcess(10, GIB, sm_percent=7)]), **none)
    fake_amd.show(machine_of([bare]))
    backend.stop()
    backend.start()
    gpu = backend.gpu(0)
    reasons = {value.reason for value in structs.asdict(gpu.read(READINGS)).values() if isinstance(value, Unknown)}
    assert len(structs.asdict(gpu.read(READINGS))) == sum(
        isinstance(v, Unknown) for v in structs.asdict(gpu.read(READINGS)).values()
    )
    assert reasons == {"not supported", "not available", "not read yet"}
    assert gpu.memory() == Unknown("not supported")
    gpu.compute_processes()
    assert gpu.process_percents() == Unknown("not available")


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        ("amdsmi_get_gpu_process_list", NO_PERMISSION, "no permission"),
        ("amdsmi_get_gpu_process_list", BUSY, "busy"),
        ("amdsmi_get_gpu_process_list", 53, "AMD SMI error 53"),
    ],
)
def test_a_fault_in_one_call_is_a_reason(
    fake_amd: AmdMachine, backend: AmdSmi, function: str, code: int, reason: str
) -> None:
    gpu = backend.gpu(0)
    fake_amd.show(machine_of([AmdGpu(uuid=_BUSY_GPU.uuid, calls=Calls(errors={function: code}))]))
    assert gpu.compute_processes() == Unknown(reason)
    assert isinstance(gpu.memory(), Memory)


def test_a_gpu_that_is_lost_is_no_unknown_memory(fake_amd: AmdMachine, backend: AmdSmi) -> None:
    gpu = backend.gpu(0)
    fake_amd.show(machine_of([AmdGpu(uuid=_BUSY_GPU.uuid, lost=True)]))
    with pytest.raises(Gone, match="the GPU does not answer"):
        gpu.memory()
    with pytest.raises(NoSuchGpu):
        backend.gpu(1)


def test_a_second_start_is_not_ended_with_the_first(fake_amd: AmdMachine, backend: AmdSmi) -> None:
    """The library itself does not count its starts."""
    other = AmdSmi(fake_amd.proc)
    other.start()
    other.stop()
    other.stop()
    assert isinstance(backend.gpu(0).memory(), Memory)
    assert fake_amd.calls().get("amdsmi_shut_down", 0) == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (NO_PERMISSION, "no permission to use the AMD driver: join the groups that "),
        (DRIVER_NOT_LOADED, "the AMD driver is not loaded: load it with "),
        (18, "AMD SMI does not start: AMD SMI error 18: see "),
    ],
)
def test_a_library_that_does_not_start_says_why(fake_amd: AmdMachine, code: int, words: str) -> None:
    fake_amd.show(machine_of([], calls=Calls(errors={"amdsmi_init": code})))
    with pytest.raises(StartFault) as raised:
        AmdSmi(fake_amd.proc).start()
    assert str(raised.value).startswith(words)
    assert not raised.value.no_driver


def test_without_a_driver_in_the_kernel_the_library_s_gpus_count(fake_amd: AmdMachine) -> None:
    fake_amd.load(driver=False)
    backend = AmdSmi(fake_amd.proc)
    for _ in range(2):
        with pytest.raises(StartFault, match="no AMD driver on this machine: load it") as raised:
            backend.start()
        assert raised.value.no_driver
    fake_amd.show(machine_of([AmdGpu()]))
    backend.start()
    assert backend.count() == 1
    backend.stop()


_START = """
import sys
from pathlib import Path
from gpumem_tui.monitor.backend import StartFault
from gpumem_tui.monitor.vendors.amd.backend import AmdSmi
for _ in range(2):
    try:
        AmdSmi(Path(sys.argv[1])).start()
        print("started")
    except StartFault as fault:
        print(fault)
"""


def _started(machine: AmdMachine) -> list[str]:
    command = [sys.executable, "-c", _START, str(machine.proc)]
    done = subprocess.run(
        command, env=machine.environment | {"HOME": os.environ["HOME"]}, capture_output=True, text=True
    )
    assert not done.stderr
    return str(done.stdout).splitlines()


def test_a_driver_without_its_library_is_one_line_of_ours(amd_machine: AmdMachine, tmp_path: Path) -> None:
    """The binding would print to standard output, amid our JSON, and raise a KeyError."""
    (tmp_path / "rocm/lib").mkdir(parents=True)
    bare = AmdMachine(tmp_path / "rocm/lib/libamd_smi.so", tmp_path)
    said = "the AMD driver runs, but its library libamd_smi.so is not here: install ROCm's package amd-smi-lib, "
    assert [line.startswith(said) for line in _started(bare)] == [True, True]
    bare.library.write_bytes(b"no library")
    assert all("libamd_smi.so cannot be loaded (" in line and "file too short" in line for line in _started(bare))


def test_a_binding_of_another_rocm_is_refused(amd_machine: AmdMachine, tmp_path: Path) -> None:
    """A library with longer structs than the binding's would write behind the memory that it is given."""
    rocm = tmp_path / "rocm"
    (rocm / "lib").mkdir(parents=True)
    (rocm / "lib/libamd_smi.so").symlink_to(amd_machine.library)
    other = AmdMachine(rocm / "lib/libamd_smi.so", tmp_path)
    (rocm / ".info").mkdir()
    (rocm / ".info/version").write_text("6.4.1-83\n")
    refused = "amdsmi 7.0.2 is not made for ROCm 6.4.1-83: `pip install amdsmi==6.4.*`"
    assert _started(other) == [refused, refused]
    (rocm / ".info/version").write_text("7.0.2-56\n")
    assert _started(other) == ["started", "started"]


def test_rocm_s_own_binding_is_used_where_it_is(amd_machine: AmdMachine, tmp_path: Path) -> None:
    rocm = tmp_path / "rocm"
    (rocm / "lib").mkdir(parents=True)
    (rocm / "lib/libamd_smi.so").symlink_to(amd_machine.library)
    own = rocm / "share/amd_smi/amdsmi"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("raise ImportError('ROCm has its own')\n")
    said = "the AMD driver runs, but its Python binding cannot be used (ROCm has its own): `pip install"
    found = _started(AmdMachine(rocm / "lib/libamd_smi.so", tmp_path))
    assert all(line.startswith(said) for line in found)
    assert found
