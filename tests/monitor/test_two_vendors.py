"""NVIDIA's and AMD's GPUs in one machine, by both compiled stand-ins: numbers, words, and faults of one alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from gpumem_tui.doctor import checks as doctor
from gpumem_tui.doctor.checks import Status
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import AlertKind, Alerts, Severity
from gpumem_tui.monitor.devices import free_gpus
from gpumem_tui.monitor.report import snapshot_json, table
from gpumem_tui.monitor.sampler import Sampler
from gpumem_tui.monitor.snapshot import DeviceState, Snapshot
from gpumem_tui.monitor.wire import HostReport, ReportReader, ReportWriter
from tests.amdsmi_stub.machine import DRIVER_NOT_LOADED, NO_PERMISSION, AmdGpu, AmdMachine, machine_of
from tests.cli.conftest import Program, program
from tests.monitor.schema import MONITOR
from tests.monitor.snapshots import printed
from tests.monitor.watching import is_complete, no_processes, until
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import LIBRARY_NOT_FOUND, Calls, FakeGpu, FakeProcess, Scenario

__all__ = ["program"]

_AMD = [AmdGpu(uuid="amd-a", runtime_index=1), AmdGpu(uuid="amd-b", runtime_index=0, used_bytes=9 * GIB)]
_BOTH = "driver 550.54.14, CUDA 12.4"


@pytest.fixture
def sampler(fake_nvml: FakeMachine, fake_amd: AmdMachine) -> Iterator[Sampler]:
    """The backends of a machine with two GPUs of each vendor, one of them busy; not started."""
    fake_nvml.show(Scenario(gpus=[FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", used_bytes=30 * GIB)]))
    fake_amd.show(machine_of(_AMD))
    made = Sampler(0.05, 0.1, look=no_processes, proc=fake_amd.proc)
    yield made
    made.stop()


def _seen(sampler: Sampler, count: int = 4) -> Snapshot:
    sampler.start()
    return until(sampler, lambda found: len(found.gpus) == count and is_complete(found))


def test_gpus_are_numbered_through_and_keep_their_own_numbers(sampler: Sampler) -> None:
    found = _seen(sampler)
    assert found.problem == ""
    assert [(gpu.index, gpu.vendor, gpu.number, gpu.uuid) for gpu in found.gpus] == [
        (0, "NVIDIA", 0, "GPU-a"),
        (1, "NVIDIA", 1, "GPU-b"),
        (2, "AMD", 1, "amd-a"),
        (3, "AMD", 0, "amd-b"),
    ]
    assert all(gpu.state is DeviceState.OK and not isinstance(gpu.ledger, Unknown) for gpu in found.gpus)
    assert [(each.vendor, each.driver_version, each.runtime, each.problem) for each in found.drivers] == [
        ("NVIDIA", "550.54.14", "CUDA", ""),
        ("AMD", "6.14.14", "ROCm", ""),
    ]
    assert found.versions[:3] == ("NVIDIA driver 550.54.14", "CUDA 12.4", "AMD driver 6.14.14")
    assert {name[:4] for name in found.calls} == {"nvml", "amds"}


def test_json_and_lines_say_whose_each_gpu_is(sampler: Sampler) -> None:
    found = _seen(sampler)
    body = printed(snapshot_json(found, Alerts().update(found)))
    jsonschema.validate(body, MONITOR)
    assert [(gpu["vendor"], gpu.get("vendor_index"), gpu.get("runtime_index")) for gpu in body["gpus"]] == [
        ("NVIDIA", None, None),
        ("NVIDIA", None, None),
        ("AMD", 0, 1),
        ("AMD", 1, 0),
    ]
    again = ReportReader().read(ReportWriter().line(HostReport.of(found)).encode()).snapshot
    assert (again.drivers[1].vendor, again.versions) == ("AMD", found.versions)
    assert [gpu.number for gpu in again.gpus] == [0, 1, 1, 0]
    lines = list(table(found, (), 100))
    assert "AMD driver 6.14.14" in lines[0]
    assert any("AMD Instinct MI300X" in line and line.split()[0] == "2" for line in lines)


def test_what_is_free_is_of_one_vendor(sampler: Sampler) -> None:
    found = _seen(sampler)

    def free(**environ: str) -> list[str]:
        return [gpu.uuid for gpu in free_gpus(found, None, environ)]

    assert free() == ["GPU-a", "amd-a"]
    assert free(HIP_VISIBLE_DEVICES="0") == ["GPU-a"]
    assert free(HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="1") == ["amd-a"]


def test_a_fault_of_one_driver_leaves_the_other_s_gpus(
    fake_nvml: FakeMachine, fake_amd: AmdMachine, sampler: Sampler
) -> None:
    _seen(sampler)
    fake_amd.show(machine_of(_AMD, calls=Calls(errors={"amdsmi_get_gpu_memory_total": 43})))
    lost = until(sampler, lambda found: sum(gpu.state is DeviceState.LOST for gpu in found.gpus) == 2)
    assert [gpu.state for gpu in lost.gpus[:2]] == [DeviceState.OK] * 2
    assert "the GPU does not answer" in lost.gpus[2].state_reason
    fake_amd.show(machine_of(_AMD))
    until(sampler, lambda found: all(gpu.state is DeviceState.OK for gpu in found.gpus))


def test_a_call_that_hangs_makes_its_gpu_stale_alone(fake_amd: AmdMachine, sampler: Sampler) -> None:
    _seen(sampler)
    stuck = AmdGpu(uuid="amd-a", calls=Calls(hangs=["amdsmi_get_power_info"]))
    fake_amd.show(machine_of([stuck, _AMD[1]]))
    stale = until(sampler, lambda found: found.gpus[2].state is DeviceState.STALE)
    assert stale.gpus[2].state_reason.startswith("amdsmi_get_power_info has not returned for ")
    assert [gpu.state for gpu in stale.gpus].count(DeviceState.OK) == 3


def test_a_driver_that_does_not_start_beside_one_that_runs_is_named(fake_amd: AmdMachine, sampler: Sampler) -> None:
    fake_amd.show(machine_of([], calls=Calls(errors={"amdsmi_init": NO_PERMISSION})))
    found = _seen(sampler, 2)
    assert found.problem == ""
    (amd,) = (each for each in found.drivers if each.vendor == "AMD")
    assert amd.problem.startswith("no permission to use the AMD driver: join the groups")
    [alert] = Alerts().update(found)
    assert (alert.kind, alert.severity, alert.message) == (AlertKind.NO_DRIVER, Severity.WARNING, amd.problem)
    (check,) = doctor.other_drivers_checks(found)
    assert (check.name, check.status, check.found) == (
        "AMD driver",
        Status.FAIL,
        "no permission to use the AMD driver",
    )
    fake_amd.show(machine_of(_AMD))
    until(sampler, lambda found: len(found.gpus) == 4)


def test_amd_alone_is_never_called_by_another_s_name(
    fake_nvml: FakeMachine, fake_amd: AmdMachine, sampler: Sampler
) -> None:
    fake_nvml.show(Scenario(init=LIBRARY_NOT_FOUND))
    found = _seen(sampler, 2)
    assert [(gpu.index, gpu.vendor_index) for gpu in found.gpus] == [(0, None), (1, None)]
    assert (found.driver_version, found.runtime) == ("6.14.14", "ROCm")
    said = json.dumps(snapshot_json(found)) + "\n".join(table(found, (), 100))
    assert "NVIDIA" not in said
    assert '"vendor": "AMD"' in said


def test_nvidia_alone_says_no_more_than_before(fake_amd: AmdMachine, sampler: Sampler) -> None:
    fake_amd.load(driver=False)
    fake_amd.show(machine_of([], calls=Calls(errors={"amdsmi_init": DRIVER_NOT_LOADED})))
    found = _seen(sampler, 2)
    assert [each.vendor for each in found.drivers] == ["NVIDIA"]
    assert "drivers" not in snapshot_json(found)


def test_free_prints_numbers_of_one_runtime(
    fake_machine: FakeMachine, amd_machine: AmdMachine, program: Program, tmp_path: Path
) -> None:
    fake_machine.show(Scenario(gpus=[FakeGpu(processes=[FakeProcess(os.getpid(), GIB)]), FakeGpu()]))
    amd_machine.show(machine_of(_AMD))
    env = {**amd_machine.environment, **fake_machine.environment, "PATH": os.environ["PATH"]}
    assert program("free", env=env).out == "1\n"
    assert program("free", "--vendor", "amd", env=env).out == "1\n", "HIP's number of the first of amd-smi"
    assert program("free", "--vendor", "amd", "--memory", "20GiB", env=env).out == "1,0\n"
    assert program("free", "--gpus", "2", "--memory", "150GiB", env=env).out == "1,0\n", "only AMD's have so much"
    assert program("free", "--vendor", "intel", env=env).code == 3
