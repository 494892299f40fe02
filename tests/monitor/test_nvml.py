"""NVML as the Monitor's backend: every reading of the table, and all else, through the real pynvml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from msgspec import structs

from gpumem_tui.memory import GIB, MIB, Unknown
from gpumem_tui.monitor.backend import Gone, GpuHandle, ListedProcess, NoSuchGpu
from gpumem_tui.monitor.readings import NOT_READ_YET, READINGS
from gpumem_tui.monitor.snapshot import Memory
from gpumem_tui.monitor.vendors.nvidia.backend import Nvml
from tests.nvml_stub.machine import FakeMachine, compile_stub
from tests.nvml_stub.scenario import NO_PERMISSION, Calls, FakeGpu, FakeProcess, Scenario

Ask = Callable[[GpuHandle], Any]


def _first(machine: FakeMachine, gpu: FakeGpu) -> GpuHandle:
    machine.show(Scenario(gpus=[gpu]))
    backend = Nvml(Path("/nowhere"))
    backend.start()
    return backend.gpu(0)


def _memory(gpu: GpuHandle) -> Any:
    return gpu.memory()


def _compute(gpu: GpuHandle) -> Any:
    return gpu.compute_processes()


def _graphics(gpu: GpuHandle) -> Any:
    return gpu.graphics_processes()


def _divided(gpu: GpuHandle) -> Any:
    return gpu.divided()


def _shares(gpu: GpuHandle) -> Any:
    return gpu.process_percents()


def _power(gpu: GpuHandle) -> Any:
    return gpu.read(["power_w"]).power_w


def _utilization(gpu: GpuHandle) -> Any:
    return gpu.read(["utilization_percent"]).utilization_percent


def test_every_reading_of_the_table_is_fetched(fake_nvml: FakeMachine) -> None:
    gpu = _first(fake_nvml, FakeGpu())
    assert NOT_READ_YET not in structs.asdict(gpu.read(READINGS)).values()


@pytest.mark.parametrize(
    ("gpu", "name", "expected"),
    [
        (FakeGpu(utilization_percent=97, memory_utilization_percent=40), "utilization_percent", 97),
        (FakeGpu(utilization_percent=97, memory_utilization_percent=40), "memory_utilization_percent", 40),
        (FakeGpu(utilization_percent=2**32 - 1), "utilization_percent", Unknown("not available")),
        (FakeGpu(power_w=312.5), "power_w", 312.5),
        (FakeGpu(power_limit_w=700), "power_limit_w", 700.0),
        (FakeGpu(temperature_c=66), "temperature_c", 66),
        (FakeGpu(slowdown_temperature_c=92), "temperature_limit_c", 92),
        (FakeGpu(fan_percent=42), "fan_percent", 42),
        (FakeGpu(sm_clock_mhz=1755), "sm_clock_mhz", 1755),
        (FakeGpu(memory_clock_mhz=2619), "memory_clock_mhz", 2619),
        (FakeGpu(pcie_generation=5), "pcie_generation", 5),
        (FakeGpu(pcie_width=8), "pcie_width", 8),
        (FakeGpu(pcie_rx_kib_per_s=3), "pcie_rx_bytes_per_s", 3072),
        (FakeGpu(pcie_tx_kib_per_s=4), "pcie_tx_bytes_per_s", 4096),
        (FakeGpu(nvlink_rx_kib=5), "nvlink_rx_bytes", 5120),
        (FakeGpu(nvlink_tx_kib=6), "nvlink_tx_bytes", 6144),
        (FakeGpu(nvlinks=0), "nvlink_rx_bytes", Unknown("not supported")),
        (FakeGpu(nvlinks=0), "nvlink_rx_bytes_per_s", Unknown("not supported")),
        (FakeGpu(), "nvlink_tx_bytes_per_s", Unknown("needs a second look")),
        (FakeGpu(energy_mj=7_250_500), "energy_j", 7250.5),
        (FakeGpu(energy_mj=None), "energy_j", Unknown("not supported")),
        (FakeGpu(ecc_corrected=5), "ecc_corrected", 5),
        (FakeGpu(ecc_uncorrected=6), "ecc_uncorrected", 6),
        (FakeGpu(performance_state=2), "performance_state", 2),
        (FakeGpu(throttle=0x1 | 0x2), "throttle", ()),
        (FakeGpu(throttle=0x4 | 0x20 | 0x40), "throttle", ("power cap", "hot", "too hot")),
    ],
)
def test_a_reading_has_the_scenarios_value(fake_nvml: FakeMachine, gpu: FakeGpu, name: str, expected: Any) -> None:
    assert structs.asdict(_first(fake_nvml, gpu).read([name]))[name] == expected


def test_nvlink_traffic_is_what_its_counters_grew_by_in_nvmls_own_time(fake_nvml: FakeMachine) -> None:
    def counted(rx_kib: int, tx_kib: int, time_us: int) -> FakeGpu:
        return FakeGpu(nvlink_rx_kib=rx_kib, nvlink_tx_kib=tx_kib, nvlink_time_us=time_us)

    names = ["nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s"]
    gpu = _first(fake_nvml, counted(1000, 50, 1_000_000))
    gpu.read(names)
    fake_nvml.show(Scenario(gpus=[counted(1000 + 4096, 50, 3_000_000)]))
    found = structs.asdict(gpu.read(names))
    assert [found[name] for name in names] == [2 * MIB, 0]
    fake_nvml.show(Scenario(gpus=[counted(10, 10, 4_000_000)]))
    assert structs.asdict(gpu.read(names))[names[0]] == Unknown("the counter began anew")


@pytest.mark.parametrize(
    ("gpu", "ask", "expected"),
    [
        (
            FakeGpu(total_bytes=80 * GIB, reserved_bytes=600 * MIB, used_bytes=GIB),
            _memory,
            Memory(80 * GIB, 600 * MIB, GIB, 79 * GIB - 600 * MIB),
        ),
        (FakeGpu(mig_mode=1), _divided, True),
        (FakeGpu(mig_mode=None), _divided, Unknown("not supported")),
        (FakeGpu(compute_capability=(9, 0)), lambda gpu: gpu.identity.compute_capability, (9, 0)),
        (FakeGpu(compute_capability=(8, 7)), lambda gpu: gpu.identity.integrated, True),
        (FakeGpu(processes=[FakeProcess(7, GIB)]), _compute, (ListedProcess(7, GIB),)),
        (FakeGpu(processes=[FakeProcess(7, GIB, "M")]), _compute, (ListedProcess(7, GIB),)),
        (FakeGpu(processes=[FakeProcess(7, GIB, "G")]), _compute, ()),
        (FakeGpu(processes=[FakeProcess(7, GIB, "C+G")]), _graphics, (ListedProcess(7, GIB),)),
    ],
)
def test_what_else_is_asked_has_the_scenarios_value(
    fake_nvml: FakeMachine, gpu: FakeGpu, ask: Ask, expected: Any
) -> None:
    assert ask(_first(fake_nvml, gpu)) == expected


def test_an_index_without_a_gpu_is_not_a_lost_gpu(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu()]))
    backend = Nvml(Path("/nowhere"))
    backend.start()
    with pytest.raises(NoSuchGpu):
        backend.gpu(1)


def test_a_process_that_did_nothing_has_no_share_of_the_sms(fake_nvml: FakeMachine) -> None:
    busy = FakeGpu(processes=[FakeProcess(7, GIB, sm_percent=80), FakeProcess(8, GIB)])
    assert _shares(_first(fake_nvml, busy)) == {7: 80}
    assert _shares(_first(fake_nvml, FakeGpu(processes=[FakeProcess(8, GIB)]))) == {}


def test_a_long_process_list_is_complete_and_a_short_one_takes_one_call(fake_nvml: FakeMachine) -> None:
    for count, calls in ((31, 1), (60, 2)):
        listed = FakeGpu(processes=[FakeProcess(pid, MIB) for pid in range(1, count + 1)])
        before = fake_nvml.calls().get("nvmlDeviceGetComputeRunningProcesses_v3", 0)
        found = _compute(_first(fake_nvml, listed))
        assert [process.pid for process in found] == list(range(1, count + 1))
        assert fake_nvml.calls()["nvmlDeviceGetComputeRunningProcesses_v3"] - before == calls


def test_both_utilizations_are_one_call(fake_nvml: FakeMachine) -> None:
    gpu = _first(fake_nvml, FakeGpu())
    before = fake_nvml.calls().get("nvmlDeviceGetUtilizationRates", 0)
    gpu.read(["utilization_percent", "memory_utilization_percent"])
    assert fake_nvml.calls()["nvmlDeviceGetUtilizationRates"] - before == 1


def test_a_lost_gpu_is_not_an_unknown_value(fake_nvml: FakeMachine) -> None:
    gpu = _first(fake_nvml, FakeGpu())
    fake_nvml.show(Scenario(gpus=[FakeGpu(lost=True)]))
    for ask in (_memory, _power, _compute, _divided):
        with pytest.raises(Gone, match="GPU is lost"):
            ask(gpu)


def test_an_error_without_words_of_ours_keeps_nvmls(fake_nvml: FakeMachine) -> None:
    code = pynvml.NVML_ERROR_CORRUPTED_INFOROM
    gpu = FakeGpu(calls=Calls(errors={"nvmlDeviceGetPowerUsage": code}))
    assert _power(_first(fake_nvml, gpu)) == Unknown("NVML error: Corrupted infoROM")


def test_a_name_that_cannot_be_read_is_no_reason_to_lose_the_gpu(fake_nvml: FakeMachine) -> None:
    gpu = FakeGpu(uuid="GPU-a", calls=Calls(errors={"nvmlDeviceGetName": NO_PERMISSION}))
    found = _first(fake_nvml, gpu).identity
    assert (found.uuid, found.name) == ("GPU-a", "unnamed GPU")


def test_drivers_whose_process_structs_are_longer_still_give_the_right_pids(fake_machine: FakeMachine) -> None:
    """Read as nvidia-ml-py declares them, every second process would be made up of the one before it."""
    machine = FakeMachine(compile_stub(fake_machine.folder, "-DDRIVER_535_43"), fake_machine.folder)
    machine.show(
        Scenario(gpus=[FakeGpu(processes=[FakeProcess(pid, GIB) for pid in (11, 12, 13)])], driver="535.54.03")
    )
    printed = machine.run(
        "from gpumem_tui.monitor.vendors.nvidia.backend import Nvml\n"
        "backend = Nvml()\n"
        "backend.start()\n"
        "print([process.pid for process in backend.gpu(0).compute_processes()])\n"
    )
    assert printed.strip() == "[11, 12, 13]"


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("c_nvmlProcessInfo_v2_t", _compute),
        ("c_nvmlProcessUtilizationSample_t", _shares),
        ("nvmlDeviceGetPowerUsage", _power),
        ("nvmlDeviceGetUtilizationRates", _utilization),
    ],
)
def test_what_the_installed_bindings_lack_is_a_reason(
    fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch, name: str, ask: Ask
) -> None:
    """An AttributeError would end the GPU's thread, and every figure of it with that."""
    monkeypatch.delattr(pynvml, name)
    assert ask(_first(fake_nvml, FakeGpu())) == Unknown("not in this nvidia-ml-py: upgrade it")


def test_memory_by_bindings_without_the_second_version(fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "nvmlMemory_v2")
    gpu = FakeGpu(total_bytes=80 * GIB, reserved_bytes=0, used_bytes=GIB)
    found = _memory(_first(fake_nvml, gpu))
    assert (found.total_bytes, found.used_bytes) == (80 * GIB, GIB)
