"""GPUs as the real pynvml reads them from a compiled stand-in for NVIDIA's library."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gpumem_tui.memory import GIB, MIB
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import (
    DRIVER_NOT_LOADED,
    LIBRARY_MISMATCH,
    NO_PERMISSION,
    UNKNOWN_ERROR,
    FakeGpu,
    FakeProcess,
    Scenario,
)

_PRINT = """
import json, msgspec
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import list_gpus
found = list_gpus()
print(json.dumps(found.reason if isinstance(found, Unknown) else
      [dict(msgspec.structs.asdict(g), free=g.is_free, sm=g.describe().sm, cuda=g.describe().cuda_total_bytes,
            left=g.describe(shared=True).cuda_total_bytes, kind=g.describe().kind) for g in found]))
"""
_A100 = FakeGpu(uuid="GPU-1111", total_bytes=80 * GIB, reserved_bytes=606 * MIB)


def _list(machine: FakeMachine, *gpus: FakeGpu) -> Any:
    machine.show(Scenario(gpus=gpus))
    return json.loads(machine.run(_PRINT))


def test_reads_memory_without_the_drivers_reserve(fake_machine: FakeMachine) -> None:
    (gpu,) = _list(fake_machine, _A100)
    assert gpu["name"] == "NVIDIA A100-SXM4-80GB"
    assert gpu["uuid"] == "GPU-1111"
    assert gpu["total_bytes"] == 80 * GIB
    assert gpu["cuda"] == 80 * GIB - 606 * MIB
    assert (gpu["used_bytes"], gpu["free"], gpu["sm"], gpu["kind"]) == (0, True, "sm_80", "datacenter")


def test_a_gpu_with_a_compute_process_is_not_free(fake_machine: FakeMachine) -> None:
    processes = [FakeProcess(4711, 5 * GIB), FakeProcess(4712, 5 * GIB)]
    (gpu,) = _list(fake_machine, replace(_A100, used_bytes=10 * GIB, processes=processes))
    assert gpu["pids"] == [4711, 4712]
    assert gpu["free"] is False
    assert gpu["left"] == gpu["cuda"] - 10 * GIB


def test_memory_in_use_by_processes_that_cannot_be_seen_is_not_free(fake_machine: FakeMachine) -> None:
    (gpu,) = _list(fake_machine, replace(_A100, used_bytes=10 * GIB))
    assert gpu["free"] is False


def test_no_gpu_at_all(fake_machine: FakeMachine) -> None:
    assert _list(fake_machine) == []


def test_a_lost_gpu_hides_no_other(fake_machine: FakeMachine) -> None:
    (gpu,) = _list(fake_machine, replace(_A100, lost=True), replace(_A100, uuid="GPU-2222"))
    assert (gpu["index"], gpu["uuid"]) == (1, "GPU-2222")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded"),
        (LIBRARY_MISMATCH, "NVIDIA driver and library versions differ: reboot, or reload the driver"),
        (NO_PERMISSION, "no permission to use the NVIDIA driver"),
        (UNKNOWN_ERROR, "NVML does not start: Unknown Error"),
    ],
)
def test_a_driver_that_does_not_start_says_why(fake_machine: FakeMachine, code: int, reason: str) -> None:
    fake_machine.show(Scenario(init=code))
    assert json.loads(fake_machine.run(_PRINT)) == reason
