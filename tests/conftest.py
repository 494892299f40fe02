"""Fixtures that several test folders share."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest

from gpumem_tui.run import interpreters
from tests.amdsmi_stub.machine import amd_machine, amdsmi_stub, fake_amd
from tests.nvml_stub.machine import FakeMachine, compile_stub
from tests.nvml_stub.scenario import Scenario
from tests.sharing import WarmPython

__all__ = ["amd_machine", "amdsmi_stub", "fake_amd"]

hypothesis.settings.register_profile(
    "quick",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("quick"), max_examples=2000, derandomize=False
)
hypothesis.settings.load_profile("quick")

interpreters.IDLE_S = 900.0
"""Tests that come later are served by it."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
"""Else each of the many processes that tests start compiles the package anew, and the test processes the tests."""

os.environ["OMP_NUM_THREADS"] = "1"
"""Threads of several processes that wait for each other turn on every core there is."""

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""A shell's job in the background has the one ignored, what nohup starts the other, and so would what tests start."""

gc.disable()
"""Until all is imported: see below."""


@pytest.fixture(scope="session", autouse=True)
def _simulated_device_is_registered() -> None:
    """Tests share a process: a backward on the CPU in one must not come before the device exists.

    Objects imported and collected by now stay: the garbage collector need not go through it again and again. It
    looks for cycles less often than it would in a program: in tests of screens that was a seventh of all work.
    """
    from gpumem_tui.simulator.device.gpu import register

    register()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    """Look once for what was never awaited or closed: pytest would go through all that was imported five times."""
    gc.collect()
    gc.freeze()


START_COLD = interpreters.CommandServer.__init__


@pytest.fixture(scope="session", autouse=True)
def _warm_python(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every test that asks for an interpreter to run a step gets one that starts with torch imported."""
    WarmPython.comes_from(tmp_path_factory)

    def made(server: interpreters.CommandServer, program: str, directory: str, environment: Mapping[str, str]) -> None:
        START_COLD(server, WarmPython.path() if program == sys.executable else program, directory, environment)

    interpreters.CommandServer.__init__ = made  # type: ignore[assignment, method-assign]


@pytest.fixture(autouse=True)
def _same_random_values() -> None:
    """Start each test from one seed: a gradient that happens to round to nothing must not fail one run in hundreds."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake `libnvidia-ml.so.1`, compiled."""
    return compile_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_machine(nvml_stub: Path, tmp_path: Path) -> FakeMachine:
    """A machine with the fake NVML and no GPU yet, for programs in processes of their own."""
    machine = FakeMachine(nvml_stub, tmp_path)
    machine.show(Scenario())
    return machine


@pytest.fixture
def fake_nvml(fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    """The machine in this process: pynvml has the fake library, as with LD_LIBRARY_PATH set at its start."""
    import pynvml

    for name in ("NVML_STUB_SCENARIO", "NVML_STUB_CALLS"):
        monkeypatch.setenv(name, fake_machine.environment[name])
    library = ctypes.CDLL(str(fake_machine.library))
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield fake_machine
    fake_machine.show(Scenario())  # everything that hangs in the library returns
    while library.nvmlShutdown() == pynvml.NVML_SUCCESS:
        pass
