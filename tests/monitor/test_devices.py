"""GPUs as the real pynvml reads them from a compiled stand-in for NVIDIA's library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import RunOnStub

_PRINT = """
import json, dataclasses
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import list_gpus
found = list_gpus()
print(json.dumps(found.reason if isinstance(found, Unknown) else
      [dict(dataclasses.asdict(g), free=g.is_free, sm=g.describe().sm, cuda=g.describe().cuda_total_bytes,
            left=g.describe(shared=True).cuda_total_bytes, kind=g.describe().kind) for g in found]))
"""
_A100 = "gpu NVIDIA A100-SXM4-80GB|GPU-1111|85899345920|635437056|{used}|8|0|{pids}\n"


def _list(run_on_stub: RunOnStub, scenario: str) -> Any:
    return json.loads(run_on_stub(scenario, _PRINT))


def test_reads_memory_without_the_drivers_reserve(run_on_stub: RunOnStub) -> None:
    (gpu,) = _list(run_on_stub, _A100.format(used=0, pids=""))
    assert gpu["name"] == "NVIDIA A100-SXM4-80GB"
    assert gpu["uuid"] == "GPU-1111"
    assert gpu["total_bytes"] == 85899345920
    assert gpu["cuda"] == 85899345920 - 635437056
    assert (gpu["used_bytes"], gpu["free"], gpu["sm"], gpu["kind"]) == (0, True, "sm_80", "datacenter")


def test_a_gpu_with_a_compute_process_is_not_free(run_on_stub: RunOnStub) -> None:
    (gpu,) = _list(run_on_stub, _A100.format(used=10 << 30, pids="4711,4712"))
    assert gpu["pids"] == [4711, 4712]
    assert gpu["free"] is False
    assert gpu["left"] == gpu["cuda"] - (10 << 30)


def test_memory_in_use_by_processes_that_cannot_be_seen_is_not_free(run_on_stub: RunOnStub) -> None:
    (gpu,) = _list(run_on_stub, _A100.format(used=10 << 30, pids=""))
    assert gpu["free"] is False


def test_no_gpu_at_all(run_on_stub: RunOnStub) -> None:
    assert _list(run_on_stub, "") == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (9, "no NVIDIA driver on this machine"),
        (18, "NVIDIA driver and library versions differ: reboot, or reload the driver"),
        (4, "no permission to use the NVIDIA driver"),
        (999, "NVML does not start: Unknown Error"),
    ],
)
def test_a_driver_that_does_not_start_says_why(run_on_stub: RunOnStub, code: int, reason: str) -> None:
    assert _list(run_on_stub, f"init {code}\n") == reason
