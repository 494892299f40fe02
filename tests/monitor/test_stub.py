"""The fake library is what nvidia-ml-py declares: struct sizes, and every value back through the real functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from gpumem_tui.memory import GIB, MIB
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NOT_SUPPORTED,
    UNKNOWN_ERROR,
    V1_ONLY,
    Calls,
    FakeGpu,
    FakeInstance,
    FakeProcess,
    Scenario,
)

_BUSY = FakeGpu(
    uuid="GPU-busy",
    bus_id="00000000:3B:00.0",
    total_bytes=80 * GIB,
    reserved_bytes=600 * MIB,
    used_bytes=12 * GIB,
    processes=[FakeProcess(10, 7 * GIB, sm_percent=40), FakeProcess(11, None, "G"), FakeProcess(12, 5 * GIB, "M")],
    utilization_percent=93,
    memory_utilization_percent=41,
    power_w=312.25,
    fan_percent=30,
    ecc_uncorrected=2,
    throttle=0x44,
    pcie_rx_kib_per_s=1000,
    pcie_tx_kib_per_s=2000,
    energy_mj=123_456,
    nvlinks=4,
    nvlink_rx_kib=800,
    nvlink_tx_kib=400,
    nvlink_time_us=7,
)


@pytest.mark.parametrize(
    ("c_type", "declared"),
    [
        ("nvmlMemory_t", pynvml.c_nvmlMemory_t),
        ("nvmlMemory_v2_t", pynvml.c_nvmlMemory_v2_t),
        ("nvmlBAR1Memory_t", pynvml.c_nvmlBAR1Memory_t),
        ("nvmlPciInfo_t", pynvml.nvmlPciInfo_t),
        ("nvmlProcessInfo_v2_t", pynvml.c_nvmlProcessInfo_v3_t),
        ("nvmlProcessUtilizationSample_t", pynvml.c_nvmlProcessUtilizationSample_t),
        ("nvmlUtilization_t", pynvml.c_nvmlUtilization_t),
        ("nvmlTemperature_v1_t", pynvml.c_nvmlTemperature_v1_t),
        ("nvmlFieldValue_t", pynvml.c_nvmlFieldValue_t),
    ],
)
def test_structs_are_as_large_as_the_binding_declares(fake_nvml: FakeMachine, c_type: str, declared: type[Any]) -> None:
    size = ctypes.CDLL(str(fake_nvml.library)).stub_size
    size.argtypes, size.restype = [ctypes.c_char_p], ctypes.c_ulong
    assert size(c_type.encode()) == ctypes.sizeof(declared)


def _first(machine: FakeMachine, *gpus: FakeGpu, **scenario: Any) -> Any:
    machine.show(Scenario(gpus=gpus, **scenario))
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def _field(gpu: Any, field: int | tuple[int, int]) -> tuple[int, int, int]:
    """A field's own code, its value and its time."""
    (found,) = pynvml.nvmlDeviceGetFieldValues(gpu, [field])
    return found.nvmlReturn, found.value.ullVal, found.timestamp


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda _: pynvml.nvmlSystemGetDriverVersion(), "550.54.14"),
        (lambda _: pynvml.nvmlSystemGetCudaDriverVersion(), 12040),
        (lambda _: pynvml.nvmlDeviceGetCount(), 1),
        (pynvml.nvmlDeviceGetUUID, "GPU-busy"),
        (pynvml.nvmlDeviceGetName, "NVIDIA A100-SXM4-80GB"),
        (pynvml.nvmlDeviceGetIndex, 0),
        (lambda g: pynvml.nvmlDeviceGetPciInfo(g).busId, "00000000:3B:00.0"),
        (lambda g: pynvml.nvmlDeviceGetPciInfo(g).bus, 0x3B),
        (lambda g: pynvml.nvmlDeviceGetMemoryInfo(g).used, 12 * GIB + 600 * MIB),
        (pynvml.nvmlDeviceGetCudaComputeCapability, (8, 0)),
        (lambda g: pynvml.nvmlDeviceGetUtilizationRates(g).gpu, 93),
        (lambda g: pynvml.nvmlDeviceGetUtilizationRates(g).memory, 41),
        (pynvml.nvmlDeviceGetPowerUsage, 312250),
        (pynvml.nvmlDeviceGetEnforcedPowerLimit, 400000),
        (pynvml.nvmlDeviceGetFanSpeed, 30),
        (pynvml.nvmlDeviceGetCurrentClocksEventReasons, 0x44),
        (lambda g: pynvml.nvmlDeviceGetTemperature(g, pynvml.NVML_TEMPERATURE_GPU), 31),
        (lambda g: pynvml.nvmlDeviceGetTemperatureThreshold(g, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN), 89),
        (lambda g: pynvml.nvmlDeviceGetClockInfo(g, pynvml.NVML_CLOCK_MEM), 1593),
        (lambda g: pynvml.nvmlDeviceGetPcieThroughput(g, pynvml.NVML_PCIE_UTIL_RX_BYTES), 1000),
        (lambda g: pynvml.nvmlDeviceGetPcieThroughput(g, pynvml.NVML_PCIE_UTIL_TX_BYTES), 2000),
        (lambda g: pynvml.nvmlDeviceGetTotalEccErrors(g, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, 0), 2),
        (pynvml.nvmlDeviceGetTotalEnergyConsumption, 123_456),
        (lambda g: _field(g, pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT), (0, 4, 7)),
        (lambda g: _field(g, (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 2**32 - 1)), (0, 800, 7)),
        (lambda g: _field(g, (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 3)), (0, 100, 7)),
        (lambda g: _field(g, (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 4)), (NOT_SUPPORTED, 0, 7)),
        (lambda g: _field(g, pynvml.NVML_FI_DEV_ECC_CURRENT), (NOT_SUPPORTED, 0, 7)),
        (pynvml.nvmlDeviceGetMigMode, [0, 0]),
        (lambda g: [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(g)], [10, 12]),
        (lambda g: [p.usedGpuMemory for p in pynvml.nvmlDeviceGetGraphicsRunningProcesses(g)], [None]),
        (lambda g: [p.pid for p in pynvml.nvmlDeviceGetMPSComputeRunningProcesses(g)], [12]),
        (lambda g: [(s.pid, s.smUtil) for s in pynvml.nvmlDeviceGetProcessUtilization(g, 0)], [(10, 40)]),
    ],
)
def test_the_real_binding_reads_the_scenario(fake_nvml: FakeMachine, read: Callable[[Any], Any], expected: Any) -> None:
    assert read(_first(fake_nvml, _BUSY)) == expected


def test_memory_v2_tells_the_reserve_apart(fake_nvml: FakeMachine) -> None:
    memory = pynvml.nvmlDeviceGetMemoryInfo(_first(fake_nvml, _BUSY), version=pynvml.nvmlMemory_v2)
    assert (memory.total, memory.reserved, memory.used) == (80 * GIB, 600 * MIB, 12 * GIB)
    assert memory.free == 68 * GIB - 600 * MIB


def _code(call: Callable[[], Any]) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        call()
    return int(caught.value.value)


def test_calls_fail_as_told(fake_nvml: FakeMachine) -> None:
    gpu = _first(fake_nvml, FakeGpu(power_w=None, calls=Calls(errors={"nvmlDeviceGetName": UNKNOWN_ERROR})), FakeGpu())
    assert _code(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu)) == NOT_SUPPORTED
    assert _code(lambda: pynvml.nvmlDeviceGetName(gpu)) == UNKNOWN_ERROR
    assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(1)) == "NVIDIA A100-SXM4-80GB"
    fake_nvml.show(Scenario(gpus=[FakeGpu(lost=True)]))
    assert _code(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu)) == GPU_IS_LOST


def test_an_old_driver_has_no_second_version(fake_nvml: FakeMachine) -> None:
    gpu = _first(fake_nvml, _BUSY, calls=Calls(errors=V1_ONLY))
    ask = pynvml.nvmlDeviceGetMemoryInfo
    assert _code(lambda: ask(gpu, version=pynvml.nvmlMemory_v2)) == FUNCTION_NOT_FOUND
    assert ask(gpu).total == 80 * GIB


def test_mig_instances_have_handles_of_their_own(fake_nvml: FakeMachine) -> None:
    instance = FakeInstance("MIG-1", used_bytes=3 * GIB, processes=[FakeProcess(77, 3 * GIB)])
    gpu = _first(fake_nvml, FakeGpu(mig_mode=1, instances=[instance]), FakeGpu())
    found = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    assert pynvml.nvmlDeviceGetUUID(found) == "MIG-1"
    assert pynvml.nvmlDeviceGetMemoryInfo(found, version=pynvml.nvmlMemory_v2).used == 3 * GIB
    assert [p.gpuInstanceId for p in pynvml.nvmlDeviceGetComputeRunningProcesses(found)] == [7]
    assert _code(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu)) == NOT_SUPPORTED
    assert _code(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)) == pynvml.NVML_ERROR_NOT_FOUND


def test_a_reload_needs_a_new_start_and_a_new_gpu_too(fake_nvml: FakeMachine) -> None:
    gpu = _first(fake_nvml, FakeGpu(), list_at_init=True)
    fake_nvml.show(Scenario(gpus=[FakeGpu(), FakeGpu()], list_at_init=True))
    assert pynvml.nvmlDeviceGetCount() == 1
    fake_nvml.show(Scenario(gpus=[FakeGpu(), FakeGpu()], list_at_init=True, generation=1))
    assert _code(lambda: pynvml.nvmlDeviceGetUUID(gpu)) == UNKNOWN_ERROR
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 2


def test_calls_are_counted(fake_nvml: FakeMachine) -> None:
    gpu = _first(fake_nvml, _BUSY)
    pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    counted = fake_nvml.calls()
    assert counted["nvmlInitWithFlags"] == 1
    assert counted["nvmlDeviceGetComputeRunningProcesses_v3"] == 2, "the binding asks for the length first"


def test_a_scenario_that_cannot_be_read_ends_the_program(fake_machine: FakeMachine) -> None:
    fake_machine.scenario_path.write_text("driver 1\ngpu\nnmae A100\n")
    code = "import os, pynvml, sys; os.dup2(1, 2); pid = os.fork()\nif not pid: pynvml.nvmlInit()\nos.waitpid(pid, 0)"
    assert "scenario line 3: nmae" in fake_machine.run(code)
