"""Fixtures that several test folders share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_STUB_SOURCE = Path(__file__).parent / "nvml_stub" / "nvml.c"


@pytest.fixture(scope="session", autouse=True)
def _simulated_device_is_registered() -> None:
    """Tests share a process: a backward on the CPU in one must not come before the device is known."""
    from gpumem_tui.simulator.device import register

    register()


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `libnvidia-ml.so.1` compiled from tests/nvml_stub, for LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, _STUB_SOURCE], check=True)
    return folder


RunOnStub = Callable[[str, str], str]


@pytest.fixture
def run_on_stub(nvml_stub: Path, tmp_path: Path) -> RunOnStub:
    """Run Python code in a fresh process whose NVML answers from a scenario; returns what it printed."""

    def run(scenario: str, code: str) -> str:
        path = tmp_path / "scenario.txt"
        path.write_text(scenario)
        environment = {"LD_LIBRARY_PATH": str(nvml_stub), "NVML_STUB_SCENARIO": str(path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    return run
