"""The reading layer, field by field, through the real pynvml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from gpumem_tui.memory import GIB, MIB, Unknown
from gpumem_tui.monitor import fields, nvml
from gpumem_tui.monitor.nvml import Caller, Gone
from gpumem_tui.monitor.snapshot import Memory
from tests.nvml_stub.machine import FakeMachine, compile_stub
from tests.nvml_stub.scenario import NO_PERMISSION, Calls, FakeGpu, FakeProcess, Scenario


def _read(machine: FakeMachine, gpu: FakeGpu, read: Callable[[Caller, Any], Any]) -> Any:
    machine.show(Scenario(gpus=[gpu]))
    call = Caller()
    nvml.start(call)
    return read(call, call("nvmlDeviceGetHandleByIndex", 0))


@pytest.mark.parametrize(
    ("gpu", "read", "expected"),
    [
        (
            FakeGpu(total_bytes=80 * GIB, reserved_bytes=600 * MIB, used_bytes=GIB),
            fields.memory,
            Memory(80 * GIB, 600 * MIB, GIB, 79 * GIB - 600 * MIB),
        ),
        (FakeGpu(utilization_percent=97, memory_utilization_percent=40), fields.utilization, (97, 40)),
        (FakeGpu(utilization_percent=2**32 - 1), fields.utilization, Unknown("not available")),
        (FakeGpu(power_w=312.5), fields.power_w, 312.5),
        (FakeGpu(power_limit_w=700), fields.power_limit_w, 700.0),
        (FakeGpu(temperature_c=66), fields.temperature_c, 66),
        (FakeGpu(slowdown_temperature_c=92), fields.temperature_limit_c, 92),
        (FakeGpu(fan_percent=42), fields.fan_percent, 42),
        (FakeGpu(sm_clock_mhz=1755), fields.sm_clock_mhz, 1755),
        (FakeGpu(memory_clock_mhz=2619), fields.memory_clock_mhz, 2619),
        (FakeGpu(pcie_generation=5), fields.pcie_generation, 5),
        (FakeGpu(pcie_width=8), fields.pcie_width, 8),
        (FakeGpu(pcie_rx_kib_per_s=3), fields.pcie_rx_bytes_per_s, 3072),
        (FakeGpu(pcie_tx_kib_per_s=4), fields.pcie_tx_bytes_per_s, 4096),
        (FakeGpu(ecc_corrected=5), fields.ecc_corrected, 5),
        (FakeGpu(ecc_uncorrected=6), fields.ecc_uncorrected, 6),
        (FakeGpu(performance_state=2), fields.performance_state, 2),
        (FakeGpu(throttle=0x1 | 0x2), fields.throttle, ()),
        (FakeGpu(throttle=0x4 | 0x20 | 0x40), fields.throttle, ("power cap", "hot", "too hot")),
        (FakeGpu(mig_mode=1), fields.mig_mode, True),
        (FakeGpu(mig_mode=None), fields.mig_mode, Unknown("not supported")),
        (FakeGpu(compute_capability=(9, 0)), fields.compute_capability, (9, 0)),
        (FakeGpu(processes=[FakeProcess(7, GIB)]), fields.compute_processes, (fields.Running(7, GIB),)),
        (FakeGpu(processes=[FakeProcess(7, GIB, "M")]), fields.compute_processes, (fields.Running(7, GIB),)),
        (FakeGpu(processes=[FakeProcess(7, GIB, "G")]), fields.compute_processes, ()),
        (FakeGpu(processes=[FakeProcess(7, GIB, "C+G")]), fields.graphics_processes, (fields.Running(7, GIB),)),
    ],
)
def test_a_field_has_the_scenarios_value(
    fake_nvml: FakeMachine, gpu: FakeGpu, read: Callable[[Caller, Any], Any], expected: Any
) -> None:
    assert _read(fake_nvml, gpu, read) == expected


def test_a_process_that_did_nothing_has_no_share_of_the_sms(fake_nvml: FakeMachine) -> None:
    busy = FakeGpu(processes=[FakeProcess(7, GIB, sm_percent=80), FakeProcess(8, GIB)])
    shares, at = _read(fake_nvml, busy, lambda call, gpu: fields.sm_percents(call, gpu, 0))
    assert (shares, at > 0) == ({7: 80}, True)
    idle = FakeGpu(processes=[FakeProcess(8, GIB)])
    assert _read(fake_nvml, idle, lambda call, gpu: fields.sm_percents(call, gpu, 5)) == ({}, 5)


def test_a_long_process_list_is_complete_and_a_short_one_takes_one_call(fake_nvml: FakeMachine) -> None:
    for count, calls in ((31, 1), (60, 2)):
        listed = FakeGpu(processes=[FakeProcess(pid, MIB) for pid in range(1, count + 1)])
        before = fake_nvml.calls().get("nvmlDeviceGetComputeRunningProcesses_v3", 0)
        found = _read(fake_nvml, listed, fields.compute_processes)
        assert [process.pid for process in found] == list(range(1, count + 1))
        assert fake_nvml.calls()["nvmlDeviceGetComputeRunningProcesses_v3"] - before == calls


def test_a_lost_gpu_is_not_an_unknown_value(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu()]))
    call = Caller()
    nvml.start(call)
    handle = call("nvmlDeviceGetHandleByIndex", 0)
    fake_nvml.show(Scenario(gpus=[FakeGpu(lost=True)]))
    for read in (fields.memory, fields.power_w, fields.compute_processes, fields.mig_mode):
        with pytest.raises(Gone, match="GPU is lost"):
            read(call, handle)


def test_an_error_without_words_of_ours_keeps_nvmls(fake_nvml: FakeMachine) -> None:
    code = pynvml.NVML_ERROR_CORRUPTED_INFOROM
    gpu = FakeGpu(calls=Calls(errors={"nvmlDeviceGetPowerUsage": code}))
    assert _read(fake_nvml, gpu, fields.power_w) == Unknown("NVML error: Corrupted infoROM")


def test_a_name_that_cannot_be_read_is_no_reason_to_lose_the_gpu(fake_nvml: FakeMachine) -> None:
    gpu = FakeGpu(uuid="GPU-a", calls=Calls(errors={"nvmlDeviceGetName": NO_PERMISSION}))
    found = _read(fake_nvml, gpu, fields.identity)
    assert (found.uuid, found.name) == ("GPU-a", "unnamed GPU")


def test_drivers_whose_process_structs_are_longer_still_give_the_right_pids(fake_machine: FakeMachine) -> None:
    """Read as nvidia-ml-py declares them, every second process would be made up of the one before it."""
    machine = FakeMachine(compile_stub(fake_machine.folder, "-DDRIVER_535_43"), fake_machine.folder)
    machine.show(
        Scenario(gpus=[FakeGpu(processes=[FakeProcess(pid, GIB) for pid in (11, 12, 13)])], driver="535.54.03")
    )
    printed = machine.run(
        "from gpumem_tui.monitor import fields, nvml\n"
        "call = nvml.Caller()\n"
        "nvml.start(call)\n"
        "print([p.pid for p in fields.compute_processes(call, call('nvmlDeviceGetHandleByIndex', 0))])\n"
    )
    assert printed.strip() == "[11, 12, 13]"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("c_nvmlProcessInfo_v2_t", fields.compute_processes),
        ("c_nvmlProcessUtilizationSample_t", lambda call, gpu: fields.sm_percents(call, gpu, 0)),
        ("nvmlDeviceGetPowerUsage", fields.power_w),
        ("nvmlDeviceGetUtilizationRates", fields.utilization),
    ],
)
def test_what_the_installed_bindings_lack_is_a_reason(
    fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[Caller, Any], Any]
) -> None:
    """An AttributeError would end the GPU's thread, and every figure of it with that."""
    monkeypatch.delattr(pynvml, name)
    assert _read(fake_nvml, FakeGpu(), read) == Unknown("not in this nvidia-ml-py: upgrade it")


def test_memory_by_bindings_without_the_second_version(fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "nvmlMemory_v2")
    gpu = FakeGpu(total_bytes=80 * GIB, reserved_bytes=0, used_bytes=GIB)
    found = _read(fake_nvml, gpu, fields.memory)
    assert (found.total_bytes, found.used_bytes) == (80 * GIB, GIB)
