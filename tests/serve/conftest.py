"""A machine with GPUs for the server's visitors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpumem_tui.memory import GIB
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario


@pytest.fixture
def environment(fake_machine: FakeMachine, tmp_path: Path) -> dict[str, str]:
    """The server's environment: a machine with two GPUs, which this process uses, and no settings of ours."""
    busy = FakeGpu(used_bytes=30 * GIB, processes=[FakeProcess(os.getpid(), 20 * GIB)], utilization_percent=97)
    fake_machine.show(Scenario(gpus=[busy, FakeGpu()]))
    config = tmp_path / "config"
    config.mkdir()
    return {**fake_machine.environment, "PATH": os.environ["PATH"], "XDG_CONFIG_HOME": str(config)}
