"""Scenarios for the fake NVML: what each GPU answers, written as the text that nvml.c reads.

scenario = Scenario(gpus=[FakeGpu(used_bytes=10 * GIB, processes=[FakeProcess(4711, 10 * GIB)])])
scenario.write(path)
scenario.change(0, lost=True).write(path)  # the program under test sees it at its next call
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpumem_tui.memory import GIB, MIB

NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
LIBRARY_NOT_FOUND = 12
LIBRARY_MISMATCH = 18
UNKNOWN_ERROR = 999

NOT_AVAILABLE = 2**64 - 1
"""NVML's value where it has no figure."""


@dataclass(frozen=True)
class FakeProcess:
    """A process on a GPU. `used_bytes` None: not available. `kind`: C, G, C+G, or M for a client of MPS."""

    pid: int
    used_bytes: int | None
    kind: str = "C"
    sm_percent: int | None = None

    def lines(self) -> list[str]:
        """As the scenario file has it."""
        size_bytes = NOT_AVAILABLE if self.used_bytes is None else self.used_bytes
        share = "" if self.sm_percent is None else f" {self.sm_percent}"
        return [f"process {self.pid} {size_bytes} {self.kind}{share}"]


@dataclass(frozen=True)
class Calls:
    """How calls go, by the name of the C function ("nvmlDeviceGetComputeRunningProcesses_v3").

    Attributes:
        errors: the code returned.
        latency_ms: how long a call takes.
        hangs: calls that return only when a later scenario no longer names them.
    """

    errors: Mapping[str, int] = field(default_factory=dict)
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    hangs: Sequence[str] = ()

    def lines(self) -> list[str]:
        """As the scenario file has it."""
        return [
            *(f"error {function} {code}" for function, code in self.errors.items()),
            *(f"latency {function} {ms}" for function, ms in self.latency_ms.items()),
            *(f"hang {function}" for function in self.hangs),
        ]


@dataclass(frozen=True)
class FakeInstance:
    """A MIG instance of 1/7 of an A100 80 GB."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    total_bytes: int | None = 10 * GIB
    reserved_bytes: int | None = 64 * MIB
    used_bytes: int | None = 0
    gpu_instance: int = 7
    compute_instance: int = 0
    processes: Sequence[FakeProcess] = ()
    calls: Calls = Calls()

    def lines(self) -> list[str]:
        """As the scenario file has it."""
        return [
            "mig",
            f"name {self.name}",
            f"uuid {self.uuid}",
            *numbers(self, _MEMORY_KEYS | {"gi": "gpu_instance", "ci": "compute_instance"}),
            *(line for process in self.processes for line in process.lines()),
            *self.calls.lines(),
        ]


@dataclass(frozen=True)
class FakeGpu:
    """One GPU, by default an idle A100 80 GB with everything supported. None: NVML states "not supported".

    `uuid` and `bus_id` default to ones made from the GPU's place in the scenario, and `nvlink_time_us`, when its links
    were counted, to now.
    """

    name: str = "NVIDIA A100-SXM4-80GB"
    uuid: str = ""
    bus_id: str = ""
    lost: bool = False
    total_bytes: int | None = 80 * GIB
    reserved_bytes: int | None = 606 * MIB
    used_bytes: int | None = 0
    processes: Sequence[FakeProcess] = ()
    compute_capability: tuple[int, int] | None = (8, 0)
    utilization_percent: int | None = 0
    memory_utilization_percent: int | None = 0
    power_w: float | None = 61.5
    power_limit_w: float | None = 400.0
    temperature_c: int | None = 31
    slowdown_temperature_c: int | None = 89
    fan_percent: int | None = None
    sm_clock_mhz: int | None = 1410
    memory_clock_mhz: int | None = 1593
    pcie_generation: int | None = 4
    pcie_width: int | None = 16
    pcie_rx_kib_per_s: int | None = 0
    pcie_tx_kib_per_s: int | None = 0
    energy_mj: int | None = 0
    nvlinks: int | None = 12
    nvlink_rx_kib: int | None = 0
    nvlink_tx_kib: int | None = 0
    nvlink_time_us: int | None = None
    ecc_corrected: int | None = 0
    ecc_uncorrected: int | None = 0
    performance_state: int | None = 0
    throttle: int | None = 0
    virtualization: int | None = 0
    mig_mode: int | None = 0
    instances: Sequence[FakeInstance] = ()
    calls: Calls = Calls()

    def lines(self) -> list[str]:
        """As the scenario file has it."""
        major, minor = self.compute_capability or (None, None)
        in_milliwatts = {"power_mw": self.power_w, "power_limit_mw": self.power_limit_w}
        values = {"major": major, "minor": minor, "persistence": 1, "compute_mode": 0, "display_active": 0}
        values |= {key: None if watts is None else round(watts * 1000) for key, watts in in_milliwatts.items()}
        return [
            "gpu",
            f"name {self.name}",
            f"uuid {self.uuid}",
            f"bus_id {self.bus_id}",
            *(["lost"] if self.lost else []),
            *numbers(self, _MEMORY_KEYS | _GPU_KEYS),
            *(f"{key} {value}" for key, value in values.items() if value is not None),
            *(line for process in self.processes for line in process.lines()),
            *self.calls.lines(),
            *(line for instance in self.instances for line in instance.lines()),
        ]


_MEMORY_KEYS = {"total": "total_bytes", "reserved": "reserved_bytes", "used": "used_bytes"}
_GPU_KEYS = {
    "utilization": "utilization_percent",
    "memory_utilization": "memory_utilization_percent",
    "temperature": "temperature_c",
    "slowdown_temperature": "slowdown_temperature_c",
    "fan": "fan_percent",
    "graphics_clock": "sm_clock_mhz",
    "sm_clock": "sm_clock_mhz",
    "max_sm_clock": "sm_clock_mhz",
    "max_graphics_clock": "sm_clock_mhz",
    "memory_clock": "memory_clock_mhz",
    "max_memory_clock": "memory_clock_mhz",
    "max_pcie_generation": "pcie_generation",
    "max_pcie_width": "pcie_width",
} | {
    name: name
    for name in (
        "pcie_generation",
        "pcie_width",
        "pcie_rx_kib_per_s",
        "pcie_tx_kib_per_s",
        "energy_mj",
        "nvlinks",
        "nvlink_rx_kib",
        "nvlink_tx_kib",
        "nvlink_time_us",
        "ecc_corrected",
        "ecc_uncorrected",
        "performance_state",
        "throttle",
        "virtualization",
        "mig_mode",
    )
}


def numbers(device: FakeGpu | FakeInstance, keys: Mapping[str, str]) -> list[str]:
    """The lines of a device's attributes, by the key that each has in the file; without those that are None."""
    values = {key: getattr(device, attribute) for key, attribute in keys.items()}
    return [f"{key} {value}" for key, value in values.items() if value is not None]


V1_ONLY = {
    "nvmlDeviceGetMemoryInfo_v2": FUNCTION_NOT_FOUND,
    "nvmlDeviceGetComputeRunningProcesses_v3": FUNCTION_NOT_FOUND,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": FUNCTION_NOT_FOUND,
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": FUNCTION_NOT_FOUND,
}
"""`Calls(errors=V1_ONLY)`: a driver before 510, which does not tell its reserve and has older process lists."""


@dataclass(frozen=True)
class Scenario:
    """The machine.

    Attributes:
        driver, cuda: versions; cuda as NVML has it, 12040 for 12.4.
        init: what starting NVML returns; 0 is well.
        calls: about calls on all GPUs, and on none.
        generation: change it to reload the driver: every call then fails until NVML is shut down and started.
        list_at_init: GPUs are found when NVML starts only, as in the real library.
        lock: one call at a time in the whole library.
    """

    gpus: Sequence[FakeGpu] = ()
    driver: str = "550.54.14"
    cuda: int = 12040
    init: int = 0
    calls: Calls = Calls()
    generation: int = 0
    list_at_init: bool = False
    lock: bool = False

    def change(self, index: int, **changes: Any) -> Scenario:
        """The scenario with other values for one GPU."""
        gpus = list(self.gpus)
        gpus[index] = replace(gpus[index], **changes)
        return replace(self, gpus=gpus)

    def text(self) -> str:
        """As the C file reads it."""
        lines = [
            f"driver {self.driver}",
            f"cuda {self.cuda}",
            f"generation {self.generation}",
            *(["list_at_init"] if self.list_at_init else []),
            *(["lock"] if self.lock else []),
            *([f"error nvmlInitWithFlags {self.init}"] if self.init else []),
            *self.calls.lines(),
        ]
        for index, gpu in enumerate(self.gpus):
            uuid, bus_id = gpu.uuid or f"GPU-{index:08d}", gpu.bus_id or f"00000000:{index + 1:02X}:00.0"
            lines += replace(gpu, uuid=uuid, bus_id=bus_id).lines()
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Replace the file at once: a reader finds the old scenario or this one, never half of it."""
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(self.text())
        new.replace(path)
