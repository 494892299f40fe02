"""The table of readings: what is read of every GPU besides its memory and its processes, one entry each.

An entry's name is the attribute of a `Telemetry`, the key in JSON and in recordings, and
what a backend is asked for (`backend.GpuHandle.read`). Its unit is the end of its name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TypeVar, Union

from msgspec import Struct, structs

from gpumem_tui.memory import Unknown

T = TypeVar("T")
Reading = Union[T, Unknown]  # noqa: UP007  an alias cannot be written with | on Python 3.10
"""A value, or why it is missing."""

NOT_READ_YET = Unknown("not read yet")
"""Still to come, of the driver."""
NOT_IN_MIG = Unknown("not available in MIG mode")
_NOT_SUPPORTED = Unknown("not supported")


class Pace(Enum):
    """How often a reading is fetched. The value is in slow intervals, 0 for each interval."""

    EACH_TIME = 0
    SLOW = 1
    SLOWER = 3
    RARE = 12


class ReadingMetric(Struct, frozen=True):
    """A reading as a Prometheus metric.

    Attributes:
        name: without ``gpumem_gpu_``.
        factor: what one unit of the reading is in the metric's base unit.
        words: what the metric is; empty for the reading's own words.
        counter: it only grows.
        label: a further label and its value. An empty value: the reading is a list, with a series of 1 for each entry.
    """

    name: str
    factor: float = 1
    words: str = ""
    counter: bool = False
    label: tuple[str, str] | None = None


class ReadingEntry(Struct, frozen=True):
    """The words, pace and metric of a reading.

    Attributes:
        words: what it is, for people.
        pace: how often it is fetched.
        metric: None for a reading that is no metric.
        in_mig: a GPU that MIG divides has it too. Asking one anyway needs privileges or gives a false 0.
    """

    words: str
    pace: Pace
    metric: ReadingMetric | None = None
    in_mig: bool = True


_entries: list[ReadingEntry] = []


def _entry(words: str, pace: Pace, metric: ReadingMetric | None = None, *, in_mig: bool = True) -> Unknown:
    """Enter a reading in the table; the value that it has before it is read."""
    _entries.append(ReadingEntry(words, pace, metric, in_mig))
    return NOT_READ_YET


_ECC = "Memory errors since the driver was loaded"


class Telemetry(Struct, frozen=True, kw_only=True):
    """The state of a GPU besides its memory: load, power, heat, clocks, link, errors. The table itself."""

    utilization_percent: Reading[int] = _entry(
        "Share of the last sample period in which a kernel ran",
        Pace.EACH_TIME, ReadingMetric("utilization_ratio", 0.01), in_mig=False,
    )  # fmt: skip
    memory_utilization_percent: Reading[int] = _entry(
        "Share of it in which memory was read or written",
        Pace.EACH_TIME, ReadingMetric("memory_utilization_ratio", 0.01), in_mig=False,
    )  # fmt: skip
    power_w: Reading[float] = _entry("Power drawn by the board", Pace.EACH_TIME, ReadingMetric("power_watts"))
    power_limit_w: Reading[float] = _entry("Power it may draw at most", Pace.RARE, ReadingMetric("power_limit_watts"))
    temperature_c: Reading[int] = _entry("Temperature of the chip", Pace.SLOW, ReadingMetric("temperature_celsius"))
    temperature_limit_c: Reading[int] = _entry(
        "Temperature at which the clocks are lowered", Pace.RARE, ReadingMetric("temperature_limit_celsius")
    )
    fan_percent: Reading[int] = _entry("Fan speed", Pace.SLOWER, ReadingMetric("fan_ratio", 0.01))
    sm_clock_mhz: Reading[int] = _entry(
        "Clock of the streaming multiprocessors", Pace.SLOW, ReadingMetric("sm_clock_hertz", 1e6)
    )
    memory_clock_mhz: Reading[int] = _entry(
        "Clock of the memory", Pace.SLOWER, ReadingMetric("memory_clock_hertz", 1e6)
    )
    pcie_generation: Reading[int] = _entry("Generation of the PCIe link; an idle GPU lowers it", Pace.RARE)
    pcie_width: Reading[int] = _entry("Lanes of the PCIe link", Pace.RARE)
    pcie_rx_bytes_per_s: Reading[int] = _entry(
        "PCIe traffic to the GPU", Pace.SLOWER, ReadingMetric("pcie_receive_bytes_per_second")
    )
    pcie_tx_bytes_per_s: Reading[int] = _entry(
        "PCIe traffic from the GPU", Pace.SLOWER, ReadingMetric("pcie_transmit_bytes_per_second")
    )
    nvlink_rx_bytes: Reading[int] = _entry(
        "Data that came over its NVLinks since the driver was loaded",
        Pace.SLOWER, ReadingMetric("nvlink_receive_bytes", counter=True),
    )  # fmt: skip
    nvlink_tx_bytes: Reading[int] = _entry(
        "Data that went over its NVLinks since the driver was loaded",
        Pace.SLOWER, ReadingMetric("nvlink_transmit_bytes", counter=True),
    )  # fmt: skip
    nvlink_rx_bytes_per_s: Reading[int] = _entry("NVLink traffic to the GPU between the last two looks", Pace.SLOWER)
    nvlink_tx_bytes_per_s: Reading[int] = _entry("NVLink traffic from the GPU between the last two looks", Pace.SLOWER)
    energy_j: Reading[float] = _entry(
        "Energy drawn since the driver was loaded", Pace.SLOWER, ReadingMetric("energy_joules", counter=True)
    )
    ecc_corrected: Reading[int] = _entry(
        "Memory errors that were corrected since the driver was loaded",
        Pace.SLOWER, ReadingMetric("ecc_errors", words=_ECC, counter=True, label=("type", "corrected")),
    )  # fmt: skip
    ecc_uncorrected: Reading[int] = _entry(
        "Memory errors that could not be corrected since the driver was loaded",
        Pace.SLOWER, ReadingMetric("ecc_errors", words=_ECC, counter=True, label=("type", "uncorrected")),
    )  # fmt: skip
    performance_state: Reading[int] = _entry("Performance state: 0 is the fastest, 15 the slowest", Pace.SLOWER)
    throttle: Reading[tuple[str, ...]] = _entry(
        'Why the clocks are lowered now ("power cap", "hot"); idleness and clocks that a user set are no reasons',
        Pace.SLOW, ReadingMetric("throttled", words="1 if its clocks are lowered", label=("reason", "")),
    )  # fmt: skip

    @classmethod
    def unknown(cls, reason: Unknown) -> Telemetry:
        """Return a state in which every value is unknown for one reason."""
        return cls(**dict.fromkeys(READINGS, reason))

    def updated(self, found: Telemetry, names: Collection[str]) -> Telemetry:
        """Return it with the readings `names` as they were found; what was not read of them is not supported."""
        read = {name: _possible(name, getattr(found, name)) for name in names}
        return structs.replace(
            self, **{name: _NOT_SUPPORTED if read[name] is NOT_READ_YET else read[name] for name in names}
        )


_WATTS, _CELSIUS, _PERCENT, _MHZ = (0, 10_000), (-100, 200), (0, 100), (0, 20_000)
_POSSIBLE: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("power_w", "power_limit_w"), _WATTS),
    **dict.fromkeys(("temperature_c", "temperature_limit_c"), _CELSIUS),
    **dict.fromkeys(("utilization_percent", "memory_utilization_percent"), _PERCENT),
    **dict.fromkeys(("sm_clock_mhz", "memory_clock_mhz"), _MHZ),
    "fan_percent": (0, 300),
    **dict.fromkeys(("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"), (0, 1e13)),
    **dict.fromkeys(("nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s"), (0, 1e15)),
}
"""The range of a reading on any GPU, with room for future ones: none draws 1,500 W or has a
clock of 4 GHz yet. A fan may run beyond its rated speed (nvmlDeviceGetFanSpeed in nvml.h)."""


def _possible(name: str, value: T) -> T | Unknown:
    """Return a reading as it was found; unknown with what the driver shows where no GPU can have that."""
    least, most = _POSSIBLE.get(name, (-math.inf, math.inf))
    if not isinstance(value, (int, float)) or least <= value <= most:
        return value
    return Unknown(f"impossible: the driver reports {value:,.0f}")


READINGS: Mapping[str, ReadingEntry] = MappingProxyType(dict(zip(Telemetry.__struct_fields__, _entries, strict=True)))
"""The entries by name, in the order of the JSON."""
