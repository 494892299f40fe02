"""A machine whose AMD driver is the fake one: compile its library, show it GPUs, run programs on it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import MIB
from gpumem_tui.monitor.vendors.amd import calls
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import Calls, FakeGpu, Scenario, numbers

NO_PERMISSION, BUSY, DRIVER_NOT_LOADED = 10, 30, 34

_SOURCE = Path(__file__).with_name("amdsmi.c")
_ASKED_FOR = re.compile(r"_libraries\['libamd_smi\.so'\]\.(\w+)")


def binding() -> Path:
    """The installed amdsmi, which can only be imported where its library is; skips if missing."""
    found = importlib.util.find_spec("amdsmi")
    if found is None or found.origin is None:
        pytest.skip("amdsmi is not installed: pip install -e '.[test]'")
    return Path(found.origin).parent


def compile_stub(folder: Path) -> Path:
    """Make `lib/libamd_smi.so` in `folder`, for ROCM_PATH; with every function that the binding asks for."""
    library = folder / "lib" / "libamd_smi.so"
    library.parent.mkdir()
    asked = set(_ASKED_FOR.findall((binding() / "amdsmi_wrapper.py").read_text()))
    ours = set(re.findall(r"^(?:int|void) (amdsmi_\w+)\(", _SOURCE.read_text(), re.MULTILINE))
    others = "".join(f"OTHER({name})\n" for name in sorted(asked - ours))
    (folder / "others.h").write_text(others)
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", "-pthread"]
    subprocess.run(["cc", *flags, "-I", folder, "-o", library, _SOURCE], check=True)
    return library


@dataclass(frozen=True)
class AmdMachine(FakeMachine):
    """The fake library, the scenario that it reads and the calls that it counts.

    Attributes:
        proc: a folder of the kernel's own files, in which amdgpu runs.
    """

    @property
    def proc(self) -> Path:
        """The folder, made with `load`."""
        return self.folder / "proc"

    @property
    def scenario_path(self) -> Path:
        """The scenario file, as AMDSMI_STUB_SCENARIO names it."""
        return self.folder / "amd-scenario.txt"

    @property
    def calls_path(self) -> Path:
        """Where the library counts calls, as AMDSMI_STUB_CALLS names it."""
        return self.folder / "amd-calls.txt"

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which a process meets this machine; add it to os.environ, or use it alone."""
        return {
            "ROCM_PATH": str(self.library.parent.parent),
            "AMDSMI_STUB_SCENARIO": str(self.scenario_path),
            "AMDSMI_STUB_CALLS": str(self.calls_path),
            "PATH": "/usr/bin:/bin",
        }

    def load(self, *, driver: bool = True) -> None:
        """Have the kernel run amdgpu, or not."""
        self.proc.mkdir(exist_ok=True)
        lines = "Character devices:\n  1 mem\n226 drm\n" + ("235 kfd\n" if driver else "")
        (self.proc / "devices").write_text(lines)


@dataclass(frozen=True)
class AmdGpu(FakeGpu):
    """One GPU, by default an idle MI300X that is not divided. None: AMD SMI states "not supported".

    Attributes:
        gfx: what it is to a compiler, as the library has it: 0x942 is gfx942.
        partition: its number in a GPU that is divided, with the two modes.
        runtime_index: HIP's number.
    """

    name: str = "AMD Instinct MI300X"
    total_bytes: int | None = 196592 * MIB
    reserved_bytes: int | None = None
    used_bytes: int | None = 284 * MIB
    power_limit_w: float | None = 750.0
    slowdown_temperature_c: int | None = 100
    sm_clock_mhz: int | None = 2100
    memory_clock_mhz: int | None = 1300
    pcie_generation: int | None = 5
    virtualization: int | None = 1
    compute_units: int | None = 304
    gfx: int = 0x942
    partition: int = 0
    compute_partition: str = "SPX"
    memory_partition: str = "NPS1"
    runtime_index: int | None = None

    def lines(self) -> list[str]:
        """As the scenario file has it."""
        modes = {"compute_partition": self.compute_partition, "memory_partition": self.memory_partition}
        return [
            *super().lines(),
            *numbers(self, {key: key for key in ("compute_units", "gfx", "partition", "runtime_index")}),
            *(f"{key} {mode}" for key, mode in modes.items() if mode),
        ]


def machine_of(gpus: Sequence[AmdGpu], **scenario: Any) -> Scenario:
    """A machine with these GPUs and ROCm's usual driver, whose GPUs are found when the library starts."""
    return Scenario(gpus=gpus, **{"driver": "6.14.14", **scenario})


@pytest.fixture(scope="session")
def amdsmi_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake `libamd_smi.so`, compiled."""
    return compile_stub(tmp_path_factory.mktemp("rocm"))


@pytest.fixture
def amd_machine(amdsmi_stub: Path, tmp_path: Path) -> AmdMachine:
    """A machine with the fake AMD SMI and no GPU yet, for programs in processes of their own."""
    machine = AmdMachine(amdsmi_stub, tmp_path)
    machine.load()
    machine.show(machine_of([]))
    return machine


@pytest.fixture
def fake_amd(amd_machine: AmdMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[AmdMachine]:
    """The machine in this process, which loads the binding once."""
    for name, value in amd_machine.environment.items():
        if name != "PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(calls, "_LIBRARY", calls._Library())  # other tests are on a machine without it
    yield amd_machine
    amd_machine.show(machine_of([]))  # everything that hangs in the library returns
    while calls._LIBRARY.starts > 0:  # a sampler that ends leaves it started
        calls.stop(calls.AmdCaller())


__all__ = ["Calls", "Scenario"]
