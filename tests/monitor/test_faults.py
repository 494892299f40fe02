"""Faults of the driver, and the snapshots then: the real pynvml on the fake library."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from msgspec import structs

from gpumem_tui.memory import GIB, Bucket, Unknown
from gpumem_tui.monitor import vendor_gpus
from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.gpu_reader import GpuReader
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.report import complete
from gpumem_tui.monitor.sampler import Sampler
from gpumem_tui.monitor.snapshot import DeviceState, HostProcess, Snapshot
from gpumem_tui.monitor.threads import Crew
from gpumem_tui.monitor.vendors.nvidia.backend import Nvml
from tests.monitor.watching import gpu, is_complete, no_processes, until, watching
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    LIBRARY_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_AVAILABLE,
    NOT_SUPPORTED,
    UNKNOWN_ERROR,
    V1_ONLY,
    Calls,
    FakeGpu,
    FakeInstance,
    FakeProcess,
    Scenario,
)
from tests.waiting import DEADLINE_S, wait_until

_THREE = Scenario(gpus=[FakeGpu(uuid=f"GPU-{name}", used_bytes=GIB) for name in "abc"])


def _states(snapshot: Snapshot) -> list[tuple[int, str, str]]:
    return [(reading.index, reading.uuid, reading.state.value) for reading in snapshot.gpus]


def _all_ok(snapshot: Snapshot) -> bool:
    return bool(snapshot.gpus) and all(reading.state is DeviceState.OK for reading in snapshot.gpus)


def _has_used(index: int, used_bytes: int) -> Callable[[Snapshot], bool]:
    def condition(snapshot: Snapshot) -> bool:
        memory = gpu(snapshot, index).memory
        return not isinstance(memory, Unknown) and memory.used_bytes == used_bytes

    return condition


def test_a_gpu_that_is_lost_stays_listed_and_comes_back(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(_THREE)
    with watching() as sampler:
        until(sampler, is_complete)
        fake_nvml.show(_THREE.change(1, lost=True))
        lost = until(sampler, lambda s: gpu(s, 1).state is DeviceState.LOST)
        assert _states(lost) == [(0, "GPU-a", "ok"), (1, "GPU-b", "lost"), (2, "GPU-c", "ok")]
        assert gpu(lost, 1).name == "NVIDIA A100-SXM4-80GB"
        assert gpu(lost, 1).memory == gpu(lost, 1).processes == gpu(lost, 1).telemetry.power_w == Unknown("GPU is lost")
        fake_nvml.show(_THREE)
        assert gpu(until(sampler, _all_ok), 1).uuid == "GPU-b"


def test_a_gpu_that_is_lost_to_a_slow_call_stays_lost_until_that_answers(fake_nvml: FakeMachine) -> None:
    """It answers the quick calls meanwhile, which end nothing: an alert a second would be sent."""
    fake_nvml.show(_THREE)
    with watching(slow_interval_s=0.5) as sampler:
        until(sampler, is_complete)
        fake_nvml.show(_THREE.change(1, calls=Calls(errors={"nvmlDeviceGetTotalEccErrors": GPU_IS_LOST})))
        seen = until(sampler, lambda s: gpu(s, 1).state is DeviceState.LOST)
        states: list[DeviceState] = []
        while len(states) < 8:
            seen = until(sampler, lambda s, before=seen: s is not before)  # type: ignore[misc]
            states.append(gpu(seen, 1).state)
        assert set(states) == {DeviceState.LOST}
        fake_nvml.show(_THREE)
        assert gpu(until(sampler, _all_ok), 1).telemetry.ecc_uncorrected == 0


def test_a_gpu_that_is_lost_at_the_start_renumbers_no_other(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(_THREE.change(1, lost=True))
    with watching() as sampler:
        found = until(sampler, is_complete)
        assert [(reading.index, reading.state.value) for reading in found.gpus] == [(0, "ok"), (1, "lost"), (2, "ok")]
        assert gpu(found, 2).uuid == "GPU-c"
        assert gpu(found, 1).state_reason == "GPU is lost"
        fake_nvml.show(_THREE)
        assert _states(until(sampler, _all_ok))[1] == (1, "GPU-b", "ok")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            LIBRARY_NOT_FOUND,
            "no NVIDIA driver on this machine: install it, or give the container its GPUs (docker: --gpus all)",
        ),
        (DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded: load it with `sudo modprobe nvidia`, or reboot"),
        (LIBRARY_MISMATCH, "NVIDIA driver and library versions differ: reboot, or reload the driver"),
        (
            NO_PERMISSION,
            "no permission to use the NVIDIA driver: see who may open /dev/nvidiactl with `ls -l /dev/nvidia*`",
        ),
        (UNKNOWN_ERROR, "NVML does not start: Unknown Error: see `sudo dmesg | grep -i nvrm`"),
    ],
)
def test_a_driver_that_does_not_start_says_what_mends_it_and_may_come_late(
    fake_nvml: FakeMachine, code: int, problem: str
) -> None:
    fake_nvml.show(Scenario(init=code))
    with watching() as sampler:
        assert until(sampler, lambda _: True).problem == problem
        fake_nvml.show(_THREE)
        late = until(sampler, _all_ok)
        assert late.problem == ""
        assert (late.driver_version, late.cuda_version, len(late.gpus)) == ("550.54.14", "12.4", 3)


def test_a_container_without_the_utility_capability_is_told_so(fake_nvml: FakeMachine, tmp_path: Path) -> None:
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text("NVRM version: NVIDIA UNIX 550.54.14")
    fake_nvml.show(Scenario(init=LIBRARY_NOT_FOUND))
    with watching(proc=tmp_path) as sampler:
        assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in until(sampler, lambda _: True).problem


def test_a_start_that_hangs_is_named(fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_gpus, "STARTS_WITHIN_S", 0.3)
    fake_nvml.show(Scenario(calls=Calls(hangs=["nvmlInitWithFlags"])))
    with watching() as sampler:
        problem = until(sampler, lambda s: "does not start" in s.problem).problem
        assert problem.startswith("the NVIDIA driver does not start: nvmlInit has not returned for ")
        fake_nvml.show(_THREE)
        assert until(sampler, _all_ok).problem == ""


@pytest.mark.parametrize("latency_ms", [300, 1600, 3000])
def test_a_slow_start_is_no_alarm_and_made_once(fake_nvml: FakeMachine, latency_ms: int) -> None:
    """Eight GPUs without persistence mode take a driver seconds to initialize."""
    fake_nvml.show(replace(_THREE, calls=Calls(latency_ms={"nvmlInitWithFlags": latency_ms})))
    alerts, problems, begun_s = Alerts(), set[str](), monotonic()
    started = fake_nvml.calls().get("nvmlInitWithFlags", 0)
    with watching() as sampler:
        seen: Snapshot | None = None
        while seen is None or not seen.gpus:
            newer = sampler.wait(seen, DEADLINE_S)
            assert newer is not None
            seen = newer
            assert alerts.update(seen) == ()
            problems |= {re.sub(r"\d+", "N", seen.problem)} - {""}
        assert problems <= {"the NVIDIA driver is starting (N s)", "the NVIDIA driver is starting"}
        assert bool(problems) == (latency_ms > 1000)
        assert monotonic() - begun_s < latency_ms / 1000 + 1.5
        until(sampler, _all_ok)
    assert fake_nvml.calls()["nvmlInitWithFlags"] == started + 1


def test_one_reading_waits_for_a_slow_start(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(replace(_THREE, calls=Calls(latency_ms={"nvmlInitWithFlags": 1600})))
    with watching() as sampler:
        snapshot = complete(sampler)
    assert (len(snapshot.gpus), snapshot.problem) == (3, "")


def test_a_reload_of_the_driver_is_survived(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(_THREE)
    with watching() as sampler:
        until(sampler, is_complete)
        fake_nvml.show(replace(_THREE, generation=1, init=DRIVER_NOT_LOADED))
        gone = until(sampler, lambda s: bool(s.problem) and "not loaded" in s.problem)
        assert [uuid for _, uuid, state in _states(gone) if state == "lost"] == ["GPU-a", "GPU-b", "GPU-c"]
        fake_nvml.show(replace(_THREE, generation=1, driver="560.1"))
        back = until(sampler, _all_ok)
        assert (back.driver_version, back.problem) == ("560.1", "")


def test_no_gpu_at_all_is_said(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(Scenario())
    with watching() as sampler:
        found = until(sampler, lambda _: True)
        assert found.gpus == ()
        assert found.problem.startswith("the NVIDIA driver runs, but lists no GPU")
        fake_nvml.show(_THREE)
        assert len(until(sampler, _all_ok).gpus) == 3


def test_a_gpu_that_appears_is_noticed_and_one_that_disappears_is_missed(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(replace(_THREE, gpus=_THREE.gpus[:2]))
    with watching() as sampler:
        until(sampler, lambda s: _all_ok(s) and len(s.gpus) == 2)
        fake_nvml.show(_THREE)
        until(sampler, lambda s: _all_ok(s) and len(s.gpus) == 3)
        fake_nvml.show(replace(_THREE, gpus=[_THREE.gpus[0], _THREE.gpus[2]]))
        missed = until(sampler, lambda s: ("GPU-c", 1) in [(r.uuid, r.index) for r in s.gpus])
        assert _states(missed) == [(0, "GPU-a", "ok"), (1, "GPU-c", "ok"), (1, "GPU-b", "lost")]
        assert missed.gpus[2].state_reason == "the driver no longer lists it"


def test_a_gpu_that_the_library_would_only_see_at_its_start_is_noticed(fake_nvml: FakeMachine, tmp_path: Path) -> None:
    bus = tmp_path / "driver" / "nvidia" / "gpus"
    (bus / "0000:01:00.0").mkdir(parents=True)
    fake_nvml.show(replace(_THREE, gpus=_THREE.gpus[:1], list_at_init=True))
    with watching(proc=tmp_path) as sampler:
        until(sampler, _all_ok)
        fake_nvml.show(replace(_THREE, list_at_init=True))
        (bus / "0000:02:00.0").mkdir()
        until(sampler, lambda s: _all_ok(s) and len(s.gpus) == 3)


_CELLS = {
    "nvmlDeviceGetMemoryInfo_v2": {"memory", "ledger"},
    "nvmlDeviceGetComputeRunningProcesses_v3": {"processes"},
    "nvmlDeviceGetUtilizationRates": {"utilization_percent", "memory_utilization_percent"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetTemperatureThreshold": {"temperature_limit_c"},
    "nvmlDeviceGetFanSpeed": {"fan_percent"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetPcieThroughput": {"pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"},
    "nvmlDeviceGetFieldValues": {
        "nvlink_rx_bytes", "nvlink_tx_bytes", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s",
    },
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_j"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
    "nvmlDeviceGetPerformanceState": {"performance_state"},
    "nvmlDeviceGetCurrentClocksThrottleReasons": {"throttle"},
    "nvmlDeviceGetCudaComputeCapability": {"compute_capability"},
    "nvmlDeviceGetMigMode": set[str](),
    "nvmlDeviceGetGraphicsRunningProcesses_v3": set[str](),
    "nvmlDeviceGetVirtualizationMode": set[str](),
}  # fmt: skip


@pytest.mark.parametrize(("function", "cells"), _CELLS.items())
@pytest.mark.parametrize(
    ("code", "reason"),
    [(NOT_SUPPORTED, "not supported"), (NO_PERMISSION, "no permission"), (UNKNOWN_ERROR, "unknown driver error")],
)
def test_a_fault_in_one_call_loses_its_cell_only(
    fake_nvml: FakeMachine, function: str, cells: set[str], code: int, reason: str
) -> None:
    healthy = FakeGpu(used_bytes=GIB, processes=[FakeProcess(4711, GIB)], fan_percent=20)
    fake_nvml.show(Scenario(gpus=[replace(healthy, calls=Calls(errors={function: code})), healthy]))
    with watching() as sampler:
        found = until(sampler, is_complete)
    ill, well = gpu(found, 0), gpu(found, 1)
    assert (ill.state, ill.state_reason) == (DeviceState.OK, "")
    cell_of, cell_of_well = ({**structs.asdict(one), **structs.asdict(one.telemetry)} for one in (ill, well))
    expected = {"index", "uuid", "bus_id", "age_s", "telemetry"}
    different = {name for name in cell_of.keys() - expected if cell_of[name] != cell_of_well[name]}
    if function == "nvmlDeviceGetComputeRunningProcesses_v3":
        cells = cells | {"ledger"}  # nobody's memory is accounted for
    assert different == cells
    for name in cells - {"ledger"}:
        assert cell_of[name] == Unknown(reason)


def test_a_process_list_that_is_not_permitted_is_not_an_empty_one(fake_nvml: FakeMachine) -> None:
    denied = Calls(errors={"nvmlDeviceGetComputeRunningProcesses_v3": NO_PERMISSION})
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=GIB, calls=denied)]))
    with watching() as sampler:
        found = gpu(until(sampler, is_complete), 0)
    assert found.processes == Unknown("no permission")
    assert not isinstance(found.ledger, Unknown)
    (unaccounted,) = (row for row in found.ledger.rows if row.kind is Bucket.UNACCOUNTED)
    assert unaccounted.size_bytes == GIB
    assert "all processes (their list: no permission)" in unaccounted.note


def test_memory_that_is_not_supported_is_the_hosts_only_on_an_integrated_gpu(fake_nvml: FakeMachine) -> None:
    silent = FakeGpu(total_bytes=None, processes=[FakeProcess(4711, 1)])
    fake_nvml.show(Scenario(gpus=[silent, replace(silent, name="NVIDIA GB10", compute_capability=(12, 1))]))
    with watching() as sampler:
        found = until(sampler, lambda s: is_complete(s) and isinstance(s.host.memory_total_bytes, int))
    discrete, integrated = gpu(found, 0), gpu(found, 1)
    assert (discrete.memory, discrete.ledger, discrete.unified) == (
        Unknown("not supported"),
        Unknown("not supported"),
        False,
    )
    assert integrated.unified
    assert not isinstance(integrated.memory, Unknown)
    assert integrated.memory.total_bytes == found.host.memory_total_bytes
    assert not isinstance(integrated.ledger, Unknown)
    assert "what runs on the CPU" in integrated.ledger.rows[-2].note


def test_an_old_driver_counts_its_reserve_as_used(fake_nvml: FakeMachine) -> None:
    busy = FakeGpu(used_bytes=3 * GIB, reserved_bytes=GIB, processes=[FakeProcess(4711, 3 * GIB)])
    fake_nvml.show(Scenario(gpus=[busy], calls=Calls(errors=V1_ONLY)))
    with watching() as sampler:
        found = gpu(until(sampler, is_complete), 0)
    assert not isinstance(found.memory, Unknown)
    assert not isinstance(found.ledger, Unknown)
    assert found.memory.used_bytes == 4 * GIB
    assert found.memory.reserved_bytes == Unknown("drivers before 510 count it as used")
    assert found.ledger.size_bytes(Bucket.PROCESS) == 3 * GIB
    assert found.ledger.rows[-2].size_bytes == GIB
    assert "the driver's reserve" in found.ledger.rows[-2].note


def test_marks_for_no_figure_are_not_figures(fake_nvml: FakeMachine) -> None:
    wide = FakeGpu(total_bytes=NOT_AVAILABLE, ecc_corrected=NOT_AVAILABLE, sm_clock_mhz=2**32 - 1, performance_state=32)
    listed = FakeGpu(used_bytes=GIB, processes=[FakeProcess(4711, None)])
    fake_nvml.show(Scenario(gpus=[wide, listed]))
    with watching() as sampler:
        found = until(sampler, is_complete)
    missing = Unknown("not available")
    assert gpu(found, 0).memory == gpu(found, 0).ledger == gpu(found, 0).telemetry.ecc_corrected == missing
    now = gpu(found, 0).telemetry
    assert now.sm_clock_mhz == now.performance_state == missing
    processes = gpu(found, 1).processes
    assert not isinstance(processes, Unknown)
    assert processes[0].used_bytes == missing


def test_what_no_gpu_can_have_is_unknown_with_what_the_driver_says(fake_nvml: FakeMachine) -> None:
    hot = FakeGpu(power_w=4_294_967.0, power_limit_w=5e6, temperature_c=4000, utilization_percent=300, fan_percent=9999)
    fake_nvml.show(Scenario(gpus=[replace(hot, sm_clock_mhz=10**6)]))
    with watching() as sampler:
        now = gpu(until(sampler, is_complete), 0).telemetry
    assert now.power_w == Unknown("impossible: the driver reports 4,294,967")
    assert now.temperature_c == Unknown("impossible: the driver reports 4,000")
    unknown = (now.power_limit_w, now.utilization_percent, now.fan_percent, now.sm_clock_mhz)
    assert all(isinstance(value, Unknown) for value in unknown)
    assert now.memory_clock_mhz == 1593, "others stand"


def test_a_process_larger_than_the_device_makes_no_other_smaller(fake_nvml: FakeMachine) -> None:
    honest, lying = FakeProcess(11, 20 * GIB), FakeProcess(12, 300 * GIB)
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=30 * GIB, processes=[honest, lying])]))
    with watching() as sampler:
        found = gpu(until(sampler, is_complete), 0)
    assert not isinstance(found.processes, Unknown)
    assert not isinstance(found.ledger, Unknown)
    sizes = {each.pid: each.used_bytes for each in found.processes}
    assert sizes == {11: 20 * GIB, 12: Unknown("impossible: the driver reports 300.00 GiB, of a device of 80.00 GiB")}
    assert found.ledger.size_bytes(Bucket.PROCESS) == 20 * GIB
    assert found.ledger.size_bytes(Bucket.UNACCOUNTED) == 10 * GIB


def test_a_process_with_two_sizes_has_an_unknown_one(fake_nvml: FakeMachine) -> None:
    twice = [FakeProcess(11, 20 * GIB), FakeProcess(11, 2 * GIB, kind="G"), FakeProcess(12, GIB, kind="C+G")]
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=30 * GIB, processes=twice)]))
    with watching() as sampler:
        found = gpu(until(sampler, is_complete), 0)
    assert not isinstance(found.processes, Unknown)
    listed = {each.pid: (each.kind.value, each.used_bytes) for each in found.processes}
    said = "the driver lists 20.00 GiB where it computes and 2.00 GiB where it draws"
    assert listed == {11: ("C+G", Unknown(said)), 12: ("C+G", GIB)}


@pytest.mark.parametrize(
    ("name", "is_possible"), [("NVIDIA H100 MIG 3g.40gb", False), ("NVIDIA H100 MIG 1c.3g.40gb", True)]
)
def test_instances_have_no_more_than_their_gpu(fake_nvml: FakeMachine, name: str, is_possible: bool) -> None:
    parts = [FakeInstance(f"MIG-{n}", name=name, total_bytes=40 * GIB, gpu_instance=n) for n in (1, 2, 3)]
    fake_nvml.show(Scenario(gpus=[FakeGpu(mig_mode=1, instances=parts)]))
    with watching() as sampler:
        found = gpu(until(sampler, lambda s: len(gpu(s, 0).instances) == 3), 0)
    said = Unknown("impossible: the driver gives the instances 120.00 GiB of the GPU's 80.00 GiB")
    assert all((each.memory == each.ledger == said) is not is_possible for each in found.instances)


def test_memory_that_does_not_add_up_is_shown_nowhere(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=90 * GIB)]))
    with watching() as sampler:
        found = gpu(until(sampler, is_complete), 0)
    assert isinstance(found.memory, Unknown)
    assert found.memory.reason.startswith("the driver's figures do not add up: 90.00 GiB used")
    latest = sampler.latest()
    assert latest is not None
    assert Alerts().update(latest) == ()


def test_names_and_versions_do_nothing_to_a_terminal(fake_nvml: FakeMachine) -> None:
    red, title = "\x1b[31mNVIDIA A100\x1b[0m", "550.54\x1b]0;owned\x07"
    part = FakeInstance("MIG-1", name="NVIDIA A100 MIG 1g.10gb\x1b[2J")
    fake_nvml.show(Scenario(gpus=[FakeGpu(name=red, mig_mode=1, instances=[part])], driver=title))
    with watching() as sampler:
        found = until(sampler, lambda s: bool(s.gpus) and bool(gpu(s, 0).instances))
    assert gpu(found, 0).name == "NVIDIA A100"
    assert found.driver_version == found.drivers[0].driver_version == "550.54"
    assert gpu(found, 0).instances[0].name.isprintable()


def test_mig_is_switched_on_and_off_while_watched(fake_nvml: FakeMachine) -> None:
    whole = Scenario(gpus=[FakeGpu(uuid="GPU-a", used_bytes=GIB, utilization_percent=70), FakeGpu(uuid="GPU-b")])
    instances = [
        FakeInstance("MIG-1", used_bytes=2 * GIB, processes=[FakeProcess(11, 2 * GIB)]),
        FakeInstance("MIG-2", used_bytes=GIB, gpu_instance=8),
    ]
    not_for_the_whole = {
        "nvmlDeviceGetMemoryInfo_v2": NO_PERMISSION,
        "nvmlDeviceGetComputeRunningProcesses_v3": NO_PERMISSION,
    }
    divided = whole.change(0, mig_mode=1, instances=instances, calls=Calls(errors=not_for_the_whole))
    fake_nvml.show(whole)
    with watching() as sampler:
        until(sampler, is_complete)
        fake_nvml.show(divided)
        found = gpu(until(sampler, lambda s: len(gpu(s, 0).instances) == 2), 0)
        assert found.mig
        assert found.telemetry.utilization_percent == Unknown("not available in MIG mode")
        assert found.memory == Unknown("no permission")
        first, second = found.instances
        assert (first.uuid, second.uuid) == ("MIG-1", "MIG-2")
        assert not isinstance(first.ledger, Unknown)
        assert first.ledger.size_bytes(Bucket.PROCESS) == 2 * GIB
        assert not isinstance(found.processes, Unknown)
        assert [(process.pid, process.instance) for process in found.processes] == [(11, "MIG-1")]
        fake_nvml.show(whole)
        off = gpu(until(sampler, lambda s: not gpu(s, 0).mig), 0)
        assert (off.state, off.instances, off.telemetry.utilization_percent) == (DeviceState.OK, (), 70)


def test_a_call_that_never_returns_makes_its_gpu_stale_and_no_other(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(_THREE)
    with watching() as sampler:
        until(sampler, is_complete)
        stuck = _THREE.change(1, calls=Calls(hangs=["nvmlDeviceGetPowerUsage"]))
        fake_nvml.show(stuck)
        stale = gpu(until(sampler, lambda s: gpu(s, 1).state is DeviceState.STALE), 1)
        assert stale.state_reason.startswith("nvmlDeviceGetPowerUsage has not returned for ")
        assert stale.age_s >= 0.8
        assert not isinstance(stale.memory, Unknown), "what was read last is still shown"

        fake_nvml.show(stuck.change(2, used_bytes=7 * GIB))
        changed_at = monotonic()
        until(sampler, _has_used(2, 7 * GIB))
        print(f"\na change on a healthy GPU shows after {monotonic() - changed_at:.3f} s")

        fake_nvml.show(_THREE)
        until(sampler, _all_ok)


@pytest.mark.parametrize("hang_s", [2.0, None])
def test_healthy_gpus_do_not_lag_and_the_end_does_not_wait(fake_nvml: FakeMachine, hang_s: float | None) -> None:
    """At the usual interval: the product's promise is 1.2 s, the bound here leaves room for a busy machine."""
    function = "nvmlDeviceGetPowerUsage"
    calls = Calls(hangs=[function]) if hang_s is None else Calls(latency_ms={function: hang_s * 1000})
    stuck = _THREE.change(1, calls=calls)
    fake_nvml.show(stuck)
    with watching(interval_s=1.0, slow_interval_s=5.0) as sampler:
        until(sampler, lambda s: gpu(s, 1).state is DeviceState.STALE and gpu(s, 0).state is DeviceState.OK)
        lags = []
        for used_gib in (2, 3):
            fake_nvml.show(stuck.change(0, used_bytes=used_gib * GIB))
            changed_at = monotonic()
            until(sampler, _has_used(0, used_gib * GIB))
            lags.append(monotonic() - changed_at)
        stopping_at = monotonic()
        sampler.stop()
        took_s = monotonic() - stopping_at
    print(
        f"\nhang {hang_s} s: a healthy GPU's change shows after at most {max(lags):.2f} s; stop() took {took_s:.4f} s"
    )
    assert max(lags) < 3.0
    assert took_s < 0.5


def test_a_snapshot_of_a_long_interval_has_what_was_read_in_it(
    fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each value would be as old as the interval, and a hung GPU well for as long."""
    monkeypatch.setattr("gpumem_tui.monitor.sampler._LONG_INTERVAL_S", 1.0)
    fake_nvml.show(_THREE)
    with watching(interval_s=1.0, slow_interval_s=1.0) as sampler:
        before = until(sampler, is_complete)
        slow = Calls(latency_ms={"nvmlDeviceGetMemoryInfo_v2": 300})
        hung = _THREE.change(2, calls=Calls(hangs=["nvmlDeviceGetMemoryInfo_v2"]))
        fake_nvml.show(hung.change(1, calls=slow, used_bytes=7 * GIB, temperature_c=80))
        found = until(sampler, lambda s: s is not before)
    memory, now = gpu(found, 1).memory, gpu(found, 1).telemetry
    assert (getattr(memory, "used_bytes", memory), now.temperature_c) == (7 * GIB, 80)
    assert gpu(found, 2).state is DeviceState.STALE
    assert gpu(found, 2).state_reason.startswith("nvmlDeviceGetMemoryInfo has not returned for ")


@pytest.mark.parametrize("function", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature"])
def test_values_that_a_slow_call_made_old_are_never_shown_as_fresh(
    fake_nvml: FakeMachine, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Neither those that were read before it in the pass, nor those of that pass when it has just returned."""
    monkeypatch.setattr("gpumem_tui.monitor.gpu_reader.STUCK_AFTER_S", 0.25)
    fake_nvml.show(_THREE)
    backend, crew = Nvml(Path("/nowhere")), Crew("crew-of-a-test")
    backend.start()
    reader = GpuReader(1, backend, slow_every=1, tell=lambda: None, crew=crew)

    def is_ok_after_a_pass() -> bool:
        reader.ask()
        wait_until(lambda: reader.worker.is_idle)
        return reader.state_and_reason()[0] is DeviceState.OK

    try:
        wait_until(is_ok_after_a_pass)
        fake_nvml.show(_THREE.change(1, calls=Calls(latency_ms={function: 600})))
        reader.ask()
        wait_until(lambda: reader.is_stuck)
        reader.ask()  # at the next interval
        wait_until(lambda: reader.worker.is_idle)
        assert reader.state_and_reason()[0] is DeviceState.STALE
        fake_nvml.show(_THREE)
        wait_until(is_ok_after_a_pass)
    finally:
        crew.end()
        backend.stop()


def test_a_library_that_hangs_as_a_whole_stops_no_snapshots(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(replace(_THREE, lock=True))
    with watching() as sampler:
        until(sampler, is_complete)
        fake_nvml.show(replace(_THREE, lock=True).change(1, calls=Calls(hangs=["nvmlDeviceGetMemoryInfo_v2"])))
        stale = until(sampler, lambda s: {reading.state for reading in s.gpus} == {DeviceState.STALE})
        assert until(sampler, lambda _: True).time_s > stale.time_s
        fake_nvml.show(_THREE)
        until(sampler, _all_ok)


def test_a_process_ends_at_once_with_a_call_that_never_returns(fake_machine: FakeMachine) -> None:
    fake_machine.show(_THREE.change(1, calls=Calls(hangs=["nvmlDeviceGetPowerUsage"])))
    printed = fake_machine.run(
        "from gpumem_tui.monitor.sampler import Sampler\n"
        "sampler = Sampler(0.1)\n"
        "sampler.start()\n"
        "seen = None\n"
        "while 'not returned' not in (seen := sampler.wait(seen, 30)).gpus[1].state_reason: pass\n"
        "sampler.stop()\n"
        "print(seen.gpus[1].state_reason)\n"
    )
    assert "nvmlDeviceGetPowerUsage has not returned" in printed


def test_a_host_that_hangs_stops_no_snapshots(fake_nvml: FakeMachine) -> None:
    """As when a process's command line is in a file system that does not answer."""
    answers = threading.Event()

    def look(pids: Iterable[int]) -> Mapping[int, Reading[HostProcess]]:
        answers.wait(DEADLINE_S)
        return no_processes(pids)

    fake_nvml.show(_THREE)
    sampler = Sampler(0.1, look=look)
    sampler.start()
    try:
        hung = until(sampler, lambda s: getattr(s.host.memory_used_bytes, "reason", "").startswith("stale "))
        assert _all_ok(hung)
        answers.set()
        until(sampler, lambda s: isinstance(s.host.memory_used_bytes, int))
    finally:
        sampler.stop()


def test_pids_that_nobody_has_are_said_to_be_unknown(fake_nvml: FakeMachine) -> None:
    fake_nvml.show(Scenario(gpus=[FakeGpu(used_bytes=GIB, processes=[FakeProcess(2**22 + 1, GIB)])]))
    sampler = Sampler(0.1)
    sampler.start()
    try:
        processes = gpu(until(sampler, is_complete), 0).processes
    finally:
        sampler.stop()
    assert not isinstance(processes, Unknown)
    assert isinstance(processes[0].host, Unknown)
