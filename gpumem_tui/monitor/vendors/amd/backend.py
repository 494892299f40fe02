"""AMD SMI as the Monitor's backend: one function for each thing that is read, and the handles that call them.

A function returns a value, or `Unknown` with the reason; a lost GPU raises `Gone`. A partition of a GPU (CPX, DPX, …)
is a GPU of its own here, as `amd-smi` and HIP list it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Gone, Identity, ListedProcess, NoSuchGpu
from gpumem_tui.monitor.readings import NOT_READ_YET, Reading, Telemetry
from gpumem_tui.monitor.snapshot import Memory
from gpumem_tui.monitor.vendors.amd.calls import (
    LOST,
    OUT_OF_RESOURCES,
    SUCCESS,
    AmdCaller,
    AmdFault,
    AmdGone,
    binding,
    figure,
    reading,
    start,
    stop,
)
from gpumem_tui.monitor.vendors.calling import Called
from gpumem_tui.text import file_text

_RESERVE = Unknown("AMD's driver counts it as used")

# ---- one GPU: what does not change


def identity(call: AmdCaller, handle: object) -> Identity:
    """Read once for each handle.

    Raises:
        AmdFault: the UUID cannot be read.
    """
    uuid = str(call("amdsmi_get_gpu_device_uuid", handle))
    asic = reading(lambda: dict(call("amdsmi_get_gpu_asic_info", handle)))
    known = {} if isinstance(asic, Unknown) else asic
    bus_id = reading(lambda: str(call("amdsmi_get_gpu_device_bdf", handle)))
    part, words = _partition(call, handle)
    mode = reading(lambda: str(call("amdsmi_get_gpu_virtualization_mode", handle)["mode"].name))
    runtime = reading(lambda: figure(call("amdsmi_get_gpu_enumeration_info", handle)["hip_id"]))
    name = known.get("market_name", "N/A")
    return Identity(
        uuid=f"{uuid}/{part}" if part else uuid,
        name="unnamed GPU" if name == "N/A" else name,
        bus_id="" if isinstance(bus_id, Unknown) else bus_id,
        compute_capability=Unknown(f"not a CUDA device: {known.get('target_graphics_version', 'AMD')}"),
        holds_virtual_machines=mode == "HOST",
        partition=words,
        runtime_index=runtime,
    )


def _partition(call: AmdCaller, handle: object) -> tuple[int, str]:
    """Return the partition's number in its GPU, and how the GPU is divided: "CPX/NPS4 3"; empty for a whole one."""
    part = reading(lambda: figure(call("amdsmi_get_gpu_kfd_info", handle)["current_partition_id"]))
    compute = reading(lambda: str(call("amdsmi_get_gpu_compute_partition", handle)))
    memory = reading(lambda: str(call("amdsmi_get_gpu_memory_partition", handle)))
    number = part if isinstance(part, int) else 0
    modes = [each for each in (compute, memory) if isinstance(each, str) and each not in ("", "N/A")]
    if not number and not set(modes) - {"SPX", "NPS1"}:
        return 0, ""
    return number, f"{'/'.join(modes)} {number}".strip()


# ---- one GPU: memory and processes


def memory(call: AmdCaller, handle: object) -> Reading[Memory]:
    """Read its video memory, of which the driver's own share is not told apart.

    Raises:
        AmdGone: its figures cannot be read as those of a GPU that is there can.
    """

    def read() -> Reading[Memory]:
        kind = binding().AmdSmiMemoryType.VRAM
        try:
            total = figure(call("amdsmi_get_gpu_memory_total", handle, kind))
            used = figure(call("amdsmi_get_gpu_memory_usage", handle, kind))
        except AmdFault as fault:
            if fault.code in LOST:
                raise AmdGone(fault.code, fault.reason) from fault
            raise
        if isinstance(total, Unknown) or isinstance(used, Unknown):
            return Unknown("not available")
        return Memory(total, _RESERVE, used, max(0, total - used))

    return reading(read)


_ROOM = 1024
_MOST_ENTRIES = 2**16


def _process_list(call: AmdCaller, handle: object) -> list[ctypes.Structure]:
    """Return the library's structs of the processes that compute on a GPU.

    Not by the binding's own function, which decodes each name as UTF-8: a program may have any bytes for a name.
    """
    kind, room = binding().amdsmi_interface.amdsmi_wrapper.amdsmi_proc_info_t, _ROOM
    while True:
        count, found = ctypes.c_uint32(room), (kind * room)()
        try:
            call.direct("amdsmi_get_gpu_process_list", handle, ctypes.byref(count), found)
        except AmdFault as fault:
            if fault.code != OUT_OF_RESOURCES or count.value <= room or room >= _MOST_ENTRIES:
                raise
            room = 2 * count.value
        else:
            return list(found[: count.value])


# ---- one GPU: what it does

T = TypeVar("T")
Read = Callable[[AmdCaller, object], Reading[T]]


def _answer(function: str, *keys: str) -> Read[int]:
    """Make a read of the first figure among some keys of what a function answers."""

    def read(call: AmdCaller, handle: object) -> Reading[int]:
        answer = call(function, handle)
        found = [figure(answer[key]) for key in keys if key in answer]
        return next((number for number in found if isinstance(number, int)), Unknown("not available"))

    return lambda call, handle: reading(lambda: read(call, handle))


def _watts(call: AmdCaller, handle: object) -> Reading[float]:
    watts = _answer("amdsmi_get_power_info", "socket_power", "current_socket_power", "average_socket_power")
    found = watts(call, handle)
    return found if isinstance(found, Unknown) else float(found)


def _limit_watts(call: AmdCaller, handle: object) -> Reading[float]:
    microwatts = _answer("amdsmi_get_power_cap_info", "power_cap")(call, handle)
    return microwatts if isinstance(microwatts, Unknown) else microwatts / 1e6


def _temperature(metric: str) -> Read[int]:
    """Make a read of the hottest place of the chip, in °C, or of its edge where a GPU tells that only."""

    def read(call: AmdCaller, handle: object) -> Reading[int]:
        amd = binding()
        kinds, asked = amd.AmdSmiTemperatureType, amd.AmdSmiTemperatureMetric[metric]
        hottest = reading(lambda: figure(call("amdsmi_get_temp_metric", handle, kinds.HOTSPOT, asked)))
        if hottest != Unknown("not supported"):
            return hottest
        return figure(call("amdsmi_get_temp_metric", handle, kinds.EDGE, asked))

    return lambda call, handle: reading(lambda: read(call, handle))


def _clock(kind: str) -> Read[int]:
    def read(call: AmdCaller, handle: object) -> Reading[int]:
        return figure(call("amdsmi_get_clock_info", handle, binding().AmdSmiClkType[kind])["clk"])

    return lambda call, handle: reading(lambda: read(call, handle))


_FASTEST_FAN = 255


def _fan(call: AmdCaller, handle: object) -> Reading[int]:
    speed = reading(lambda: figure(call("amdsmi_get_gpu_fan_speed", handle, 0)))
    return speed if isinstance(speed, Unknown) else round(100 * speed / _FASTEST_FAN)


_GENERATIONS = {2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}
"""PCIe generation by the rate of a lane in MT/s."""


def _link(key: str) -> Read[int]:
    def read(call: AmdCaller, handle: object) -> Reading[int]:
        return figure(call("amdsmi_get_pcie_info", handle)["pcie_metric"][key])

    return lambda call, handle: reading(lambda: read(call, handle))


def _pcie_generation(call: AmdCaller, handle: object) -> Reading[int]:
    speed = _link("pcie_speed")(call, handle)
    return speed if isinstance(speed, Unknown) else _GENERATIONS.get(speed, Unknown(f"{speed} MT/s a lane"))


_THROTTLES = {
    "active_ppt_pwr": "power cap",
    "active_socket_thrm": "hot",
    "active_hbm_thrm": "memory hot",
    "active_vr_thrm": "regulator hot",
    "active_prochot_thrm": "too hot",
}


def _throttle(call: AmdCaller, handle: object) -> Reading[tuple[str, ...]]:
    def read() -> tuple[str, ...]:
        answer = call("amdsmi_get_violation_status", handle)
        return tuple(words for key, words in _THROTTLES.items() if answer[key] is True or answer[key] == 1)

    return reading(read)


# ---- the handles


class AmdSmi(Called[AmdCaller]):
    """The `GpuBackend` of AMD."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        super().__init__(AmdCaller(), proc)
        self._started = False

    def start(self) -> None:
        """Start AMD SMI as `GpuBackend.start` has it."""
        if not self._started:
            start(self._call, self._proc)
            self._started = True

    def stop(self) -> None:
        """Let go of AMD SMI; nothing happens if it was not started."""
        if self._started:
            self._started = False
            stop(self._call)

    def driver_version(self) -> Reading[str]:
        """Read the version of the kernel's module, or of the kernel whose own it is."""

        def read() -> str:
            handles = self._handles()
            if not handles:
                raise AmdFault(0, "told with a GPU only")
            return str(self._call("amdsmi_get_gpu_driver_info", handles[0])["driver_version"])

        return reading(read)

    def runtime_version(self) -> Reading[str]:
        """Read ROCm's version; the driver itself runs several."""

        def read() -> Reading[str]:
            found, words = self._call("amdsmi_get_rocm_version")
            return str(words) if found else Unknown("ROCm is not installed here")

        return reading(read)

    def count(self) -> int:
        """Count the GPUs and partitions that were found at the start."""
        return len(self._handles())

    def gpu(self, index: int) -> AmdGpu:
        """Return the GPU at an index, which is `amd-smi`'s.

        Raises:
            NoSuchGpu: none exists.
            AmdFault: it does not answer.
        """
        handles = self._handles()
        if index >= len(handles):
            raise NoSuchGpu("the driver has no GPU at this index")
        return AmdGpu(self._call, handles[index], identity(self._call, handles[index]))

    def check_answers(self) -> None:
        """Judge as `GpuBackend.check_answers` has it."""
        if self._call.codes and SUCCESS not in self._call.codes:
            raise Gone("the driver answers nothing but errors")

    def bus(self) -> frozenset[str]:
        """List places on the PCI bus: the kernel names the driver of each at the end of its line."""
        lines = file_text(self._proc / "bus/pci/devices").splitlines()
        return frozenset(line.split()[0] for line in lines if line.split()[-1:] == ["amdgpu"])

    def _handles(self) -> list[object]:
        return list(self._call("amdsmi_get_processor_handles"))


class AmdGpu:
    """The `GpuHandle` of AMD."""

    def __init__(self, call: AmdCaller, handle: object, identity: Identity) -> None:
        self.identity = identity
        self._call = call
        self._handle = handle
        self._units: Reading[int] | None = None
        self._occupied: Reading[Mapping[int, Reading[int]]] = Unknown("not read yet")

    def memory(self) -> Reading[Memory]:
        """Read its video memory."""
        return memory(self._call, self._handle)

    def compute_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """List the processes that have a queue on it, with the video memory that each holds."""

        def read() -> tuple[ListedProcess, ...]:
            listed = _process_list(self._call, self._handle)
            self._occupied = reading(lambda: {int(each.pid): figure(each.cu_occupancy) for each in listed})
            return tuple(ListedProcess(int(each.pid), figure(each.memory_usage.vram_mem)) for each in listed)

        return reading(read)

    def graphics_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """List none: the library does not list programs that only draw."""
        return ()

    def process_percents(self) -> Reading[Mapping[int, int]]:
        """Return the share of the compute units that each process occupied when the processes were listed last."""
        if self._units is None:
            self._units = reading(
                lambda: figure(self._call("amdsmi_get_gpu_asic_info", self._handle)["num_compute_units"])
            )
        units, occupied = self._units, self._occupied
        if isinstance(units, Unknown):
            return units
        if isinstance(occupied, Unknown):
            return occupied
        known = {pid: number for pid, number in occupied.items() if isinstance(number, int)}
        if occupied and not known:
            return Unknown("not available")
        return {pid: min(100, round(100 * number / units)) for pid, number in known.items()}

    def read(self, names: Collection[str]) -> Telemetry:
        """Read them as `GpuHandle.read`.

        Left out: PCIe traffic, which takes a second and is not told on MI300, and performance states, which AMD's GPUs
        have not.
        """

        def due(name: str, read: Read[T]) -> Reading[T]:
            return read(self._call, self._handle) if name in names else NOT_READ_YET

        return Telemetry(
            utilization_percent=due("utilization_percent", _answer("amdsmi_get_gpu_activity", "gfx_activity")),
            memory_utilization_percent=due(
                "memory_utilization_percent", _answer("amdsmi_get_gpu_activity", "umc_activity")
            ),
            power_w=due("power_w", _watts),
            power_limit_w=due("power_limit_w", _limit_watts),
            temperature_c=due("temperature_c", _temperature("CURRENT")),
            temperature_limit_c=due("temperature_limit_c", _temperature("CRITICAL")),
            fan_percent=due("fan_percent", _fan),
            sm_clock_mhz=due("sm_clock_mhz", _clock("GFX")),
            memory_clock_mhz=due("memory_clock_mhz", _clock("MEM")),
            pcie_generation=due("pcie_generation", _pcie_generation),
            pcie_width=due("pcie_width", _link("pcie_width")),
            ecc_corrected=due("ecc_corrected", _answer("amdsmi_get_gpu_total_ecc_count", "correctable_count")),
            ecc_uncorrected=due("ecc_uncorrected", _answer("amdsmi_get_gpu_total_ecc_count", "uncorrectable_count")),
            throttle=due("throttle", _throttle),
        )

    def divided(self) -> Reading[bool]:
        """Return that it is not: each of its partitions is a GPU of its own."""
        return False

    def instances(self) -> tuple[()]:
        """Return nothing: partitions of an AMD GPU are GPUs of their own."""
        return ()
